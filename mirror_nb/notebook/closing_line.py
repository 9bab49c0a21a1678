"""The line below a mirrored cell: how it went, what travelled, and what to look at. Knows words; asks nobody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mirror_nb.notebook.absorbing import Returned
from mirror_nb.pool.report import Death, ended
from mirror_nb.readable import duration, size

LISTED = 8
# Names that a line shows.


@dataclass(slots=True)
class ClosingLine:
    """What there is to say of one cell."""

    alone: str = ""
    # The single replica's device, where this cell has started it and others could have.
    mended: list[str] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)
    sent_bytes: int = 0
    withheld: list[str] = field(default_factory=list)
    returned: Returned = field(default_factory=Returned)
    mixed: list[str] = field(default_factory=list)
    # Files that several replicas have opened to write, as this cell was the first to show.
    undivided: list[str] = field(default_factory=list)
    # Loaders that every replica has gone through, likewise.

    def parts(self, replicas: Sequence[int], seconds: float) -> list[str]:
        n = len(replicas)
        alone = f" on {self.alone}; for more: %mirror restart --devices cpu:0,cpu:1" if self.alone else ""
        parts = [f"{n} replica{'s' if n > 1 else ''}{alone}", duration(seconds), *self.mended]
        if self.sent:
            parts.append(f"sent {shortened(self.sent)} ({size(self.sent_bytes)})")
        if self.withheld:
            names = " ".join(self.withheld)
            parts.append(f"not sent, since the replicas have changed it too: {names} (%mirror push {names})")
        if self.returned.bound:
            parts.append(f"back {shortened(self.returned.bound)}")
        if self.returned.deleted:
            parts.append(f"deleted {shortened(self.returned.deleted)}")
        if self.returned.stayed:
            parts.append(f"stays in the replicas: {shortened(self.returned.stayed)}")
        if self.returned.altered:
            names = " ".join(self.returned.altered)
            parts.append(f"changed in the replicas alone: {names} (%mirror pull {names} brings it)")
        if self.returned.diverged:
            named = [name for name in self.returned.diverged if name.isidentifier()]
            advice = f" (%mirror push {' '.join(named)} makes it equal)" if named else ""
            parts.append(f"differs between the replicas: {shortened(list(self.returned.diverged.values()))}{advice}")
        if self.returned.loose:
            advice = "(gradients are synchronised of what a module or an optimizer has)"
            parts.append(f"each replica's own: {shortened(self.returned.loose)} {advice}")
        if self.mixed:
            advice = "(under `if replica_id == 0:` it is written once)"
            parts.append(f"written by several replicas at once: {shortened(self.mixed)} {advice}")
        for name in self.undivided:
            whose = name or "a DataLoader"
            advice = f"(strategy.distribute_dataset({name or '...'}) gives each its share)"
            parts.append(f"every replica trained on all of {whose} {advice}")
        if self.returned.problem is not None:
            parts.append(f"could not be rebuilt here: {self.returned.problem}")
        return parts


def mended(deaths: Sequence[Death], source: int | None, left: Sequence[str]) -> str:
    """Say that replicas that ended in one way were started anew, with whose names, and without which."""
    text = f"{ended(deaths)}; {'they were' if deaths[1:] else 'it was'} started anew"
    if source is not None:
        text += f" with the names of replica {source}"
    if left:
        text += f", except {shortened(left)}, which cannot travel"
    return text


def lost_values(lost: list[str], earlier: list[str]) -> list[str]:
    """Say what went with the replicas, and what is in the notebook again as it was earlier."""
    says = [f"lost with the replicas: {shortened(lost)}"] if lost else []
    return [*says, *([f"again as before cells changed it: {shortened(earlier)}"] if earlier else [])]


def shortened(names: Sequence[str]) -> str:
    """Return names with commas, and how many more there are."""
    shown = ", ".join(names[:LISTED])
    return shown if len(names) <= LISTED else f"{shown} and {len(names) - LISTED} more"
