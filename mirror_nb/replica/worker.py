"""The replica's process: its signals, its two threads, its end. What it computes is the runtime's business.

The main thread reads a request, carries it out, and reads the next one. Meanwhile the control thread reads, and
acts at once on what cannot wait: an interrupt, an abort, the end. It never sends, so that a main thread blocked in
a send cannot stop it from reading. It begins LOOK_AFTER a request did: to wake two threads for a message instead
of one would take a third of the time of a small call.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import dataclasses
import functools
import math
import multiprocessing
import multiprocessing.process
import os
import pdb
import select
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mirror_nb import event_files
from mirror_nb.channel import Channel, ChannelClosed
from mirror_nb.collectives import process_group, sealed
from mirror_nb.environment import log_lines, surroundings
from mirror_nb.errors import PeerFailed
from mirror_nb.machine.cores import cores
from mirror_nb.messages import (
    Abort,
    CommMessage,
    Communicate,
    Count,
    Done,
    Exit,
    Form,
    HeldBack,
    Interrupt,
    Record,
    ReplicaSpec,
    Request,
    RunCell,
    Steer,
    Stream,
    Where,
)
from mirror_nb.replica import downloads, files, runtime, saves, shell, whereabouts, whole
from mirror_nb.replica.alarm import Alarm
from mirror_nb.replica.streams import Streams
from mirror_nb.steps.recorder import Recorder
from mirror_nb.steps.steering import Steering
from mirror_nb.telemetry.ring import Writer
from mirror_nb.transfer import hooks

INTERRUPT = signal.SIGUSR1
# Not SIGINT: Jupyter sends that to the whole process group, VS Code to every descendant.
_RAISED_FROM = signal.SIGCHLD, signal.SIGALRM
# Torch's handler of the first raises that a DataLoader's worker died. A loader finds out by its next batch, too.
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 512 * 2**20
INSIST_SECONDS = 0.02
FREED_SECONDS = 0.5
# So long an interrupt for a peer's failure waits for a collective that has been ended to tell of that itself.
LOOK_AFTER = 0.05
# Seconds from the start of a request until the control thread reads the channel.
AWAKE_SECONDS = 0.004
# So long a replica looks for the next message before it sleeps, if the one before came as soon: a loop of calls. To be
# woken takes 0.1 ms, and on a busy machine the wrong core, where another replica runs already, for some ms.
BRIEF_SECONDS = 0.001
# Work as short as that is not worth it.
SPARE_AFTER = 0.1
# Seconds without a word of which replica this is, after which it is a spare and has time.


def main(end: socket.socket, stderr: tuple[int, int] | None = None) -> None:
    """Live as a replica until the controller ends it or is gone; `stderr` is a pipe that it can read too.

    Which replica it is the controller tells first: at once, or, of a spare, when it takes a dead one's place.
    """
    _leave_the_parent()
    _keep_freed_memory()
    process = _Process(Channel(end), stderr)
    try:
        process.serve()
    except BaseException:
        process.say(traceback.format_exc())
        raise


def _warm_up() -> None:
    """Do a step, since a process's first takes three times as long: where the forkserver has loaded all for it.

    Not where torch knows GPUs: a backward pass would look for them before it is told which are for this replica.
    """
    if "torch._dynamo" in sys.modules and torch.accelerator.current_accelerator() is None:
        network = torch.nn.Linear(1, 1)
        optimizer = torch.optim.Adam(network.parameters())
        network(torch.ones(1, 1)).sum().backward()
        optimizer.step()


def _leave_the_parent() -> None:
    """Be safe from the terminal's and Jupyter's signals, and never outlive the forkserver."""
    os.setsid()
    # The controller blocks them while it starts processes: the forkserver lets them through again, others have that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGALRM})
    # A handler, not SIG_IGN: programs that a cell starts would inherit that and could not be interrupted.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    # The forkserver has a use for it.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # A replica that wakes must not push the controller aside while that sends to the next one.
        # Some containers forbid it; nothing depends on it.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if sys.platform != "win32" and sys.platform != "darwin":
        # Otherwise a DataLoader's workers would be spawned and could not find classes made in a cell.
        multiprocessing.set_start_method("fork", force=True)
    _close_forkserver_descriptor()


def _keep_freed_memory() -> None:
    """Let glibc keep what a step frees for the next one: to give it back and to get it anew takes 5 to 10 % of a step.

    What lies at the heap's end is still given back from KEPT_BYTES on, and so are blocks of 32 MiB and more, always.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def _close_forkserver_descriptor() -> None:
    """Close the descriptor by which every replica would keep the forkserver alive after the kernel's end."""
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    descriptor = getattr(server, "_forkserver_alive_fd", None)
    if descriptor is not None:
        with contextlib.suppress(OSError):
            os.close(descriptor)
        server._forkserver_alive_fd = None  # type: ignore[union-attr]


