"""The op that measures which op is the fastest, for each size, and remembers it from one session to the next.

    first all_reduce ─▶ replica 0 looks into the cache ─▶ tells all ─▶ nothing there? all measure, replica 0 keeps it
    every all_reduce ─▶ the op that was fastest at the nearest size

Knows ops, their measurement and one folder of JSON files. All replicas decide by the same numbers, so alike.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from mirror_nb import readable
from mirror_nb.collectives.base import BYTES_PER_PACK, CrossDeviceOps, Member, name_of
from mirror_nb.collectives.handles import Handle
from mirror_nb.collectives.measuring import Trial, compare
from mirror_nb.collectives.topology import numa_nodes
from mirror_nb.devices import Device
from mirror_nb.errors import UsageError
from mirror_nb.machine.cores import cores
from mirror_nb.values import ReduceOp

SIZES = (2**12, 2**16, 2**20, 2**22, BYTES_PER_PACK)
# Bytes; buckets are 1 to 25 MiB as a rule, and small ones are what is left over.
SECONDS_A_SIZE = 0.3
WORTH = 0.9
# Another op has to take less than this part of the default's time.
_WRONG = 1e12
# µs, in the place of the time of an op whose sums were wrong.
_FORMAT = 2
# Of the files; to be raised when ops become faster, so that everybody measures anew.

Times = dict[int, list[tuple[float, float]]]
# By bytes: of each candidate the median, and how far its middle half is apart, µs.


@final
class AutoAllReduce(CrossDeviceOps):
    """Takes, for each size, the fastest of `candidates`, as measured here at the first all-reduce: seconds, once.

    The first candidate is the default: another one is taken only where its median is 10 % better, and by more than
    the times spread. `cache`: the folder where the measurement is kept; None: `mirror_nb` in the user's cache folder
    (XDG_CACHE_HOME, else ~/.cache). It counts for the same machine, torch, candidates and number of replicas. A file
    that cannot be read, or is not the user's own, is passed over.

    Raises UsageError without candidates, and for one that is no op.
    """

    _called = "auto"
    _decided: tuple[Member, dict[int, CrossDeviceOps]] | None = None
    _told = False
    # Whether it has said what it chose.

    def __init__(self, candidates: Sequence[CrossDeviceOps], cache: str | os.PathLike[str] | None = None) -> None:
        self.candidates = tuple(candidates) if isinstance(candidates, Iterable) else (candidates,)
        if not self.candidates:
            raise UsageError("`candidates` is empty; pass the ops to choose from, the default first")
        wrong = [candidate for candidate in self.candidates if not isinstance(candidate, CrossDeviceOps)]
        if wrong:
            raise UsageError(f"`candidates` holds {wrong[0]!r}; it takes cross-device ops, such as GlooAllReduce()")
        self.cache = None if cache is None else os.fspath(cache)

    @property
    def exact(self) -> bool:
        """Whether all candidates are."""
        return all(candidate.exact for candidate in self.candidates)

    def parts(self) -> Sequence[CrossDeviceOps]:
        """Return the candidates."""
        return self.candidates

    def start(self, op: ReduceOp, flat: Tensor) -> Handle:
        """Begin an all-reduce by the op that is fastest at this size; the first one measures before."""
        return self.chosen(flat.numel() * flat.element_size()).begin(op, flat)

    def unfit_for(self, devices: Sequence[Device]) -> str | None:
        """Return why not: one of the candidates cannot."""
        reasons = ((ops, ops.unfit_for(devices)) for ops in self.candidates)
        return next((f"{type(ops).__name__}: {reason}" for ops, reason in reasons if reason is not None), None)

    def chosen(self, nbytes: int) -> CrossDeviceOps:
        """Return the op that reduces `nbytes` bytes. The first call measures: then every replica has to make it."""
        choices = self.choices()
        return choices[min(choices, key=lambda size: abs(math.log((size + 1) / (nbytes + 1))))]

    def choices(self) -> Mapping[int, CrossDeviceOps]:
        """Return the op of each measured size, bytes. The first call measures: then every replica has to make it."""
        member = self.member
        # Another member: the group was formed anew, maybe with a replica that has yet to decide.
        if self._decided is None or self._decided[0] is not member:
            times = self._times(member)
            choices = {nbytes: self.candidates[pick(found)] for nbytes, found in times.items()}
            self._decided = member, choices
            if member.replica_id == 0 and member.num_replicas > 1 and not self._told:
                self._told = True
                print(f"auto chose {self._said(choices)}{self._won(times)}", flush=True)
        return self._decided[1]

    def _said(self, choices: Mapping[int, CrossDeviceOps]) -> str:
        """Return which op is for which sizes, in words."""
        sizes: dict[str, list[str]] = {}
        for nbytes, ops in choices.items():
            sizes.setdefault(name_of(ops), []).append(readable.size(nbytes))
        if len(sizes) == 1:
            return f"{next(iter(sizes))} for all sizes"
        return ", ".join(f"{name} for {' and '.join(each)}" for name, each in sizes.items())

    def _won(self, times: Times) -> str:
        """Return what the chosen op and the next one took for the largest tensors, and which ops summed wrongly."""
        nbytes, found = max(times.items())
        mine = pick(found)
        names = [name_of(candidate) for candidate in self.candidates]
        wrong = [name for i, name in enumerate(names) if any(row[i][0] >= _WRONG for row in times.values())]
        said = f"; sums of {' and '.join(wrong)} were wrong" if wrong else ""
        others = [(p50, names[i]) for i, (p50, _) in enumerate(found) if i != mine and p50 < _WRONG]
        if not others:
            return said
        next_one, name = min(others)
        its, other = (readable.milliseconds(us / 1e6) for us in (found[mine][0], next_one))
        return f": {readable.size(nbytes)} in {its} against {other} of {name}{said}"

    def _times(self, member: Member) -> Times:
        if member.num_replicas == 1 or len(self.candidates) == 1:
            return {SIZES[0]: [(0.0, 0.0)] * len(self.candidates)}
        what = surroundings(member, self.candidates)
        leads = member.replica_id == 0
        known = load(self._folder(), what) if leads else None
        # One replica reads, all decide by what it read: two that choose differently would wait for ever.
        found = [(math.nan, math.nan)] * len(SIZES) * len(self.candidates)
        if known is not None:
            found = [pair for size in SIZES for pair in known[size]]
        shared = torch.tensor(found, dtype=torch.float64, device=member.device)
        self.broadcast(shared, 0)
        if not math.isnan(float(shared[0, 0])):
            pairs = shared.view(len(SIZES), -1, 2).tolist()
            return {size: [(p50, spread) for p50, spread in row] for size, row in zip(SIZES, pairs, strict=True)}
        times = self._measured()
        if leads and all(p50 < _WRONG for row in times.values() for p50, _ in row):
            # An op whose sums were wrong is measured anew once it was mended: its name says nothing of that.
            save(self._folder(), what, times)
        return times

    def _measured(self) -> Times:
        ops = {str(i): candidate for i, candidate in enumerate(self.candidates)}
        times: Times = {}
        for size in SIZES:
            trials = compare(ops, size // 4, seconds=SECONDS_A_SIZE)
            times[size] = [_outcome(trials[name]) for name in ops]
        return times

    def _folder(self) -> Path:
        return Path(self.cache) if self.cache is not None else cache_folder()

    def __repr__(self) -> str:
        if self._decided is not None:
            return f"<AutoAllReduce: {self._said(self._decided[1])}>"
        return f"<AutoAllReduce: the fastest of {', '.join(map(name_of, self.candidates))}>"

    def __getstate__(self) -> dict[str, object]:
        # What was decided is for the replicas of one group.
        return {"candidates": self.candidates, "cache": self.cache}


def pick(times: Sequence[tuple[float, float]]) -> int:
    """Return which candidate to take, by the median and the spread of each: the first, unless one is surely better."""
    default, noise = times[0]
    better = [
        i
        for i, (p50, spread) in enumerate(times)
        if i and p50 < WORTH * default and default - p50 > max(noise, spread)
    ]
    return min(better, key=lambda i: times[i][0], default=0)


def _outcome(trial: Trial) -> tuple[float, float]:
    # What is wrong is no candidate, however fast.
    return (trial.quantile(0.5), trial.spread) if trial.correct else (_WRONG, 0.0)


# ---------------------------------------------------------------------- the cache


def cache_folder() -> Path:
    """Return where measurements are kept: below the user's cache folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mirror_nb"
    except RuntimeError:
        # A user of no name, as containers have them, without HOME: nothing is to be found there, or kept.
        return Path(os.devnull) / "mirror_nb"


