"""torchmetrics' objects and names over replicas. Knows its metrics' states and reductions; knows no replica.

torchmetrics is loaded when a name asks for it, and is there already where an object is given.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from mirror_nb.data.batches import leaves, map_leaves, to_device
from mirror_nb.errors import UsageError
from mirror_nb.training.metric import IGNORED, Metric, State, number, on_cpu, only_tensor
from mirror_nb.training.objectives import fit_classes, fit_elements, is_binary

_Fit = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, tuple[str, int]]]
# Outputs and targets as torchmetrics takes them, and the task ("binary", "multiclass", …) with its classes.

_OF_CLASSES = {
    **dict.fromkeys(("f1", "f1_score"), "F1Score"),
    "precision": "Precision",
    "recall": "Recall",
    "specificity": "Specificity",
    **dict.fromkeys(("auroc", "auc"), "AUROC"),
    "average_precision": "AveragePrecision",
    **dict.fromkeys(("jaccard", "iou"), "JaccardIndex"),
    **dict.fromkeys(("matthews_corrcoef", "mcc"), "MatthewsCorrCoef"),
    "cohen_kappa": "CohenKappa",
}
_OF_VALUES = {
    **dict.fromkeys(("r2", "r2_score"), "R2Score"),
    "explained_variance": "ExplainedVariance",
    **dict.fromkeys(("pearson", "pearson_corrcoef"), "PearsonCorrCoef"),
    **dict.fromkeys(("spearman", "spearman_corrcoef"), "SpearmanCorrCoef"),
}
_WITHOUT_AVERAGE = {"CohenKappa", "MatthewsCorrCoef"}


def torch_metric_names() -> list[str]:
    """Return every name that `named_torch_metric` knows."""
    return sorted({*_OF_CLASSES, *_OF_VALUES})


def named_torch_metric(asked: str, name: str, *, probabilities: bool, columns: bool, classes_last: bool) -> Metric:
    """Return the metric `name`, which logs call `asked`.

    `probabilities`: outputs are probabilities, not logits. `columns`: targets of the outputs' shape are labels of
    their own, not one class. `classes_last`: the classes are in the outputs' last dimension. Raises UsageError where
    torchmetrics is not installed.
    """
    if name in _OF_CLASSES:
        fit = _fit_classes(probabilities, columns, classes_last)
        return OfShapes(asked, _of_classes(_OF_CLASSES[name], asked), fit)
    return OfShapes(asked, _of_values(_OF_VALUES[name], asked), _fit_values)


@final
class TorchMetric(Metric):
    """A torchmetrics object: its states are merged by the reductions that it names, and computed once.

    The mean of states is weighed by examples. A reduction that torchmetrics leaves to `compute` (None) gets what
    torchmetrics gives it: the states of the replicas that had examples, stacked.
    """

    def __init__(self, name: str, metric: Any) -> None:
        self.name = name
        self._metric = metric.clone()
        for one in _torch_metrics_in(self._metric).values():
            # Its own synchronisation would start collectives, on whichever replicas compute it.
            one.sync_on_compute = one._to_sync = one.dist_sync_on_step = False
        self.reset()

    def reset(self) -> None:
        self._metric.reset()
        self._examples = 0

    @torch.no_grad()
    def update(self, outputs: Any, targets: Any, sample_weight: Any = None) -> None:
        if sample_weight is not None:
            raise UsageError(
                f"the torchmetrics object {self.name} takes no `sample_weight`; give it in `metrics` instead of "
                "`weighted_metrics`"
            )
        tensors = [leaf for leaf in leaves((outputs, targets)) if isinstance(leaf, Tensor)]
        if tensors and self._metric.device != tensors[0].device:
            self._metric.to(tensors[0].device)
        self._metric.update(outputs, targets)
        self._examples += next((len(tensor) for tensor in tensors if tensor.ndim), 1)

    def state(self) -> State:
        if not self._examples:
            return {}
        state: State = {"examples": torch.tensor(self._examples, device="cpu")}
        for path, one in _torch_metrics_in(self._metric).items():
            for name in one._reductions:
                state[f"{path}.{name}"] = map_leaves(getattr(one, name), on_cpu)
        return state

    @torch.no_grad()
    def compute(self, states: Sequence[State]) -> float | Tensor:
        known = [state for state in states if state]
        if not known:
            return float("nan")
        whole = self._metric.clone().to("cpu")
        whole.reset()
        self._fill(whole, known[0] if len(known) == 1 else self._merged(known))
        return number(whole.compute())

    def _merged(self, states: list[State]) -> State:
        merged: State = {}
        for path, one in _torch_metrics_in(self._metric).items():
            for name, reduction in one._reductions.items():
                key = f"{path}.{name}"
                merged[key] = _reduced([state[key] for state in states], reduction, [s["examples"] for s in states])
        return merged

    @staticmethod
    def _fill(metric: Any, state: State) -> None:
        for path, one in _torch_metrics_in(metric).items():
            for name in one._reductions:
                # A list is a new one, which the metric may append to.
                setattr(one, name, to_device(state[f"{path}.{name}"], one.device))
            # Without an update it warns that there are no data.
            one._update_count = 1


@final
class OfShapes(Metric):
    """A torchmetrics class by name, made for as many classes as the first outputs have."""

    def __init__(self, name: str, make: Callable[[str, int], Any], fit: _Fit) -> None:
        self.name = name
        self._make = make
        self._fit = fit
        self.reset()

    def reset(self) -> None:
        self._metric: TorchMetric | None = None
        self._kind = ("", 0)

    @torch.no_grad()
    def update(self, outputs: Any, targets: Any, sample_weight: Any = None) -> None:
        outputs, targets, kind = self._fit(only_tensor(outputs, self.name), only_tensor(targets, self.name))
        if self._metric is None:
            self._kind = kind
            self._metric = TorchMetric(self.name, self._make(*kind))
        self._metric.update(outputs, targets, sample_weight)

    def state(self) -> State:
        if self._metric is None:
            return {}
        return {"task": self._kind[0], "classes": self._kind[1], **self._metric.state()}

    def compute(self, states: Sequence[State]) -> float | Tensor:
        known = [state for state in states if state]
        if not known:
            return float("nan")
        return TorchMetric(self.name, self._make(known[0]["task"], known[0]["classes"])).compute(known)


def is_torch_metric(value: Any) -> bool:
    """Return whether `value` is a torchmetrics object, without loading torchmetrics."""
    # Whoever has such an object has imported it.
    base = getattr(sys.modules.get("torchmetrics"), "Metric", None)
    return base is not None and isinstance(value, base)


def _torch_metrics_in(metric: Any) -> dict[str, Any]:
    """The metric and those that it wraps, by path: each holds states of its own."""
    base = importlib.import_module("torchmetrics").Metric
    return {path: one for path, one in metric.named_modules() if isinstance(one, base)}


def _reduced(values: list[Any], reduction: Any, examples: list[Tensor]) -> Any:
    """One state of all replicas, by torchmetrics' reduction: what its own synchronisation does."""
    if isinstance(values[0], list):
        together = [tensor for value in values for tensor in value]
        # A list stays one: `compute` cats it; other reductions of lists are the metric's own.
        stays = reduction is None or not together or getattr(reduction, "__name__", "") == "dim_zero_cat"
        return together if stays else reduction(together)
    stacked = torch.stack(values)
    if reduction is None:
        return stacked
    if getattr(reduction, "__name__", "") == "dim_zero_mean":
        weights = torch.stack(examples).to(torch.float64)
        weights = (weights / weights.sum()).reshape(-1, *(1 for _ in stacked.shape[1:]))
        return (stacked.double() * weights).sum(0).to(stacked.dtype if stacked.is_floating_point() else torch.float32)
    return reduction(stacked)


