"""The notebook's one session: its replicas, its names, and what a cell goes through from magic to result."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import linecache
import os
import re
import sys
import time
import types
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from IPython.core.interactiveshell import InteractiveShell

from mirror_nb import devices as device_names
from mirror_nb.collectives.base import name_of
from mirror_nb.collectives.options import Communication
from mirror_nb.collectives.options import chosen as choose
from mirror_nb.devices import Device
from mirror_nb.environment import log_lines, modes
from mirror_nb.environment.log_lines import Logged
from mirror_nb.errors import PoolClosed, TransferError, UsageError
from mirror_nb.event_files import EventFiles, Written
from mirror_nb.messages import Again, Bind, CommSent, Fetch, LoadModules, Reduces, RunCell, Source
from mirror_nb.mirroring.networks import called
from mirror_nb.notebook.absorbing import Returned
from mirror_nb.notebook.advising import LEAST_SECONDS, CellAdvice
from mirror_nb.notebook.closing_line import ClosingLine, lost_values, mended, shortened
from mirror_nb.notebook.lent import Lent
from mirror_nb.notebook.live import LiveDashboard
from mirror_nb.notebook.measuring import Measuring
from mirror_nb.notebook.names import Names
from mirror_nb.notebook.options import AS_USUAL, CellOptions, GradientFlags
from mirror_nb.notebook.output import CellView, CommProxy, comms_of
from mirror_nb.notebook.parcels import Parcel
from mirror_nb.notebook.source import CellNames, cell_names
from mirror_nb.pool.base import Pool
from mirror_nb.pool.failures import raise_for, spans
from mirror_nb.pool.following import SECOND_AFTER
from mirror_nb.pool.in_process import InProcessPool
from mirror_nb.pool.interrupts import Deferred
from mirror_nb.pool.local import LocalPool, stop_forkserver
from mirror_nb.pool.recovery import compare, level, recover
from mirror_nb.pool.report import Report, alike
from mirror_nb.readable import aligned, duration, size
from mirror_nb.replica.shell import cell_numbers, learn, source_of
from mirror_nb.strategies.mirrored import SETUP
from mirror_nb.transfer.packing import pack
from mirror_nb.transfer.payload import Payload
from mirror_nb.transfer.submodules import bring, reached
from mirror_nb.transfer.told import is_told
from mirror_nb.values import Remote

IDLE_SECONDS = 0.2
# Between two looks at the replicas while no cell runs; one takes 10 µs.
_UNDEFINED = re.compile(r"name '(\w+)' is not defined")
KEPT_CELLS = 1000


class Session:
    """Replicas for one notebook, from the first cell that wants them until `stop()`."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._pool: Pool | None = None
        self._told: set[int] = set()
        # Pids of dead replicas that the user has been told of.
        self._told_files: set[str] = set()
        self._told_loaders: set[str] = set()
        self._advice = CellAdvice()
        self._cells: deque[Source] = deque(maxlen=KEPT_CELLS)
        # What replicas have run, in whose functions tracebacks may end.
        self._untaught: set[int] = set()
        # Replicas that have functions of these cells from another one, without their lines.
        self._unfinished: Callable[[], str] | None = None
        # The start of a restart that has not come so far.
        self._seed = 0
        self._exchange = AS_USUAL
        self._communication: Communication | None = None
        # What replicas begin with.
        self._reduces = Reduces("", "")
        # What they reduce by: a cell may choose other ops.
        self._dashboard: LiveDashboard | None = None
        # The one that follows from cell to cell.
        self._trained = ""
        # The network that the last cell named; empty while one runs.
        self.dashboards_above_cells = False
        # Each cell that trains has one of its own.
        self._proxies: set[str] = set()
        # Comms of the replicas' widgets that the kernel knows.
        self.measuring = Measuring(shell.user_ns, self._mended_pool)
        self._lent = Lent(self._mended_pool)
        self._names = Names(shell.user_ns, self.fetch, self._lent)

    # ------------------------------------------------------------------ life

    @property
    def pool(self) -> Pool | None:
        """The replicas, if there are any."""
        return self._pool

    def start(
        self,
        devices: str | None = None,
        seed: int | None = None,
        in_process: bool = False,
        exchange: GradientFlags = AS_USUAL,
    ) -> str:
        """Start replicas and return a line that says so; on the same devices again, say that they run.

        Raises DeviceError for devices that are not there and ops that cannot
        work on them, UsageError when others are running, or with another seed.
        """
        chosen = device_names.resolve(devices, torch.cuda.device_count())
        if self._pool is not None:
            same = exchange.over(self._exchange) == self._exchange
            if (devices is None or chosen == self._pool.devices) and same:
                self._check_begun_so(self._pool, seed, in_process)
                return f"{_replicas(self._pool.devices)} running already"
            # What is recommended has to work.
            wanted = exchange.over(self._exchange)
            choose(wanted.ops, wanted.options(), self._pool.devices if devices is None else chosen)
            raise UsageError(
                f"replicas are running on {', '.join(map(str, self._pool.devices))}; "
                f"use %mirror restart {_flags(devices, exchange)} (their names are lost then), or %mirror stop"
            )
        began = time.perf_counter()
        communication = choose(exchange.ops, exchange.options(), chosen)
        self._seed, self._exchange, self._communication = seed or 0, exchange, communication
        pool = (InProcessPool if in_process else LocalPool)(
            chosen, setup=SETUP, seed=self._seed, communication=communication.pickled()
        )
        try:
            pool.start()
        except BaseException:
            pool.close()
            raise
        self._pool, self._unfinished = pool, None
        self._reduces = _reduces(communication)
        pool.tell("", self._reduces.operation)
        self._watch(pool)
        self._names = Names(self._shell.user_ns, self.fetch, self._lent)
        by = f" by {exchange.ops}" if exchange.ops else ""
        return f"{_replicas(chosen)}{by} ready in {duration(time.perf_counter() - began)}"

    def _check_begun_so(self, pool: Pool, seed: int | None, in_process: bool) -> None:
        """Raise UsageError where the replicas that run were begun otherwise, which nothing but a new start changes."""
        if in_process and not isinstance(pool, InProcessPool):
            raise UsageError(
                "replicas are running in processes of their own; %mirror stop first (their names are lost then)"
            )
        if seed not in (None, self._seed):
            raise UsageError(
                f"replicas are running that began with seed {self._seed}; %mirror stop first (their names are lost "
                f"then), or write torch.manual_seed({seed})"
            )

    def _watch(self, pool: Pool) -> None:
        """Tell of a replica that dies while no cell runs, below the last cell, as soon as the kernel is idle."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            # No event loop runs under the shell, as in a terminal: the next cell tells.
            return

        def look() -> None:
            if self._pool is not pool or pool.closed:
                return
            for death in pool.dead():
                if death.pid not in self._told:
                    self._told.add(death.pid)
                    print(f"{death}. The next %%mirrored cell starts it anew.", file=sys.stderr, flush=True)
            loop.call_later(IDLE_SECONDS, look)

        loop.call_later(IDLE_SECONDS, look)

    def restart(self, devices: str | None = None, exchange: GradientFlags = AS_USUAL) -> str:
        """Stop the replicas and start new ones, on the same devices with the same options unless others are named."""
        if self._pool is None:
            return self.start(devices, exchange=exchange) if devices or exchange != AS_USUAL else self._begin()
        names, exchange = devices or ",".join(map(str, self._pool.devices)), exchange.over(self._exchange)
        # A mistake in the names must not cost the replicas that run.
        chosen = device_names.resolve(names, torch.cuda.device_count())
        choose(exchange.ops, exchange.options(), chosen)
        # Of several devices each replica has a process.
        in_process = isinstance(self._pool, InProcessPool) and len(chosen) == 1
        self._unfinished = functools.partial(self.start, names, self._seed, in_process, exchange)
        lost = self._end()
        return "; ".join([self._begin(), *lost])

    def _begin(self) -> str:
        """Start replicas as nobody has said how, or as a restart was to that was interrupted."""
        return (self._unfinished or self.start)()

    def stop(self) -> str:
        """Stop the replicas and all that they started; return a line that says so."""
        if self._pool is None:
            return "no replicas are running"
        devices = self._pool.devices
        self.dashboards_above_cells, self._unfinished = False, None
        lost = self._end()
        stop_forkserver()
        return "; ".join([f"{_replicas(devices)} stopped", *lost])

    def _end(self) -> list[str]:
        """Stop the replicas; return what there is to say of the values that they had."""
        pool = self._running()
        self._lent.keep(pool, self._names.keep)
        self._pool = None
        if self._dashboard is not None:
            self._dashboard.close()
            self._dashboard = None
        for comm_id in list(self._proxies):
            self._drop_proxy(comm_id)
        try:
            pool.close()
        finally:
            lost = lost_values(*self._names.ended())
        return lost

    def status(self) -> str:
        """Return a table of the replicas: id, device, pid, memory, state; and how they exchange gradients."""
        if self._pool is None:
            return "no replicas are running; %mirror start, or any %%mirrored cell, starts them"
        rows = [("replica", "device", "pid", "memory", "state")]
        found = self._pool.status()
        for s in found:
            memory = size(s.memory_bytes) if s.memory_bytes is not None else "–"
            rows.append((str(s.replica_id), str(s.device), str(s.pid), memory, s.state))
        dead = [f"{s.how}; the next %%mirrored cell starts it anew" for s in found if s.how]
        return "\n".join([*aligned(rows), *dead, *self._exchanging()])

    def _exchanging(self) -> list[str]:
        """Return a line that says how gradients are exchanged: "2 replicas · shared_memory · 25 MiB buckets"."""
        n, by = self._running().size, self._communication
        if by is None or n < 2:
            return []
        parts = [f"{n} replicas", self._reduces.ops, f"{size(by.options.bytes_per_pack)} buckets"]
        return [" · ".join([*parts, *([by.options.compression] if by.options.compression else [])])]

    # ------------------------------------------------------------------ dashboards

    def dashboard(self) -> None:
        """Show the dashboard that follows from cell to cell; starts replicas if there are none.

        Raises UsageError for replicas that record nothing.
        """
        if self._pool is None:
            self._begin()
        if self._dashboard is None:
            self._dashboard = self._live()
        self._dashboard.show()

    def _live(self, fresh: bool = False) -> LiveDashboard:
        return LiveDashboard(
            self._running(), operation=self._reduces.operation, title=self._title, shell=self._shell, fresh=fresh
        )

    def _title(self) -> str:
        """What the last cell trained; empty while a cell runs, which may make what it trains."""
        return self._trained

    def _network(self, names: Iterable[str]) -> str:
        """The last network that bears one of these names, else the last one there is."""
        networks = [module for _, module in self._names.mirrors.roots()]
        values = [self._shell.user_ns.get(name) for name in names]
        named = [module for module in networks if any(module is value for value in values)]
        return called((named or networks)[-1]) if networks else ""

    @contextlib.contextmanager
    def _watched(self, options: CellOptions) -> Iterator[list[LiveDashboard]]:
        """Yield the dashboards that show this cell: the one of all cells, and its own."""
        following = [self._dashboard] if self._dashboard is not None else []
        above = self.dashboards_above_cells and not options.quiet and getattr(self._shell, "kernel", None) is not None
        if not options.dashboard and (not above or self._running().notice() is None):
            yield following
            return
        own = self._live(fresh=True)
        if options.dashboard:
            own.show()
        else:
            place = uuid.uuid4().hex
            self._shell.display_pub.publish({"text/plain": ""}, transient={"display_id": place})
            own.show_above(place)
        try:
            yield [*following, own]
            own.cell_ended()
        finally:
            own.close()

    def compare(self) -> str:
        """Return a line that says whether the replicas' parameters are equal, or which are not."""
        pool = self._running()
        self._mend()
        return repr(compare(pool))

    # ------------------------------------------------------------------ cells

    def run_cell(self, source: str, options: CellOptions) -> Any:
        """Run a cell on the replicas; return the value of its last expression, merged over them.

        Raises what the replicas raised, ReplicaDied, ReplicaTimeout, KeyboardInterrupt, or TransferError for a
        name that cannot be sent (then nothing has run).
        """
        alone = ""
        if self._pool is None:
            self._begin()
            devices = self._running().devices
            alone = str(devices[0]) if len(devices) == 1 and devices[0].kind == "cpu" else ""
        pool = self._running()
        began = time.perf_counter()
        replicas = self._chosen(options.replicas)
        closing = ClosingLine(alone, self._mend())
        self._tell_surroundings(pool)
        names = cell_names(self._shell.transform_cell(source))
        parcels = self._names.prepare(names.read, replicas, names.unsure)
        closing.withheld = sorted(set(self._names.withheld))
        self._trained = ""
        with _closing(parcels), self._names.stay(), self._watched(options) as dashboards:
            # What is told counts as told before it is sent.
            with Deferred(SECOND_AFTER) as interrupt:
                self._push_changed(closing)
            if interrupt.came:
                raise KeyboardInterrupt
            requests, slabs = self._requests(source, options, names, replicas, parcels)
            view = CellView(self._shell, replicas, pool.devices, options.quiet)
            # Left halfway, the notebook would have the one half of a step, and the replicas took it for told of all.
            with Deferred(SECOND_AFTER) as interrupt:
                for replica_id, request in requests.items():
                    self._names.told(replica_id, request.holdings)
                self._untaught.difference_update(replicas)
                report = self._follow(requests, slabs, view, dashboards, options.timeout)
                self._told |= {death.pid for death in report.deaths}
                self._enter(closing, parcels, report)
                self._lent.take_changes(report, replicas[0])
                closing.returned = self._absorb(report, replicas[0])
                self._import_too(names.imported)
                self._level()
            report.interrupted = report.interrupted or interrupt.came
            closing.mixed = self._note_mixed(report)
            closing.undivided = [name for name in report.undivided_loaders() if name not in self._told_loaders]
            self._told_loaders.update(closing.undivided)
            self._trained = self._network(names.mentioned)
            pool.tell(self._trained, self._reduces.operation)
        seconds = time.perf_counter() - began
        advice: list[str] = []
        try:
            if report.clean and len(replicas) == pool.size and seconds >= LEAST_SECONDS and not options.quiet:
                advice = self._advice.after_cell(pool, self._exchange.options())
        finally:
            view.close(closing.parts(replicas, seconds), advice)
        self._explain_lacking(report)
        raise_for(report, pool.devices, options.timeout)
        if options.out is not None:
            self._shell.user_ns[options.out] = closing.returned.result
            return None
        return self._shown(report, replicas[0], closing.returned.result)

    def _import_too(self, submodules: Iterable[str]) -> None:
        """Import what the replicas have imported of packages, where the package has a name here."""
        for path in submodules:
            if isinstance(self._shell.user_ns.get(path.partition(".")[0]), types.ModuleType):
                # Who uses it here is told why it cannot be imported.
                with contextlib.suppress(Exception):
                    bring([path])

    def _explain_lacking(self, report: Report) -> None:
        """Say below a NameError why the notebook's name was not sent."""
        for answer in report.answers.values():
            failure = answer.failure
            name = _UNDEFINED.fullmatch(failure.message) if failure is not None else None
            if name is None or answer.done is None or failure is None:
                continue
            value = self._shell.user_ns.get(name[1])
            lost = value.where() if isinstance(value, Remote) and value.lost else None
            if why := lost or self._names.kept.get(name[1]):
                answer.done.failure = dataclasses.replace(failure, traceback=(*failure.traceback, why))

    def _follow(
        self,
        requests: dict[int, RunCell],
        slabs: dict[int, int | None],
        view: CellView,
        dashboards: Sequence[LiveDashboard],
        timeout: float | None,
    ) -> Report:
        """Run the requests, and show how they go on."""

        def tick(pending: set[int]) -> None:
            view.tick(pending)
            for dashboard in dashboards:
                dashboard.tick(pending)

        files = EventFiles(requests)
        take = self._shown_by(view, files, dashboards)
        try:
            report = self._running().run(requests, slabs=slabs, on_message=take, on_tick=tick, timeout=timeout)
        finally:
            files.close()
        for dashboard in dashboards:
            dashboard.ended(report)
        return report

    def _enter(self, closing: ClosingLine, parcels: Sequence[Parcel], report: Report) -> None:
        """Note which names have arrived."""
        # A replica that could not open its parcel, or died before, answers without a payload.
        arrived = [r for r, a in report.answers.items() if a.done is not None and a.done.payload is not None]
        for parcel in parcels:
            self._names.sent(parcel, arrived)
            closing.sent += [
                name
                for name, value in parcel.names.items()
                if name not in {*closing.sent, *parcel.beside} and not isinstance(value, types.ModuleType)
            ]
            closing.sent_bytes += parcel.packed.payload.nbytes

    def _requests(
        self, source: str, options: CellOptions, names: CellNames, replicas: Sequence[int], parcels: list[Parcel]
    ) -> tuple[dict[int, RunCell], dict[int, int | None]]:
        requests, slabs = {}, {}
        # The magic's own line counts, so that tracebacks give the notebook's line numbers.
        body = source if source.lstrip().startswith("%%") else f"# %%mirrored\n{source}"
        # Not execution_count: since IPython 9 that is the next cell's already.
        number = self._shell.displayhook.prompt_count
        for replica_id in replicas:
            parcel = next((p for p in parcels if replica_id in p.replicas), None)
            requests[replica_id] = RunCell(
                source=body,
                names=parcel.packed.payload if parcel is not None else None,
                bound=names.bound,
                mentioned=names.mentioned,
                count=number,
                working_directory=_folder(),
                synchronize=options.synchronize,
                partial=len(replicas) < self._running().size,
                owner=replica_id == replicas[0],
                sources=self._sources(parcel, replica_id),
                submodules=reached(sorted(names.paths), self._shell.user_ns),
                widgets=getattr(self._shell, "kernel", None) is not None,
                holdings=self._names.holdings(replica_id, names, () if parcel is None else parcel.names),
                modes=modes.current(),
            )
            slabs[replica_id] = parcel.packed.slab if parcel is not None else None
        cell = source_of(self._shell, body, number)
        self._cells.append(cell)
        learn(self._shell, [cell])
        return requests, slabs

    def _sources(self, parcel: Parcel | None, replica_id: int) -> tuple[Source, ...]:
        files = parcel.packed.files if parcel is not None else frozenset()
        texts = {file: "".join(linecache.getlines(file)) for file in sorted(files)}
        numbers = cell_numbers(self._shell)
        found = (Source(file, text, numbers.get(file)) for file, text in texts.items() if text)
        return (*found, *(self._cells if replica_id in self._untaught else ()))

    def _shown_by(self, view: CellView, files: EventFiles, dashboards: Sequence[LiveDashboard]) -> Any:
        kernel = getattr(self._shell, "kernel", None)

        def take(replica_id: int, message: Any) -> None:
            if isinstance(message, CommSent) and kernel is not None:
                if message.kind == "comm_open":
                    self._proxy(replica_id, message.content["comm_id"])
                elif message.kind == "comm_close":
                    self._drop_proxy(message.content["comm_id"])
            if isinstance(message, Written):
                files.take(replica_id, message)
            elif isinstance(message, Logged):
                log_lines.take(message)
            elif isinstance(message, Reduces):
                self._reduce_by(message, dashboards)
            else:
                view.take(replica_id, message)

        return take

    def _reduce_by(self, reduces: Reduces, dashboards: Iterable[LiveDashboard]) -> None:
        """Say everywhere by what the replicas reduce from now on."""
        self._reduces = reduces
        self._running().tell(self._trained, reduces.operation)
        for dashboard in dashboards:
            dashboard.reduces_by(reduces.operation)

    def _proxy(self, replica_id: int, comm_id: str) -> None:
        pool = self._running()
        proxy: Any = CommProxy(comm_id, lambda message: pool.hand(replica_id, message))
        comms_of(self._shell)[comm_id] = proxy
        self._proxies.add(comm_id)

    def _drop_proxy(self, comm_id: str) -> None:
        # The front end may have closed it first.
        comms_of(self._shell).pop(comm_id, None)
        self._proxies.discard(comm_id)

    def _shown(self, report: Report, lead: int, value: Any) -> Any:
        """Return the value for Out[n]; nothing where the cell ended in a semicolon or had no value."""
        done = report.answers[lead].done
        return value if done is not None and done.result is not None else None

    def _note_mixed(self, report: Report) -> list[str]:
        first = [path for path in report.mixed_files() if path not in self._told_files]
        self._told_files.update(first)
        here = _folder()
        return [path.removeprefix(os.path.realpath(here) + os.sep) if here else path for path in first]

    def _absorb(self, report: Report, lead: int, *, pulled: bool = False) -> Returned:
        for death in report.deaths:
            self._names.mirrors.forget_replica(death.replica_id)
        payloads = _payloads(report)
        for death in report.deaths if payloads else ():
            # What the others tell of an object that it had, too, is all that there is of it.
            self._names.shared.forget_replica(death.replica_id)
        told = bool(payloads)
        while payloads and lead not in payloads:
            # It was to send the networks: of these the others have sent only what is averaged.
            report.close()
            lead = min(payloads)
            report = self._running().run({r: Again(r == lead) for r in payloads})
            payloads = _payloads(report)
        returned = self._names.absorb(payloads, lead, pulled=pulled)
        if told and not payloads:
            returned.problem = "the replicas that are left could not say what they hold"
        if returned.left is not None and returned.left.grads is not None:
            torch.set_grad_enabled(returned.left.grads)
        if returned.left is not None and returned.left.process is not None:
            self._running().settle(returned.left.process)
        return returned

    def _push_changed(self, closing: ClosingLine) -> None:
        """Give the replicas what was changed here: values of networks, settings and states of optimizers."""
        self._lent.send_changes()
        changed = self._names.changed_modules()
        if changed:
            closing.sent_bytes += self._give(LoadModules, changed, range(self._running().size))
            closing.sent += ["changed values of a network"]

    def _give(self, kind: Any, obj: object, replicas: Sequence[int] | range) -> int:
        """Send each of these replicas an object; return its size in bytes."""
        pool = self._running()
        with contextlib.closing(pack(obj)) as packed:
            slabs = dict.fromkeys(replicas, packed.slab)
            raise_for(pool.run(dict.fromkeys(replicas, kind(packed.payload)), slabs=slabs), pool.devices)
            return packed.payload.nbytes

    # ------------------------------------------------------------------ names by hand

    def push(self, names: Sequence[str]) -> str:
        """Send names to all replicas, whether they have them or not."""
        pool = self._running()
        self._mend()
        self._tell_surroundings(pool)
        lacking = [name for name in names if name not in self._shell.user_ns]
        if lacking or not names:
            raise UsageError(f"the notebook has no name `{'`, `'.join(lacking)}`" if lacking else "push which names?")
        for name in names:
            self._check_sent(name)
        for replica_id in range(pool.size):
            self._names.shared.outdate(replica_id, names)
        parcels = self._names.prepare(names, range(pool.size))
        nbytes = 0
        with _closing(parcels):
            for parcel in parcels:
                slabs = dict.fromkeys(parcel.replicas, parcel.packed.slab)
                report = pool.run(dict.fromkeys(parcel.replicas, Bind(parcel.packed.payload)), slabs=slabs)
                raise_for(report, pool.devices)
                self._names.sent(parcel, parcel.replicas)
                nbytes += parcel.packed.payload.nbytes
        # Of what replicas keep the values go out too: theirs may be others.
        values = self._names.values_of(names)
        if values:
            nbytes += self._give(LoadModules, values, range(pool.size))
        self._lent.send_again([self._shell.user_ns[name] for name in names])
        return f"sent {shortened(list(names))} ({size(nbytes)}) to {_replicas(pool.devices)}"

    def _check_sent(self, name: str) -> None:
        """Raise UsageError for a name that is not sent, whatever it holds, and for a stand-in."""
        if not self._names.travels(name):
            value = self._shell.user_ns[name]
            own = f"`{name}` is not sent: each replica has one of its own; give the value another name"
            raise UsageError(value.where() if isinstance(value, Remote) else own)

    def pull(self, names: Sequence[str], replica: int | None = None) -> str:
        """Bind in the notebook what the replicas' names hold, whatever its size."""
        self._mend()
        replicas = self._chosen(None if replica is None else (replica,))
        if not names:
            raise UsageError("pull which names?")
        # What they hold is to come as it is there, and to stay one with what has a name.
        names = sorted({*names, *self._names.shared.altered_in(names, replicas)})
        report = self._fetch(tuple(names), replicas)
        standing = self._names.shared.standing(names)
        try:
            returned = self._absorb(report, replicas[0], pulled=report.clean)
            self._check_fetched(names, report, returned)
        except BaseException:
            self._names.shared.put_back(standing)
            raise
        stayed = {name: self._shell.user_ns[name] for name in returned.stayed}
        self._names.shared.put_back({name: standing[name] for name in stayed})
        for name, value in stayed.items():
            _check_brought(name, value)
        whence = f"replica{'s' if len(replicas) > 1 else ''} {spans(replicas)}"
        # Besides what is bound anew, networks and the like whose values came.
        pulled = sorted({*names, *returned.bound} - stayed.keys())
        return f"pulled {shortened(pulled)} ({size(returned.nbytes)}) from {whence}"

    def fetch(self, name: str, replica_id: int) -> Any:
        """Return a replica's value of a name, whatever its size; the notebook's name is left alone."""
        self._mend()
        name = self._names.lies_under(name, replica_id)
        report = self._fetch((name,), [replica_id])
        standing = self._names.shared.standing((name,))
        try:
            returned = self._absorb(report, replica_id)
            value = self._shell.user_ns.get(name)
        finally:
            self._names.shared.put_back(standing)
        self._check_fetched((name,), report, returned)
        _check_brought(name, value)
        return value

    def _check_fetched(self, names: Sequence[str], report: Report, returned: Returned) -> None:
        lacking = next((f for f in report.failures.values() if f.type_name == UsageError.__name__), None)
        if lacking is not None:
            # Where a replica found that out tells the user nothing.
            raise UsageError(lacking.message)
        raise_for(report, self._running().devices)
        _check_rebuilt(names, returned)

    def _fetch(self, names: tuple[str, ...], replicas: Sequence[int]) -> Report:
        lacked = tuple(self._names.undelivered)
        standing = tuple(self._names.shared.alike(replicas).difference(names))
        return self._running().run(
            {r: Fetch(names, r == replicas[0], undelivered=lacked, standing=standing) for r in replicas}
        )

    # ------------------------------------------------------------------ replicas that are gone

    def _level(self) -> None:
        """After a failure bring the replicas to one step, and that step here: what is saved next would be of two."""
        pool = self._running()
        # It is the cell's own error that is told; replicas that are still apart are brought to one step by `_mend`.
        with contextlib.suppress(Exception, KeyboardInterrupt):
            changed = level(pool)
            if not changed:
                return
            gone = {death.replica_id for death in pool.dead()}
            living = [r for r in range(pool.size) if r not in gone]
            here = self._shell.user_ns
            # Optimizers and schedulers are the same ones here: of these the settings are told.
            variables = tuple(name for name in changed if name in here and not is_told(here[name]))
            self._absorb(self._fetch(variables, living), living[0])
            self._lent.read_settings(pool, living[0])

    def _mend(self) -> list[str]:
        """Replace dead replicas, refill them from a survivor, and return what there is to say of it."""
        pool = self._running()
        gone = pool.mend()
        for replica_id in pool.blank:
            self._names.forget_replica(replica_id)
        if not (pool.blank or pool.apart):
            return []
        recovery = recover(pool)
        lost = lost_values(*self._names.ended()) if recovery.source is None else []
        if recovery.source is None and self._communication is not None:
            # Nobody is left who knew what a cell had chosen.
            self._reduce_by(_reduces(self._communication), [self._dashboard] if self._dashboard else [])
        if recovery.source is not None:
            for replica_id in recovery.filled:
                self._names.restored(replica_id, recovery.source, recovery.left)
                self._untaught.add(replica_id)
        return [*(mended(deaths, recovery.source, recovery.left) for deaths in alike(gone)), *lost]

    def _mended_pool(self) -> Pool | None:
        if self._pool is not None:
            self._mend()
        return self._pool

    def _tell_surroundings(self, pool: Pool) -> None:
        """Say, before names are sent, where the modules are that they need, and what else the kernel has set."""
        followed = pool.follow_controller()
        if followed is not None:
            raise_for(followed, pool.devices)

    # ------------------------------------------------------------------ checks

    def _running(self) -> Pool:
        if self._pool is None:
            raise PoolClosed("no replicas are running; %mirror start, or any %%mirrored cell, starts them")
        return self._pool

    def _chosen(self, replicas: tuple[int, ...] | None) -> list[int]:
        n = self._running().size
        if replicas is None:
            return list(range(n))
        wrong = [r for r in replicas if not 0 <= r < n]
        if wrong:
            raise UsageError(f"there is no replica {spans(wrong)}; there are {n}: {spans(range(n))}")
        return sorted(set(replicas))


