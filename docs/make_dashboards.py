"""Makes docs/dashboard-*.png, the dashboard of made trainings in a headless Chromium: python docs/make_dashboards.py

`--all FOLDER` writes every mix of 1, 2, 4, 8 replicas, light and dark, narrow and wide, and the still figures there.
Needs Chromium and the `test` extra.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser.lab import chromium  # noqa: E402
from made_rings import KB, MB, MadeRings, readings  # noqa: E402

from mirror_nb.notebook.dashboard.frame import Frame  # noqa: E402
from mirror_nb.notebook.dashboard.page import STYLE, Page  # noqa: E402
from mirror_nb.notebook.dashboard.still import draw  # noqa: E402
from mirror_nb.telemetry.findings import findings  # noqa: E402
from mirror_nb.telemetry.samples import Mark  # noqa: E402

if TYPE_CHECKING:
    from playwright.sync_api import Browser

WIDE, NARROW, SCALE = 1200, 480, 1.5
# Of the cell, in CSS pixels, and how many pixels each becomes.
KEPT = ((2, "light", WIDE), (2, "dark", WIDE), (8, "light", WIDE), (4, "dark", NARROW))
PAPER = {
    # JupyterLab's own, of its two themes.
    "light": ("true", "#fff", "rgba(0,0,0,.87)"),
    "dark": ("false", "#111", "#fff"),
}
SPEED_UP = {2: 1.94, 4: 3.71, 8: 7.2}


def made(replicas: int) -> Frame:
    """Return the last frame of 480 made steps; with more than two replicas, one gets slow near the end."""
    buckets = (64 * KB, 64 * KB, MB, 25 * MB, 25 * MB, 25 * MB, 100 * MB)
    slow = 2 if replicas > 2 else None
    with MadeRings(replicas, jitter=0.02, bandwidth=60e9, buckets=buckets if replicas > 1 else (), seed=3) as rings:
        rings.mark(Mark.PLANNED, 1200)
        for step in range(480):
            if step == 442 and slow is not None:
                rings.slowness[slow] = 1.18
            rings.step()
            rings.log_loss()
        rings.log_checksums([7] * replicas)
        rings.timeline.update(now=rings.now)
        shot = rings.timeline.snapshot(now=rings.now)
    read = readings(replicas, slow)
    return Frame(
        snapshot=shot,
        findings=findings(shot, read),
        readings=read,
        devices=tuple(f"cuda:{r}" for r in range(replicas)),
        title="ResNet-50",
        operation="NcclAllReduce" if replicas > 1 else "",
        speed_up=SPEED_UP.get(replicas),
    )


def photograph(browser: Browser, frame: Frame, theme: str, width: int, path: Path) -> None:
    """Write the page of a frame as a picture."""
    light, paper, ink = PAPER[theme]
    style = f"margin:0;padding:10px;background:{paper};--jp-layout-color0:{paper};--jp-content-font-color1:{ink}"
    drawn = f'<body data-jp-theme-light="{light}" style="{style}">{STYLE}{Page().body(frame)}</body>'
    tab = browser.new_page(viewport={"width": width + 20, "height": 200}, device_scale_factor=SCALE)
    tab.set_content(f'<!doctype html><meta charset="utf-8">{drawn}')
    tab.screenshot(path=path, full_page=True)
    tab.close()


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--all", type=Path, metavar="FOLDER", help="write every mix there")
    folder = parser.parse_args().all
    mixes = [(n, theme, width) for n in (1, 2, 4, 8) for theme in PAPER for width in (NARROW, WIDE)]
    frames = {n: made(n) for n in (1, 2, 4, 8)}
    with chromium() as browser:
        for n, theme, width in mixes if folder else KEPT:
            name = f"dashboard-{n}-{theme}{'-narrow' if width == NARROW else ''}.png"
            photograph(browser, frames[n], theme, width, (folder or Path(__file__).parent) / name)
    for n, frame in frames.items() if folder else ():
        draw(frame).savefig(folder / f"still-{n}.png", dpi=90)


if __name__ == "__main__":
    shutil.which("chromium") or sys.exit("needs chromium on the path")
    main()
