"""Metrics of shares against the metric of all data at once, on any number of replicas."""

from __future__ import annotations

import builtins
import importlib
import io
import math
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn

from mirror_nb.data.batches import map_leaves, share_of
from mirror_nb.errors import UsageError
from mirror_nb.training.metrics import Metric, metric_names, metrics

N, BATCH = 23, 5
GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(N, 4, generator=GENERATOR)
CLASSES = torch.randint(0, 4, (N,), generator=GENERATOR)
ANSWERS = (torch.randn(N, generator=GENERATOR) > 0).float()
SCORES = torch.randn(N, generator=GENERATOR)
WEIGHTS = torch.rand(N, generator=GENERATOR)


def over_replicas(asked, outputs, targets, n, weights=None, *, loss=None, batch=BATCH):
    """Every metric's value by name, from n replicas which see their shares of global batches, batch by batch."""
    length = len(targets) if isinstance(targets, torch.Tensor) else N
    replicas = [metrics(asked, loss=loss) for _ in range(n)]
    for begin in range(0, length, batch):
        size = min(batch, length - begin)
        for replica_id, mine in enumerate(replicas):
            share = share_of(size, replica_id, n)
            part = slice(begin + share.start, begin + share.stop)
            if part.start == part.stop:
                continue
            cut = [
                None if x is None else map_leaves(x, lambda leaf, part=part: leaf[part]) for x in (outputs, targets)
            ]
            for metric in mine:
                metric.update(*cut, None if weights is None else weights[part])
    return {
        metric.name: metric.compute([sent(mine[place].state()) for mine in replicas])
        for place, metric in enumerate(metrics(asked, loss=loss))
    }


