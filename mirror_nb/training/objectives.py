"""Losses as sums with their divisors, so that shares of any size add up to one device's loss of the global batch.

Knows outputs, targets and weights of one share. Knows no replica, no network and no optimizer: who adds up and
who goes backward is the caller's.

    share ──▶ Objective ──▶ Loss: numerator, denominator
                              │         │ added up over the replicas, where there is one
                              ▼         ▼
                            value(global_examples, global_denominator): this share's part of the global loss
"""

from __future__ import annotations

import copy
import difflib
import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import loss as torch_losses

from mirror_nb.data.batches import leaves
from mirror_nb.errors import UsageError

Weights = dict[int, float]
# By class; a class that is left out has weight 1.


class Divisor(enum.Enum):
    """By what the numerators of all shares, added up, are divided."""

    EXAMPLES = "the examples of the global batch"
    COUNTED = "what the shares counted in their data"
    NOTHING = "a sum stays as it is"


@final
@dataclass(frozen=True, slots=True)
class Loss:
    """One share's part of a loss, before it is divided by what only all shares know together."""

    # Differentiable: the sum of the weighted losses of this share. Shape []; [terms] where several outputs have
    # divisors that differ.
    numerator: Tensor
    # Float64, to be added up over the replicas; of shape [], with several outputs [terms that are counted]. None
    # where the data have no say.
    denominator: Tensor | None
    # By output, detached and without `loss_weights`, for logs; empty with one output.
    parts: dict[str, Tensor] = field(default_factory=dict)
    # One for each output.
    divisors: tuple[Divisor, ...] = (Divisor.EXAMPLES,)

    @property
    def is_by_examples(self) -> bool:
        """Whether `value` is nothing but `numerator` divided by the examples of the global batch."""
        return self.divisors[0] is Divisor.EXAMPLES and self.numerator.ndim == 0

    def value(self, global_examples: int, global_denominator: Tensor | None = None) -> Tensor:
        """Return this share's part of the global batch's loss, a scalar: the parts of all shares add up to it.

        `global_denominator`: `denominator`, added up over the replicas.
        """
        if self.is_by_examples:
            return self.numerator / global_examples
        by = self._divided_by(global_examples, global_denominator)
        if self.numerator.ndim == 0:
            return self.numerator / by[0]
        return torch.stack([term / divisor for term, divisor in zip(self.numerator, by, strict=True)]).sum()

    def part_values(self, global_examples: int, global_denominator: Tensor | None = None) -> dict[str, Tensor]:
        """Return the same for each output, without its weight in the loss; empty with one output."""
        by = self._divided_by(global_examples, global_denominator)
        return {name: part / divisor for (name, part), divisor in zip(self.parts.items(), by, strict=False)}

    def _divided_by(self, global_examples: int, global_denominator: Tensor | None) -> list[Any]:
        counted = iter(()) if global_denominator is None else iter(global_denominator.reshape(-1))
        kinds: dict[Divisor, Callable[[], Any]] = {
            Divisor.EXAMPLES: lambda: global_examples,
            Divisor.NOTHING: lambda: 1,
            # Numerators are float32, as single-device losses are.
            Divisor.COUNTED: lambda: next(counted).to(self.numerator.dtype),
        }
        return [kinds[divisor]() for divisor in self.divisors]


