"""Metrics by name, by torchmetrics object and by function, for one output or several.

Knows what names mean. What a metric is, and how it comes together over the replicas, is metric.py's.
"""

from __future__ import annotations

import copy
import itertools
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mirror_nb.data.batches import leaves
from mirror_nb.errors import UsageError
from mirror_nb.training.metric import IGNORED, Called, Mean, Metric, OfOutput, Sums, only_tensor, sums_of
from mirror_nb.training.objectives import (
    cosine_similarity,
    fit_classes,
    fit_elements,
    is_binary,
    loss_names,
    meant,
    objective,
    unknown,
)
from mirror_nb.training.torch_metrics import TorchMetric, is_torch_metric, named_torch_metric, torch_metric_names


def metrics(asked: Any, *, loss: Any = None, taken: Collection[str] = (), prefix: str = "") -> list[Metric]:
    """Return the metrics for a name, a torchmetrics object, a function, or a list of them.

    Names take logits: "accuracy" (by shapes, as in Keras: outputs [N] or [N, 1] are binary, targets of the
    outputs' shape one-hot, all else classes), "binary_accuracy", "top5_accuracy" (any number), "rmse",
    "perplexity", every name of a loss, and with torchmetrics "f1", "precision", "recall", "auroc", "r2" and more
    (averaged over classes alike, "macro"). Class targets of -100 count nowhere. With `loss` an nn.BCELoss,
    binary outputs are probabilities; with a "…categorical_crossentropy" the classes are in the last dimension.

    A torchmetrics object gives its class and settings; it is not changed. A function is called with (outputs,
    targets): one value for each example is averaged over all; **a scalar means that it is called once, with all
    data, which every replica keeps until then**.

    With several outputs (`loss` is a dict or list): a dict or list of metrics by output, or one list for each
    output. With one loss, a dict gives metrics names of one's own. A name that is `taken` in the logs gets `prefix`,
    and a number where that does not help.

    Raises UsageError for an unknown name, and where torchmetrics is needed but not installed.
    """
    if asked is None:
        return []
    several = isinstance(loss, (Mapping, list, tuple))
    if isinstance(asked, Mapping) and (several or loss is None):
        found = [_of_output(one, key, loss) for key, some in asked.items() for one in _listed(some)]
    elif isinstance(asked, Mapping):
        found = [_renamed(_metric(one, loss), name) for name, some in asked.items() for one in _expanded(some)]
    elif several:
        found = _by_output(asked, loss)
    else:
        found = [_metric(one, loss) for some in _listed(asked) for one in _expanded(some)]
    return _with_names_of_their_own(found, taken, prefix)


def metric_names() -> list[str]:
    """Return every name that `metrics` knows; those of torchmetrics need it installed."""
    return sorted({*_MEANS, *_LOSSES, *torch_metric_names(), *loss_names(), "top5_accuracy"})


# What the means are of


def _sparse_accuracy(classes_last: bool) -> Callable[[Tensor, Tensor, Any], Sums]:
    def sums(outputs: Tensor, targets: Tensor, weight: Any) -> Sums:
        logits, classes = fit_classes(outputs, targets, classes_last)
        if classes.is_floating_point():
            return sums_of(logits.argmax(1) == classes.argmax(1), weight)
        right, kept = logits.argmax(1) == classes, classes != IGNORED
        # No output is the class that is ignored: it need not be left out of the sum.
        return (right.sum(), kept.sum()) if weight is None else sums_of(right, weight, kept)

    return sums


def _binary_accuracy(threshold: float) -> Callable[[Tensor, Tensor, Any], Sums]:
    def sums(outputs: Tensor, targets: Tensor, weight: Any) -> Sums:
        outputs, targets = fit_elements(outputs, targets)
        return sums_of((outputs > threshold) == (targets > 0.5), weight)

    return sums


def _accuracy(threshold: float, classes_last: bool) -> Callable[[Tensor, Tensor, Any], Sums]:
    binary, sparse = _binary_accuracy(threshold), _sparse_accuracy(classes_last)

    def sums(outputs: Tensor, targets: Tensor, weight: Any) -> Sums:
        return (binary if is_binary(outputs, targets) else sparse)(outputs, targets, weight)

    return sums


