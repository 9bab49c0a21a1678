"""The dashboard's colours, on light and on dark paper. Draws nothing.

Each replica has one, everywhere; none of them is pink, which is communication, or red, which is trouble.
"""

from __future__ import annotations

LIGHT = ("#2f74dc", "#dd7f00", "#0b9577", "#43128a", "#5bbcf0", "#6b3d0c", "#c9c000", "#4a5560")
DARK = ("#5b8cff", "#f5a03d", "#22b08c", "#d3b8ff", "#9be8ff", "#a8702c", "#e6f07a", "#87919f")
# Of replicas 0 to 7: blue, orange, green, violet, sky, brown, yellow, grey. Beyond them the colours come again. They
# differ in lightness too: without it, eyes without red or green cones take violet for blue, and brown for olive.
COMMUNICATION = ("#cf4a9a", "#f27bbf")
TROUBLE = ("#d4322c", "#ff6b63")
# Each on light, and on dark paper.
PARTS = {
    "data": ("#8e97a5", "#a3aab6"),
    "forward": ("#b9c8e8", "#50628c"),
    "backward": ("#7189bd", "#7f97cc"),
    "exposed": COMMUNICATION,
    "optimizer": ("#454f63", "#d5dbe5"),
    "other": ("#c9ced6", "#555e6c"),
}
# Of a step: what is computed in the tints of slate, so that no replica's colour is taken for it;
# those that touch differ in lightness, and all from the card.


def colour(replica_id: int, dark: bool = False) -> str:
    """Return a replica's colour."""
    return (DARK if dark else LIGHT)[replica_id % len(LIGHT)]