@final
class Objective:
    """What training makes small: one loss, or several outputs' losses with weights. Made by `objective`."""

    def __init__(self, terms: Sequence[Term], names: Sequence[Any] = (), weights: Sequence[float] = (1.0,)) -> None:
        self._terms = tuple(terms)
        # Keys or positions of the outputs that have a loss; none where the only loss takes the outputs as they are.
        self._keys = tuple(names)
        self._weights = tuple(weights)
        self.divisors = tuple(term.divisor for term in self._terms)
        # One for each output.

    def no_denominator(self, device: torch.device | str = "cpu") -> Tensor | None:
        """Return what an empty share adds to the denominator: zeros; None where nothing is added up."""
        counted = self.divisors.count(Divisor.COUNTED)
        shape = (counted,) if self._keys else ()
        return torch.zeros(shape, dtype=torch.float64, device=device) if counted else None

    def knowing(self, targets: Any) -> Objective:
        """Return the objective for data with these targets, all of them: with fewer denominators to add up.

        Where no target is ignored and no class has a weight, the examples are the denominator.
        """
        if not self._keys:
            return Objective([self._terms[0].knowing(targets)])
        terms = [term.knowing(member(targets, key, "targets")) for term, key in self._each()]
        return Objective(terms, self._keys, self._weights)

    def to(self, device: torch.device | str) -> Self:
        """Move the losses' own tensors, such as class weights."""
        for term in self._terms:
            term.to(device)
        return self

    def __call__(
        self,
        outputs: Any,
        targets: Any,
        sample_weight: Any = None,
        class_weight: Weights | None = None,
        *,
        examples: int | None = None,
    ) -> Loss:
        """Return the loss of a share.

        `sample_weight`: shape [examples], or the losses' own (one for each token, say); with several outputs also
        a dict or list of them by output. `class_weight`: a factor by class. Both multiply the losses and leave the
        divisor as it is, Keras's rule ("sum_over_batch_size"). `examples`: the share's, by default the length of the
        first tensor.

        Raises UsageError for targets or weights that do not fit, and for weights where there is one loss for all.
        """
        if not self._keys:
            count = _length(outputs, targets) if examples is None else examples
            weight = _weight_of(outputs, targets, sample_weight, class_weight, self._terms[0].classes_at)
            numerator, denominator = self._terms[0](outputs, targets, weight, count)
            return Loss(numerator, denominator, {}, self.divisors)
        if class_weight is not None:
            raise UsageError("`class_weight` says nothing about which of several outputs; give `sample_weight`")
        return self._several(outputs, targets, sample_weight, examples)

    def _several(self, outputs: Any, targets: Any, sample_weight: Any, examples: int | None) -> Loss:
        numerators, denominators = [], []
        for term, key in self._each():
            output, target = member(outputs, key, "outputs"), member(targets, key, "targets")
            weight = weight_of(sample_weight, key, outputs)
            count = _length(output, target) if examples is None else examples
            numerator, denominator = term(output, target, weight, count)
            numerators.append(numerator)
            denominators += [] if denominator is None else [denominator]
        parts = {output_name(key): part.detach() for key, part in zip(self._keys, numerators, strict=True)}
        weighted = [part * weight for part, weight in zip(numerators, self._weights, strict=True)]
        together = torch.stack(weighted)
        if len(set(self.divisors)) == 1 and not denominators:
            together = together.sum()
        return Loss(together, torch.stack(denominators) if denominators else None, parts, self.divisors)

    def _each(self) -> zip[tuple[Term, Any]]:
        return zip(self._terms, self._keys, strict=True)


