"""Replicas as processes of this machine, started by torch.multiprocessing, reached over Unix socket pairs.

    controller ──── socket pair ────▶ replica (its own session)
        │  └─ pipe ─▶ nanny ── kills the sessions when the pipe ends
        └─ TCPStore on 127.0.0.1, where replicas find each other

On Linux a forkserver that has torch loaded forks them (0.03 s a replica instead of 0.9 s); elsewhere they are
spawned. Never forked from the controller itself: it may have used CUDA. Where a forkserver makes it cheap, one process
more waits: it takes the place of the replica that dies first.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import math
import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing

from mirror_nb.channel import Channel, ChannelClosed, Frame
from mirror_nb.devices import Device
from mirror_nb.errors import DeviceError, ReplicaError
from mirror_nb.machine import memory
from mirror_nb.machine.cores import cores
from mirror_nb.messages import Exit, Record, Rendezvous, ReplicaSpec
from mirror_nb.pool import huge_pages, nanny, outside
from mirror_nb.pool.base import Pool
from mirror_nb.pool.hangs import Silent
from mirror_nb.pool.last_words import Ends, LastWords
from mirror_nb.pool.report import Death, Incoming, ReplicaStatus
from mirror_nb.telemetry.notice import Notice, Posted
from mirror_nb.telemetry.ring import Reader, Ring
from mirror_nb.telemetry.samples import last_collective
from mirror_nb.telemetry.timeline import Timeline

COLLECTIVE_SECONDS = 600.0
# A collective that waits longer fails; the controller frees waits much earlier when it knows of a failure.
EXIT_SECONDS = 0.5
NANNY_SECONDS = 10.0
# For the nanny to sweep up, which takes it a quarter of a second; one that a signal has stopped never does.
SPARE_SECONDS = 0.1
# From the start of replicas until another is started that waits for one to die. Who starts some for one all-reduce
# does not pay for it.
LOOK_SECONDS = 1.0
# Between two looks whether it is still there.
RESTS = "mirror_nb rests"
# Name of a forkserver's process that has loaded all: who asks it for a process does not wait. 15 characters at most.
_PRELOAD = ["mirror_nb.strategies.preload"]
_LONGEST = 107 - len("/listener-12345678")
# Bytes of the path of multiprocessing's folder, in which a socket's name has to have room.


@dataclass(slots=True)
class _Member:
    process: Any
    channel: Channel
    began: str
    # Start time of the process, to tell it from a later one with the same pid.
    last_words: LastWords
    end: int
    # A descriptor that can be read once the process has ended; not its sentinel, which tells when it was reaped.
    death: Death | None = None
    killed: bool = False

    def usable(self) -> bool:
        """Whether nobody has ended it, or stopped it by a signal."""
        return self.process.exitcode is None and nanny.state(self.process.pid) not in ("Z", "X", "T", "t")


_CHANNEL, _END = "channel", "end"


class LocalPool(Pool):
    """One process a device on this machine."""

    def __init__(
        self,
        devices: tuple[Device, ...],
        *,
        setup: str,
        seed: int = 0,
        reduction: str = "mean",
        communication: bytes = b"",
    ) -> None:
        if sys.platform == "win32":
            raise DeviceError("mirror_nb's replicas need Linux or macOS; on Windows run the notebook in WSL 2")
        super().__init__(devices, seed)
        self._setup = setup
        self._reduction = reduction
        self.communication = communication
        # What replicas that are started from now on reduce gradients by; see ReplicaSpec.
        self._members: dict[int, _Member] = {}
        self._spare: _Member | None = None
        # A process that is no replica yet: it takes the place of one that dies in half the time of a new one.
        self._spare_at = math.inf
        # When to see whether there is one.
        self._rings: dict[int, Ring] = {}
        # They outlive replicas: what a dead one did last is still there, and the next one goes on with it.
        self._title = self._operation = ""
        self._posted: Posted | None = None
        self._selector = selectors.DefaultSelector()
        # Kept: to register five descriptors anew for every message would take longer than the message. Several threads
        # may ask it at once, which `select.poll` forbids.
        self._selector.register(self._interrupts.readable, selectors.EVENT_READ)
        self._store: Any = None
        self._port = 0
        self._out_of_memory = 0
        # How many processes the system had ended for that when replicas were started last.
        self._nanny: subprocess.Popen[bytes] | None = None
        _guard_this_process()
        _close_with(os.getpid())
        _open_pools.add(self)

    # ------------------------------------------------------------------ start

    def _start(self, ids: list[int]) -> None:
        if self._store is None:
            self._store, self._port = _listen()
        if self._nanny is None:
            self._nanny = _start_nanny()
        self._out_of_memory = memory.ended()
        if "torch._dynamo" in sys.modules:
            # Somebody has made an optimizer here: the replicas are to train, and each would load it for itself.
            warm_up_to_train()
        for replica_id in ids:
            # The dead one stays until another is there: where that cannot be started, it is to be replaced still.
            dead = self._members.get(replica_id)
            if dead is not None:
                self._end_session(dead)
            member = self._members[replica_id] = self._take_spare() or self._launch()
            if dead is not None:
                self._bury(dead)
            if replica_id not in self._rings:
                self._rings[replica_id] = Ring.create()
            # One that is dead already shows in `poll`.
            with contextlib.suppress(ChannelClosed):
                member.channel.send(self._spec(replica_id))
                member.channel.send(Record(), self._rings[replica_id].descriptor)
            self._selector.register(member.channel, selectors.EVENT_READ, (replica_id, _CHANNEL))
            self._selector.register(member.end, selectors.EVENT_READ, (replica_id, _END))
        self._post()
        if self.size > 1:
            self._spare_at = time.monotonic() + SPARE_SECONDS

    def prepare(self) -> None:
        # In the main thread alone: while a process starts, what is pickled there would not find the main module.
        early = self._closed or time.monotonic() < self._spare_at
        if early or threading.current_thread() is not threading.main_thread():
            return
        self._spare_at = time.monotonic() + (SPARE_SECONDS if self._spare is None else LOOK_SECONDS)
        if (self._spare is None or not self._spare.usable()) and _forkserver_rests():
            self._end_spare()
            # Nothing depends on it: what hinders it hinders the start of a replica too, which tells.
            with contextlib.suppress(OSError, EOFError):
                self._spare = self._launch()

    def _take_spare(self) -> _Member | None:
        if self._spare is not None and not self._spare.usable():
            self._end_spare()
        spare, self._spare = self._spare, None
        return spare

    def _end_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            self._bury(spare)

    def _launch(self) -> _Member:
        """Start a process, which is a replica once it got its ReplicaSpec."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        last_words = LastWords()
        try:
            process = _context().Process(
                target=_be_a_replica,
                args=(theirs, last_words.ends()),
                name="mirror_nb replica",
                daemon=False,
                # A daemon may not have children, and a DataLoader's workers are children.
            )
            # It is there by now, and has the forkserver's socket in it from the start on.
            self._tell_nanny(f"/ {multiprocessing.util.get_temp_dir()}")
            with _starting():
                process.start()
        except BaseException:
            ours.close()
            last_words.close()
            raise
        finally:
            theirs.close()
        last_words.started()
        member = _Member(process, Channel(ours), nanny.start_time(process.pid), last_words, _end_of(process))
        self._tell_nanny(f"+ {process.pid} {member.began}")
        return member

    def _spec(self, replica_id: int) -> ReplicaSpec:
        n = self.size
        on_cpu = self.devices[0].kind == "cpu"
        environment = {
            "NCCL_SOCKET_IFNAME": "lo",
            # Unless the user says otherwise: nobody outside of this machine is to reach a replica.
            "NCCL_RAS_ENABLE": "0",
            # A thread for NCCL's own diagnosis, which listens on port 28028.
            **os.environ,
            "RANK": str(replica_id),
            "LOCAL_RANK": str(replica_id),
            "WORLD_SIZE": str(n),
            "LOCAL_WORLD_SIZE": str(n),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": "mirror_nb",
        }
        gpus = [] if on_cpu else list(dict.fromkeys(device.index for device in self.devices))
        # CUDA takes a list that names one twice for the end of the list.
        if gpus:
            # torchrun's scripts take the GPU of their LOCAL_RANK, so replica i must see its GPU as number i.
            environment["CUDA_VISIBLE_DEVICES"] = _visible(gpus)
        return ReplicaSpec(
            replica_id=replica_id,
            num_replicas=n,
            device="cpu" if on_cpu else f"cuda:{gpus.index(self.devices[replica_id].index)}",
            seed=self._seed,
            threads=max(1, cores() // n if on_cpu else min(torch.get_num_threads(), cores() // n)),
            environment=environment,
            reduction=self._reduction,
            setup=self._setup,
            communication=self.communication,
        )

    def _rendezvous(self, replica_id: int) -> Rendezvous:
        return Rendezvous("127.0.0.1", self._port, self.generation, replica_id, self.size, COLLECTIVE_SECONDS)

    # ------------------------------------------------------------------ messages

    def send(self, replica_ids: Iterable[int], message: object, slab: int | None = None) -> None:
        frame = Frame.of(message, slab)
        for replica_id in replica_ids:
            # A channel that is closed belongs to a replica whose death `poll` tells; there are none of a closed pool.
            with contextlib.suppress(ChannelClosed, KeyError):
                self._members[replica_id].channel.send_frame(frame)

    def poll(self, timeout: float) -> list[Incoming]:
        self._check_open()
        try:
            return self._polled(timeout)
        except (OSError, ValueError, KeyError):
            # A signal's handler may close the pool anywhere in here.
            self._check_open()
            raise

    def _polled(self, timeout: float) -> list[Incoming]:
        dead: list[Incoming] = [(r, m.death, None) for r, m in self._members.items() if m.death is not None]
        ready = self._ready(0.0 if dead else timeout)
        found: list[Incoming] = []
        for replica_id in sorted({replica_id for replica_id, _ in ready}):
            found += self._receive(replica_id, (replica_id, _END) in ready)
        return found + dead

    def _ready(self, timeout: float) -> list[tuple[int, str]]:
        """Return which replicas' channels, or ends, have something to tell."""
        return [key.data for key, _ in self._selector.select(timeout) if key.data is not None]

    def _receive(self, replica_id: int, ended: bool) -> list[Incoming]:
        """Return what a replica sent; its death last, if its process has ended."""
        member = self._members[replica_id]
        try:
            found = [(replica_id, message, slab) for message, slab in member.channel.drain()]
        except ChannelClosed:
            found, ended = [], True
            if _wait_for(member.process) is None:
                # A cell closed the channel's descriptor: nobody can reach this replica any more.
                self.kill(replica_id)
        return [*found, self._died(replica_id)] if ended else found

    def _died(self, replica_id: int) -> Incoming:
        member = self._members[replica_id]
        code = _wait_for(member.process)
        self._end_session(member)
        last_words = member.last_words.take()
        short_of = memory.usable().total if memory.ended() > self._out_of_memory else 0
        member.death = Death(
            replica_id, self.devices[replica_id], member.process.pid, code, member.killed, last_words, short_of
        )
        # Last: an interrupt before this, outside of a request, leaves a death that is seen again.
        self._stop_watching(member)
        return replica_id, member.death, None

    # ------------------------------------------------------------------ ends

    def look(self, replica_id: int) -> Silent:
        member = self._members[replica_id]
        pid = member.process.pid
        status = ""
        with contextlib.suppress(psutil.Error):
            status = psutil.Process(pid).status()
        if status == psutil.STATUS_STOPPED:
            how = f"is stopped by a signal (kill -CONT {pid} lets it go on)"
            return Silent(how, outside.stack(pid), self._last_record(replica_id))
        how = "does not return to Python: native code holds its lock"
        stack = member.last_words.look(pid) or outside.stack(pid)
        return Silent(how, stack, self._last_record(replica_id))

    def _last_record(self, replica_id: int) -> str:
        """Say which collective the replica recorded last: its ring is here, whatever became of it."""
        reader = Reader(self._rings[replica_id].descriptor)
        try:
            return last_collective(reader.read())
        finally:
            reader.close()

    def kill(self, replica_id: int) -> None:
        member = self._members[replica_id]
        member.killed = True
        if member.death is None:
            member.last_words.ask(member.process.pid)
        self._end_session(member)

    def _end_session(self, member: _Member) -> None:
        """End the replica and all that its cells started."""
        nanny.end_session(member.process.pid, member.began)

    def _bury(self, member: _Member) -> None:
        self._end_session(member)
        member.process.join(EXIT_SECONDS)
        self._tell_nanny(f"- {member.process.pid}")
        self._stop_watching(member)
        member.channel.close()
        member.last_words.close()
        if member.end != member.process.sentinel:
            os.close(member.end)
        with contextlib.suppress(ValueError):
            member.process.close()

    def _stop_watching(self, member: _Member) -> None:
        for source in (member.channel, member.end):
            # Its death may have been told before it is buried.
            with contextlib.suppress(KeyError):
                self._selector.unregister(source)

    def _close(self) -> None:
        # A process forked from the controller must not end its replicas.
        if self.forked:
            return
        _open_pools.discard(self)
        self._end_spare()
        self.send(self._members, Exit())
        deadline = time.monotonic() + EXIT_SECONDS
        for member in self._members.values():
            member.process.join(max(0.0, deadline - time.monotonic()))
        while self._members:
            self._bury(self._members.popitem()[1])
        if self._nanny is not None and self._nanny.stdin is not None:
            self._tell_nanny(".")
            self._nanny.stdin.close()
            try:
                self._nanny.wait(NANNY_SECONDS)
            except subprocess.TimeoutExpired:
                self._nanny.kill()
                self._nanny.wait()
        self._store = None
        self._selector.close()
        if self._posted is not None:
            self._posted.close()
        for ring in self._rings.values():
            ring.close()

    def _tell_nanny(self, line: str) -> None:
        if self._nanny is not None and self._nanny.stdin is not None:
            with contextlib.suppress(OSError):
                self._nanny.stdin.write(line.encode() + b"\n")
                self._nanny.stdin.flush()

    # ------------------------------------------------------------------ questions

    def dead(self) -> list[Death]:
        for replica_id, source in [] if self._closed or self.forked else self._ready(0.0):
            if source is _END:
                self._died(replica_id)
        found = [member.death for member in self._members.values() if member.death is not None]
        return sorted(found, key=lambda death: death.replica_id)

    def timeline(self) -> Timeline | None:
        return Timeline([Reader(ring.descriptor) for _, ring in sorted(self._rings.items())]) if self._rings else None

    def tell(self, title: str, operation: str) -> None:
        self._title, self._operation = title, operation
        self._post()

    def notice(self) -> Notice | None:
        if not self._rings:
            return None
        return Notice(
            pid=os.getpid(),
            rings=tuple(ring.descriptor for _, ring in sorted(self._rings.items())),
            devices=tuple(map(str, self.devices)),
            places=self._places(),
            title=self._title,
            operation=self._operation,
        )

    def _places(self) -> tuple[int | str, ...]:
        if self.devices[0].kind == "cpu":
            return tuple(member.process.pid for _, member in sorted(self._members.items()))
        named = _visible([d.index for d in self.devices]).split(",")
        return tuple(int(name) if name.isdigit() else name for name in named)

    def _post(self) -> None:
        """Let other processes find the rings; replaced replicas have other process ids."""
        notice = self.notice()
        if notice is None or not hasattr(os, "memfd_create"):
            return
        if self._posted is None:
            self._posted = Posted(notice)
        else:
            self._posted.change(notice)

    def spare(self) -> int | None:
        """Return the pid of the process that waits to take a dead replica's place; None: there is none."""
        return self._spare.process.pid if self._spare is not None and self._spare.usable() else None

    def status(self) -> list[ReplicaStatus]:
        gone = {death.replica_id: death for death in self.dead()}
        lines = []
        for replica_id, member in sorted(self._members.items()):
            state, how, memory = "ready", "", None
            if replica_id in gone:
                state, how = "dead", str(gone[replica_id])
            else:
                with contextlib.suppress(psutil.Error):
                    memory = psutil.Process(member.process.pid).memory_info().rss
            device = self.devices[replica_id]
            lines.append(ReplicaStatus(replica_id, device, member.process.pid, memory, state, how))
        return lines

    def leave(self) -> None:
        """In a forked child: close what would hide the controller's end from replicas and nanny."""
        self.forked = True
        for member in filter(None, [*self._members.values(), self._spare]):
            member.channel.close()
            member.last_words.close()
            # At its end multiprocessing waits for these, as if they were the child's.
            getattr(multiprocessing.process, "_children", set()).discard(member.process)
        # Its destructor would wait for a thread that is not here.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._store))
        if self._nanny is not None and self._nanny.stdin is not None:
            self._nanny.stdin.close()


# --------------------------------------------------------------------------- what a pool starts


def _be_a_replica(end: socket.socket, ends: Ends) -> None:
    # By name: what a pool starts is not what a pool knows.
    importlib.import_module("mirror_nb.replica.worker").main(end, ends.use())


def _end_of(process: Any) -> int:
    """Return a descriptor that can be read once the process has ended, whether or not its parent is busy."""
    # What has ended already was reaped; systems other than Linux have no such descriptor.
    with contextlib.suppress(OSError, AttributeError):
        return os.pidfd_open(process.pid)
    return int(process.sentinel)


def _wait_for(process: Any) -> int | None:
    """Wait a little for a process that is thought to end, and return how it did; None: it lives.

    Its parent, the forkserver, tells; but not while it loads something. The kernel tells then, until that reaps it.
    """
    deadline = time.monotonic() + EXIT_SECONDS
    while True:
        code = process.exitcode
        if code is None:
            code = nanny.exit_code(process.pid)
        if code is not None or time.monotonic() > deadline:
            return None if code is None else int(code)
        process.join(0.005)


def _context() -> Any:
    """Return torch's multiprocessing context for replicas."""
    if sys.platform != "linux":
        return torch.multiprocessing.get_context("spawn")
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with _main_lock:
        _shorten_addresses()
    return context


def _shorten_addresses() -> None:
    """Have multiprocessing keep its sockets where there is room for their paths. Raises ReplicaError if nowhere is."""
    configured, saved = tempfile.gettempdir(), tempfile.tempdir
    reason: object = ""
    if len(os.fsencode(configured)) > _LONGEST - len("/pymp-12345678"):
        tempfile.tempdir = "/tmp"
    try:
        # It makes its folder once.
        folder = multiprocessing.util.get_temp_dir()
    except OSError as error:
        folder, reason = configured, f" ({error})"
    finally:
        tempfile.tempdir = saved
    if len(os.fsencode(folder)) > _LONGEST:
        raise ReplicaError(
            f"the path of a Unix socket may have {_LONGEST} bytes before its name; the folder for temporary files has "
            f"{len(os.fsencode(configured))}, {configured!r}, and /tmp was not used{reason}: set TMPDIR to a shorter "
            "one, before Python starts"
        )


def warm_up() -> None:
    """Start the forkserver, so that torch is loaded in it by the time replicas are wanted; does not wait."""
    if sys.platform == "linux":
        # By now: what a program registers for its end from here on finds the replicas there, and forks leave the
        # forkserver to this process.
        _guard_this_process()
        _context()
        with _starting():
            multiprocessing.forkserver.ensure_running()


def _forkserver_pid() -> int | None:
    return getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None)