def _of_classes(class_name: str, asked: str) -> Callable[[str, int], Any]:
    made = _torchmetrics_class(class_name, asked)

    def make(task: str, classes: int) -> Any:
        options: dict[str, Any] = {} if class_name in _WITHOUT_AVERAGE else {"average": "macro"}
        if task == "multiclass":
            options |= {"num_classes": classes, "ignore_index": IGNORED}
        elif task == "multilabel":
            options |= {"num_labels": classes}
        else:
            options = {}
        return made(task=task, **options)

    return make


def _of_values(class_name: str, asked: str) -> Callable[[str, int], Any]:
    made = _torchmetrics_class(class_name, asked)
    many = "num_outputs" if class_name in ("PearsonCorrCoef", "SpearmanCorrCoef") else ""
    return lambda task, columns: made(**{many: columns}) if many and columns > 1 else made()


def _torchmetrics_class(class_name: str, asked: str) -> Any:
    try:
        return getattr(importlib.import_module("torchmetrics"), class_name)
    except ImportError as error:
        raise UsageError(
            f"the metric {asked!r} is torchmetrics' {class_name}, which is not installed: pip install torchmetrics"
        ) from error


def _fit_classes(probabilities: bool, columns: bool, classes_last: bool) -> _Fit:
    """Probabilities and classes; targets of the outputs' shape are labels of their own if the loss says so."""

    def fit(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, tuple[str, int]]:
        if columns or is_binary(outputs, targets):
            outputs, targets = fit_elements(outputs, targets)
            outputs, targets = outputs if probabilities else outputs.sigmoid(), targets.long()
            if is_binary(outputs, targets):
                return outputs.flatten(), targets.flatten(), ("binary", 2)
            return outputs, targets, ("multilabel", outputs.shape[1])
        logits, classes = fit_classes(outputs, targets, classes_last)
        if classes.is_floating_point():
            classes = classes.argmax(1)
        return logits.softmax(1), classes, ("multiclass", logits.shape[1])

    return fit


def _fit_values(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, tuple[str, int]]:
    outputs, targets = fit_elements(outputs, targets)
    if outputs.shape[1:] == (1,):
        outputs, targets = outputs.squeeze(1), targets.squeeze(1)
    return outputs, targets, ("regression", outputs.shape[1] if outputs.ndim > 1 else 1)
