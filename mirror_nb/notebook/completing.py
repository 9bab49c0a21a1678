"""What Tab offers after `%mirror` and `%%mirrored`, and of `strategy` in a mirrored cell, where alone it is bound.

Knows IPython's completer. What there is to offer of the magics is handed in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mirror_nb.collectives.options import AUTO, IMPLEMENTATIONS
from mirror_nb.messages import travels
from mirror_nb.strategies.mirrored import MirroredStrategy

try:
    from IPython.core.completer import SimpleCompletion, context_matcher
except ImportError:
    # IPython before 8.6 would mix Python's own into them.
    context_matcher = None  # type: ignore[assignment]

_NAME = "mirror_nb"
_ATTRIBUTE = re.compile(r"\bstrategy\.\w*$")


def offer(shell: Any, words: Sequence[str], taken_by: Mapping[str, Sequence[str]], of_cells: Sequence[str]) -> None:
    """Have Tab offer the `words` of `%mirror`, its options by the words that take them, and those of `%%mirrored`."""
    if context_matcher is None:
        return

    def of_mirror(given: list[str], token: str) -> Sequence[str]:
        if token.startswith("-"):
            fitting = (option for option, takers in taken_by.items() if not given or given[0] in takers)
            return [f"--{option.replace('_', '-')}" for option in fitting]
        match given:
            case []:
                return words
            case [*_, "--ops"]:
                return [*IMPLEMENTATIONS, AUTO]
            case [*_, "--devices" | "start" | "restart"]:
                gpus = torch.cuda.device_count()
                return [f"cuda:{i}" for i in range(gpus)] or ["cpu:0", "cpu:1"]
            case ["push" | "pull", *_]:
                return list(filter(travels, shell.user_ns))
        return []

    @context_matcher(identifier=_NAME)
    def matcher(context: Any) -> Any:
        token, line = context.token, context.text_until_cursor
        given = line[: len(line) - len(token)].split()
        offered: Sequence[str] = []
        if given[:1] == ["%mirror"]:
            offered = of_mirror(given[1:], token)
        elif given[:1] == ["%%mirrored"]:
            offered = of_cells
        elif context.full_text.lstrip().startswith("%%mirrored") and _ATTRIBUTE.search(line):
            before = token[: token.rfind(".") + 1]
            offered = [before + name for name in dir(MirroredStrategy) if not name.startswith("_")]
        found = [SimpleCompletion(text=text, type=_NAME) for text in offered if text.startswith(token)]
        # What Python or a folder have of that name is not meant.
        return {"completions": found, "suppress": bool(found), "ordered": True}

    # Loaded anew, the extension's of before is none any more.
    matchers = shell.Completer.custom_matchers
    matchers[:] = [*(one for one in matchers if getattr(one, "matcher_identifier", "") != _NAME), matcher]