def sent(state):
    """The state as another process gets it: plain values and tensors alone."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.fixture(params=[1, 2, 3, 7], ids=lambda n: f"{n} replicas")
def n(request):
    return request.param


def assert_value(asked, outputs, targets, wanted, n, **settings):
    (value,) = over_replicas([asked], outputs, targets, n, **settings).values()
    assert isinstance(value, float)
    assert value == pytest.approx(float(wanted), rel=1e-5, abs=1e-6)


# Names


def test_accuracy_of_classes(n):
    wanted = (LOGITS.argmax(1) == CLASSES).float().mean()
    for targets in (CLASSES, CLASSES[:, None], F.one_hot(CLASSES, 4), CLASSES.float()):
        assert_value("accuracy", LOGITS, targets, wanted, n)
    assert_value("sparse_categorical_accuracy", LOGITS, CLASSES, wanted, n)
    assert_value("categorical_accuracy", LOGITS, F.one_hot(CLASSES, 4), wanted, n)


def test_accuracy_of_two_classes(n):
    wanted = ((SCORES > 0) == (ANSWERS > 0)).float().mean()
    for name in ("accuracy", "binary_accuracy"):
        assert_value(name, SCORES, ANSWERS, wanted, n)
        assert_value(name, SCORES[:, None], ANSWERS, wanted, n)
        assert_value(name, SCORES[:, None], ANSWERS[:, None].long(), wanted, n)
        assert_value(name, SCORES.sigmoid(), ANSWERS, wanted, n, loss=nn.BCELoss())
    images, masks = SCORES.reshape(N, 1, 1, 1).repeat(1, 1, 3, 3), ANSWERS.reshape(N, 1, 1, 1).repeat(1, 1, 3, 3)
    assert_value("accuracy", images, masks, wanted, n)


def test_columns_may_be_right_or_wrong_one_by_one():
    targets = F.one_hot(CLASSES, 4)
    assert_value("binary_accuracy", LOGITS, targets, ((LOGITS > 0) == (targets > 0)).float().mean(), 2)


def test_accuracy_leaves_padding_out(n):
    logits, classes = torch.randn(N, 4, 6), torch.randint(0, 4, (N, 6))
    classes[::2, 3:] = -100
    kept = classes != -100
    wanted = (logits.argmax(1) == classes)[kept].float().mean()
    assert_value("accuracy", logits, classes, wanted, n)
    assert_value("accuracy", logits.movedim(1, 2), classes, wanted, n)


def test_the_best_few(n):
    top2 = (LOGITS.topk(2, dim=1).indices == CLASSES[:, None]).any(1).float().mean()
    assert_value("top2_accuracy", LOGITS, CLASSES, top2, n)
    assert_value("top_2_accuracy", LOGITS, F.one_hot(CLASSES, 4), top2, n)
    # There are only four.
    for name in ("top5_accuracy", "top_k_accuracy", "sparse_top_k_categorical_accuracy"):
        assert_value(name, LOGITS, CLASSES, 1.0, n)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("mae", (SCORES - ANSWERS).abs().mean()),
        ("mse", (SCORES - ANSWERS).square().mean()),
        ("rmse", (SCORES - ANSWERS).square().mean().sqrt()),
        ("mean_absolute_error", (SCORES - ANSWERS).abs().mean()),
        ("binary_cross_entropy", F.binary_cross_entropy_with_logits(SCORES, ANSWERS)),
    ],
)
def test_errors_of_numbers(name, wanted, n):
    assert_value(name, SCORES, ANSWERS, wanted, n)
    assert_value(name, SCORES[:, None], ANSWERS, wanted, n)


def test_a_cosine_is_positive_though_the_loss_of_that_name_is_not(n):
    wanted = F.cosine_similarity(LOGITS, LOGITS.flip(0)).mean()
    assert_value("cosine_similarity", LOGITS, LOGITS.flip(0), wanted, n)


def test_a_cosine_of_numbers_alone_would_depend_on_the_shares():
    (cosine,) = metrics("cosine_similarity")
    with pytest.raises(UsageError, match=r"outputs are of shape \(\d+,\); let the network return \[examples"):
        cosine.update(LOGITS[:, 0], LOGITS[:, 1])


def test_perplexity_is_over_tokens(n):
    logits, classes = torch.randn(N, 4, 6), torch.randint(0, 4, (N, 6))
    classes[:9, 2:] = -100
    assert_value("perplexity", logits, classes, F.cross_entropy(logits, classes).exp(), n)
    assert_value("cross_entropy", logits, classes, F.cross_entropy(logits, classes), n)


@pytest.mark.parametrize(
    ("name", "task", "made"),
    [
        ("f1", "multiclass", torchmetrics.F1Score),
        ("precision", "multiclass", torchmetrics.Precision),
        ("recall", "multiclass", torchmetrics.Recall),
        ("auroc", "multiclass", torchmetrics.AUROC),
        ("average_precision", "multiclass", torchmetrics.AveragePrecision),
        ("specificity", "multiclass", torchmetrics.Specificity),
        ("jaccard", "multiclass", torchmetrics.JaccardIndex),
        ("cohen_kappa", "multiclass", torchmetrics.CohenKappa),
        ("mcc", "multiclass", torchmetrics.MatthewsCorrCoef),
    ],
)
def test_torchmetrics_classes_by_name(name, task, made, n):
    average = {} if name in ("cohen_kappa", "mcc") else {"average": "macro"}
    wanted = made(task=task, num_classes=4, **average)(LOGITS.softmax(1), CLASSES)
    assert_value(name, LOGITS, CLASSES, wanted, n)
    assert_value(name, LOGITS, F.one_hot(CLASSES, 4), wanted, n)
    binary = made(task="binary")(SCORES.sigmoid(), ANSWERS.long())
    assert_value(name, SCORES[:, None], ANSWERS, binary, n)
    assert_value(name, SCORES.sigmoid(), ANSWERS, binary, n, loss=nn.BCELoss)
    assert_value(name, SCORES.sigmoid(), ANSWERS, binary, n, loss="BCELoss")


@pytest.mark.parametrize(
    "loss",
    ["binary_cross_entropy", "binary_cross_entropy_with_logits", "BCEWithLogitsLoss", nn.BCEWithLogitsLoss()],
)
def test_columns_are_labels_where_the_loss_says_so(loss, n):
    targets = (LOGITS.flip(0) > 0.2).float()
    wanted = torchmetrics.F1Score(task="multilabel", num_labels=4, average="macro")(LOGITS.sigmoid(), targets.long())
    assert_value("f1", LOGITS, targets, wanted, n, loss=loss)


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("r2", torchmetrics.R2Score),
        ("pearson", torchmetrics.PearsonCorrCoef),
        ("spearman", torchmetrics.SpearmanCorrCoef),
    ],
)
@pytest.mark.filterwarnings("ignore:Metric .Spearman")
def test_torchmetrics_of_numbers_by_name(name, made, n):
    wanted = made()(SCORES, LOGITS[:, 0])
    assert_value(name, SCORES[:, None], LOGITS[:, 0], wanted, n)


# torchmetrics objects


@pytest.mark.filterwarnings("ignore:Metric .Spearman")
@pytest.mark.parametrize(
    ("metric", "outputs", "targets"),
    [
        (torchmetrics.Accuracy(task="multiclass", num_classes=4), LOGITS, CLASSES),
        (torchmetrics.ConfusionMatrix(task="multiclass", num_classes=4), LOGITS, CLASSES),
        (torchmetrics.AUROC(task="multiclass", num_classes=4), LOGITS.softmax(1), CLASSES),
        (torchmetrics.MeanSquaredError(), SCORES, LOGITS[:, 0]),
        (torchmetrics.PearsonCorrCoef(), SCORES, LOGITS[:, 0]),
        (torchmetrics.SpearmanCorrCoef(), SCORES, LOGITS[:, 0]),
        (torchmetrics.MultioutputWrapper(torchmetrics.MeanSquaredError(), 4), LOGITS, LOGITS.flip(0)),
        (torchmetrics.MeanSquaredError() + torchmetrics.MeanAbsoluteError(), SCORES, LOGITS[:, 0]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_torchmetrics_object_sees_all_data(metric, outputs, targets, n):
    fresh = metric.clone()
    fresh.update(outputs, targets)
    (value,) = over_replicas(metric, outputs, targets, n).values()
    wanted = fresh.compute()
    value, wanted = torch.as_tensor(value), torch.as_tensor(wanted)
    torch.testing.assert_close(value, wanted, check_dtype=False)
    # The object gave its class and its settings.
    assert not metric.update_called
    assert metric.sync_on_compute or isinstance(metric, torchmetrics.metric.CompositionalMetric)


class Levels(torchmetrics.Metric):
    """States with every reduction that torchmetrics has a name for, and one of its own."""

    def __init__(self):
        super().__init__()
        for reduction in ("sum", "mean", "max", "min"):
            self.add_state(f"{reduction}_", torch.zeros(()) + (-9 if reduction == "max" else 9), reduction)
        self.sum_.zero_()
        self._defaults["sum_"].zero_()
        self.add_state("all_", [], "cat")
        self.add_state("longest_", torch.zeros(()), lambda stacked: stacked.amax(0))

    def update(self, outputs, targets):
        values = outputs - targets
        seen = sum(len(each) for each in self.all_)
        self.mean_ = (self.mean_ * seen + values.sum()) / (seen + len(values))
        self.sum_ += values.sum()
        self.max_ = torch.maximum(self.max_, values.max())
        self.min_ = torch.minimum(self.min_, values.min())
        self.all_.append(values)
        self.longest_ = torch.maximum(self.longest_, values.abs().max())

    def compute(self):
        everything = torch.cat(self.all_) if isinstance(self.all_, list) else self.all_
        return torch.stack([self.sum_, self.mean_, self.max_, self.min_, everything.std(), self.longest_])


def test_states_are_merged_by_the_reductions_that_they_name(n):
    values = SCORES - LOGITS[:, 0]
    wanted = torch.stack([values.sum(), values.mean(), values.max(), values.min(), values.std(), values.abs().max()])
    torch.testing.assert_close(over_replicas(Levels(), SCORES, LOGITS[:, 0], n)["levels"], wanted)


def test_a_collection_is_its_metrics_by_name(n):
    collection = torchmetrics.MetricCollection(
        {"mse": torchmetrics.MeanSquaredError(), "mae": torchmetrics.MeanAbsoluteError()}, prefix="my_"
    )
    found = over_replicas([collection, "rmse"], SCORES, ANSWERS, n)
    assert list(found) == ["my_mae", "my_mse", "rmse"]
    assert found["my_mae"] == pytest.approx(float((SCORES - ANSWERS).abs().mean()))


def test_a_metric_does_not_start_collectives_of_its_own(monkeypatch):
    def refuse(*arguments, **settings):
        raise AssertionError("a collective")

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torchmetrics.metric, "gather_all_tensors", refuse)
    assert_value(torchmetrics.MeanSquaredError(), SCORES, ANSWERS, (SCORES - ANSWERS).square().mean(), 2)


# Functions


def test_a_function_of_one_value_an_example_is_averaged(n):
    def far(outputs, targets):
        return (outputs - targets).abs() > 1

    found = over_replicas([far], SCORES, ANSWERS, n)
    assert found == {"far": pytest.approx(float(((SCORES - ANSWERS).abs() > 1).float().mean()))}


@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_function_that_squeezes_a_single_example_is_averaged_all_the_same(size):
    def far(outputs, targets):
        return (outputs - targets).abs().squeeze()

    (metric,) = metrics(far)
    outputs, targets = SCORES[:9, None], ANSWERS[:9, None]
    # Of four in a share the last one has one; of three none has, and of one all.
    for first in range(0, 9, size):
        metric.update(outputs[first : first + size], targets[first : first + size])
    wanted = float((outputs - targets).abs().mean())
    assert metric.compute([metric.state()]) == pytest.approx(wanted)
    # As on replicas of which one has single examples alone.
    other = metrics(far)[0]
    other.update(outputs, targets)
    assert metric.compute([other.state(), metric.state()]) == pytest.approx(wanted)


def test_a_single_example_that_a_replica_has_counts_as_one_where_a_function_squeezes_it():
    def far(outputs, targets):
        return (outputs - targets).abs().squeeze()

    # Replica 0 has two, of which the function gives two values.
    outputs, targets = SCORES[:3, None], ANSWERS[:3, None]
    wanted = float((outputs - targets).abs().mean())
    assert over_replicas(far, outputs, targets, 2) == {"far": pytest.approx(wanted)}


@pytest.mark.filterwarnings("ignore:cov")
def test_a_function_of_a_scalar_is_called_once_with_all_data_in_order(n):
    calls = []

    def correlation(outputs, targets):
        calls.append(outputs)
        return torch.corrcoef(torch.stack([outputs["score"], targets]))[0, 1]

    outputs = {"score": SCORES}
    found = over_replicas(correlation, outputs, ANSWERS, n)
    wanted = float(torch.corrcoef(torch.stack([SCORES, ANSWERS]))[0, 1])
    assert found["correlation"] == pytest.approx(wanted, rel=1e-5)
    assert torch.equal(calls[-1]["score"], SCORES)
    # Once on each replica, to see what it returns; the last time for all.
    assert len(calls) == min(n, BATCH) + 1


def test_a_function_may_return_a_number():
    assert over_replicas(lambda outputs, targets: len(outputs), SCORES, ANSWERS, 2) == {"<lambda>": N}


# Weights


@pytest.mark.parametrize(
    ("asked", "each"),
    [
        ("accuracy", ((SCORES > 0) == (ANSWERS > 0)).float()),
        ("mae", (SCORES - ANSWERS).abs()),
        ("binary_cross_entropy", F.binary_cross_entropy_with_logits(SCORES, ANSWERS, reduction="none")),
        (lambda outputs, targets: outputs * targets, SCORES * ANSWERS),
    ],
)
def test_weighted_metrics_are_weighted_means(asked, each, n):
    assert_value(asked, SCORES, ANSWERS, (each * WEIGHTS).sum() / WEIGHTS.sum(), n, weights=WEIGHTS)


def test_weights_of_tokens_and_of_examples(n):
    logits, classes, weights = torch.randn(N, 4, 6), torch.randint(0, 4, (N, 6)), torch.rand(N, 6)
    classes[:9, 2:] = -100
    kept = (classes != -100).float()
    each = F.cross_entropy(logits, classes, reduction="none")
    for given in (weights, weights[:, :1], weights[:, 0]):
        wide = given.reshape(N, -1).expand(N, 6) * kept
        last = logits.movedim(1, 2)
        assert_value(
            "sparse_categorical_crossentropy", last, classes, (each * wide).sum() / wide.sum(), n, weights=given
        )
        soft = F.one_hot(classes.clamp(min=0), 4).float()
        everywhere = F.cross_entropy(logits, soft.movedim(2, 1), reduction="none")
        wider = given.reshape(N, -1).expand(N, 6)
        wanted = (everywhere * wider).sum() / wider.sum()
        assert_value("categorical_crossentropy", last, soft, wanted, n, weights=given)
        assert_value("cross_entropy", logits, classes, (each * wide).sum() / wide.sum(), n, weights=given)
        right = (logits.argmax(1) == classes).float()
        assert_value("accuracy", logits, classes, (right * wide).sum() / wide.sum(), n, weights=given)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (torchmetrics.MeanSquaredError(), "mean_squared_error takes no `sample_weight`; give it in `metrics`"),
        (lambda outputs, targets: 1.0, "returns a scalar, which cannot be weighed"),
        ("mae", r"`sample_weight` of shape \(3,\)"),
    ],
)
def test_weights_that_cannot_be_are_named(asked, message):
    (metric,) = metrics(asked)
    with pytest.raises(UsageError, match=message):
        metric.update(SCORES, ANSWERS, WEIGHTS[:3] if asked == "mae" else WEIGHTS)


# Several outputs


def test_several_outputs_have_metrics_of_their_own(n):
    accuracy = float((LOGITS.argmax(1) == CLASSES).float().mean())
    mae = float((SCORES - ANSWERS).abs().mean())
    outputs, targets = {"a": LOGITS, "b": SCORES}, {"a": CLASSES, "b": ANSWERS}
    loss = {"a": "cross_entropy", "b": "mse"}
    found = over_replicas({"a": ["accuracy"], "b": "mae"}, outputs, targets, n, loss=loss)
    assert found == {"a_accuracy": pytest.approx(accuracy), "b_mae": pytest.approx(mae)}
    found = over_replicas(
        [["accuracy"], None], tuple(outputs.values()), tuple(targets.values()), n, loss=["nll", "mse"]
    )
    assert found == {"output_0_accuracy": pytest.approx(accuracy)}
    found = over_replicas(["accuracy"], outputs, targets, n, loss=loss)
    assert list(found) == ["a_accuracy", "b_accuracy"]


def test_with_one_loss_a_dict_gives_names():
    found = over_replicas({"off by": "mae", "second": "mae"}, SCORES, ANSWERS, 2, loss="mse")
    assert list(found) == ["off by", "second"]


def test_two_metrics_have_two_names():
    found = over_replicas(["mae", "mae", torchmetrics.MeanAbsoluteError(), "mae"], SCORES, ANSWERS, 2)
    assert list(found) == ["mae", "mae_1", "mean_absolute_error", "mae_2"]


# States


@pytest.mark.parametrize(
    "asked",
    [
        "accuracy",
        "perplexity",
        "f1",
        torchmetrics.AUROC(task="multiclass", num_classes=4),
        torchmetrics.MeanMetric,
        lambda outputs, targets: outputs.argmax(1) == targets,
        lambda outputs, targets: outputs.std(),
    ],
    ids=["name", "tokens", "by shape", "torchmetrics", "own", "each", "all"],
)
def test_a_metric_goes_on_from_its_state(asked):
    class Own(Metric):
        name = "own"

        def reset(self):
            self.total = torch.zeros(())

        def update(self, outputs, targets, sample_weight=None):
            self.total = self.total + outputs.sum()

        def state(self):
            return {"total": self.total}

        def compute(self, states):
            return float(sum(state["total"] for state in states))

    given = Own() if asked is torchmetrics.MeanMetric else asked
    if isinstance(given, Own):
        given.reset()
    (whole,), (first,), (second,) = metrics(given), metrics(given), metrics(given)
    whole.update(LOGITS[:9], CLASSES[:9])
    whole.update(LOGITS[9:], CLASSES[9:])
    first.update(LOGITS[:9], CLASSES[:9])
    state = sent(first.state())
    first.update(LOGITS[:3], CLASSES[:3])
    second.update(LOGITS[9:], CLASSES[9:])
    value = second.compute([state, second.state()])
    assert value == pytest.approx(whole.compute([whole.state()]))
    assert math.isfinite(value)
    whole.reset()
    first.reset()
    first.update(LOGITS[9:], CLASSES[9:])
    assert second.compute([sent(whole.state()), second.state()]) == pytest.approx(first.compute([first.state()]))


@pytest.mark.parametrize("asked", ["accuracy", "f1", torchmetrics.MeanSquaredError(), lambda outputs, targets: 1.0])
def test_without_data_there_is_no_number_and_no_warning(asked):
    (metric,) = metrics(asked)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert math.isnan(metric.compute([metric.state(), metric.state()]))


def test_updates_keep_no_graph():
    outputs = LOGITS.clone().requires_grad_(True)
    for metric in metrics(["accuracy", "cross_entropy", lambda outputs, targets: outputs.mean()]):
        metric.update(outputs * 2, CLASSES)
        state = metric.state()
        tensors = [x for value in state.values() for x in (value if isinstance(value, list) else [value])]
        assert not any(tensor.requires_grad for tensor in tensors)


@pytest.mark.gpu
def test_states_come_from_a_gpu():
    asked = ["accuracy", "rmse", "f1", torchmetrics.AUROC(task="multiclass", num_classes=4)]
    for metric in metrics(asked[:1] + asked[2:]):
        metric.update(LOGITS.cuda(), CLASSES.cuda())
        state = sent(metric.state())
        assert math.isfinite(metric.compute([state]))
        metric.update(LOGITS.cuda(), CLASSES.cuda())
        assert math.isfinite(metric.compute([state, metric.state()]))


# Mistakes


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics("acuracy"), "no metric 'acuracy'; did you mean 'accuracy'\\?.*or give a torchmetrics object"),
        (lambda: metrics(torchmetrics.MeanSquaredError), "an instance, not its class"),
        (lambda: metrics([3]), "there is no metric 3"),
        (lambda: metrics([["mae"], ["mae"]], loss=["mse"]), "a list of 2 lists, but `loss` is for 1 outputs"),
        (lambda: metrics("mae")[0].update({"a": SCORES}, {"a": SCORES}), "the loss takes a tensor"),
        (lambda: metrics("accuracy")[0].update({"a": SCORES}, SCORES), "'accuracy' takes a tensor, not a dict"),
        (lambda: metrics(lambda outputs, targets: "a")[0].update(SCORES, SCORES), "returned a str; a function"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(UsageError, match=message):
        call()


def test_a_metric_that_gives_several_values_is_named():
    with pytest.raises(UsageError, match=r"a metric gave .*, a dict; logs hold numbers"):
        over_replicas(torchmetrics.MinMaxMetric(torchmetrics.MeanSquaredError()), SCORES, ANSWERS, 2)


def test_a_metric_may_give_a_tensor():
    confusion = torchmetrics.ConfusionMatrix(task="multiclass", num_classes=4)
    found = over_replicas(confusion, LOGITS, CLASSES, 3)["multiclass_confusion_matrix"]
    assert found.shape == (4, 4)
    assert found.sum() == N


def test_a_name_of_torchmetrics_says_what_to_install_where_it_is_not(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "torchmetrics"]:
        monkeypatch.delitem(sys.modules, name)
    original = builtins.__import__

    def without(name, *arguments, **settings):
        if name.split(".")[0] == "torchmetrics":
            raise ImportError(name)
        return original(name, *arguments, **settings)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setattr(importlib, "import_module", lambda name: without(name))
    with pytest.raises(UsageError, match="'f1' is torchmetrics' F1Score, which is not installed: pip install torchm"):
        metrics("f1")
    assert metrics("accuracy")


def test_every_name_makes_a_metric():
    assert {"accuracy", "f1", "mse", "rmse", "perplexity", "top5_accuracy"} <= set(metric_names())
    assert [metric.name for metric in metrics(metric_names())] == metric_names()


@pytest.mark.parametrize("one_hot", [False, True])
def test_classes_are_where_the_loss_has_them(one_hot, n):
    # As many tokens as classes: the shapes alone do not tell.
    logits = torch.randn(N, 4, 4, generator=torch.Generator().manual_seed(3))
    classes = torch.randint(0, 4, (N, 4), generator=torch.Generator().manual_seed(4))
    targets = F.one_hot(classes, 4).float() if one_hot else classes
    asked = ["accuracy", "top2_accuracy", "perplexity", "f1"]
    found = over_replicas(asked, logits, targets, n, loss="categorical_crossentropy")
    moved = logits.movedim(2, 1)
    f1 = torchmetrics.F1Score("multiclass", num_classes=4, average="macro")
    wanted = {
        "accuracy": (logits.argmax(2) == classes).float().mean(),
        "top2_accuracy": (logits.topk(2).indices == classes[..., None]).any(2).float().mean(),
        "perplexity": F.cross_entropy(moved, classes).exp(),
        "f1": f1(moved.softmax(1), classes),
    }
    assert found == {name: pytest.approx(float(value), rel=1e-5) for name, value in wanted.items()}
