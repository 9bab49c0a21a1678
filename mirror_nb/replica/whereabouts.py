"""Where this replica is: the line of the user's that it runs, the collectives that it waits in, how many it has begun.

Looks at other threads' stacks and at the process groups, takes no lock and changes nothing. Knows no channel and no
request; whoever asks gives their numbers.
"""

from __future__ import annotations

import itertools
import linecache
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType

from mirror_nb.collectives import process_group
from mirror_nb.messages import Whereabouts

_OURS = str(Path(__file__).parent.parent) + "/"
_PATHS = sysconfig.get_paths()
_NOT_THE_USERS = (_OURS, *(f"{_PATHS[name]}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")), "<frozen ")
_WAITING = ("mirror_nb", "torch.distributed", "threading")
# To be in them is to wait, which is told otherwise.


def look(question: int, request: int | None, main_thread: int, cells: Mapping[str, int]) -> Whereabouts:
    """Return where this process is; `cells`: the notebook's numbers of its cells, by the file of their code."""
    frames = sys._current_frames()
    frame = frames.get(main_thread) if request is not None else None
    mine = _users(frame)
    ours = {main_thread, *(t.ident for t in threading.enumerate() if t.name.startswith("mirror_nb"))}
    return Whereabouts(
        question,
        request,
        "" if mine is None else _line(mine, mine.f_lineno, cells),
        "" if frame is None or frame is mine else _inside(frame),
        frame is not None and any(map(_synchronizes, frames.values())),
        any(_users(other) is not None for thread, other in frames.items() if thread not in ours),
        tuple(process_group.standing()),
    )


def _synchronizes(frame: FrameType) -> bool:
    # In any thread: of what is on a GPU, autograd's own ends the backward pass.
    return any(_module(one) == "mirror_nb.gradients.synchronizer" for one in _outwards(frame))


def waits(frame: FrameType | None) -> bool:
    """Whether the innermost code of the user's at `frame`, if there is any, has called a collective of ours."""
    inside = itertools.takewhile(lambda one: not _is_the_users(one), _outwards(frame))
    return any(_module(one).startswith("mirror_nb.collectives.") for one in inside)


def line_of(trace: TracebackType | None, cells: Mapping[str, int]) -> str:
    """Return the innermost line of the user's in a traceback; empty if there is none."""
    found = ""
    while trace is not None:
        if _is_the_users(trace.tb_frame):
            found = _line(trace.tb_frame, trace.tb_lineno, cells)
        trace = trace.tb_next
    return found


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _users(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame that runs the user's code."""
    return next(filter(_is_the_users, _outwards(frame)), None)


def _is_the_users(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(_NOT_THE_USERS)


def _line(frame: FrameType, number: int, cells: Mapping[str, int]) -> str:
    file = frame.f_code.co_filename
    text = linecache.getline(file, number, frame.f_globals).strip()
    # A cell's code has a name of its own each time; its number is what the user sees. Of a file without a text here
    # the controller may know both, by its whole name.
    place = f"Cell In[{cells[file]}]" if file in cells else Path(file).name if text else file
    return f"{place}, line {number}" + (f": {text}" if text else "")


def _inside(frame: FrameType) -> str:
    module = _module(frame)
    return "" if module.startswith(_WAITING) else f"{module}.{frame.f_code.co_name}"
