"""What replicas have of the controller's objects: a token travels in the place of each, itself but once.

Knows handles, marks and payloads. Sends nothing; knows no replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import torch
from torch import nn

from mirror_nb.errors import UsageError
from mirror_nb.held_variables import scope_variables
from mirror_nb.mirroring.mirrors import Mirrors, Moved
from mirror_nb.mirroring.networks import all_parameters, parts_below
from mirror_nb.strategies.base import Strategy
from mirror_nb.strategies.misuse import BlindWrites, not_mirrored, not_owned, of_another_strategy
from mirror_nb.strategies.objects import Objects
from mirror_nb.transfer.opening import Arrivals
from mirror_nb.transfer.packing import pack
from mirror_nb.transfer.payload import Packed
from mirror_nb.transfer.told import has_groups_of, is_told, parameters_of
from mirror_nb.variables import Variable

_BELONGS_TO_SCOPE = (
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.optim.lr_scheduler.ReduceLROnPlateau,
)


@final
class References:
    """The objects made in the scope, networks among them; `owns(strategy)`: whether that commands the replicas.

    `none_sent`: see Objects. `note(obj)` has an object be one of these.
    """

    def __init__(
        self, owns: Callable[[Strategy], bool], none_sent: Callable[[], None], note: Callable[[Any], None]
    ) -> None:
        self._owns = owns
        self._note = note
        self.objects = Objects(none_sent)
        self.mirrors = Mirrors("k")

    def forget_sent(self) -> None:
        """The replicas have nothing any more."""
        self.mirrors = Mirrors("k")
        self.objects.forget_sent()

    def token(self, obj: Any, wanted: list[Any]) -> Any:
        """For `pack`: a token for what is mirrored; what the replicas lack of it is added to `wanted`.

        An optimizer, or its scheduler, is added too where it has parameter groups that the replicas lack.

        Raises UsageError for what is not, but would have to be.
        """
        if type(obj) is torch.Tensor and not obj.requires_grad and self.objects.handle(obj) is None:
            # Most of what is asked for; to ask whether it is a Parameter takes longer than all else here.
            return None
        if isinstance(obj, Strategy):
            if not self._owns(obj):
                raise UsageError(f"the function captures {obj!r}, which is another strategy than the one that runs it")
            return ("strategy",)
        token = self.mirrors.reference(obj)
        if token is not None:
            return token
        handle = self.objects.handle(obj)
        if handle is None:
            belongs = isinstance(obj, _BELONGS_TO_SCOPE) and is_told(obj)
            if belongs and self._is_around_one(obj):
                # Nobody has noticed it as it was made: it need not call torch's constructor.
                self._note(obj)
                return self.token(obj, wanted)
            if belongs or (isinstance(obj, torch.amp.GradScaler) and obj.is_enabled()):
                raise not_mirrored(obj)
            if isinstance(obj, Variable) and obj.home is not None:
                raise of_another_strategy(obj)
            owner = self._owner(obj) if isinstance(obj, nn.Parameter) else None
            if owner is None:
                if isinstance(obj, torch.Tensor) and obj.requires_grad:
                    self._check_untrained(obj)
                return None
            module, name = owner
            wanted.append(module)
            return ("parameter", self.mirrors.handle(module), name)
        if isinstance(obj, nn.Module):
            wanted.append(obj)
            return ("module", self.mirrors.handle(obj))
        if isinstance(obj, torch.optim.Optimizer):
            self.objects.check_groups(obj)
        if not self.objects.is_sent(obj) or self.objects.grown(obj) is not None:
            wanted.append(obj)
        return ("object", handle)

    def has_token(self, obj: object) -> bool:
        """Whether the replicas have the object, so that a token stands for it."""
        if isinstance(obj, Strategy):
            return self._owns(obj)
        if isinstance(obj, nn.Module):
            return self.mirrors.known(obj) is not None
        if isinstance(obj, torch.optim.Optimizer):
            self.objects.check_groups(obj)
        return self.objects.is_sent(obj) and self.objects.grown(obj) is None

    def _owner(self, parameter: nn.Parameter) -> tuple[nn.Module, str] | None:
        """Return the module that registered this parameter, and its name there.

        One made in the scope, or a part of one: that may have come later.
        """
        seen: set[int] = set()
        for obj in self.objects.all():
            if isinstance(obj, nn.Module) and id(obj) not in seen:
                for module in obj.modules():
                    seen.add(id(module))
                    for name, own in module._parameters.items():
                        if own is parameter:
                            return module, name
        return None

    def _is_around_one(self, obj: Any) -> bool:
        """Whether it is an optimizer around one of the scope."""
        return isinstance(obj, torch.optim.Optimizer) and any(
            has_groups_of(one, obj) and self.objects.has(one) for one in vars(obj).values()
        )

    def _check_untrained(self, tensor: torch.Tensor) -> None:
        """Refuse what an optimizer of the scope trains, but no module has: the optimizer would train another copy."""
        for obj in self.objects.all():
            if isinstance(obj, torch.optim.Optimizer):
                for group in obj.param_groups:
                    if any(tensor is parameter for parameter in group["params"]):
                        raise not_owned(tensor, obj)

    def whole(self, wanted: list[Any]) -> tuple[dict[str, Any], list[nn.Module]]:
        """Return by handle what replicas have to get that lack what is wanted; and the networks, without parts."""
        objects: dict[str, Any] = {}
        queue = list(wanted)
        while queue:
            obj = queue.pop(0)
            handle = self.objects.add(obj)
            if handle in objects:
                continue
            objects[handle] = obj
            if isinstance(obj, torch.optim.Optimizer):
                # Its network comes along whole, whatever the function captured of it.
                queue += self._networks_of(obj)
        modules = [obj for obj in objects.values() if isinstance(obj, nn.Module)]
        # Their parts too, each by itself: one may live on when the whole is gone.
        objects.update((self.objects.add(part), part) for module in modules for part in module.modules())
        held = (variable for module in modules for variable in scope_variables(module))
        objects.update((self.objects.add(v), v) for v in held if not self.objects.is_sent(v))
        return objects, modules

    def parts(self, wanted: list[Any]) -> Iterator[nn.Module]:
        """Yield the parts of the networks that replicas have to get, each network itself first."""
        for network in self.whole(wanted)[1]:
            yield from network.modules()

    def packed(self, wanted: list[Any]) -> tuple[Packed, dict[str, Any], list[nn.Module]]:
        """Return what is wanted in one pickle, since an optimizer keeps the parameters of its network; and `whole`.

        So do the optimizer of a scheduler, and what else is mirrored and inside: else the replicas had two of it.
        """
        while True:
            objects, networks = self.whole(wanted)
            inside: dict[int, Any] = {}
            packed = pack(objects, reference=self._sent_reference(objects, inside), handle=self.mirrors.handle)
            if not inside:
                return packed, objects, networks
            packed.close()
            wanted = [*wanted, *inside.values()]

    def sent(self, objects: dict[str, Any], networks: list[nn.Module]) -> None:
        """The replicas have these now."""
        for obj in objects.values():
            self.objects.mark_sent(obj)
        self.mirrors.gave(networks)

    def changes(self, unread: bool = False) -> tuple[dict[str, dict[str, torch.Tensor]], BlindWrites]:
        """Return, once, by handle, what was written to networks here, by load_state_dict for instance.

        With it, if the networks were `unread`, what of them was made from older values than the replicas have.
        """
        changed: dict[str, dict[str, torch.Tensor]] = {}
        blindly: BlindWrites = []
        for handle, module in self.mirrors.roots():
            if self.mirrors.known(module) is None:
                changed[handle] = self.mirrors.left(module)
            elif self.mirrors.changed(module) and (written := self.mirrors.written(module)):
                names = self.mirrors.written_in_place(module) if unread else []
                if names:
                    blindly.append((module, names))
                # These alone: of the others the replicas may have newer values.
                changed[handle] = self.mirrors.given(module, written)
        return {handle: values for handle, values in changed.items() if values}, blindly

    def graft(
        self,
        modules: dict[str, nn.Module],
        arrivals: Arrivals,
        moved: Iterable[Moved],
        replacing: Iterable[nn.Parameter],
    ) -> None:
        """A call has given networks other parts, or other tensors: those here get them too."""
        known = {handle: module for handle, module in modules.items() if self.mirrors.find(handle) is not None}
        if known:
            here = self.mirrors.graft(known, arrivals, moved, replacing)
            self.mirrors.take(arrivals)
            for part in (part for module in here.values() for part in module.modules()):
                self.objects.add(part)
                self.objects.mark_sent(part)

    def resolve(self, token: Any) -> object:
        """For `unpack`: the object here that a token of the replicas means."""
        if token[0] == "object":
            return self.objects.find(token[1])
        return self.mirrors.resolve(token)

    def _networks_of(self, optimizer: torch.optim.Optimizer) -> list[nn.Module]:
        """Return the outermost networks made in the scope that have what it trains in parts that replicas lack."""
        modules = [obj for obj in self.objects.all() if isinstance(obj, nn.Module)]
        parts = parts_below(modules)
        owners: dict[int, tuple[nn.Module, nn.Module]] = {}
        for network in (module for module in modules if id(module) not in parts):
            for part, _, own in all_parameters([network]):
                owners.setdefault(id(own), (part, network))
        found = (owners[id(trained)] for trained in parameters_of(optimizer) if id(trained) in owners)
        return [network for part, network in found if self.mirrors.known(part) is None]

    def _sent_reference(self, new: dict[str, Any], inside: dict[int, Any]) -> Callable[[object], Any]:
        """For `pack`: a token for what the replicas have; what they lack that is not among `new` goes to `inside`."""
        coming = set(map(id, new.values()))

        def reference(obj: object) -> Any:
            if id(obj) in coming:
                return None
            token = self.mirrors.reference(obj)
            if token is None and self.objects.is_sent(obj) and not isinstance(obj, nn.Module):
                return ("object", self.objects.handle(obj))
            if token is None and self.objects.has(obj):
                inside[id(obj)] = obj
            return token

        return reference
