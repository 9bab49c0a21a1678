"""Lines of a notebook's plain cells: replicas know no more of them than the file that their code names."""

from __future__ import annotations

import linecache
import re
import sys
from pathlib import Path

_UNREAD = re.compile(r"(?P<file>[^:]+), line (?P<number>\d+)")
# A line as replicas tell it where they have not its text, which would stand behind a colon.


def cell_of(file: str) -> str:
    """Return IPython's name of the cell whose code names this file, as `Cell In[5]`; empty if there is none."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    # IPython 7 has no such names.
    name = getattr(shell.compile, "format_code_name", None) if shell is not None else None
    named = name(file) if name is not None else None
    return " ".join(named) if named else ""


def text_of(file: str, number: int | str) -> str:
    """Return the text of a line, empty where nobody knows it."""
    return linecache.getline(file, int(number)).strip()


def told(line: str) -> str:
    """Return a line of the user's, as a replica tells it, with the cell's name and text where it is a plain cell's."""
    unread = _UNREAD.fullmatch(line)
    if unread is None:
        return line
    file, number = unread.groups()
    text = text_of(file, number)
    return f"{cell_of(file) or Path(file).name}, line {number}" + (f": {text}" if text else "")