def objective(loss: Any, loss_weights: Any = None) -> Objective:
    """Return the objective for a loss: a name, an `nn.Module`, a function, or a dict or list of them by output.

    Names, on logits as in torch: "cross_entropy" (classes [N, …] or probabilities [N, C, …], logits [N, C, …];
    -100 is left out), "binary_cross_entropy" (logits, 0 or 1), "mse", "mae", "huber", "smooth_l1", "nll" (log
    probabilities), "kl_divergence" (log probabilities, probabilities), "hinge", "cosine_similarity" (negative, as
    in Keras), and more: an unknown name's error lists them. Keras's names mean the same functions; its
    "…categorical_crossentropy" look for the classes in the last dimension. The name of a class of torch.nn,
    "BCELoss" (probabilities, 0 or 1), means that.

    A torch.nn loss with reduction="mean" gives one device's mean over the global batch, with `weight`,
    `ignore_index` and `label_smoothing`; with "sum" the sum; with "none" the mean over all. A loss of torch that
    takes more than two tensors gets them from outputs or targets that are tuples: TripletMarginLoss three
    outputs, MarginRankingLoss and CosineEmbeddingLoss two, GaussianNLLLoss (mean, variance), CTCLoss targets
    (labels, input lengths, label lengths). A function or a module of one's own is called with (outputs, targets).
    One loss for each example is exact; **a scalar counts as the mean over the share's examples**, which is exact
    only if each example weighs alike in it.

    `loss_weights`: for several outputs, a factor for each, as a dict or list. An output whose loss is None has none.

    Raises UsageError for an unknown name, and for weights without several outputs.
    """
    if isinstance(loss, Mapping):
        keys = [key for key, one in loss.items() if one is not None]
        losses = [loss[key] for key in keys]
    elif isinstance(loss, (list, tuple)):
        keys = [place for place, one in enumerate(loss) if one is not None]
        losses = [loss[place] for place in keys]
    else:
        if loss_weights is not None:
            raise UsageError("`loss_weights` are for several outputs; give `loss` as a dict or list of losses too")
        return Objective([_term(loss)])
    if not losses:
        raise UsageError(f"`loss` is {loss!r}: no output has a loss")
    return Objective([_term(one) for one in losses], keys, _loss_weights(loss_weights, keys, loss))


def output_name(key: Any) -> str:
    """How logs call an output: by its key, or by its place in a tuple."""
    return f"output_{key}" if isinstance(key, int) else str(key)


def loss_names() -> list[str]:
    """Return every name that `objective` knows."""
    return sorted(_NAMES)


def unknown(what: str, name: str, known: Sequence[str]) -> UsageError:
    """Return the error for a name that is none of `known`, with the nearest one first."""
    near = difflib.get_close_matches(name, known, 1)
    meant = f"; did you mean {near[0]!r}?" if near else ";"
    return UsageError(f"there is no {what} {name!r}{meant} known are {', '.join(known)}")


# One loss of one output


