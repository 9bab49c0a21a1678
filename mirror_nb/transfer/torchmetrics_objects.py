"""torchmetrics' objects that replicas update: what they count is there, so there the notebook has them computed.

    metric.compute(), metric.reset()   here ─▶ every replica, which computes from what all have counted
    metric.update(…), metric(…)        here: refused, the copy here alone would count

Knows torchmetrics' classes, where they have been imported; knows no replicas and no channel.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from mirror_nb.errors import ContextError

Ask = Callable[[Any, str], Any]
# Calls a metric's method on all replicas and returns what one of them returned.

_asks: dict[int, tuple[weakref.ref[Any], weakref.WeakMethod[Ask]]] = {}
# By id: equal metrics have the same hash. Weakly: a metric may outlive its strategy.
_ASKED, _REFUSED = ("compute", "reset"), ("update", "forward")


def watch(module: nn.Module, ask: Ask) -> None:
    """Have the metrics in a module asked in the replicas, which have it, from now on."""
    for metric in _metrics_in(module):
        if _ask_of(metric) is None:
            # Past torch's own: it lets no method stand beside the class's.
            own = vars(metric)
            for name in (*_ASKED, *_REFUSED):
                # A metric's own methods, which torchmetrics wraps for each and leaves out when it is pickled.
                if name in own:
                    own[name] = _there(metric, name, own[name])
            for kind in type(metric).__mro__:
                _replace_methods(kind)
        gone = functools.partial(_forget, id(metric))
        _asks[id(metric)] = weakref.ref(metric, gone), weakref.WeakMethod(ask)


def settle(modules: Iterable[nn.Module]) -> None:
    """Keep here what the replicas have computed, since they are about to end; then the metrics are like any other.

    Raises, after all, what computing one of them raised first.
    """
    reasons = []
    for metric in (metric for module in modules for metric in _metrics_in(module)):
        ask = _ask_of(metric)
        # Not a collection's, which has its metrics' values.
        if ask is not None and hasattr(metric, "_computed"):
            try:
                if ask(metric, "update_count"):
                    metric._computed, metric._update_count = ask(metric, "compute"), 1
                    metric._mirror_nb_settled = True
            except Exception as reason:
                reasons.append(reason)
        _asks.pop(id(metric), None)
    if reasons:
        raise reasons[0]


def forget(metric: Any) -> None:
    """No replica has the metric any more: from now on it is like any other."""
    _asks.pop(id(metric), None)


def arrived(modules: Iterable[nn.Module], counts: bool) -> None:
    """Metrics came from another process: have them count anew, unless what they have counted `counts` here."""
    for metric in (metric for module in modules for metric in _metrics_in(module)):
        counted = getattr(metric, "_update_count", 0)
        if counted and not counts and not _is_settled(metric):
            metric.reset()
        _compute_anew(metric)


def _is_settled(metric: Any) -> bool:
    """Whether a metric has a value and no counts, as `settle` leaves it: then every replica is to have the value."""
    if getattr(metric, "_computed", None) is None or not getattr(metric, "_mirror_nb_settled", False):
        return False
    # It may have counted since.
    states = ((getattr(metric, name), default) for name, default in metric._defaults.items())
    return all(
        torch.equal(now, default) if isinstance(now, torch.Tensor) else now == default for now, default in states
    )


def _compute_anew(metric: Any) -> None:
    """Forget what a metric has computed: all replicas compute together, or those wait that have computed nothing."""
    for part in _metrics_in(metric):
        if getattr(part, "_computed", None) is not None and not _is_settled(part):
            part._computed = None


def asked(metric: Any, name: str) -> Any:
    """What replicas call: return a metric's attribute, or what its method returns."""
    if name == "compute":
        _compute_anew(metric)
    value = getattr(metric, name)
    return value() if callable(value) else value


def _ask_of(metric: Any) -> Ask | None:
    entry = _asks.get(id(metric))
    return entry[1]() if entry is not None and entry[0]() is metric else None


def _forget(known: int, reference: object) -> None:
    if known in _asks and _asks[known][0] is reference:
        del _asks[known]


def _metrics_in(module: nn.Module) -> Iterator[Any]:
    library = sys.modules.get("torchmetrics")
    if library is not None:
        kinds = library.Metric, library.MetricCollection
        yield from (part for part in module.modules() if isinstance(part, kinds))


def _there(metric: Any, name: str, here: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method that asks the replicas, if there are any to ask."""
    reference = weakref.ref(metric)

    @functools.wraps(here)
    def method(*args: Any, **kwargs: Any) -> Any:
        return _answer(reference(), name, functools.partial(here, *args, **kwargs))

    return method


def _answer(metric: Any, name: str, here: Callable[[], Any]) -> Any:
    ask = _ask_of(metric)
    if ask is None:
        return here()
    if name in _REFUSED:
        raise ContextError(
            f"{type(metric).__name__}.{name}() of a metric that the replicas have would change the copy here alone; "
            "call it in a mirrored cell, or in the function given to strategy.run"
        )
    return ask(metric, name)


def _replace_methods(kind: Any) -> None:
    """Have the methods that a class of torchmetrics defines ask the replicas, for those metrics that are watched."""
    if kind in _replaced or not kind.__module__.startswith("torchmetrics."):
        return
    _replaced.add(kind)
    for name in (*_ASKED, *_REFUSED):
        # What a metric's class defines as these two is wrapped for each metric.
        if name in vars(kind) and not (name in ("compute", "update") and hasattr(kind, "_wrap_compute")):
            setattr(kind, name, _of_class(name, vars(kind)[name]))


_replaced: weakref.WeakSet[Any] = weakref.WeakSet()


def _of_class(name: str, here: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(here)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _answer(self, name, functools.partial(here, self, *args, **kwargs))

    return method
