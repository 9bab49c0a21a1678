"""torchmetrics' objects that replicas update, from the notebook: computed there of what all have counted."""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import pytest
import torch
import torchmetrics
from driving import running
from torch.utils.data import DataLoader, TensorDataset

import mirror_nb as mnb

torch.manual_seed(0)
OUTPUTS, TARGETS = torch.randn(30, 3).softmax(1), torch.randint(0, 3, (30,))
# Probabilities: torchmetrics takes logits for some where those of a batch happen to lie between 0 and 1.
CLASSES: dict[str, Any] = {"task": "multiclass", "num_classes": 3}


def accuracy() -> torchmetrics.Metric:
    return torchmetrics.Accuracy(**CLASSES)


def collection() -> torchmetrics.MetricCollection:
    kinds = torchmetrics.Accuracy, torchmetrics.F1Score, torchmetrics.Recall
    return torchmetrics.MetricCollection([kind(**CLASSES) for kind in kinds], prefix="val_")


def areas() -> torchmetrics.Metric:
    return torchmetrics.AUROC(**CLASSES)


def extremes() -> torchmetrics.Metric:
    return torchmetrics.MinMaxMetric(torchmetrics.Accuracy(**CLASSES))


def plain(made: Any, examples: int = 30) -> Any:
    """What one device computes of the first examples."""
    made.update(OUTPUTS[:examples], TARGETS[:examples])
    return made.compute()


def count(strategy: mnb.MirroredStrategy, metric: Any, examples: int = 30) -> None:
    data = TensorDataset(OUTPUTS[:examples], TARGETS[:examples])

    def step(outputs: torch.Tensor, targets: torch.Tensor) -> None:
        metric.update(outputs, targets)

    for batch in strategy.distribute_dataset(DataLoader(data, batch_size=7)):
        strategy.run(step, batch)


@pytest.mark.parametrize("make", [accuracy, collection, areas, extremes])
def test_the_notebook_reads_what_all_replicas_counted_and_begins_anew_on_all(two, make):
    with two.scope():
        metric = make()
    alone = make()
    for examples in (30, 13):
        count(two, metric, examples)
        torch.testing.assert_close(metric.compute(), plain(alone, examples))
        metric.reset(), alone.reset()


