"""Makes the README's pictures from a real JupyterLab: python docs/make_pictures.py [first-cell] [live]

    first-cell.png   a mirrored cell that trained, and the next one
    live.png         the dashboard above a cell while it trains, and the end of that cell

Needs what the browser tests need (Chromium and the `test` extra), and uses their harness.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser.lab import Lab, Notebook, chromium  # noqa: E402
from driving import eventually  # noqa: E402

WIDTH, HEIGHT, SCALE = 1000, 1600, 1.5
# Of the page, in CSS pixels, and how many pixels each becomes.
MARGIN = 8
# To the right of the cells and below them, in CSS pixels.

# Above the picture.
PREPARED = """
import mirror_nb, torch, torch.nn as nn, torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
torch.manual_seed(0)
order = torch.randperm(len(labels))
train, test_set = order[:1500], (images[order[1500:]], labels[order[1500:]])
train_loader = DataLoader(TensorDataset(images[train], labels[train]), batch_size=32, shuffle=True)

def accuracy(model, data):
    with torch.no_grad():
        return round((model(data[0]).argmax(1) == data[1]).float().mean().item(), 3)
"""

SHOWN = (
    "%load_ext mirror_nb\n%mirror start --devices cpu:0,cpu:1",
    """%%mirrored
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(5):
    for x, y in strategy.distribute_dataset(train_loader):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    print(f"epoch {epoch}: loss {loss:.3f}")""",
    "accuracy(model, test_set)      # an ordinary cell, in the kernel: the trained model is here",
)


LIVE = """%%mirrored --dashboard
model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
    nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 4 * 4, 256), nn.ReLU(), nn.Linear(256, 10),
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(40):
    for x, y in strategy.distribute_dataset(train_loader):
        loss = F.cross_entropy(model(x.unsqueeze(1)), y)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        mirror_nb.log(loss=loss)"""
STEPS_SEEN = 500
# When the live picture is taken.


def finished(notebook: Notebook, path: Path) -> None:
    """Run all, and photograph the shown cells."""
    notebook.run_all()
    photograph(notebook, path, 1, len(SHOWN))


def live(notebook: Notebook, path: Path) -> None:
    """Photograph the dashboard while its cell trains."""
    notebook.run(0, 1)
    notebook.start(2)
    steps = re.compile(r"([\d,]+)\s*steps")

    def far_enough() -> bool:
        found = steps.search(notebook.shown(2))
        return found is not None and int(found[1].replace(",", "")) > STEPS_SEEN

    eventually(far_enough, "the training comes so far", seconds=120)
    photograph(notebook, path, 2, 2)
    notebook.wait(300)


def photograph(notebook: Notebook, path: Path, first_cell: int, last_cell: int) -> None:
    """Take a picture of these cells with all that is below them."""
    # The active cell bears a frame and buttons: let it be one that is not in the picture.
    notebook.select(0)
    page = notebook.page
    page.mouse.move(0, 0)
    cells = page.locator(".jp-Notebook .jp-Cell")
    cells.nth(first_cell).evaluate("cell => cell.scrollIntoView({block: 'start'})")
    first, last = cells.nth(first_cell).bounding_box(), cells.nth(last_cell).bounding_box()
    assert first is not None
    assert last is not None
    top, bottom = first["y"], last["y"] + last["height"]
    clip = {"x": first["x"], "y": top, "width": first["width"] + MARGIN, "height": bottom - top + MARGIN}
    page.screenshot(path=path, clip=clip)


PICTURES = {"first-cell": (finished, SHOWN), "live": (live, (SHOWN[0], LIVE))}


def main() -> None:
    """Write the pictures that were asked for, or all, beside this file."""
    with tempfile.TemporaryDirectory() as folder, Lab(Path(folder) / "lab") as lab, chromium() as browser:
        for name in sys.argv[1:] or PICTURES:
            take, cells = PICTURES[name]
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=SCALE)
            take(Notebook(page, lab, lab.write([PREPARED.strip(), *cells])), Path(__file__).with_name(f"{name}.png"))
            page.close()


if __name__ == "__main__":
    main()