def warm_up_to_train() -> None:
    """Have the forkserver load all that training needs before it starts the next process; does not wait."""
    if sys.platform != "linux" or _forkserver_rests():
        return
    warm_up()
    pid, alarm = _forkserver_pid(), 1 << (signal.SIGALRM - 1)
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
        masks = [int(line.split()[1], 16) for line in file if line.startswith(("SigBlk", "SigCgt"))]
        # It ends one that does not expect it, which the user's own program has started.
        if pid is not None and any(mask & alarm for mask in masks):
            os.kill(pid, signal.SIGALRM)


def _forkserver_rests() -> bool:
    """Whether a process can be had at once and for some 15 MB: there is a forkserver, which has loaded all."""
    with contextlib.suppress(OSError), open(f"/proc/{_forkserver_pid()}/comm", encoding="ascii") as file:
        return file.read().rstrip("\n") == RESTS
    return False


def stop_forkserver() -> None:
    """End the forkserver, if no pool needs it; the next pool starts another."""
    server = multiprocessing.forkserver._forkserver
    if not _open_pools and hasattr(server, "_stop"):
        pid = _forkserver_pid()
        # Two threads may come here when a kernel ends; one of them finds nothing left to end.
        with contextlib.suppress(OSError):
            if pid is not None:
                # It has nothing to finish, and unloading torch would take it a second.
                os.kill(pid, signal.SIGKILL)
            server._stop()


