"""A machine with GPUs that never were, and a session without replicas: to test the picker, and to look at it."""

from __future__ import annotations

from collections.abc import Sequence

from mirror_nb.errors import DeviceError
from mirror_nb.notebook.picker.choice import Choice, Driven, Offers, Operation, Standing
from mirror_nb.notebook.picker.inventory import Card, Inventory, Tenant
from mirror_nb.telemetry.machine import Reading

GB = 2**30


class MadeMachine:
    """So many GPUs; on the second of them somebody else computes."""

    def __init__(self, gpus: int = 4, *, cores: int = 16, note: str = "") -> None:
        self.num_gpus, self.cores, self.note = gpus, cores, note
        self.looks = 0
        self.closed = False

    def look(self) -> Inventory:
        self.looks += 1
        n = range(self.num_gpus)
        near = [["" if a == b else "NVLink" if a // 2 == b // 2 else "SYS" for b in n] for a in n]
        return Inventory(
            gpus=tuple(self._card(i) for i in n),
            host=Reading("host", "", 0, 0.31, 12 * GB, 64 * GB, None, None, None, None, None, ()),
            cores=self.cores,
            links=tuple(map(tuple, near)),
            note=self.note,
        )

    def _card(self, i: int) -> Card:
        used, tenants = 1 * GB // 2, ()
        if i == 1:
            used = 61 * GB
            tenants = (
                Tenant(4711, "python3 of anna", 40 * GB),
                Tenant(4712, "a process with a very long name that does not end of <b>ben</b>", 20 * GB),
                Tenant(4713, "python3 of anna", None),
                Tenant(4714, "python3 of anna", 1),
            )
        elif i == 0:
            tenants = (Tenant(100, "python3 of me", GB // 4),)
        name, hot = "NVIDIA H100 80GB HBM3", 88.0 if i == 1 else 36.0
        busy, power = (0.98, 642.0) if i == 1 else (0.0, 71.0)
        limits = (700.0, None, None, ())
        return Card(f"cuda:{i}", Reading(f"cuda:{i}", name, 0, busy, used, 80 * GB, hot, power, *limits), tenants)

    def close(self) -> None:
        self.closed = True


class MadeSession(Driven):
    """Notes what it is told to do."""

    def __init__(self, gpus: int = 4, *, offers: bool = True) -> None:
        self.num_gpus = gpus
        self.told: list[tuple[str, Choice | None]] = []
        self.runs = Standing()
        self.fails: Exception | None = None
        self.measured = False
        self._offers = offers

    def gpus(self) -> int:
        return self.num_gpus

    def standing(self) -> Standing:
        return self.runs

    def offers(self, devices: Sequence[str]) -> Offers:
        if not self._offers:
            return Offers()
        names = ("nccl", "hierarchical_copy", "one_device") if "cuda" in devices[0] else ("shared_memory", "gloo")
        times = ((64 * 1024, 0.00003), (25 * 2**20, 0.0016)) if self.measured else ()
        return Offers(
            operations=tuple(Operation(name, times) for name in names),
            bucket_sizes=tuple(size * 2**20 for size in (25, 4, 100)),
            compressions=("none", "bf16"),
            measurable=True,
        )

    def start(self, choice: Choice) -> str:
        return self._run("start", choice)

    def restart(self, choice: Choice) -> str:
        return self._run("restart", choice)

    def _run(self, what: str, choice: Choice) -> str:
        self.told.append((what, choice))
        if self.fails is not None:
            raise self.fails
        self.runs = Standing(choice.devices, tuple(range(100, 100 + len(choice.devices))))
        return f"{len(choice.devices)} replicas ready in 0.9 s"

    def stop(self) -> str:
        self.told.append(("stop", None))
        self.runs = Standing()
        return "stopped"

    def measure(self, choice: Choice) -> str:
        self.told.append(("measure", choice))
        if len(choice.devices) < 2:
            raise DeviceError("one replica has nobody to reduce with; pick two devices")
        self.measured = True
        return "measured"
