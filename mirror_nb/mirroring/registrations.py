"""How often networks of the process have got other parts: while that stays, none has to be looked through."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as hooks

from mirror_nb.environment.replaced import Replaced


class Registrations:
    """Counts every part that any network of the process registers or lets go of, and conversions of networks."""

    def __init__(self) -> None:
        self.count = self.conversions = 0
        self._watching = False

    def watch(self) -> None:
        if not self._watching:
            self._watching = True
            hooks.register_module_module_registration_hook(self._registered)
            hooks.register_module_parameter_registration_hook(self._registered)
            hooks.register_module_buffer_registration_hook(self._registered)
            # There are no hooks for what goes or is put between, nor for a parameter that is None.
            for owner, name in _UNTOLD:
                Replaced(owner, name, after=self._registered)
            # `network.double()` and the like put other buffers in the place of those that there are.
            Replaced(nn.Module, "_apply", after=self._converted)

    def _registered(self, *_: object) -> None:
        self.count += 1

    def _converted(self, *_: object, **__: object) -> None:
        self.conversions += 1


_UNTOLD = (
    (nn.Module, "__delattr__"),
    (nn.Module, "register_parameter"),
    (nn.ModuleDict, "__delitem__"),
    (nn.ModuleDict, "clear"),
    (nn.ModuleList, "insert"),
    (nn.Sequential, "insert"),
)
registrations = Registrations()
