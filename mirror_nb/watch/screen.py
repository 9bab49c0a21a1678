"""Where lines of text appear: redrawn in place on a terminal, otherwise one line a strategy. Knows no telemetry."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from typing import TextIO, final

from mirror_nb.watch.lines import Colour, Line

_STYLES = {"": "", "strong": "1", "faint": "2", "trouble": "31"}
_REPLICAS = (34, 33, 32, 35, 36, 93, 92, 90)
# The terminal's own colours that come next to those of the dashboard: blue, orange, green, purple, …


@final
class Screen:
    """Draws on `out`; on a terminal each picture takes the place of the one before."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self.live = out.isatty()
        # https://no-color.org
        self._coloured = self.live and not os.environ.get("NO_COLOR")
        self._height = 0
        # Lines of the picture that is there.

    def draw(self, lines: Sequence[Line]) -> None:
        """Show lines, cut to the terminal's size: one that wraps could not be taken back."""
        columns, rows = shutil.get_terminal_size()
        shown = [self._painted(_cut(line, columns - 1)) if self.live else _plain(line) for line in lines]
        if self.live:
            shown = shown[: rows - 1]
        back = f"\x1b[{self._height}F\x1b[J" if self._height else ""
        self._out.write(back + "".join(f"{line}\n" for line in shown))
        self._out.flush()
        self._height = len(shown) if self.live else 0

    def say(self, text: str) -> None:
        """Write a line that stays, with the time."""
        self._out.write(f"{time.strftime('%H:%M:%S')}  {text}\n")
        self._out.flush()
        self._height = 0

    def _painted(self, line: Line) -> str:
        return "".join(self._paint(text, colour) for text, colour in line)

    def _paint(self, text: str, colour: Colour) -> str:
        code = str(_REPLICAS[colour % len(_REPLICAS)]) if isinstance(colour, int) else _STYLES[colour]
        return f"\x1b[{code}m{text}\x1b[0m" if self._coloured and code and text else text


def _plain(line: Line) -> str:
    return "".join(text for text, _ in line).rstrip()


def _cut(line: Line, columns: int) -> Line:
    found = []
    for text, colour in line:
        found.append((text[:columns], colour))
        columns -= min(columns, len(text))
    return tuple(found)
