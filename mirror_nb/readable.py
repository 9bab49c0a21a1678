"""Numbers and lists as people read them, in one way and on every console. Knows nothing of what they count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO


def number(value: float) -> str:
    """Return three digits that count: `0.0124`, `1.5`, `346`."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def size(nbytes: float) -> str:
    """Return bytes in steps of 1024: `512 B`, `1.5 KiB`, `25 MiB`, `74.5 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1023.5:
            return f"{number(nbytes)} {unit}"
        nbytes /= 1024
    return f"{number(nbytes)} GiB"


def milliseconds(seconds: float) -> str:
    """Return a time that is compared with others: `0.21 ms`, `83.0 ms`, `1.2 s`."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{bare_milliseconds(seconds)} ms"


def bare_milliseconds(seconds: float) -> str:
    """Return the number of milliseconds alone, to a thousandth: `0.212`, `8.30`, `83.0`, `412`."""
    value = seconds * 1e3
    digits = next((digits for digits, least in enumerate((99.95, 0.995, 0.0995)) if value >= least), 3)
    return f"{value:.{digits}f}"


def duration(seconds: float) -> str:
    """Return a time that people wait: `40 ms`, `2.4 s`, `35 s`, `12 min 06 s`, `3 h 20 min`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 19.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def listed(things: Sequence[object]) -> str:
    """Return them in words: `0, 1 and 3`. Raises IndexError where there are none."""
    words = [str(thing) for thing in things]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + f" and {words[-1]}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of a table as lines: every column but the last is as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in rows), strict=True)]
    lines = ("  ".join([*map(str.ljust, row, widths), row[-1]]) for row in rows)
    return [line.rstrip() for line in lines]


def writable(text: str, stream: TextIO) -> str:
    """Return the text with other signs for those that the stream's encoding lacks: `12 \\xb5s` in ASCII."""
    # What a program puts in the place of standard output may be able to write and no more.
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