class _Process:
    def __init__(self, channel: Channel, stderr: tuple[int, int] | None) -> None:
        self._stderr = stderr
        self._channel = channel
        self._requests: deque[tuple[Any, int | None]] = deque()
        # That the control thread read, though none should come while one runs.
        self._reading = threading.Lock()
        # Held by the thread that reads the channel.
        self._busy = False
        self._relief = Alarm(LOOK_AFTER)
        # Rings when a request has taken LOOK_AFTER.
        self._ended, self._end = os.pipe()
        # By which the main thread tells the control thread that it reads again.
        self._relieved = False
        self._main_thread = threading.get_ident()
        self._awake = 0.0
        # Seconds that it looks for the next message before it sleeps.
        self._rests = True
        # The last message did not come within AWAKE_SECONDS.
        self._came = time.monotonic()
        # When it came.
        self._running: int | None = None
        # Number of the request whose user code runs now.
        self._interrupted: int | None = None
        # Number of the request that shall be interrupted.
        self._took: int | None = None
        # Number of the latest request that was.
        self._shown = True
        # Whether anybody will see where.
        self._freed_until = 0.0
        # When it is raised at last in a collective that was ended.
        self._held_back = False
        # The interrupt came inside an optimizer's step, or while a message was sent, and waits for the end of that.
        self._said = 0.0
        # When the controller was told so last.
        self._sending = 0
        # Messages that the main thread is sending, one inside the other.
        self._streams = Streams(self._emit)
        self._comms: Any = None
        self._replica: runtime.Replica | None = None
        self._request: int | None = None
        # Number of the request that the main thread carries out.
        self._together = False
        # Whether that is something that replicas only do together: who waits for another is not at work.
        self._answered = -1
        # Number of the latest request that was answered.
        self._last_word = threading.Lock()
        # Held while this changes, and while what must not come after an answer is sent.
        self._answering: threading.Thread | None = None
        # Sends an answer to `Where`.

    def serve(self) -> None:
        sys.stdout, sys.stderr = self._streams.stdout, self._streams.stderr
        self._streams.capture_descriptors(self._stderr)
        signal.signal(INTERRUPT, self._on_interrupt)
        sys.unraisablehook = functools.partial(self._on_unraisable, sys.unraisablehook)
        process_group.install()
        hooks.number_apart()
        # The forkserver hands every replica the controller's key, which no other user can read.
        sealed.seal_objects(bytes(multiprocessing.current_process().authkey))
        saves.save_whole()
        shell.note_files(files.watch())
        # They are ours, there until a first forward pass has begun, and may fire more often.
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks", UserWarning)
        home = shell.make_shell(self._emit, None)
        builtins.input = shell.refuse_input
        sys.breakpointhook = pdb.set_trace = shell.refuse_breakpoint
        shell.be_no_kernel()
        if not select.select([self._channel], [], [], SPARE_AFTER)[0]:
            _warm_up()
        spec, _ = self._receive()
        replica = self._replica = self._become(spec, home)
        threading.Thread(target=self._control, name="mirror_nb control", daemon=True).start()
        while True:
            try:
                self._answer_request(replica, *self._next_request())
            except KeyboardInterrupt:
                # It came between two requests: there was nothing left to interrupt.
                self._running = None

    def _become(self, spec: ReplicaSpec, home: shell.ReplicaShell) -> runtime.Replica:
        surroundings.begin_with(spec.environment)
        torch.set_num_threads(spec.threads)
        downloads.take_turns(spec.replica_id)
        event_files.hand_on(self._emit)
        log_lines.hand_on(self._emit)
        # Not where replicas share cores: who looks would keep others from their work.
        self._awake = AWAKE_SECONDS if spec.num_replicas <= cores() else 0.0
        device = torch.device(spec.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._recorder = Recorder(device)
        self._steering = Steering(self._recorder.mark)
        register_optimizer_step_pre_hook(lambda *_: self._recorder.optimizer_begun())
        register_optimizer_step_post_hook(self._after_optimizer_step)
        return runtime.Replica(
            runtime.Identity(spec.replica_id, spec.num_replicas, device, spec.seed, spec.reduction),
            self._emit,
            spec.setup,
            home,
            self._user_code,
            spec.communication,
            self._recorder,
            self._steering,
        )

    def _next_request(self) -> tuple[Any, int | None]:
        while not self._requests:
            with self._reading:
                # The control thread may have read one while this thread waited for its turn.
                if not self._requests:
                    self._act(*self._receive())
        return self._requests.popleft()

    def _receive(self) -> tuple[Any, int | None]:
        began = time.monotonic()
        worked = began - self._came
        try:
            # After calls as short as BRIEF_SECONDS those that share its core would lose more by it.
            return self._channel.receive(0.0 if self._rests or worked < BRIEF_SECONDS else min(self._awake, worked))
        except ChannelClosed:
            # The controller is gone: nobody can use this replica any more.
            _end()
            raise
        finally:
            self._came = time.monotonic()
            self._rests = self._came - began > AWAKE_SECONDS

    def _answer_request(self, replica: runtime.Replica, request: Request, slab: int | None) -> None:
        """Carry it out; the control thread reads meanwhile, if this takes long."""
        self._together = isinstance(request.what, Form | Communicate)
        self._request = request.number
        process_group.mark()
        self._busy = True
        self._relief.start()
        try:
            self._streams.open()
            if isinstance(request.what, RunCell):
                self._prepare_to_show(request.what.widgets)
            replica.handle(request, slab)
            if replica.gpu_lost:
                # It has been told; the pool starts another, and ends what this one's cells have started.
                os._exit(1)
        finally:
            self._busy = False
            self._request = None
            self._relief.stop()
            if self._relieved:
                os.write(self._end, b"!")

    def say(self, text: str) -> None:
        """Tell the controller why this process cannot go on."""
        with contextlib.suppress(ChannelClosed):
            self._channel.send(Stream("stderr", text))

    def _emit(self, message: object, slab: int | None = None) -> None:
        """Send; in user code an interrupt waits: half a message would make nonsense of all that follow."""
        if threading.get_ident() != self._main_thread:
            self._put(message, slab)
            return
        self._sending += 1
        try:
            self._put(message, slab)
        finally:
            self._sending -= 1
        self._catch_up(sys._getframe())

    def _put(self, message: object, slab: int | None) -> None:
        if isinstance(message, Done):
            answering, self._answering = self._answering, None
            if answering is not None:
                # Nobody listens any more once this request is done.
                answering.join()
            self._streams.close()
            if message.request == self._took:
                message = dataclasses.replace(message, interrupted=True)
            with self._last_word:
                self._answered = message.request
        elif not isinstance(message, Stream):
            self._streams.flush()
        with contextlib.suppress(ChannelClosed):
            self._channel.send(message, slab)

    def _prepare_to_show(self, widgets: bool) -> None:
        shell.use_notebook_figures()
        if widgets and self._comms is None:
            self._comms = shell.Comms(self._emit)

    # ------------------------------------------------------------------ the control thread

    def _control(self) -> None:
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.register(self._ended, select.POLLIN)
        try:
            while True:
                self._relief.wait()
                with self._reading:
                    self._relieved = True
                    # What came together with the request has left the socket.
                    self._act_on_all()
                    while self._busy:
                        self._read_for_a_while(poll)
                    self._relieved = False
        except ChannelClosed:
            # The controller is gone: nobody can use this replica any more.
            _end()
        except BaseException:
            self.say(f"mirror_nb's own thread in this replica failed, which ends it:\n{traceback.format_exc()}")
            _end()

    def _read_for_a_while(self, poll: select.poll) -> None:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if self._ended in ready:
            os.read(self._ended, 64)
        if self._channel.fileno() in ready:
            self._act_on_all()

    def _act_on_all(self) -> None:
        for message, slab in self._channel.drain():
            self._act(message, slab)

    def _act(self, message: Any, slab: int | None) -> None:
        match message:
            case Request():
                self._requests.append((message, slab))
            case Interrupt(number, shown):
                self._interrupted, self._shown = number, shown
                self._freed_until = time.monotonic() + FREED_SECONDS
                threading.Thread(target=self._insist, args=(number,), daemon=True).start()
            case Abort(reason):
                process_group.abort(PeerFailed(reason))
            case CommMessage() if self._comms is not None:
                self._comms.receive(message)
            case Where(question):
                self._answer(question)
            case Steer():
                self._steering.hear(message)
            case Count(step):
                self._recorder.go_on_from(step)
            case Record() if slab is not None:
                self._recorder.open(Writer(slab))
                os.close(slab)
            case Exit():
                _end()

    def _answer(self, question: int) -> None:
        """Say where this replica is as of now; what follows the question on the channel does not wait for that."""
        cells = self._replica.cell_numbers if self._replica is not None else {}
        answer = whereabouts.look(question, self._request, self._main_thread, cells)

        def send() -> None:
            with contextlib.suppress(ChannelClosed):
                self._channel.send(answer)

        if threading.get_ident() == self._main_thread:
            send()
        else:
            answering = threading.Thread(target=send, name="mirror_nb answers", daemon=True)
            # Only then may the main thread know of it: one that has not been started cannot be joined.
            answering.start()
            self._answering = answering

    def _insist(self, number: int) -> None:
        """Interrupt the main thread until it has taken it: it holds interrupts back while it imports.

        Outside the user's code it is not interrupted: then say that it is at work, until it has answered.
        """
        pause, said = threading.Event(), -math.inf
        while self._answered < number:
            if self._running == self._interrupted == number:
                signal.pthread_kill(self._main_thread, INTERRUPT)
            elif self._works_by_itself(number) and time.monotonic() > said + whole.SAY_SECONDS:
                said = time.monotonic()
                self._say_held_back(number)
            pause.wait(INSIST_SECONDS)

    def _works_by_itself(self, number: int) -> bool:
        """Whether this replica is at the request, needs no other one for it, and runs no code of the user's."""
        return self._request == number and self._running is None and not self._together

    def _say_held_back(self, number: int) -> None:
        # Never after the answer.
        with self._last_word, contextlib.suppress(ChannelClosed):
            if self._answered < number:
                self._channel.send(HeldBack(own=True))

    # ------------------------------------------------------------------ interrupts, in the main thread

    @contextlib.contextmanager
    def _user_code(self, number: int) -> Iterator[None]:
        self._held_back = False
        self._running = number
        try:
            if self._interrupted == number:
                self._take()
            yield
        finally:
            self._running = None
            self._restrain_handlers()

    def _restrain_handlers(self) -> None:
        """Let handlers of signals that the user's code has put in place raise in that code alone."""
        for number in _RAISED_FROM:
            handler = signal.getsignal(number)
            if callable(handler) and not isinstance(handler, _Restrained):
                signal.signal(number, _Restrained(handler, lambda: self._running is not None and not self._sending))

    def _catch_up(self, frame: FrameType | None) -> None:
        """Raise the interrupt that was held back, unless there is still a reason to hold it."""
        came = self._held_back and self._running is not None and not self._sending
        if came and not whole.runs(frame) and not self._is_freed(frame):
            self._take()

    def _is_freed(self, frame: FrameType | None) -> bool:
        """Whether `frame` is in a collective that was ended, and the interrupt for the same: a peer's failure."""
        ended = not self._shown and process_group.aborted() and whereabouts.waits(frame)
        return ended and time.monotonic() < self._freed_until

    def _take(self) -> None:
        self._held_back = False
        self._interrupted, self._took = None, self._running
        interrupt = KeyboardInterrupt()
        interrupt.unseen = not self._shown  # type: ignore[attr-defined]
        raise interrupt

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._running is None or self._running != self._interrupted:
            return
        self._held_back = True
        self._catch_up(frame)
        # In the middle of a message there is nothing to say: that does not take long.
        if not self._sending and time.monotonic() > self._said + whole.SAY_SECONDS:
            self._said = time.monotonic()
            # Past `_emit`: what was interrupted here may have the locks of the streams.
            with contextlib.suppress(ChannelClosed):
                self._channel.send(HeldBack())

    def _on_unraisable(self, show: Callable[[Any], object], lost: Any) -> None:
        """Raise an interrupt anew that came while an object was being deleted, where Python drops exceptions."""
        running = self._running
        if running is None or not issubclass(lost.exc_type, KeyboardInterrupt):
            show(lost)
        elif self._interrupted is None:
            # Held back until this function has ended: raised in here it would be dropped again.
            self._sending += 1
            try:
                self._act(Interrupt(running, self._shown), None)
            finally:
                self._sending -= 1

    def _after_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._recorder.optimizer_ended()
        if not self._recorder.fed:
            self._steering.boundary()
        self._catch_up(sys._getframe(1))


@final
class _Restrained:
    """A signal's handler whose exceptions are dropped where they would end this process, or cut a message in two."""

    def __init__(self, handler: Callable[..., object], may_raise: Callable[[], bool]) -> None:
        self._handler = handler
        self._may_raise = may_raise

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handler(number, frame)
        except Exception:
            if self._may_raise():
                raise


def _end() -> None:
    """End this process and all that its cells started (they share its session), at once."""
    with contextlib.suppress(OSError):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
