"""Stop and Pause: heard by the control thread, agreed on by all replicas, obeyed where a step ends.

    controller ─ Steer ─▶ hear ─▶ flags ─(with the gradients)─▶ agree ─▶ boundary: hold, or raise TrainingStopped

What one replica has heard rides with the gradients of its step, so that all end, or hold, after the same one. Steps
whose gradients others synchronise, DDP for instance, have no such ride: there each replica obeys when it has heard.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import final

from mirror_nb.errors import TrainingStopped
from mirror_nb.messages import Steer, Word
from mirror_nb.telemetry.samples import Mark

LATE_SECONDS = 1.0
# How much later a word may reach one replica than another.
_LOOK_SECONDS = 0.05
# Between two looks while it holds: an interrupt has to come through.
QUIET = [0.0, 0.0, 0.0]
# What `flags` gives where nothing was said.


@final
class Steering:
    """What one replica was told, and whether it is time to obey."""

    def __init__(self, mark: Callable[[Mark], None]) -> None:
        self._mark = mark
        self.compare: Callable[[], dict[str, int]] = dict
        # Records the checksums of the parameters, and returns them.
        self._news = threading.Condition()
        self._heard = Steer(0, Word.GO)
        self._obeyed = 0
        # Number of the latest word that was acted on.
        self._asked = self._answered = 0
        # The same of the word to compare, which changes nothing else.
        self._comparing: bool | None = None
        # Whether all have agreed to compare, as in `_agreed`.
        self._agreed: Word | None = None
        # None: the replicas have not met since the last boundary.
        self._met = False
        # Whether they had before that one.

    def begin(self) -> None:
        """A request begins. A word that was not obeyed yet is for this one too, unless it was taken back."""
        self._agreed = self._comparing = None
        self._met = False

    def hear(self, steer: Steer) -> None:
        """Take a word from the controller; any thread."""
        with self._news:
            if steer.word is Word.COMPARE:
                self._asked = steer.number
            else:
                self._heard = steer
            self._news.notify_all()

    # ------------------------------------------------------------------ the ride with the gradients

    def flags(self) -> list[float]:
        """Return what this replica has heard, to be summed over all: whether to stop, to hold, to compare."""
        word = self._present()
        return [float(word is Word.STOP), float(word is Word.PAUSE), float(self._asked > self._answered)]

    def agree(self, sums: Sequence[float]) -> None:
        """Take what all have heard together."""
        self._agreed = Word.STOP if sums[0] else Word.PAUSE if sums[1] else Word.GO
        self._comparing = bool(sums[2])

    def _present(self) -> Word:
        return self._heard.word if self._heard.number > self._obeyed else Word.GO

    # ------------------------------------------------------------------ where a step ends

    def boundary(self, *, alone: bool = True) -> None:
        """Hold here as long as that is wanted. Raises TrainingStopped if the training is to end.

        `alone`: where the replicas do not meet in their steps, what this one has heard counts.
        """
        agreed, self._agreed = self._agreed, None
        comparing, self._comparing = self._comparing, None
        # An epoch's first boundary follows the last one of the epoch before without a step between them: who obeyed
        # there, and had heard a little earlier than the others, would keep them waiting in the step that follows.
        alone = alone and not self._met
        self._met = agreed is not None
        if (alone and self._asked > self._answered) if comparing is None else comparing:
            self._compare()
        word = (self._present() if alone else Word.GO) if agreed is None else agreed
        if word is Word.GO:
            return
        if word is Word.PAUSE:
            self._mark(Mark.PAUSED)
        self._catch_up()
        if word is Word.PAUSE:
            word = self._hold()
        self._obeyed = self._heard.number
        if word is Word.STOP:
            self._mark(Mark.STOPPED)
            raise TrainingStopped("stopped at the end of a step, as was asked; the variables are those of that step")
        self._mark(Mark.RUNNING)

    def _catch_up(self) -> None:
        """Wait for the word itself, which another replica may have heard first: obeyed, it must not come anew."""
        waited = 0.0
        with self._news:
            while self._heard.number <= self._obeyed and waited < LATE_SECONDS:
                self._news.wait(_LOOK_SECONDS)
                waited += _LOOK_SECONDS

    def _hold(self) -> Word:
        with self._news:
            while self._present() is Word.PAUSE:
                if self._asked > self._answered:
                    self._compare()
                self._news.wait(_LOOK_SECONDS)
            return self._present()

    def _compare(self) -> None:
        self._answered = self._asked
        self.compare()
