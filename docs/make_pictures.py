"""Makes docs/first-cell.png, the picture of the README, from a real JupyterLab: python docs/make_pictures.py

Needs what the browser tests need (Chromium and the `test` extra), and uses their harness.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser.lab import Lab, Notebook, chromium  # noqa: E402

WIDTH, HEIGHT, SCALE = 1000, 1200, 1.5
# Of the page, in CSS pixels, and how many pixels each becomes.
MARGIN = 8
# To the right of the cells and below them, in CSS pixels.

# Above the picture.
PREPARED = """
import torch, torch.nn as nn, torch.nn.functional as F
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


def picture(notebook: Notebook, path: Path) -> None:
    """Run all, and photograph the shown cells."""
    notebook.run_all()
    # The active cell bears a frame and buttons: let it be one that is not in the picture.
    notebook.select(0)
    page = notebook.page
    page.mouse.move(0, 0)
    cells = page.locator(".jp-Notebook .jp-Cell")
    first, last = cells.nth(1).bounding_box(), cells.nth(len(SHOWN)).bounding_box()
    assert first is not None
    assert last is not None
    top, bottom = first["y"], last["y"] + last["height"]
    clip = {"x": first["x"], "y": top, "width": first["width"] + MARGIN, "height": bottom - top + MARGIN}
    page.screenshot(path=path, clip=clip)


def main() -> None:
    """Write the picture beside this file."""
    with tempfile.TemporaryDirectory() as folder, Lab(Path(folder) / "lab") as lab, chromium() as browser:
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=SCALE)
        name = lab.write([PREPARED.strip(), *SHOWN])
        picture(Notebook(page, lab, name), Path(__file__).with_name("first-cell.png"))


if __name__ == "__main__":
    main()