def end_children() -> None:
    """End all pools, the forkserver and multiprocessing's resource tracker, and reap them.

    For a kernel that shuts down. ipykernel waits up to 4 s for its children to be gone, dead ones that nobody reaped
    among them; after 2.5 s Jupyter kills it, before what was registered for its end has run.
    """
    _close_pools()
    stop_forkserver()
    tracker: Any = multiprocessing.resource_tracker._resource_tracker
    descriptor, pid = getattr(tracker, "_fd", None), getattr(tracker, "_pid", None)
    if descriptor is None or pid is None:
        return
    tracker._fd = tracker._pid = None
    with contextlib.suppress(OSError):
        os.close(descriptor)
        # It lives on while a process of the user's has its descriptor.
        deadline = time.monotonic() + EXIT_SECONDS
        while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.005)


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """Hide the main script while a process starts, which would run it again, and keep Ctrl-C from it.

    From a forkserver also the signal to load all, until it knows it.
    """
    main = sys.modules["__main__"]
    config = getattr(multiprocessing.process.current_process(), "_config", {})
    with _main_lock, _somewhere():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, set())
        # A worker of a multiprocessing.Pool may start none, lest they outlive it. The nanny ends ours.
        daemon = config.pop("daemon", False)
        try:
            # It lets Ctrl-C through again when it is started, just before the forkserver is.
            multiprocessing.resource_tracker.ensure_running()
            # It raises an interrupt that has come already after it has blocked those to come.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGALRM})
            sys.modules["__main__"] = types.ModuleType("__main__")
            with huge_pages.asked_for():
                yield
        finally:
            config["daemon"] = daemon
            sys.modules["__main__"] = main
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _somewhere() -> Iterator[None]:
    """Be in a folder that is there: the notebook's may have been moved, and multiprocessing asks for its path."""
    try:
        os.getcwd()
    except FileNotFoundError:
        gone = os.open(".", os.O_RDONLY)
        os.chdir(tempfile.gettempdir())
        try:
            yield
        finally:
            os.fchdir(gone)
            os.close(gone)
    else:
        yield


