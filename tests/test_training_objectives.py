"""Losses of shares against one device's loss of the global batch: value and gradient, whatever the shares."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mirror_nb.data.batches import leaves, map_leaves
from mirror_nb.errors import UsageError
from mirror_nb.training.objectives import Divisor, loss_names, objective

N = 7
SHARES = (slice(0, 3), slice(3, 4), slice(4, 7), slice(7, 7))
# The last one is empty.


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def cut(nest, share):
    return map_leaves(nest, lambda leaf: None if leaf is None else leaf[share])


def in_shares(loss, outputs, targets, sample_weight=None, class_weight=None, *, loss_weights=None, known=False):
    """The loss of all shares together, and its gradient for the first output, as a strategy makes them."""
    made = objective(loss, loss_weights)
    made = made.knowing(targets) if known else made
    outputs = map_leaves(outputs, lambda leaf: leaf.detach().clone().requires_grad_(True))
    found = [
        made(
            cut(outputs, s),
            cut(targets, s),
            cut(sample_weight, s),
            class_weight,
        )
        for s in SHARES
    ]
    nothing = made.no_denominator()
    assert all((one.denominator is None) == (nothing is None) for one in found)
    whole = None if nothing is None else sum((one.denominator for one in found), nothing)
    value = sum(one.value(N, whole) for one in found)
    value.backward()
    parts = [one.part_values(N, whole) for one in found]
    assert value.ndim == 0
    return value.detach(), leaves(outputs)[0].grad, {name: sum(part[name] for part in parts) for name in parts[0]}


def on_one_device(loss, outputs, *arguments):
    outputs = map_leaves(outputs, lambda leaf: leaf.detach().clone().requires_grad_(True))
    value = loss(outputs, *arguments)
    value.backward()
    return value.detach(), leaves(outputs)[0].grad


def assert_exact(loss, outputs, targets, reference=None, **settings):
    value, gradient, _ = in_shares(loss, outputs, targets, **settings)
    wanted, wanted_gradient = on_one_device(reference or loss, outputs, targets)
    torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-5, atol=1e-6)


LOGITS = torch.randn(N, 5, generator=torch.Generator().manual_seed(3))
CLASSES = torch.tensor([0, 4, 2, 1, 1, 3, 0])
SOME_IGNORED = torch.tensor([0, -100, 2, -100, 1, -100, -100])
PROBABILITIES = LOGITS.flip(0).softmax(1)
WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.1, 3.0])


@pytest.mark.parametrize("targets", [CLASSES, SOME_IGNORED, PROBABILITIES], ids=["classes", "ignored", "soft"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weight": WEIGHT},
        {"label_smoothing": 0.2},
        {"weight": WEIGHT, "label_smoothing": 0.2},
        {"reduction": "sum"},
    ],
    ids=str,
)
@pytest.mark.parametrize("known", [False, True])
def test_cross_entropy_is_one_devices(targets, settings, known):
    assert_exact(nn.CrossEntropyLoss(**settings), LOGITS, targets, known=known)


@pytest.mark.parametrize("settings", [{}, {"weight": WEIGHT}, {"ignore_index": 1}, {"reduction": "sum"}], ids=str)
def test_nll_is_one_devices(settings):
    assert_exact(nn.NLLLoss(**settings), LOGITS.log_softmax(1), CLASSES)


@pytest.mark.parametrize("settings", [{}, {"ignore_index": 1}, {"ignore_index": 1, "weight": WEIGHT}], ids=str)
@pytest.mark.parametrize("known", [False, True])
def test_tokens_count_one_by_one_and_padding_does_not(settings, known):
    outputs, targets = torch.randn(N, 5, 6), torch.randint(0, 5, (N, 6))
    targets[2:5, 3:] = settings.get("ignore_index", -100)
    assert_exact(nn.CrossEntropyLoss(**settings), outputs, targets, known=known)
    assert_exact(nn.CrossEntropyLoss(**settings), outputs, torch.randint(0, 5, (N, 6)), known=known)


def test_data_in_which_nothing_is_ignored_need_no_communication():
    made = objective("cross_entropy")
    assert made.divisors == (Divisor.COUNTED,)
    assert made.no_denominator() is not None
    assert made.knowing(CLASSES).no_denominator() is None
    assert made.knowing(SOME_IGNORED).no_denominator() is not None
    assert objective(nn.CrossEntropyLoss(weight=WEIGHT)).knowing(CLASSES).no_denominator() is not None
    # What one set of data allows, another may not.
    assert made.divisors == (Divisor.COUNTED,)


TENSORS = [
    (nn.MSELoss(), LOGITS, PROBABILITIES),
    (nn.L1Loss(), LOGITS, PROBABILITIES),
    (nn.HuberLoss(delta=0.3), LOGITS, PROBABILITIES),
    (nn.SmoothL1Loss(beta=0.4), LOGITS, PROBABILITIES),
    (nn.BCELoss(weight=WEIGHT), PROBABILITIES, (LOGITS > 0).float()),
    (nn.BCEWithLogitsLoss(pos_weight=WEIGHT), LOGITS, (LOGITS > 0.3).float()),
    (nn.PoissonNLLLoss(), LOGITS, PROBABILITIES * 9),
    (nn.KLDivLoss(reduction="batchmean"), LOGITS.log_softmax(1), PROBABILITIES),
    (nn.KLDivLoss(reduction="mean"), LOGITS.log_softmax(1), PROBABILITIES),
    (nn.SoftMarginLoss(), LOGITS, (LOGITS > 0).float() * 2 - 1),
    (nn.MultiLabelSoftMarginLoss(), LOGITS, (LOGITS > 0).float()),
    (nn.MultiMarginLoss(), LOGITS, CLASSES),
    (nn.MultiLabelMarginLoss(), LOGITS, torch.tensor([[1, 3, -1, 0, 2]] * N)),
    (nn.HingeEmbeddingLoss(), LOGITS, (LOGITS > 0).float() * 2 - 1),
    (nn.MSELoss(reduction="sum"), LOGITS, PROBABILITIES),
]


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")
@pytest.mark.parametrize(("loss", "outputs", "targets"), TENSORS, ids=lambda value: type(value).__name__)
def test_torchs_other_losses_are_one_devices(loss, outputs, targets):
    assert_exact(loss, outputs, targets)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")
@pytest.mark.parametrize(("loss", "outputs", "targets"), TENSORS, ids=lambda value: type(value).__name__)
def test_weights_of_1_change_nothing(loss, outputs, targets):
    value, gradient, _ = in_shares(loss, outputs, targets)
    again, same_gradient, _ = in_shares(loss, outputs, targets, torch.ones(N))
    torch.testing.assert_close(again, value)
    torch.testing.assert_close(same_gradient, gradient)


def test_losses_of_several_tensors_take_them_from_tuples():
    a, b, c = torch.randn(3, N, 4)
    sign = torch.tensor([1.0, -1, 1, 1, -1, -1, 1])
    triplet, ranking, cosine = nn.TripletMarginLoss(), nn.MarginRankingLoss(0.5), nn.CosineEmbeddingLoss()
    assert_exact(triplet, (a, b, c), sign, lambda outputs, targets: triplet(*outputs))
    assert_exact(cosine, (a, b), sign, lambda outputs, targets: cosine(*outputs, targets))
    assert_exact(ranking, (a[:, 0], b[:, 0]), sign, lambda outputs, targets: ranking(*outputs, targets))
    gaussian = nn.GaussianNLLLoss()
    assert_exact(gaussian, (a, b.exp()), c, lambda outputs, targets: gaussian(outputs[0], targets, outputs[1]))


@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 2.0])])
def test_ctc_counts_examples_though_time_comes_first(weight):
    outputs = torch.randn(8, 2, 4).log_softmax(2)
    targets = (torch.tensor([[1, 2, 3], [2, 1, 0]]), torch.tensor([8, 7]), torch.tensor([3, 2]))
    each = F.ctc_loss(outputs, *targets, reduction="none") / targets[2]
    found = objective("ctc")(outputs, targets, weight)
    torch.testing.assert_close(found.value(2), (each * (1 if weight is None else weight)).sum() / 2)


# Weights


@pytest.mark.parametrize("name", ["cross_entropy", "sparse_categorical_crossentropy"])
def test_sample_weights_multiply_and_do_not_divide(name):
    weights = torch.tensor([1.0, 0.0, 2.0, 3.0, 0.5, 1.0, 4.0])
    value, gradient, _ = in_shares(name, LOGITS, CLASSES, weights)
    logits = LOGITS.clone().requires_grad_(True)
    wanted = (F.cross_entropy(logits, CLASSES, reduction="none") * weights).sum() / N
    wanted.backward()
    torch.testing.assert_close(value, wanted.detach())
    torch.testing.assert_close(gradient, logits.grad)


def test_sample_weights_may_be_for_each_token():
    outputs, targets, weights = torch.randn(N, 5, 6), torch.randint(0, 5, (N, 6)), torch.rand(N, 6)
    each = F.cross_entropy(outputs, targets, reduction="none")
    torch.testing.assert_close(in_shares("cross_entropy", outputs, targets, weights)[0], (each * weights).mean())
    torch.testing.assert_close(
        in_shares("cross_entropy", outputs, targets, weights[:, :1])[0], (each * weights[:, :1]).mean()
    )


@pytest.mark.parametrize("loss", ["mse", nn.MSELoss(), nn.MSELoss(reduction="none"), F.mse_loss])
def test_sample_weights_of_a_mean_over_elements(loss):
    weights = torch.rand(N)
    if loss is F.mse_loss:
        with pytest.raises(UsageError, match=r"mse_loss gives one loss for the whole batch.*reduction='none'"):
            in_shares(loss, LOGITS, PROBABILITIES, weights)
        return
    wanted = ((LOGITS - PROBABILITIES).square() * weights[:, None]).mean()
    torch.testing.assert_close(in_shares(loss, LOGITS, PROBABILITIES, weights)[0], wanted)


def test_a_weighted_loss_may_squeeze_a_share_of_one_example():
    def far(outputs, targets):
        return (outputs - targets).abs().squeeze()

    loss = objective(far)(torch.full((1, 1), 3.0), torch.ones(1, 1), torch.full((1,), 0.5))
    assert float(loss.value(1)) == 1.0


def test_sample_weights_of_a_sum():
    weights = torch.rand(N)
    wanted = ((LOGITS - PROBABILITIES).square() * weights[:, None]).sum()
    torch.testing.assert_close(in_shares(nn.MSELoss(reduction="sum"), LOGITS, PROBABILITIES, weights)[0], wanted)


@pytest.mark.parametrize("one_hot", [False, True])
def test_class_weights_are_those_of_the_targets(one_hot):
    targets = F.one_hot(CLASSES, 5).float() if one_hot else CLASSES
    weights = torch.tensor([10.0 if c == 1 else 0.5 if c == 4 else 1.0 for c in CLASSES])
    each = F.cross_entropy(LOGITS, CLASSES, reduction="none")
    found = in_shares("cross_entropy", LOGITS, targets, class_weight={1: 10.0, 4: 0.5})[0]
    torch.testing.assert_close(found, (each * weights).sum() / N)
    both = in_shares("cross_entropy", LOGITS, targets, torch.full((N,), 2.0), {1: 10.0, 4: 0.5})[0]
    torch.testing.assert_close(both, (each * weights).sum() * 2 / N)


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 6])
@pytest.mark.parametrize("last", [False, True])
def test_class_weights_are_found_where_the_loss_has_the_classes(last, tokens, one_hot):
    logits, classes = torch.randn(N, 3, tokens), torch.randint(0, 3, (N, tokens))
    wanted = (F.cross_entropy(logits, classes, reduction="none") * torch.tensor([1.0, 10.0, 0.5])[classes]).mean()
    targets = F.one_hot(classes, 3).float() if one_hot else classes
    if last:
        logits = logits.movedim(1, 2)
    elif one_hot:
        targets = targets.movedim(2, 1)
    name = "categorical_crossentropy" if last else "cross_entropy"
    found = in_shares(name, logits, targets, class_weight={1: 10.0, 2: 0.5})[0]
    torch.testing.assert_close(found, wanted)


def test_class_weights_of_an_image_of_two_classes():
    outputs, targets = torch.randn(N, 1, 3, 4), (torch.rand(N, 1, 3, 4) > 0.5).float()
    each = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
    wanted = (each * torch.where(targets == 1, 3.0, 1.0)).mean()
    torch.testing.assert_close(in_shares("binary_cross_entropy", outputs, targets, class_weight={1: 3.0})[0], wanted)


def test_class_weights_of_columns_that_a_loss_compares_one_by_one_are_those_of_the_greatest():
    targets = F.one_hot(CLASSES, 5).float()
    weights = torch.ones(N).masked_fill(CLASSES == 1, 10.0).masked_fill(CLASSES == 4, 0.5)
    wanted = ((LOGITS - targets).square().mean(1) * weights).mean()
    torch.testing.assert_close(in_shares("mse", LOGITS, targets, class_weight={1: 10.0, 4: 0.5})[0], wanted)


def test_class_weights_of_two_classes():
    outputs, targets = torch.randn(N, 1), torch.tensor([0, 1, 1, 0, 0, 1, 0])
    each = F.binary_cross_entropy_with_logits(outputs[:, 0], targets.float(), reduction="none")
    wanted = (each * torch.where(targets == 1, 3.0, 1.0)).mean()
    torch.testing.assert_close(in_shares("binary_cross_entropy", outputs, targets, class_weight={1: 3.0})[0], wanted)


def test_class_weights_are_those_of_the_nearest_class():
    outputs, targets = torch.randn(N, 1), torch.tensor([0.1, 0.9, 1.0, 0.0, 0.3, 1.2, 0.4])[:, None]
    wanted = ((outputs - targets).square() * torch.where(targets > 0.5, 3.0, 1.0)).mean()
    torch.testing.assert_close(in_shares("mse", outputs, targets, class_weight={1: 3.0})[0], wanted)


def test_weights_that_do_not_fit_are_named():
    with pytest.raises(UsageError, match=r"`sample_weight` of shape \(3,\) does not fit losses of shape \(7,\)"):
        objective("cross_entropy")(LOGITS, CLASSES, torch.ones(3))


# Functions and modules of one's own


def test_a_function_of_one_loss_an_example_is_exact():
    def halved(outputs, targets):
        return (outputs - targets).square().sum(1) / 2

    assert_exact(halved, LOGITS, PROBABILITIES, lambda outputs, targets: halved(outputs, targets).mean())
    weights = torch.rand(N)
    found = in_shares(halved, LOGITS, PROBABILITIES, weights)[0]
    torch.testing.assert_close(found, (halved(LOGITS, PROBABILITIES) * weights).sum() / N)


def test_a_scalar_is_the_mean_of_its_share():
    assert_exact(F.mse_loss, LOGITS, PROBABILITIES)


def test_a_module_that_says_its_reduction_is_taken_at_its_word():
    class Focal(nn.Module):
        def __init__(self, reduction="mean"):
            super().__init__()
            self.reduction = reduction

        def forward(self, outputs, targets):
            each = (outputs - targets).abs().pow(3).mean(1)
            return {"mean": torch.mean, "sum": torch.sum, "none": lambda value: value}[self.reduction](each)

    assert_exact(Focal(), LOGITS, PROBABILITIES)
    assert_exact(Focal("sum"), LOGITS, PROBABILITIES)
    weights = torch.rand(N)
    wanted = (Focal("none")(LOGITS, PROBABILITIES) * weights).sum() / N
    torch.testing.assert_close(in_shares(Focal(), LOGITS, PROBABILITIES, weights)[0], wanted)


def test_a_function_may_take_any_structure():
    outputs, targets = {"a": LOGITS, "b": LOGITS * 2}, [PROBABILITIES]

    def both(outputs, targets):
        return ((outputs["a"] + outputs["b"] - targets[0]) ** 2).mean(1)

    assert_exact(both, outputs, targets, lambda outputs, targets: both(outputs, targets).mean())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda outputs, targets: 3.0, "returned a float; a loss returns a tensor"),
        (lambda outputs, targets: outputs.mean(0), r"losses of shape \(5,\) for 7 examples; return one for each"),
    ],
)
def test_what_is_no_loss_is_named(function, message):
    with pytest.raises(UsageError, match=message):
        objective(function)(LOGITS, PROBABILITIES)


def test_half_precision_is_summed_in_float32():
    outputs, targets = torch.full((4096, 2), 40.0, dtype=torch.float16), torch.zeros(4096, 2, dtype=torch.float16)
    torch.testing.assert_close(objective("mse")(outputs, targets).value(4096).float(), torch.tensor(1600.0))
    value = objective("cross_entropy")(outputs * torch.tensor([-40, 40.0]), torch.zeros(4096, dtype=torch.long))
    torch.testing.assert_close(value.value(4096, value.denominator), torch.tensor(3200.0))


# Several outputs


def several(kind):
    outputs, targets = {"a": LOGITS, "b": PROBABILITIES * 3}, {"a": CLASSES, "b": LOGITS}
    return (outputs, targets) if kind is dict else (tuple(outputs.values()), tuple(targets.values()))


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("kind", [dict, tuple])
def test_several_outputs_are_added_up_with_their_weights(kind, ignored):
    outputs, targets = several(kind)
    first = SOME_IGNORED if ignored else CLASSES
    targets = {**targets, "a": first} if kind is dict else (first, targets[1])
    key = ("a", "b") if kind is dict else (0, 1)
    loss = {"a": "cross_entropy", "b": "mse"} if kind is dict else ["cross_entropy", "mse"]
    weights = {"b": 0.25} if kind is dict else [1.0, 0.25]

    def together(outputs, targets):
        one = F.cross_entropy(outputs[key[0]], targets[key[0]])
        return one + 0.25 * F.mse_loss(outputs[key[1]], targets[key[1]])

    for known in (False, True):
        value, gradient, parts = in_shares(loss, outputs, targets, loss_weights=weights, known=known)
        wanted, wanted_gradient = on_one_device(together, outputs, targets)
        torch.testing.assert_close(value, wanted)
        torch.testing.assert_close(gradient, wanted_gradient)
        names = ("a", "b") if kind is dict else ("output_0", "output_1")
        torch.testing.assert_close(parts[names[0]], F.cross_entropy(LOGITS, first))
        torch.testing.assert_close(parts[names[1]], F.mse_loss(PROBABILITIES * 3, LOGITS))
        assert not any(part.requires_grad for part in parts.values())


@pytest.mark.parametrize("known", [False, True])
def test_each_of_several_outputs_is_divided_by_what_counts_in_it(known):
    outputs, targets = (
        {"a": LOGITS, "b": LOGITS * 2},
        {"a": SOME_IGNORED, "b": CLASSES.index_fill(0, CLASSES[:1], -100)},
    )
    value, gradient, _ = in_shares(dict.fromkeys("ab", "cross_entropy"), outputs, targets, known=known)

    def together(outputs, targets):
        return sum(F.cross_entropy(outputs[key], targets[key]) for key in "ab")

    wanted, wanted_gradient = on_one_device(together, outputs, targets)
    torch.testing.assert_close(value, wanted)
    torch.testing.assert_close(gradient, wanted_gradient)


def test_an_output_without_a_loss_is_left_alone():
    outputs, targets = several(tuple)
    found = in_shares([None, "mse"], outputs, targets)
    torch.testing.assert_close(found[0], F.mse_loss(PROBABILITIES * 3, LOGITS))
    assert list(found[2]) == ["output_1"]


def test_a_sum_beside_a_mean():
    outputs, targets = several(tuple)
    value = in_shares([nn.CrossEntropyLoss(reduction="sum"), "mse"], outputs, targets)[0]
    torch.testing.assert_close(
        value, F.cross_entropy(LOGITS, CLASSES, reduction="sum") + F.mse_loss(PROBABILITIES * 3, LOGITS)
    )


def test_sample_weights_of_several_outputs_go_by_output_or_to_all():
    outputs, targets = several(dict)
    losses, one, two = {"a": "cross_entropy", "b": "mse"}, torch.rand(N), torch.rand(N)
    a = F.cross_entropy(LOGITS, CLASSES, reduction="none")
    b = (PROBABILITIES * 3 - LOGITS).square().mean(1)
    torch.testing.assert_close(in_shares(losses, outputs, targets, one)[0], (a * one + b * one).mean())
    torch.testing.assert_close(
        in_shares(losses, outputs, targets, {"a": one, "b": two})[0], (a * one + b * two).mean()
    )
    # What is left out has weight 1.
    left_out = (a * one + b).mean()
    torch.testing.assert_close(in_shares(losses, outputs, targets, {"a": one})[0], left_out)
    torch.testing.assert_close(in_shares(losses, outputs, targets, [one, None])[0], left_out)
    in_order = ["cross_entropy", "mse"]
    torch.testing.assert_close(in_shares(in_order, outputs, targets, {"a": one})[0], left_out)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: objective("mse", [1.0]), "`loss_weights` are for several outputs"),
        (lambda: objective({"a": "mse"}, {"b": 1.0}), r"`loss_weights` has \['b'\], but `loss` is for the outputs"),
        (lambda: objective(["mse", "mse"], [1.0]), "with one number for each"),
        (lambda: objective({"a": "mse"}, [1.0]), "give a dict or list like `loss`"),
        (lambda: objective([None]), "no output has a loss"),
        (lambda: objective({"a": "mse"})({"b": LOGITS}, {"a": LOGITS}), "the outputs have none: there is \\['b'\\]"),
        (lambda: objective(["mse", "mse"])((LOGITS,), (LOGITS,)), "for the output 1, but the outputs have none"),
        (lambda: objective(["mse"])(LOGITS, (LOGITS,)), r"there is a tensor of shape \(7, 5\)"),
        (lambda: objective(["mse"])((LOGITS,), (LOGITS,), None, {0: 1.0}), "which of several outputs"),
        (
            lambda: objective({"a": "mse"})({"a": LOGITS}, {"a": LOGITS}, {"A": LOGITS}),
            r"`sample_weight` has \['A'\], but the outputs are \['a'\]",
        ),
        (lambda: objective(["mse"])((LOGITS,), (LOGITS,), [None, None]), "a list of 2, but there are 1 outputs"),
        (lambda: objective("mse")(LOGITS, LOGITS, {"a": LOGITS}), "is by output, but this loss or metric is one for"),
        (lambda: objective("mse")({"a": LOGITS}, LOGITS), "takes a tensor, but the outputs are a dict; for several"),
    ],
)
def test_mistakes_with_several_outputs_are_named(call, message):
    with pytest.raises(UsageError, match=message):
        call()


# Names and shapes


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("cross_entropy", F.cross_entropy),
        ("sparse_categorical_crossentropy", F.cross_entropy),
        ("Cross-Entropy", F.cross_entropy),
    ],
)
def test_classes_by_name(name, reference):
    assert_exact(name, LOGITS, CLASSES, reference)
    wanted = reference(LOGITS, CLASSES)
    for targets in (CLASSES.int(), CLASSES[:, None], CLASSES.float(), F.one_hot(CLASSES, 5)):
        torch.testing.assert_close(in_shares(name, LOGITS, targets)[0], wanted)


def test_kerass_names_look_for_classes_last_and_torchs_second():
    outputs, targets = torch.randn(N, 5, 5), torch.randint(0, 5, (N, 5))
    second, last = F.cross_entropy(outputs, targets), F.cross_entropy(outputs.movedim(2, 1), targets)
    torch.testing.assert_close(in_shares("cross_entropy", outputs, targets)[0], second)
    torch.testing.assert_close(in_shares("sparse_categorical_crossentropy", outputs, targets)[0], last)
    one_hot = F.one_hot(targets, 5)
    torch.testing.assert_close(in_shares("categorical_crossentropy", outputs, one_hot)[0], last)
    # Where only one can be meant, both find it.
    outputs = torch.randn(N, 5, 3)
    for name in ("cross_entropy", "sparse_categorical_crossentropy"):
        for targets in (torch.randint(0, 5, (N, 3)), torch.randint(0, 3, (N, 5))):
            logits = outputs if targets.shape == (N, 3) else outputs.movedim(2, 1)
            torch.testing.assert_close(in_shares(name, outputs, targets)[0], F.cross_entropy(logits, targets))


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("binary_cross_entropy", F.binary_cross_entropy_with_logits),
        ("binary_crossentropy", F.binary_cross_entropy_with_logits),
        ("binary_cross_entropy_with_logits", F.binary_cross_entropy_with_logits),
        ("BCEWithLogitsLoss", F.binary_cross_entropy_with_logits),
        ("mse", F.mse_loss),
        ("mse_loss", F.mse_loss),
        ("MSELoss", F.mse_loss),
        ("mean_squared_error", F.mse_loss),
        ("mae", F.l1_loss),
        ("huber", F.huber_loss),
        ("smooth_l1", F.smooth_l1_loss),
        ("hinge", lambda outputs, targets: torch.relu(1 - (2 * targets - 1) * outputs).mean()),
        ("squared_hinge", lambda outputs, targets: torch.relu(1 - (2 * targets - 1) * outputs).square().mean()),
        ("log_cosh", lambda outputs, targets: (outputs - targets).cosh().log().mean()),
    ],
)
def test_elements_by_name(name, reference):
    outputs, targets = LOGITS[:, 0], torch.tensor([0.0, 1, 1, 0, 1, 0, 0])
    assert_exact(name, outputs, targets, reference)
    wanted = reference(outputs, targets)
    for given in (targets.long(), targets.bool(), targets[:, None], targets.double()):
        torch.testing.assert_close(in_shares(name, outputs, given)[0], wanted)
    torch.testing.assert_close(in_shares(name, outputs[:, None], targets)[0], wanted)


def test_torchs_own_classes_by_name():
    probabilities, targets = LOGITS[:, 0].sigmoid(), torch.tensor([0.0, 1, 1, 0, 1, 0, 0])
    assert_exact("BCELoss", probabilities, targets, F.binary_cross_entropy)
    assert_exact("CrossEntropyLoss", LOGITS, CLASSES, F.cross_entropy)
    assert_exact("nll_loss", LOGITS.log_softmax(1), CLASSES, F.nll_loss)


def test_every_name_makes_a_loss():
    classes = {"cross_entropy", "sparse_categorical_crossentropy", "categorical_crossentropy", "nll", "multi_margin"}
    others = {"triplet_margin", "ctc", "gaussian_nll"}
    for name in loss_names():
        if name not in others:
            value = in_shares(name, LOGITS, CLASSES if name in classes else PROBABILITIES)[0]
            assert torch.isfinite(value), name
    cosine = F.cosine_similarity(LOGITS, PROBABILITIES).mean()
    torch.testing.assert_close(in_shares("cosine_similarity", LOGITS, PROBABILITIES)[0], -cosine)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: objective("cros_entropy"), "no loss 'cros_entropy'; did you mean 'cross_entropy'\\? known are"),
        (lambda: objective("xyzzy"), "no loss 'xyzzy'; known are .*cross_entropy"),
        (lambda: objective(3), "`loss` is 3, a int; give a name"),
        (lambda: objective("cross_entropy")(LOGITS, CLASSES[:3]), r"targets of shape \(3,\) do not fit outputs"),
        (lambda: objective("mse")(LOGITS, CLASSES), r"targets of shape \(7,\) do not fit .*element by element"),
        (lambda: objective(nn.MSELoss())(LOGITS[:, :1], LOGITS), "do not fit"),
        (lambda: objective(lambda o, t: o)([], []), "cannot count the examples"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(UsageError, match=message):
        call()


def test_a_class_of_a_loss_is_made():
    assert_exact(nn.CrossEntropyLoss, LOGITS, CLASSES, F.cross_entropy)


@pytest.mark.gpu
def test_a_losss_own_tensors_move():
    made = objective(nn.CrossEntropyLoss(weight=WEIGHT)).to("cuda")
    found = made(LOGITS.cuda(), CLASSES.cuda())
    value = found.value(N, found.denominator)
    torch.testing.assert_close(value.cpu(), F.cross_entropy(LOGITS, CLASSES, WEIGHT))
