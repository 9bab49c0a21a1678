"""What makes a cell or a call the scope: modules made in it are on the replica's device, tracked, and equal.

Knows modules, devices and random numbers. Knows nothing of gradients but whom to hand parameters to, and
nothing of processes: replicas are equal here since each draws the same numbers, without a word between them.

Every random generator of the replica has two streams (`random_streams.py`).

    building   shared stream   at first, and from the construction of any module
    running    own stream      from the first batch, forward pass, gradient or `strategy.run` after that

With one replica there is one stream, and nothing differs from plain PyTorch.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.modules import module as hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from mirror_nb.environment.imported import when_imported
from mirror_nb.environment.replaced import Replaced
from mirror_nb.gradients.agreement import Keys
from mirror_nb.gradients.synchronizer import GradientSynchronizer
from mirror_nb.mirroring.lazy import kind_of
from mirror_nb.mirroring.networks import tensors
from mirror_nb.replica.decisions import GlobalLosses, GlobalMetrics
from mirror_nb.replica.random_streams import RandomStreams, Streams, seeding_functions, state_functions
from mirror_nb.replica.whole import whole
from mirror_nb.tensors.batch_norms_of_shares import BatchNormsOfShares
from mirror_nb.tensors.sharded import is_sharded
from mirror_nb.transfer.compiled import OutsideOfCompiled, tracing
from mirror_nb.transfer.told import Groups, note_step, parameters_of

_Change = Replaced | RemovableHandle | GlobalMetrics | BatchNormsOfShares
_INITIAL = (
    *("uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_"),
    *("kaiming_uniform_", "kaiming_normal_", "orthogonal_", "sparse_"),
)
# The functions of `nn.init` that draw.


@final
class Scope:
    """Entered around every cell and call of one replica; may be entered again inside itself.

    Modules that are made or unpickled inside get their parameters tracked by `gradients`; parameters and
    buffers move from the CPU to `device` once the module is complete, so that initial values are the CPU's,
    as with ``.to(device)``. `seed` is the shared stream's; after ``torch.manual_seed(s)`` (``random.seed``,
    ``numpy.random.seed``) in the scope it is `s`, and replica i's own stream starts anew from ``s + i``.
    `script` tells how generators were seeded outside of it, and when, for code that is not all in the scope.
    """

    def __init__(
        self,
        replica_id: int,
        num_replicas: int,
        device: torch.device,
        gradients: GradientSynchronizer,
        seed: int,
        script: Callable[[], dict[str, tuple[int, int]]] = dict,
    ) -> None:
        self._device = device
        self._gradients = gradients
        self._streams = Streams(replica_id, device, seed, script) if num_replicas > 1 else None
        self._depth = 0
        self._changes: list[_Change] = []
        self._watch: RemovableHandle | None = None
        self._groups: weakref.WeakKeyDictionary[torch.optim.Optimizer, Groups] = weakref.WeakKeyDictionary()
        # What optimizers have, as far as it is tracked.
        self._wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        # On the CPU still, since their modules were under construction.
        self._waiting: list[Tensor] = []
        gradients.before_backward = self.start_running
        when_imported("torch.distributed.pipelining.stage", "mirror_nb.replica.pipelines:install")

    @whole
    def __enter__(self) -> Scope:
        if self._depth:
            self._depth += 1
            return self
        try:
            self._depth = 1
            for change in self._made():
                self._changes.append(change)
            self._watch_forward()
        except BaseException:
            # Nobody holds interrupts back where one device's own process runs a function.
            self._end()
            raise
        return self

    @whole
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._depth > 1:
            self._depth -= 1
            return
        try:
            self._end()
        except BaseException:
            self._end()
            raise
        self._move_waiting()

    def _end(self) -> None:
        self._unwatch_forward()
        while self._changes:
            self._changes[-1].remove()
            self._changes.pop()
        self._depth = 0

    def settle(self) -> None:
        """A cell or call has ended: what it made is complete and moves to the device."""
        if self._waiting:
            self._move_waiting()

    def adopt(self, module: nn.Module) -> None:
        """Move a module that arrived complete to the device and track its parameters; twice is once."""
        elsewhere = [tensor for _, tensor in tensors(module) if tensor.device != self._device]
        if any(tensor.is_meta for tensor in elsewhere):
            # What has no values yet cannot be moved; who gives it some says where.
            module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(self._device))
        elif elsewhere or self._device.type != "cpu":
            # Not for nothing: a tensor of a library's own class torch exchanges, which it refuses while others refer
            # to it. To a GPU also what a network has besides.
            module.to(self._device)
        for part in module.modules():
            self._track(part)
        for part in module.modules():
            if isinstance(part, DistributedDataParallel):
                self._leave_to(part, part.module)
                _follow_hooks(part)

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Track what an optimizer that arrived has: tensors that no module has are trained all the same."""
        tensors, name = self._had_by(optimizer, optimizer.param_groups)
        for tensor in tensors:
            self._gradients.track(tensor, name)

    def keys(self, packed: Iterable[Any]) -> Keys:
        """Return by what the replicas know what these networks and optimizers train, for `take_keys`."""
        found: list[Tensor] = []
        for obj in packed:
            if isinstance(obj, nn.Module):
                found += (parameter for parameter in obj._parameters.values() if parameter is not None)
            elif isinstance(obj, torch.optim.Optimizer):
                found += parameters_of(obj)
        return self._gradients.keys(found)

    def take_keys(self, keys: Keys) -> None:
        """Know what has arrived from another replica by what all of them know it."""
        self._gradients.take_keys(keys)

    def regroup(self) -> None:
        """The process group was formed anew: DDP cuts its buckets anew, as it does in a process that is new in it.

        In others it may have cut them by the order of its first backward pass already, or have been stopped in one.
        """
        for wrapper in list(self._wrappers):
            # What a failed constructor left has none; torch cannot make another one of what has a group of its own.
            if "reducer" in wrapper.__dict__ and wrapper.process_group is dist.group.WORLD:
                wrapper.__setstate__(wrapper.__getstate__())
                _follow_hooks(wrapper)

    def start_running(self) -> None:
        """End building: from here random numbers differ by replica. Cheap when it has ended before."""
        if self._streams is not None:
            self._streams.notice()
        if self._waiting or (self._streams is not None and not self._streams.running):
            with _untraced():
                self._move_waiting()
                if self._streams is not None:
                    self._streams.run()
        self._unwatch_forward()

    def took_random_state(self) -> None:
        """The live generators were given states that had been taken from them: nobody has seeded anything."""
        if self._streams is not None:
            self._streams.took_state()

    def plant(self, seed: int) -> None:
        """Begin this replica's own stream anew, at a place that `seed` and the replica's id give: 10 µs."""
        if self._streams is not None:
            self.start_running()
            self._streams.plant(seed)

    def random_streams(self) -> RandomStreams | None:
        """Return how far this replica's shared stream came, for others to `follow`; None with one replica."""
        return None if self._streams is None else self._streams.shared()

    def follow(self, streams: RandomStreams | None) -> None:
        """Go on from another replica's shared stream; this one's own stream begins anew."""
        if self._streams is not None and streams is not None:
            self._streams.follow(streams)

    @contextmanager
    def shared_randomness(self) -> Iterator[None]:
        """Draw from the shared stream inside, so that every replica draws the same.

        Torch's generators (the CPU's and this replica's GPU's), Python's and NumPy's.
        """
        if self._streams is None or not self._streams.running:
            yield
            return
        self._streams.build()
        try:
            yield
        finally:
            self._streams.run()

    # What changes in the process while the scope is entered

    def _made(self) -> Iterator[_Change]:
        """Make what has to be undone at the end, one by one: an interrupt may come at any of them."""
        yield register_optimizer_step_post_hook(note_step)
        yield BatchNormsOfShares(self._gradients)
        if self._streams is None and self._device.type == "cpu":
            return
        yield hooks.register_module_parameter_registration_hook(self._parameter_registered)
        yield hooks.register_module_buffer_registration_hook(self._buffer_registered)
        yield hooks.register_module_module_registration_hook(self._module_registered)
        # Copies and unpickled modules register nothing.
        yield Replaced(nn.Module, "__setstate__", after=self._restored)
        # Neither do conversions that put new parameters in the place of old ones: of what was on the meta device.
        # Those are not moved: where they lie is what the caller has asked for.
        yield Replaced(nn.Module, "_apply", after=self._track)
        # Tensors that no module registered are trained all the same when an optimizer holds them.
        yield Replaced(torch.optim.Optimizer, "add_param_group", after=self._optimized)
        # What is put into a group that is there takes neither way: larger parameters, with more points, say.
        yield Replaced(torch.optim.Optimizer, "zero_grad", before=self._look_for_others)
        yield register_optimizer_step_pre_hook(self._look_for_others)
        yield Replaced(torch.autograd, "backward", after=self._passed)
        # Copies and unpickled optimizers add no groups.
        yield Replaced(torch.optim.Optimizer, "__setstate__", after=self._optimizer_restored)
        # Optimizers that step within the backward pass would step by this replica's gradients alone.
        yield Replaced(Tensor, "register_post_accumulate_grad_hook", after=self._hooked)
        yield register_optimizer_step_pre_hook(GlobalLosses(self._gradients))
        yield GlobalMetrics(self._gradients)
        if self._device.type != "cpu":
            # Who asks for the parameters may look where they are, and optimizers make state beside them.
            yield Replaced(nn.Module, "named_parameters", before=self._settle)
            yield Replaced(torch.optim.Optimizer, "__init__", before=self._settle)
        if self._streams is not None:
            yield from self._made_for_streams(self._streams)

    def _made_for_streams(self, streams: Streams) -> Iterator[_Change]:
        yield Replaced(nn.Module, "__init__", before=self._build)
        # A lazy module draws its initial values in the first forward pass.
        yield Replaced(UninitializedParameter, "materialize", before=self._build)
        # One that is there already may be given others, for the next fold: `reset_parameters` draws by these, too.
        for name in _INITIAL:
            yield Replaced(nn.init, name, before=self._build)
        for owner, name, generators in seeding_functions(self._device):
            seeded = functools.partial(streams.seeded, generators)
            yield Replaced(owner, name, before=self._build, after=seeded)
        for owner, get, set_, number, key in state_functions(self._device):
            taken, giving, given = (
                functools.partial(one, number, key) for one in (streams.taken, streams.giving, streams.given)
            )
            yield Replaced(owner, get, after=taken)
            yield Replaced(owner, set_, before=giving, after=given)

    def _build(self, *_: object, **__: object) -> None:
        if self._streams is not None and self._streams.running:
            self._streams.build()
            self._watch_forward()

    def _watch_forward(self) -> None:
        """Look for the first forward pass, as long as there is something to end with it.

        One that is compiled does not end it, the backward pass after it does.
        """
        building = self._streams is not None and not self._streams.running
        if self._watch is None and self._depth and (building or self._waiting) and not tracing():
            self._watch = hooks.register_module_forward_pre_hook(OutsideOfCompiled(self._forward_begins))

    def _unwatch_forward(self) -> None:
        if self._watch is not None:
            self._watch.remove()
            self._watch = None

    def _forward_begins(self) -> None:
        # A constructor may run its own layers, to learn the shape of what they give.
        if not _under_construction(sys._getframe(2)):
            self.start_running()

    # Modules

    def _parameter_registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not is_sharded(parameter):
            self._gradients.track(parameter, f"{kind_of(module)}.{name}", module)
            self._move_later(parameter)

    def _buffer_registered(self, module: nn.Module, name: str, buffer: Tensor | None) -> None:
        if buffer is not None:
            self._move_later(buffer)

    def _module_registered(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        if isinstance(parent, DistributedDataParallel) and name == "module" and module is not None:
            self._leave_to(parent, module)

    def _leave_to(self, wrapper: DistributedDataParallel, module: nn.Module) -> None:
        self._wrappers.add(wrapper)
        self._gradients.leave_to(wrapper, module.parameters())

    def _restored(self, module: nn.Module, *_: object) -> None:
        self._track(module)
        if isinstance(module, DistributedDataParallel):
            self._leave_to(module, module.module)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                self._move_later(tensor)

    def _optimized(self, optimizer: torch.optim.Optimizer, *_: object, **__: object) -> None:
        self._train(optimizer, optimizer.param_groups[-1:])

    def _look_for_others(self, optimizer: torch.optim.Optimizer, *_: object, **__: object) -> None:
        groups = None if tracing() else self._groups.get(optimizer)
        if groups is not None and not groups.are(optimizer):
            self._train(optimizer, optimizer.param_groups)

    def _train(self, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
        tensors, name = self._had_by(optimizer, groups)
        self._gradients.track_all(tensors, name)

    def _optimizer_restored(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        # One that is around another has none of its own.
        if "param_groups" in vars(optimizer):
            self.adopt_optimizer(optimizer)

    def _had_by(self, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> tuple[list[Any], str]:
        """Take note of what an optimizer has; return the tensors of these groups, and what they are called."""
        self._groups[optimizer] = Groups(optimizer)
        tensors = [tensor for group in groups for tensor in group["params"]]
        found = [tensor for tensor in tensors if tensor.is_leaf and not is_sharded(tensor)]
        return found, f"{type(optimizer).__name__}'s parameter"

    def _passed(self, tensors: Any = (), *_: object, **__: object) -> None:
        self._gradients.passed((tensors,) if isinstance(tensors, (Tensor, GradientEdge)) else tensors)

    def _hooked(self, tensor: Tensor, *_: object, **__: object) -> None:
        self._gradients.hooked(tensor)

    def _track(self, module: nn.Module, *_: object, **__: object) -> None:
        for name, parameter in module._parameters.items():
            if parameter is not None and not is_sharded(parameter):
                self._gradients.track(parameter, f"{kind_of(module)}.{name}", module)

    def _move_later(self, tensor: Tensor) -> None:
        if self._device.type != "cpu" and tensor.device.type == "cpu":
            self._waiting.append(tensor)
            self._watch_forward()

    def _settle(self, *_: object, **__: object) -> None:
        if self._waiting and not _under_construction(sys._getframe(1)):
            self._move_waiting()

    def _move_waiting(self) -> None:
        while self._waiting:
            tensor = self._waiting[-1]
            if tensor.device.type == "cpu":
                _move(tensor, self._device)
            self._waiting.pop()


def _move(tensor: Tensor, device: torch.device) -> None:
    # The tensor itself: its hooks stay, and so do optimizers and modules that hold it.
    tensor.data = tensor.data.to(device)


def _follow_hooks(wrapper: DistributedDataParallel) -> None:
    """Register with DDP's new reducer the communication hooks that were registered with an earlier one."""
    hooks = list(getattr(wrapper, "_comm_hooks", ()))
    for hook, state in hooks:
        wrapper._comm_hooks.remove((hook, state))
        wrapper.register_comm_hook(state, hook)


@contextmanager
def _untraced() -> Iterator[None]:
    """Keep what is done inside out of `torch.jit.trace`, where the first forward pass is one that is traced."""
    take, give = (getattr(torch._C, f"_{verb}_tracing_state", None) for verb in ("get", "set"))
    tracing = take() if take is not None and give is not None else None
    if tracing is None or give is None:
        yield
        return
    give(None)
    try:
        yield
    finally:
        give(tracing)


def _under_construction(frame: FrameType | None) -> bool:
    """Whether a module's constructor is running below `frame`."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount:
            made = frame.f_locals.get(code.co_varnames[0])
            # DDP is no part of the model: it wants complete modules.
            if isinstance(made, nn.Module) and not isinstance(made, DistributedDataParallel):
                return True
        frame = frame.f_back
    return False
