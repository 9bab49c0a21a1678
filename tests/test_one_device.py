"""OneDeviceStrategy and the default strategy: this process alone."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mirror_nb.collectives.options import CommunicationOptions
from mirror_nb.errors import ContextError, DeviceError, PoolClosed, UsageError
from mirror_nb.strategies.context import get_replica_context, get_strategy, has_strategy, in_cross_replica_context
from mirror_nb.strategies.one_device import OneDeviceStrategy
from mirror_nb.values import PerReplica, ReduceOp
from mirror_nb.variables import Variable


@pytest.fixture
def strategy():
    return OneDeviceStrategy("cpu:1")


def test_run_returns_the_plain_value(strategy):
    assert strategy.num_replicas_in_sync == 1
    assert strategy.extended.worker_devices == ("cpu:1",)
    value = strategy.run(lambda x, y: x + y, (1,), {"y": torch.tensor(2.0)})
    assert type(value) is torch.Tensor
    assert strategy.reduce(ReduceOp.SUM, value, axis=None) == 3
    assert strategy.run(lambda x: x, (PerReplica([7]),)) == 7


def test_reductions_of_one_replica(strategy):
    assert strategy.reduce("mean", torch.tensor([1.0, 3.0]), axis=0) == 2
    assert strategy.reduce("sum", {"a": 1, "b": [2.0]}, axis=None) == {"a": 1, "b": [2.0]}
    assert strategy.gather(torch.ones(2), axis=0).tolist() == [1, 1]
    assert strategy.local_results(5) == (5,)
    with pytest.raises(ValueError, match="over axis 0"):
        strategy.reduce("sum", 1.0, axis=0)


def test_the_cpu_is_a_destination_of_every_strategy(strategy):
    assert strategy.extended.reduce_to("mean", torch.tensor(2.0), "cpu:0") == 2


def test_a_per_replica_of_another_number_of_values_is_refused(strategy):
    for given in ({"args": (PerReplica([1, 2]),)}, {"kwargs": {"x": [PerReplica([1, 2])]}}):
        with pytest.raises(ValueError, match="this PerReplica has 2 values, but the strategy has 1 replicas"):
            strategy.run(lambda x: x, **given)
        with pytest.raises(ValueError, match="this PerReplica has 2 values, but the strategy has 1 replicas"):
            strategy.extended.update(Variable(1.0), lambda own, x: x, **given)


def test_what_an_update_returns_has_no_variables_in_it(strategy):
    own, (added, number) = strategy.extended.update(Variable(1.0), lambda own: [own, (own.assign_add(1.0), 5)])
    assert (type(own), type(added), own.item(), added.item(), number) == (torch.Tensor, torch.Tensor, 2, 2, 5)


def test_what_is_given_as_options_and_is_none_is_refused(strategy):
    def calls(options):
        context, one = get_replica_context(), torch.ones(1)
        yield lambda: context.all_reduce("sum", one, options)
        yield lambda: context.all_gather(one, 0, options)
        yield lambda: strategy.extended.reduce_to("sum", one, one, options)
        yield lambda: strategy.extended.batch_reduce_to("sum", [(one, one)], options)

    assert [call() for call in calls(CommunicationOptions())] == [1, 1, 1, [1]]
    for call in calls(3):
        with pytest.raises(ValueError, match=r"`options` must be CommunicationOptions\(\.\.\.\) or None, not 3"):
            call()


def test_an_async_function_is_refused(strategy):
    async def step(x):
        return x

    with pytest.raises(ValueError, match="`fn` is an async function"):
        strategy.run(step, (1,))


def test_arguments_may_be_given_by_the_names_of_tensorflow(strategy):
    with strategy.scope():
        total = Variable(initial_value=1.0)

    def step(x):
        total.assign_add(delta=2.0)
        total.assign_sub(delta=1.0)
        context = get_replica_context()
        merged = context.merge_call(merge_fn=lambda strategy, y: y, args=(x,), kwargs={})
        both = context.all_gather(value=torch.ones(1), axis=0, options=None)
        return context.all_reduce(reduce_op="SUM", value=merged, options=None) + both

    result = strategy.run(fn=step, args=(torch.tensor([2.0]),), kwargs={}, options=None)
    assert (result.tolist(), total.item()) == ([3.0], 2.0)
    assert strategy.reduce(reduce_op="SUM", value=result, axis=None).tolist() == [3.0]
    assert strategy.gather(value=result, axis=0).tolist() == [3.0]
    assert strategy.experimental_local_results(value=5) == (5,)
    (batch,) = strategy.experimental_distribute_dataset(dataset=torch.ones(2), options=None, batch_size=2)
    assert len(batch) == 2
    with pytest.raises(ValueError, match="`reduce_op` is 'max'"):
        strategy.reduce("max", result, axis=None)


def test_inside_run_there_is_a_replica_and_merge_call_leaves_it(strategy):
    def merge(merging, x):
        return merging is strategy, in_cross_replica_context(), get_replica_context(), x

    def replica():
        context = get_replica_context()
        x = torch.tensor(2.0, requires_grad=True)
        context.all_reduce("mean", {"a": x * x})["a"].backward()
        gathered = context.all_gather([torch.ones(1)], 0)
        return context.replica_id_in_sync_group, x.grad, gathered, context.merge_call(merge, (3,)), has_strategy()

    assert strategy.run(replica) == (0, 4, [torch.ones(1)], (True, True, None, 3), True)
    assert not has_strategy()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex32, torch.bfloat16, torch.uint16, torch.bool])
def test_a_mean_of_numbers_that_torch_does_not_divide_is_taken(strategy, dtype):
    found = strategy.run(lambda: get_replica_context().all_reduce("mean", torch.ones(2).to(dtype)))
    fractions = dtype.is_floating_point or dtype.is_complex
    assert (found.dtype, found.to(torch.complex64).tolist()) == (dtype if fractions else torch.float32, [1, 1])


def test_a_size_is_reduced_and_gathered_as_one_value(strategy):
    def sizes(own):
        context = get_replica_context()
        return context.all_reduce("mean", [own]), context.all_gather([own], 0)

    (mean,), (gathered,) = strategy.run(sizes, (torch.ones(2, 3).shape,))
    assert mean.tolist() == gathered.tolist() == [2, 3]


def test_batches_are_whole_and_next_in_run_is_refused(strategy):
    dataset = strategy.distribute_dataset(torch.arange(5), batch_size=2)
    assert [batch.tolist() for batch in dataset] == [[0, 1], [2, 3], [4]]
    iterator = iter(dataset)
    with pytest.raises(ValueError, match="should be called from outside of replica_fn"):
        strategy.run(lambda: next(iterator))
    made = strategy.distribute_datasets_from_function(
        lambda context: [torch.ones(context.get_per_replica_batch_size(4))]
    )
    assert [len(batch) for batch in made] == [4]
    assert strategy.distribute_values_from_function(lambda context: context.replica_id_in_sync_group + 2) == 2


def test_training_and_variables(strategy):
    with strategy.scope():
        model = nn.Linear(1, 1)
        counter = Variable(0, trainable=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = model.bias.item()

    def step(x):
        model(x).sum().backward()
        optimizer.step()
        counter.assign_add(1)

    strategy.run(step, (torch.zeros(1, 1),))
    assert model.bias.item() == pytest.approx(before - 0.1)
    assert counter == 1
    assert repr(counter) == "Variable(tensor(1))"
    assert strategy.extended.update(counter, lambda own, by: own.assign_add(by), (5,)) == 6
    assert counter == 6


def test_what_run_returns_of_an_assignment_is_the_value_of_that_moment(strategy):
    with strategy.scope():
        count = Variable(0.0)
    for step in (lambda: count.assign_add(1.0), lambda: count.assign_sub(-1.0), lambda: count.assign(count + 1)):
        count.assign(0.0)
        results = [strategy.run(step) for _ in range(3)]
        assert [type(result) for result in results] == [torch.Tensor] * 3
        assert results == [1.0, 2.0, 3.0]
    assert count.assign(5.0) is count


@pytest.mark.parametrize("devices", [["cpu:0", "cpu:1"], "cpu:0,cpu:1", None, [], "tpu:0", "cuda:99"])
def test_it_wants_one_device_that_is_there(devices):
    with pytest.raises(DeviceError):
        OneDeviceStrategy(devices)


def test_it_has_what_the_others_have_to_mirror_and_to_ask(strategy):
    for one in (strategy, get_strategy()):
        model = nn.Linear(2, 1)
        assert one.mirror(model) is model
        assert (one.replica_id, one.device) == (0, torch.device("cpu"))
        with one.no_sync():
            model(torch.ones(1, 2)).sum().backward()
        assert model.weight.grad.tolist() == [[1.0, 1.0]]


def test_without_a_strategy_there_is_the_default_one():
    default = get_strategy()
    assert not has_strategy()
    assert not in_cross_replica_context()
    assert default.num_replicas_in_sync == 1
    assert get_replica_context().replica_id_in_sync_group == 0
    assert get_replica_context().strategy is default
    assert get_strategy() is default
    assert default.run(lambda: (has_strategy(), get_strategy() is default)) == (False, True)
    assert repr(Variable(1.0)) == "Variable(tensor(1.))"


def test_one_that_was_closed_says_so_and_the_default_one_cannot_be():
    with OneDeviceStrategy("cpu:0") as strategy:
        assert strategy.run(lambda: 1) == 1
    for use in (lambda: strategy.run(lambda: 1), lambda: strategy.scope().__enter__()):
        with pytest.raises(PoolClosed, match="was closed; make a new one"):
            use()
    assert not has_strategy()
    with get_strategy() as default:
        assert default.run(lambda: 1) == 1
    assert default.run(lambda: 1) == 1


@pytest.mark.gpu
def test_modules_variables_and_batches_land_on_the_gpu():
    strategy = OneDeviceStrategy("GPU:0")
    with strategy.scope():
        model, variable = nn.Linear(1, 1), Variable(1.0)
    (batch,) = strategy.distribute_dataset(torch.ones(2, 1), batch_size=2)
    where = {tensor.device for tensor in (*model.parameters(), variable, batch, strategy.run(model, (batch,)))}
    assert where == {torch.device("cuda:0")}


def test_code_in_the_default_strategys_scope_stands_where_code_outside_every_scope_stands():
    default = get_strategy()
    with default.scope() as entered:
        assert entered is default is get_strategy()
        assert not has_strategy()
        assert not in_cross_replica_context()
        assert get_replica_context().num_replicas_in_sync == 1
        with OneDeviceStrategy("cpu:0").scope() as other:
            assert get_strategy() is other
        assert default.run(lambda: 3) == 3
    with OneDeviceStrategy("cpu:0").scope() as other:
        with pytest.raises(ContextError, match="Must not nest Strategy scopes: <OneDeviceStrategy: cpu:0> is current"):
            default.scope().__enter__()
        assert get_strategy() is other


def test_who_leaves_a_scope_leaves_those_that_were_entered_in_it_too(strategy):
    before = nn.BatchNorm1d.forward
    with strategy.scope():
        # As notebooks do.
        inner = strategy.scope()
        inner.__enter__()
        assert nn.BatchNorm1d.forward is not before
    assert not has_strategy()
    assert nn.BatchNorm1d.forward is before
    with strategy.scope():
        inner.__exit__(None, None, None)
        assert get_strategy() is strategy
        assert nn.BatchNorm1d.forward is not before


def test_a_scope_is_left_by_an_interrupt_while_it_is_left(strategy, monkeypatch):
    @contextlib.contextmanager
    def interrupted():
        yield
        raise KeyboardInterrupt

    monkeypatch.setattr(strategy._place, "scope", interrupted)
    with pytest.raises(KeyboardInterrupt), strategy.scope():
        pass
    assert not has_strategy()


def test_each_thread_stands_in_scopes_of_its_own(strategy):
    other, found = OneDeviceStrategy("cpu:0"), []

    def elsewhere() -> None:
        found.append(has_strategy())
        # Were it one for all, these would be mixed.
        with other.scope():
            found.append(get_strategy())

    with strategy.scope():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert get_strategy() is strategy
    assert found == [False, other]


def test_a_scope_that_was_entered_by_itself_is_left_by_the_same_object_once(strategy):
    scope = strategy.scope()
    scope.__enter__()
    with pytest.raises(ContextError, match="was not entered, or was left already; keep the one that is: scope = "):
        strategy.scope().__exit__(None, None, None)
    assert get_strategy() is strategy
    scope.__exit__(None, None, None)
    assert not has_strategy()
    with pytest.raises(ContextError, match="was left already"):
        scope.__exit__(None, None, None)


def test_a_closed_strategy_lets_go_of_the_workers_of_its_loaders(strategy):
    loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=2, num_workers=1, persistent_workers=True)
    before = set(multiprocessing.active_children())
    assert len(list(strategy.distribute_dataset(loader))) == 2
    assert len(set(multiprocessing.active_children()) - before) == 1
    strategy.close()
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize("examples", ["4", 1.5, -1, True])
def test_a_step_has_a_whole_number_of_examples(strategy, examples):
    with pytest.raises(UsageError, match=f"`examples` is a number of examples, 0 or more, not {examples!r}"):
        strategy.step(examples=examples)
    strategy.step(examples=4)