def test_metrics_are_composed_and_are_parts_of_modules(two):
    class Judge(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = accuracy()

        def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
            self.accuracy(outputs, targets)

    with two.scope():
        judge = Judge()
        error = 1 - judge.accuracy
    count(two, judge)
    assert judge.accuracy.compute() == plain(accuracy())
    assert error.compute() == 1 - plain(accuracy())


def test_a_metric_of_the_replicas_counts_nothing_here(two):
    with two.scope():
        metric = accuracy()
    count(two, metric)
    for use in (metric.update, metric, metric.forward):
        with pytest.raises(mnb.ContextError, match=r"Accuracy\.(update|forward)\(\) of a metric that the replicas"):
            use(OUTPUTS, TARGETS)
    assert metric.compute() == plain(accuracy())
    alone = copy.deepcopy(metric)
    alone.reset()
    assert plain(alone, 5) == plain(accuracy(), 5)


def test_what_was_counted_before_counts_once(two):
    with two.scope():
        metric = accuracy()
    metric.update(OUTPUTS[:5], TARGETS[:5])
    two.run(lambda: metric.update(OUTPUTS[5:], TARGETS[5:]))
    twice = torch.cat([OUTPUTS[:5], OUTPUTS[5:], OUTPUTS[5:]]), torch.cat([TARGETS[:5], TARGETS[5:], TARGETS[5:]])
    metric_here = accuracy()
    metric_here.update(*twice)
    assert metric.compute() == metric_here.compute()


def test_what_a_replica_that_died_had_counted_is_not_counted_twice(two):
    with two.scope():
        metric = accuracy()
    count(two, metric)
    left = two.run(lambda: metric.update_count)
    with pytest.raises(mnb.ReplicaDied):
        two.run(lambda: os._exit(1) if mnb.get_replica_context().replica_id_in_sync_group == 0 else None)
    assert two.run(lambda: metric.update_count).values == (0, left)


def test_a_metric_that_cannot_be_computed_at_the_end_costs_the_others_nothing():
    class Broken(torchmetrics.MeanMetric):
        def compute(self) -> torch.Tensor:
            raise ValueError("no value")

    strategy = mnb.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        broken, metric = Broken(), accuracy()
    count(strategy, metric)
    strategy.run(lambda: broken.update(1.0))
    with pytest.warns(UserWarning, match="closed without the latest .* metrics: no value"):
        strategy.close()
    assert metric.compute() == plain(accuracy())


def test_values_stay_when_the_strategy_is_closed():
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            metrics, unused = collection(), areas()
        count(strategy, metrics)
        strategy.run(lambda: unused.reset())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            strategy.close()
    torch.testing.assert_close(metrics.compute(), plain(collection()))
    metrics.reset()
    torch.testing.assert_close(plain(metrics, 9), plain(collection(), 9))


def test_cells_count_and_the_notebook_reads(shell):
    # In one session, whatever cell made it: replicas that start anew need three seconds each to import torchmetrics.
    run = running(shell)
    shell.user_ns.update(OUTPUTS=OUTPUTS, TARGETS=TARGETS)
    run("%mirror start --devices cpu:0,cpu:1")
    for name, place in (("here", ""), ("there", "%%mirrored\n")):
        run(f"{place}import torchmetrics\n{name} = torchmetrics.Accuracy(task='multiclass', num_classes=3)")
    for metric in ("here", "there"):
        counting = (
            "%%mirrored\nfor outputs, targets in strategy.distribute_dataset((OUTPUTS, TARGETS), batch_size=7):\n"
            f"    {metric}.update(outputs, targets)"
        )
        run(counting)
        assert run(f"{metric}.compute()") == plain(accuracy())
        assert run(f"{metric}.reset(); {metric}.update_count") == 0
        run(counting + "\n    break")
        assert run(f"{metric}.compute()") == plain(accuracy(), 7)
        with pytest.raises(mnb.ContextError, match="call it in a mirrored cell"):
            run(f"{metric}.update(OUTPUTS, TARGETS)")
    run("before = torchmetrics.SumMetric(); before.update(3.0)")
    run("%%mirrored\nbefore.update(1.0)")
    assert run("before.compute()") == 5, "what was counted here once, and one for each replica"
    # Computed here before, and there by one of two replicas: each would take what it has, and the other one wait.
    run("seen = torchmetrics.SumMetric(); seen.update(3.0); seen.compute()")
    assert run("%%mirrored\nseen.compute()") == 3
    run("%%mirrored\nif replica_id == 0: seen.update(1.0)")
    assert run("seen.compute()") == 4
    # Its group is no more, and no cell has formed a new one: all the same they end with what they have counted.
    with pytest.raises(ZeroDivisionError):
        run("%%mirrored\nif replica_id == 1: 1 / 0\nstrategy.reduce('sum', 1.0)")
    run("%mirror restart")
    for metric in ("here", "there"):
        assert run(f"%%mirrored\n{metric}.compute()") == plain(accuracy(), 7)
    run("%mirror stop")
    for metric in ("here", "there"):
        assert run(f"{metric}.compute()") == plain(accuracy(), 7)
        assert run(f"{metric}.reset(); {metric}.update(OUTPUTS, TARGETS); {metric}.compute()") == plain(accuracy())


def test_what_a_cell_counts_as_it_makes_a_metric_counts_there_alone(shell):
    run = running(shell)
    run("%mirror start --devices cpu:0,cpu:1")
    run("%%mirrored\nimport torchmetrics\ntotal = torchmetrics.SumMetric(); total.update(2.0)")
    assert run("total.compute()") == 4
    with pytest.warns(UserWarning, match="before the ``update`` method"):
        assert run("total.clone().compute()") == 0, "not what the first of them had counted then"
    run("%mirror restart")
    assert run("%%mirrored\ntotal.compute()") == 4


def test_a_metric_is_as_any_other_once_all_replicas_that_had_it_have_died(shell):
    run = running(shell)
    run("%mirror start --devices cpu:0,cpu:1")
    run("import torchmetrics\nsent = torchmetrics.SumMetric(); sent.update(3.0)")
    run("%%mirrored\nmade = torchmetrics.SumMetric(); made.update(2.0); sent.update(1.0)")
    with pytest.raises(mnb.ReplicaDied):
        run("%%mirrored\nimport os\nos._exit(1)")
    with pytest.warns(UserWarning, match="before the ``update`` method"):
        assert run("made.compute()") == 0
    run("made.reset()")
    assert run("sent.compute()") == 3
    run("sent.update(1.0)")
    run("%%mirrored\nmade.update(1.0); sent.update(1.0)")
    assert run("made.compute(), sent.compute()") == (2, 6)


def test_a_metric_that_some_replicas_lack_says_so(shell):
    run = running(shell)
    run("%mirror start --devices cpu:0,cpu:1")
    run("%%mirrored --replicas 0\nimport torchmetrics\ntotal = torchmetrics.SumMetric(); total.update(2.0)")
    with pytest.raises(mnb.UsageError, match=r"SumMetric\.compute\(\) .* replica 1 lacks this one: name it"):
        run("total.compute()")
    run("%%mirrored\ntotal.update(1.0)")
    assert run("total.compute()") == 4