class Term(ABC):
    """One output's loss: a numerator and what it is divided by."""

    divisor = Divisor.EXAMPLES
    classes_at: int | None = None
    # The dimension of the outputs that the classes are in; None for a loss that compares element by element.

    @abstractmethod
    def __call__(
        self, outputs: Any, targets: Any, weight: Tensor | None, examples: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return numerator and denominator (float64; None unless the divisor is COUNTED) of a share."""

    def knowing(self, targets: Any) -> Term:
        """Return the term for data with all these targets."""
        return self

    @abstractmethod
    def to(self, device: torch.device | str) -> None:
        """Move what it holds."""


@final
class ClassTerm(Term):
    """Cross entropy or NLL with reduction="mean": divided by the classes' weights that are not ignored."""

    def __init__(self, module: nn.Module, *, classes_last: bool = False, counted: bool = True) -> None:
        self._module = module
        self._classes_last = classes_last
        self.classes_at = -1 if classes_last else 1
        self.divisor = Divisor.COUNTED if counted else Divisor.EXAMPLES

    def knowing(self, targets: Any) -> Term:
        weighted = self._module.weight is not None
        if weighted or not isinstance(targets, Tensor) or bool((targets == self._ignored).any()):
            return self
        return ClassTerm(self._module, classes_last=self._classes_last, counted=False)

    def to(self, device: torch.device | str) -> None:
        self._module.to(device)

    @property
    def _ignored(self) -> int:
        return int(self._module.ignore_index)  # type: ignore[arg-type]

    def __call__(
        self, outputs: Any, targets: Any, weight: Tensor | None, examples: int
    ) -> tuple[Tensor, Tensor | None]:
        logits, classes = fit_classes(_tensor(outputs, "outputs"), _tensor(targets, "targets"), self._classes_last)
        counted = self.divisor is Divisor.COUNTED
        denominator = self._denominator(logits, classes) if counted else None
        if weight is None:
            numerator = self._losses(logits, classes, "sum")
        else:
            numerator = weighed(self._losses(logits, classes, "none"), weight).sum()
        if counted or logits.ndim == 2:
            return numerator, denominator
        # Of an example with many positions the mean over them counts.
        return numerator / math.prod(logits.shape[2:]), denominator

    def _losses(self, logits: Tensor, classes: Tensor, reduction: str) -> Tensor:
        # Half the precision would run over at 65504, and lose small losses in a sum.
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        options: dict[str, Any] = {"ignore_index": self._ignored, "reduction": reduction}
        weight: Any = self._module.weight
        if isinstance(self._module, nn.NLLLoss):
            return F.nll_loss(logits, classes, weight, **options)
        return F.cross_entropy(logits, classes, weight, label_smoothing=self._module.label_smoothing, **options)  # type: ignore[arg-type]

    def _denominator(self, logits: Tensor, classes: Tensor) -> Tensor:
        if classes.is_floating_point():
            count = logits.shape[0] * math.prod(logits.shape[2:])
            return torch.full((), count, dtype=torch.float64, device=logits.device)
        kept = classes != self._ignored
        if self._module.weight is None:
            return kept.sum(dtype=torch.float64)
        weight: Any = self._module.weight
        return (weight[classes.where(kept, torch.zeros_like(classes))] * kept).sum(dtype=torch.float64)


@final
class MeanTerm(Term):
    """Any loss that gives a mean over the share's examples, one value for each example, or a sum."""

    def __init__(self, function: Callable[..., Any], *, name: str, fit: _Fit) -> None:
        self._function = function
        self._name = name
        self._fit = fit
        self.classes_at = 1 if fit is _class_tensors else None
        self._reduction = str(getattr(function, "reduction", "")) if isinstance(function, nn.Module) else ""
        self.divisor = Divisor.NOTHING if self._reduction == "sum" else Divisor.EXAMPLES

    def to(self, device: torch.device | str) -> None:
        if isinstance(self._function, nn.Module):
            self._function.to(device)

    def __call__(
        self, outputs: Any, targets: Any, weight: Tensor | None, examples: int
    ) -> tuple[Tensor, Tensor | None]:
        if examples == 0:
            # A mean of nothing is NaN.
            return _nothing(outputs), None
        arguments = self._fit(outputs, targets)
        if weight is not None:
            return self._weighted(arguments, weight, examples), None
        losses = self._values(self._function, arguments)
        if self.divisor is Divisor.NOTHING:
            return losses.sum(), None
        if losses.ndim:
            self._check(losses, examples)
        return losses.mean() * examples, None

    def _weighted(self, arguments: tuple[Any, ...], weight: Tensor, examples: int) -> Tensor:
        function = self._function
        if self._reduction not in ("", "none"):
            # A shallow copy: it shares the tensors, and only the setting differs.
            function = copy.copy(function)
            function.reduction = "none"  # type: ignore[attr-defined]
        losses = self._values(function, arguments)
        if losses.ndim == 0 and examples == 1:
            losses = losses.reshape(1)
        if losses.ndim == 0:
            raise UsageError(
                f"{self._name} gives one loss for the whole batch, but `sample_weight` and `class_weight` need one "
                "for each example: return a tensor of shape [examples] (reduction='none' in torch's losses)"
            )
        self._check(losses, examples)
        if isinstance(function, nn.CTCLoss):
            losses = losses / arguments[3].clamp(min=1) if self._reduction == "mean" else losses
        weighted = weighed(losses, weight)
        if self._reduction in ("sum", "batchmean"):
            return weighted.sum()
        return weighted.sum() * (examples / weighted.numel())

    def _values(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Tensor:
        losses = function(*arguments)
        if not isinstance(losses, Tensor):
            raise UsageError(f"{self._name} returned a {type(losses).__qualname__}; a loss returns a tensor")
        return losses.float() if losses.dtype in (torch.float16, torch.bfloat16) else losses

    def _check(self, losses: Tensor, examples: int) -> None:
        if losses.shape[0] != examples:
            raise UsageError(
                f"{self._name} returned losses of shape {tuple(losses.shape)} for {examples} examples; return one "
                "for each example, or a scalar, their mean"
            )


# How outputs and targets become a loss's arguments

_Fit = Callable[[Any, Any], tuple[Any, ...]]


def _one_by_one(outputs: Any, targets: Any) -> tuple[Any, ...]:
    return outputs, targets


def _elements(outputs: Any, targets: Any) -> tuple[Any, ...]:
    return fit_elements(_tensor(outputs, "outputs"), _tensor(targets, "targets"))


def _class_tensors(outputs: Any, targets: Any) -> tuple[Any, ...]:
    return fit_classes(_tensor(outputs, "outputs"), _tensor(targets, "targets"), False)


# What takes more than two tensors.
_CALLS: dict[type, _Fit] = {
    nn.CTCLoss: lambda outputs, targets: (outputs, *targets),
    nn.GaussianNLLLoss: lambda outputs, targets: (outputs[0], targets, outputs[1]),
    nn.MarginRankingLoss: lambda outputs, targets: (*outputs, targets),
    nn.CosineEmbeddingLoss: lambda outputs, targets: (*outputs, targets),
    nn.TripletMarginLoss: lambda outputs, targets: tuple(outputs),
    nn.TripletMarginWithDistanceLoss: lambda outputs, targets: tuple(outputs),
    nn.CrossEntropyLoss: _class_tensors,
    nn.NLLLoss: _class_tensors,
    **dict.fromkeys(
        (nn.L1Loss, nn.MSELoss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.PoissonNLLLoss),
        _elements,
    ),
    **dict.fromkeys((nn.KLDivLoss, nn.SoftMarginLoss, nn.MultiLabelSoftMarginLoss), _elements),
}


def fit_classes(outputs: Tensor, targets: Tensor, classes_last: bool) -> tuple[Tensor, Tensor]:
    """Return logits [N, C, …] and targets as F.cross_entropy takes them: classes int64 [N, …], or probabilities.

    Targets may have one dimension of 1 more, or hold whole numbers as floats; `classes_last` prefers logits
    [N, …, C] where both could be meant, and they are taken without it where nothing else fits.
    """
    if outputs.ndim == 2 and targets.ndim == 1 and targets.dtype == torch.int64 and len(targets) == len(outputs):
        # Nearly always; the rest costs more than the loss of a small batch.
        return outputs, targets
    if targets.shape == outputs.shape and outputs.ndim > 1:
        targets = targets if targets.is_floating_point() else targets.to(outputs.dtype)
        return (outputs.movedim(-1, 1), targets.movedim(-1, 1)) if classes_last else (outputs, targets)
    second, last = outputs.shape[:1] + outputs.shape[2:], outputs.shape[:-1]
    for shape in (targets.shape, targets.shape[:-1]):
        if outputs.ndim < 2 or targets.numel() != math.prod(shape) or shape not in (second, last):
            continue
        at_last = shape == last and (classes_last or shape != second)
        return outputs.movedim(-1, 1) if at_last else outputs, targets.reshape(shape).long()
    raise UsageError(
        f"targets of shape {tuple(targets.shape)} do not fit outputs of shape {tuple(outputs.shape)}: classes need "
        "outputs [N, classes, …] and targets [N, …], or probabilities of the outputs' own shape"
    )


def fit_elements(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return both with the same shape and targets as floats; they may differ by a dimension of 1 at the end.

    Raises UsageError otherwise: broadcast, [N, 1] against [N] would compare every example with every other.
    """
    if targets.shape != outputs.shape:
        if targets.shape != (*outputs.shape, 1) and (*targets.shape, 1) != outputs.shape:
            raise UsageError(
                f"targets of shape {tuple(targets.shape)} do not fit outputs of shape {tuple(outputs.shape)}; "
                "this loss compares element by element"
            )
        targets = targets.reshape(outputs.shape)
    if not targets.is_floating_point() or (targets.dtype == torch.float64 and outputs.is_floating_point()):
        targets = targets.to(outputs.dtype)
    return outputs, targets


def is_binary(outputs: Tensor, targets: Tensor) -> bool:
    """Whether there is one logit for each target: outputs [N], [N, 1], or [N, 1, …] like the targets."""
    if outputs.ndim == 1 or outputs.shape[1:] == (1,):
        return True
    return outputs.shape == targets.shape and outputs.shape[1] == 1


def _tensor(value: Any, what: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if value is None:
        raise UsageError(f"the loss has no {what}: give `y`, or data whose batches are (inputs, targets)")
    raise UsageError(
        f"the loss takes a tensor, but the {what} are a {type(value).__qualname__}; for several outputs give `loss` "
        "as a dict or list with one loss for each (None for none), or a function of (outputs, targets)"
    )


def member(nest: Any, key: Any, what: str) -> Any:
    """The part of outputs, targets or weights that belongs to one output."""
    try:
        if isinstance(nest, Mapping) and isinstance(key, int) and key not in nest:
            return list(nest.values())[key]
        if isinstance(nest, (Mapping, list, tuple)):
            return nest[key]
    except (KeyError, IndexError, TypeError):
        pass
    there = list(nest) if isinstance(nest, Mapping) else f"{len(nest)} of them" if isinstance(nest, tuple) else nest
    there = f"a tensor of shape {tuple(nest.shape)}" if isinstance(nest, Tensor) else there
    raise UsageError(f"`loss` has a loss for the output {key!r}, but the {what} have none: there is {there}")


def weight_of(sample_weight: Any, key: Any, outputs: Any) -> Any:
    """The weights of one output's examples, of weights for all outputs or by output; None: all count the same."""
    if not isinstance(sample_weight, (Mapping, list, tuple)):
        return sample_weight
    names = list(outputs) if isinstance(outputs, Mapping) else list(range(len(outputs)))
    place = names.index(key) if key in names else key
    if isinstance(sample_weight, Mapping):
        extra = [name for name in sample_weight if name not in names]
        if extra:
            raise UsageError(f"`sample_weight` has {extra}, but the outputs are {names}")
        return sample_weight.get(names[place])
    if len(sample_weight) != len(names):
        raise UsageError(
            f"`sample_weight` is a list of {len(sample_weight)}, but there are {len(names)} outputs; give weights for "
            "each, None where all examples count the same"
        )
    return sample_weight[place]


def _length(outputs: Any, targets: Any) -> int:
    for leaf in (*leaves(targets), *leaves(outputs)):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return int(leaf.shape[0])
    raise UsageError("cannot count the examples: neither outputs nor targets have a tensor with a first dimension")


def _nothing(outputs: Any) -> Tensor:
    found = [leaf for leaf in leaves(outputs) if isinstance(leaf, Tensor)]
    if not found:
        return torch.zeros((), device="cpu")
    return torch.stack([(leaf.sum() * 0).float() for leaf in found]).sum()


# Weights of examples and of classes


def _weight_of(
    outputs: Any, targets: Any, sample_weight: Any, class_weight: Weights | None, classes_at: int | None
) -> Tensor | None:
    if class_weight is None:
        return sample_weight
    by_class = _class_weights(_tensor(outputs, "outputs"), _tensor(targets, "targets"), class_weight, classes_at)
    return by_class if sample_weight is None else weighed(by_class, sample_weight)


def _class_weights(outputs: Tensor, targets: Tensor, class_weight: Weights, classes_at: int | None) -> Tensor:
    """The weight of each target's class: of the index, of the greatest of several columns, of 0 or 1.

    Numbers between classes count as the nearest, as in Keras.
    """
    classes = targets
    alike = targets.shape == outputs.shape and targets.ndim > 1
    if alike and classes_at is not None:
        classes = targets.argmax(classes_at)
    elif alike and targets.ndim > 2 and targets.shape[1] == 1:
        # An image of 0 and 1: each of its elements has a class.
        classes = targets
    elif alike and targets.shape[-1] > 1:
        classes = targets.argmax(1)
    elif targets.ndim > 1 and targets.shape[-1] == 1:
        classes = targets.squeeze(-1)
    nearest = classes.round() if classes.is_floating_point() else classes
    weights = torch.ones_like(classes, dtype=torch.float32)
    for index, weight in class_weight.items():
        weights = weights.masked_fill(nearest == index, float(weight))
    return weights


def weighed(losses: Tensor, weight: Any) -> Tensor:
    """Multiply losses [examples, …] by weights, which may lack the trailing dimensions, or have one of 1 more."""
    listed = isinstance(weight, (list, tuple)) and any(isinstance(one, Tensor) for one in weight)
    if listed or isinstance(weight, Mapping):
        raise UsageError(
            "`sample_weight` is by output, but this loss or metric is one for all of them; give `loss` and "
            "`weighted_metrics` as a dict or list by output too, or one weight for each example"
        )
    weights = torch.as_tensor(weight, device=losses.device)
    aligned = weights.squeeze(-1) if weights.ndim == losses.ndim + 1 and weights.shape[-1] == 1 else weights
    aligned = aligned.reshape(aligned.shape + (1,) * (losses.ndim - aligned.ndim))
    fits = aligned.ndim == losses.ndim and all(a in (1, b) for a, b in zip(aligned.shape, losses.shape, strict=True))
    if not fits or aligned.shape[:1] != losses.shape[:1]:
        raise UsageError(
            f"`sample_weight` of shape {tuple(weights.shape)} does not fit losses of shape {tuple(losses.shape)}; "
            "give one weight for each example"
        )
    # All elements of the losses, those of a mean, keep their number: weights do not divide.
    return losses * aligned.to(losses.dtype)


def _loss_weights(weights: Any, keys: list[Any], loss: Any) -> list[float]:
    if weights is None:
        return [1.0] * len(keys)
    if isinstance(weights, Mapping):
        extra = [key for key in weights if key not in keys]
        if extra:
            raise UsageError(f"`loss_weights` has {extra}, but `loss` is for the outputs {keys}")
        return [float(weights.get(key, 1.0)) for key in keys]
    if not isinstance(weights, (list, tuple)) or isinstance(loss, Mapping) or len(weights) != len(loss):
        raise UsageError(f"`loss_weights` is {weights!r}; give a dict or list like `loss`, with one number for each")
    return [float(weights[key]) for key in keys]


# Losses by name


def meant(loss: Any) -> Any:
    """Return what a loss's name means: one of `loss_names()`, or a class of torch.nn; what is no name as it is."""
    if not isinstance(loss, str):
        return loss
    name = loss.lower().replace("-", "_").replace(" ", "_")
    # As torch.nn.functional has it: "mse_loss".
    short = name.removesuffix("_loss")
    if short in _NAMES:
        return short
    if name not in _CLASSES:
        raise unknown("loss", loss, loss_names())
    return _CLASSES[name]


def _term(loss: Any) -> Term:
    loss = meant(loss)
    if isinstance(loss, str):
        return _NAMES[loss]()
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        loss = loss()
    if type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss, torch_losses.NLLLoss2d) and loss.reduction == "mean":
        return ClassTerm(loss)
    if not callable(loss):
        raise UsageError(
            f"`loss` is {loss!r}, a {type(loss).__qualname__}; give a name, an nn.Module, a function of (outputs, "
            "targets), or a dict or list of them by output"
        )
    name = type(loss).__name__ if isinstance(loss, nn.Module) else getattr(loss, "__name__", type(loss).__name__)
    return MeanTerm(loss, name=f"the loss {name}", fit=_CALLS.get(type(loss), _one_by_one))


def _named(module: Callable[[], nn.Module]) -> Callable[[], Term]:
    return lambda: _term(module())


def _elementwise(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Term]:
    return lambda: MeanTerm(function, name=f"the loss {function.__name__}", fit=_elements)


def cosine_similarity(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the negative cosine of each example with its target, over the last dimension.

    Raises UsageError where an example is a number alone: the whole batch would be one vector.
    """
    if outputs.ndim < 2:
        raise UsageError(
            "the cosine similarity is of a vector for each example, but the outputs are of shape "
            f"{tuple(outputs.shape)}; let the network return [examples, features], or take another"
        )
    return -F.cosine_similarity(outputs, targets, dim=-1)


def _hinge(outputs: Tensor, targets: Tensor) -> Tensor:
    # Labels 0 and 1 mean -1 and 1, as in Keras.
    return torch.relu(1 - torch.where(targets == 0, -1.0, targets) * outputs)


def _squared_hinge(outputs: Tensor, targets: Tensor) -> Tensor:
    return _hinge(outputs, targets).square()


def _log_cosh(outputs: Tensor, targets: Tensor) -> Tensor:
    # log(cosh(x)) = x + log(1 + exp(-2x)) - log 2, which does not run over.
    error = outputs - targets
    return error + F.softplus(-2 * error) - math.log(2)


def _percentage(outputs: Tensor, targets: Tensor) -> Tensor:
    return 100 * ((outputs - targets) / targets.abs().clamp(min=1e-7)).abs()


def _logarithmic(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.clamp(min=1e-7).log1p() - targets.clamp(min=1e-7).log1p()).square()


def _classes_last() -> Term:
    return ClassTerm(nn.CrossEntropyLoss(), classes_last=True)


_NAMES: dict[str, Callable[[], Term]] = {
    "cross_entropy": _named(nn.CrossEntropyLoss),
    **dict.fromkeys(("categorical_crossentropy", "sparse_categorical_crossentropy"), _classes_last),
    **dict.fromkeys(
        ("binary_cross_entropy", "binary_crossentropy", "binary_cross_entropy_with_logits"),
        _named(nn.BCEWithLogitsLoss),
    ),
    **dict.fromkeys(("mse", "mean_squared_error"), _named(nn.MSELoss)),
    **dict.fromkeys(("mae", "l1", "mean_absolute_error"), _named(nn.L1Loss)),
    **dict.fromkeys(("mape", "mean_absolute_percentage_error"), _elementwise(_percentage)),
    **dict.fromkeys(("msle", "mean_squared_logarithmic_error"), _elementwise(_logarithmic)),
    "huber": _named(nn.HuberLoss),
    "smooth_l1": _named(nn.SmoothL1Loss),
    "log_cosh": _elementwise(_log_cosh),
    "nll": _named(nn.NLLLoss),
    **dict.fromkeys(("kl_div", "kl_divergence"), _named(lambda: nn.KLDivLoss(reduction="batchmean"))),
    "poisson_nll": _named(nn.PoissonNLLLoss),
    "gaussian_nll": _named(nn.GaussianNLLLoss),
    "hinge": _elementwise(_hinge),
    "squared_hinge": _elementwise(_squared_hinge),
    "multi_margin": _named(nn.MultiMarginLoss),
    "multilabel_soft_margin": _named(nn.MultiLabelSoftMarginLoss),
    "soft_margin": _named(nn.SoftMarginLoss),
    "cosine_similarity": _elementwise(cosine_similarity),
    "triplet_margin": _named(nn.TripletMarginLoss),
    "ctc": _named(nn.CTCLoss),
}
_CLASSES = {name.lower(): getattr(nn, name) for name in dir(nn) if name.endswith("Loss")}
# By torch's own names, as "BCELoss".