_main_lock = threading.Lock()


def _listen() -> tuple[Any, int]:
    """Return a store that listens on loopback alone, and its port; torch's own would listen on every interface."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    port = listener.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, port


def _start_nanny() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-S", "-E", nanny.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd=tempfile.gettempdir(),
    )


def _visible(indices: list[int]) -> str:
    """Return CUDA_VISIBLE_DEVICES for GPUs that are numbered among those visible here."""
    already = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    if already and max(indices) >= len(already):
        raise ReplicaError(f"GPU {max(indices)} is not among CUDA_VISIBLE_DEVICES={','.join(already)}")
    return ",".join(already[i] if already else str(i) for i in indices)


_open_pools: weakref.WeakSet[LocalPool] = weakref.WeakSet()


@functools.cache
def _guard_this_process() -> None:
    """Arrange, once, that the end of this process ends its replicas and that its forks do not hold their pipes."""
    # After multiprocessing.util's own handler was registered, hence run before it: that one waits for processes.
    atexit.register(_close_pools)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_leave_to_parent)


@functools.cache
def _close_with(pid: int) -> None:
    """Have a process that multiprocessing started close its pools: it waits for its children, and knows no atexit."""
    multiprocessing.util.Finalize(None, _close_pools, exitpriority=0)


def _close_pools() -> None:
    for pool in list(_open_pools):
        pool.close()


def _leave_to_parent() -> None:
    """In a forked child: leave replicas and forkserver to the parent; pools that are made here start another."""
    for pool in list(_open_pools):
        pool.leave()
    server: Any = multiprocessing.forkserver._forkserver
    descriptor = getattr(server, "_forkserver_alive_fd", None)
    if descriptor is not None:
        os.close(descriptor)
    # It would wait for its parent's child; and its lock may be held by a thread that is not here.
    server.__init__()