def _top_accuracy(k: int, classes_last: bool) -> Callable[[Tensor, Tensor, Any], Sums]:
    def sums(outputs: Tensor, targets: Tensor, weight: Any) -> Sums:
        logits, classes = fit_classes(outputs, targets, classes_last)
        classes = classes.argmax(1) if classes.is_floating_point() else classes
        best = logits.topk(min(k, logits.shape[1]), dim=1).indices
        return sums_of((best == classes.unsqueeze(1)).any(1), weight, classes != IGNORED)

    return sums


def _cosine_similarity(outputs: Tensor, targets: Tensor, weight: Any) -> Sums:
    return sums_of(-cosine_similarity(*fit_elements(outputs, targets)), weight)


def _loss_sums(name: str) -> Callable[[Any, Any, Any], Sums]:
    """A loss's numerator and denominator; with weights the weighted mean, as metrics have it."""
    if name in _CLASS_LOSSES:
        return _logits_only(_class_loss_sums(*_CLASS_LOSSES[name]), name)
    loss = objective(name)

    def sums(outputs: Any, targets: Any, weight: Any) -> Sums:
        numerator = loss(outputs, targets, weight).numerator
        count = next(len(leaf) for leaf in leaves(targets) if isinstance(leaf, Tensor))
        if weight is None:
            return numerator, torch.full((), count, device=numerator.device)
        weights = torch.as_tensor(weight, device=numerator.device, dtype=torch.float64)
        return numerator, weights.reshape(count, -1).mean(1).sum()

    return sums


def _class_loss_sums(function: Callable[..., Tensor], classes_last: bool) -> Callable[[Tensor, Tensor, Any], Sums]:
    def sums(outputs: Tensor, targets: Tensor, weight: Any) -> Sums:
        logits, classes = fit_classes(outputs, targets, classes_last)
        losses = function(logits.float(), classes, reduction="none")
        return sums_of(losses, weight, None if classes.is_floating_point() else classes != IGNORED)

    return sums


def _logits_only(values: Callable[[Tensor, Tensor, Any], Sums], name: str) -> Callable[[Any, Any, Any], Sums]:
    def sums(outputs: Any, targets: Any, weight: Any) -> Sums:
        return values(only_tensor(outputs, name), only_tensor(targets, name), weight)

    return sums


# Metrics by name

_MEANS: dict[str, Callable[[float, bool], Callable[[Tensor, Tensor, Any], Sums]]] = {
    **dict.fromkeys(("accuracy", "acc"), _accuracy),
    "binary_accuracy": lambda threshold, _: _binary_accuracy(threshold),
    **dict.fromkeys(("categorical_accuracy", "sparse_categorical_accuracy"), lambda _, last: _sparse_accuracy(last)),
    **dict.fromkeys(
        ("top_k_accuracy", "top_k_categorical_accuracy", "sparse_top_k_categorical_accuracy"),
        lambda _, last: _top_accuracy(5, last),
    ),
    "cosine_similarity": lambda _, __: _cosine_similarity,
}
# Given what from on an output is a 1, and whether the classes are in the last dimension.
_LOSSES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    **dict.fromkeys(("rmse", "root_mean_squared_error"), ("mse", torch.sqrt)),
    "perplexity": ("cross_entropy", torch.exp),
}
# Losses of which each token counts by itself; whether the classes are in the last dimension.
_CLASS_LOSSES: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "cross_entropy": (F.cross_entropy, False),
    "nll": (F.nll_loss, False),
    **dict.fromkeys(("categorical_crossentropy", "sparse_categorical_crossentropy"), (F.cross_entropy, True)),
}
# Losses by which each column is a label of its own.
_OF_LABELS = (
    "binary_cross_entropy",
    "binary_crossentropy",
    "binary_cross_entropy_with_logits",
    "multilabel_soft_margin",
)