def surroundings(member: Member, candidates: Sequence[CrossDeviceOps]) -> dict[str, Any]:
    """Return what a measurement holds for, as JSON has it."""
    return {
        "format": _FORMAT,
        "machine": _processor(),
        "cores": cores(),
        "nodes": numa_nodes(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if member.device.type == "cuda"
        else [],
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "replicas": member.num_replicas,
        "candidates": [repr(candidate) for candidate in candidates],
    }


def load(folder: Path, what: Mapping[str, Any]) -> Times | None:
    """Return what was measured for the same surroundings; None where that is not there, or not to be trusted."""
    try:
        # A pipe that somebody has put there would be waited for until it is written to.
        descriptor = os.open(_file(folder, what), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, encoding="utf-8") as file:
            found = os.fstat(descriptor)
            if found.st_uid != os.getuid() or found.st_mode & 0o077:
                return None
            content = json.loads(file.read(2**20))
        return _times_of(content, what)
    except (OSError, ValueError, OverflowError, KeyError, TypeError, RecursionError):
        return None


def save(folder: Path, what: Mapping[str, Any], times: Times) -> None:
    """Keep a measurement, readable by the user alone; where nothing can be written, nothing is."""
    path = _file(folder, what)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    content = {"what": what, "microseconds": {str(size): pairs for size, pairs in times.items()}}
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
            # In one go: a session that begins meanwhile reads the old one or the new one.
            os.replace(draft, path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise


def _file(folder: Path, what: Mapping[str, Any]) -> Path:
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
    return folder / f"ops-{key}.json"


def _times_of(content: Any, what: Mapping[str, Any]) -> Times | None:
    if content["what"] != what:
        return None
    times: Times = {}
    for size in SIZES:
        pairs = [(float(p50), float(spread)) for p50, spread in content["microseconds"][str(size)]]
        plausible = all(math.isfinite(p50) and math.isfinite(s) and p50 >= 0 and s >= 0 for p50, s in pairs)
        if len(pairs) != len(what["candidates"]) or not plausible:
            return None
        times[size] = pairs
    return times


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(("model name", "Hardware", "CPU part")):
                return line.partition(":")[2].strip()
    return "unknown"