def _payloads(report: Report) -> dict[int, tuple[Payload, int | None]]:
    return {
        r: (a.done.payload, a.slab)
        for r, a in report.answers.items()
        if a.done is not None and a.done.payload is not None
    }


@contextlib.contextmanager
def _closing(parcels: Iterable[Parcel]) -> Iterator[None]:
    """Close the sender's descriptors of these parcels at the end of the block."""
    try:
        yield
    finally:
        for parcel in parcels:
            parcel.packed.close()


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        # It was moved while the kernel ran; the replicas stay where they are.
        return ""


def _replicas(devices: Sequence[Device]) -> str:
    return f"{len(devices)} replica{'s' if len(devices) > 1 else ''} ({', '.join(map(str, devices))})"


def _reduces(by: Communication) -> Reduces:
    return Reduces(name_of(by.ops), type(by.ops).__name__)


def _check_rebuilt(names: Sequence[str], returned: Returned) -> None:
    if returned.problem is not None:
        raise TransferError(
            f"{shortened(list(names))} cannot be rebuilt in the notebook: {returned.problem}; it stays in the replicas"
        )


def _check_brought(name: str, value: object) -> None:
    if isinstance(value, Remote):
        raise TransferError(f"`{name}` cannot be brought to the notebook: {value.why}; it stays in the replicas")


def _flags(devices: str | None, exchange: GradientFlags) -> str:
    return " ".join([*([] if devices is None else [f"--devices {devices}"]), *exchange.flags()])