def _metric(asked: Any, loss: Any) -> Metric:
    if isinstance(asked, str):
        return _named(asked, loss)
    if isinstance(asked, Metric):
        mine = copy.deepcopy(asked)
        mine.reset()
        return mine
    if is_torch_metric(asked):
        return TorchMetric(_snake(type(asked).__name__), asked)
    if callable(asked) and not isinstance(asked, type):
        return Called(getattr(asked, "__name__", _snake(type(asked).__name__)), asked)
    raise UsageError(
        f"there is no metric {asked!r}; give a name, a torchmetrics object (an instance, not its class), or a "
        "function of (outputs, targets)"
    )


def _named(asked: str, loss: Any) -> Metric:
    name = asked.lower().replace("-", "_").replace(" ", "_")
    # Only where the loss says so are binary outputs probabilities, and columns labels rather than one class.
    loss = meant(loss)
    kind = loss if isinstance(loss, type) else type(loss)
    probabilities = issubclass(kind, nn.BCELoss)
    of_labels = loss in _OF_LABELS or issubclass(kind, (nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss))
    # The loss says, too, where the classes are.
    last = _CLASS_LOSSES[loss][1] if isinstance(loss, str) and loss in _CLASS_LOSSES else False
    if name in _MEANS:
        return Mean(asked, _logits_only(_MEANS[name](0.5 if probabilities else 0.0, last), asked))
    if found := re.fullmatch(r"top_?([1-9]\d*)_accuracy", name):
        return Mean(asked, _logits_only(_top_accuracy(int(found[1]), last), asked))
    if name in _LOSSES:
        of, finish = _LOSSES[name]
        return Mean(asked, _loss_sums(loss if last and of == "cross_entropy" else of), finish)
    if name in loss_names():
        return Mean(asked, _loss_sums(name))
    if name in torch_metric_names():
        columns = probabilities or of_labels
        return named_torch_metric(asked, name, probabilities=probabilities, columns=columns, classes_last=last)
    raise UsageError(f"{unknown('metric', asked, metric_names())}; or give a torchmetrics object, or a function")


# Which metric is whose, and what it is called


def _listed(asked: Any) -> list[Any]:
    return list(asked) if isinstance(asked, (list, tuple)) else [] if asked is None else [asked]


def _expanded(asked: Any) -> Iterator[Any]:
    """One metric, or those of a torchmetrics MetricCollection by their names, and of a list."""
    collection = getattr(sys.modules.get("torchmetrics"), "MetricCollection", None)
    if collection is not None and isinstance(asked, collection):
        for name, one in asked.items():
            yield TorchMetric(name, one)
    elif isinstance(asked, (list, tuple)):
        yield from (each for one in asked for each in _expanded(one))
    else:
        yield asked


def _by_output(asked: Any, loss: Any) -> list[Metric]:
    """Metrics of several outputs: a list of lists goes by the outputs, one list for each output."""
    every = list(loss.items()) if isinstance(loss, Mapping) else list(enumerate(loss))
    keys = [key for key, one in every if one is not None]
    each = _listed(asked)
    if any(isinstance(one, (list, tuple)) or one is None for one in each):
        if len(each) != len(every):
            raise UsageError(f"`metrics` is a list of {len(each)} lists, but `loss` is for {len(every)} outputs")
        return [
            _of_output(one, key, loss) for (key, _), some in zip(every, each, strict=True) for one in _listed(some)
        ]
    return [_of_output(one, key, loss) for key in keys for one in each]


def _of_output(asked: Any, key: Any, loss: Any) -> Metric:
    own: Any = None
    if isinstance(loss, Mapping):
        own = loss.get(key)
    elif isinstance(loss, (list, tuple)) and isinstance(key, int) and key < len(loss):
        own = loss[key]
    return OfOutput(_metric(asked, own), key)


def _renamed(metric: Metric, name: Any) -> Metric:
    metric.name = str(name)
    return metric


def _with_names_of_their_own(found: list[Metric], taken: Collection[str], prefix: str) -> list[Metric]:
    used = set(taken)
    for metric in found:
        given, prefixed = metric.name, f"{prefix}{metric.name}"
        names = itertools.chain([given, prefixed], (f"{prefixed}_{number}" for number in itertools.count(1)))
        metric.name = next(name for name in names if name not in used)
        used.add(metric.name)
    return found


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
