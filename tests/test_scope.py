"""The scope, replica after replica in this process: it needs no word from the others."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mirror_nb.gradients.synchronizer import GradientSynchronizer
from mirror_nb.replica import random_streams
from mirror_nb.replica import scope as scope_module
from mirror_nb.replica.scope import Scope

N = 3
CPU = torch.device("cpu")
# A device that every machine has, and where tensors are not on the CPU.
ELSEWHERE = torch.device("meta")


class Tracker:
    """What the scope needs of the gradients, and what it told them."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.tracked: list[nn.Parameter] = []
        self.left: list[tuple[object, list[nn.Parameter]]] = []
        self.before_backward: Callable[[], None] = lambda: None

    def track(self, parameter: nn.Parameter, name: str, module: nn.Module | None = None) -> None:
        if not any(parameter is known for known in self.tracked):
            self.tracked.append(parameter)
            self.names.append(name)

    def track_all(self, tensors: Any, name: str) -> None:
        for tensor in tensors:
            self.track(tensor, name)

    def passed(self, outputs: Any) -> None:
        """What nobody tracks is the gradients' business."""

    def hooked(self, parameter: Tensor) -> None:
        """Hooks that others have are the gradients' business."""

    def leave_to(self, owner: object, parameters: Any) -> None:
        self.left.append((owner, list(parameters)))


def make(replica_id: int = 0, n: int = N, device: torch.device = CPU, seed: int = 7) -> Scope:
    return Scope(replica_id, n, device, Tracker(), seed)  # type: ignore[arg-type]


def tracker(scope: Scope) -> Tracker:
    return scope._gradients  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def own_random_numbers() -> Iterator[None]:
    """Leave the random generators of the test process as they were."""
    kept = torch.get_rng_state(), random.getstate(), np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(np.random.MT19937(3))  # type: ignore[attr-defined]
    yield
    torch.set_rng_state(kept[0])
    random.setstate(kept[1])
    np.random.set_bit_generator(kept[2])  # type: ignore[attr-defined]


def on_each(cell: Callable[[Scope], Any], *more: Callable[[Scope], Any], seed: int = 7) -> list[Any]:
    """What the cells give on each replica; of several, the last one's value."""
    results = []
    for i in range(N):
        scope = make(i, seed=seed)
        for part in (cell, *more):
            with scope:
                value = part(scope)
        results.append(value)
    return results


def equal(values: list[Any]) -> bool:
    return all(torch.equal(torch.as_tensor(v), torch.as_tensor(values[0])) for v in values)


def distinct(values: list[Any]) -> bool:
    return len({str(torch.as_tensor(v).tolist()) for v in values}) == len(values)


def weights(module: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


# Random numbers


def test_initial_values_are_equal_on_all_replicas() -> None:
    assert equal(on_each(lambda _: weights(net())))


def test_random_numbers_differ_by_replica_once_a_model_has_run() -> None:
    def cell(_: Scope) -> Tensor:
        net()(torch.ones(2, 3))
        return torch.rand(3)

    assert distinct(on_each(cell))


def test_a_first_forward_pass_may_be_one_that_is_traced() -> None:
    def cell(_: Scope) -> Tensor:
        model = net().eval()
        traced = torch.jit.trace(model, torch.ones(2, 3))
        assert not torch.jit.is_tracing()
        inputs = torch.arange(6.0).reshape(2, 3)
        torch.testing.assert_close(traced(inputs), model(inputs))
        # Nothing of the scope's own doing is in the graph.
        assert "randint" not in str(traced.inlined_graph)
        return torch.randn(3)

    assert distinct(on_each(cell))


def test_a_torch_that_tells_of_no_tracing_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_set_tracing_state")
    assert distinct(on_each(lambda _: (net()(torch.ones(2, 3)), torch.randn(3))[1]))


def test_a_second_model_is_equal_too_after_training_that_differed() -> None:
    def train(_: Scope) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
        for _step in range(3):
            model(torch.rand(2, 3))

    for draws in on_each(train, lambda _: weights(net())), on_each(lambda s: (train(s), weights(net()))[1]):
        assert equal(draws)


@pytest.mark.parametrize(
    "again",
    [
        nn.Linear.reset_parameters,
        lambda layer: nn.init.normal_(layer.weight.data),
        lambda layer: nn.init.xavier_uniform_(layer.weight),
    ],
    ids=["reset_parameters", "its values", "a parameter"],
)
def test_initial_values_that_a_model_is_given_anew_are_equal_too(again: Callable[[nn.Linear], object]) -> None:
    def cell(_: Scope) -> Tensor:
        model = nn.Linear(3, 3)
        for _fold in range(2):
            again(model)
            initial = weights(model)
            nn.functional.dropout(model(torch.rand(2, 3)), 0.5)
        return initial

    def trained(scope: Scope) -> Tensor:
        cell(scope)
        return torch.rand(3)

    assert equal(on_each(cell))
    assert distinct(on_each(trained))


def test_the_seed_of_the_session_decides() -> None:
    assert equal([*on_each(lambda _: weights(net()), seed=1), on_each(lambda _: weights(net()), seed=1)[0]])
    first, second = (on_each(lambda _: weights(net()), seed=seed)[0] for seed in (1, 2))
    assert not torch.equal(first, second)


def test_manual_seed_gives_the_weights_of_plain_pytorch() -> None:
    torch.manual_seed(0)
    expected = weights(net())

    def cell(_: Scope) -> Tensor:
        torch.manual_seed(0)
        return weights(net())

    for result in on_each(cell) + on_each(cell, lambda _: net()(torch.ones(2, 3)), cell):
        assert torch.equal(result, expected)


def test_manual_seed_makes_a_run_reproducible() -> None:
    def cell(_: Scope) -> list[Any]:
        torch.manual_seed(0)
        random.seed(1)
        np.random.seed(2)
        model = net()
        model(torch.ones(2, 3))
        return [float(torch.rand(1)), random.random(), np.random.rand()]

    once, twice = on_each(cell), on_each(cell, cell)
    assert once == twice
    assert all(distinct(list(column)) for column in zip(*once, strict=True))


def leaving_no_trace(what: str, running: bool) -> Callable[[Scope], Any]:
    """A cell that draws numbers and makes a module in the middle of something else, and puts the states back."""

    def inside() -> None:
        net()(torch.rand(2, 3))
        random.random(), np.random.rand()

    def cell(_: Scope) -> Any:
        net()
        if running:
            net()(torch.rand(2, 3))
        if what == "fork_rng":
            with torch.random.fork_rng():
                torch.manual_seed(7)
                inside()
        elif what == "torch":
            state = torch.get_rng_state()
            inside()
            torch.set_rng_state(new_state=state)
        elif what == "others":
            states = random.getstate(), np.random.get_state(), np.random.get_state(legacy=False)
            inside()
            random.setstate(states[0]), np.random.set_state(states[1]), np.random.set_state(states[2])
        if what == "others":
            return [random.random(), np.random.rand()], None
        own = float(torch.rand(1)) if running else None
        return own, (weights(net()), weights(net()))

    return cell


@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize("what", ["fork_rng", "torch", "others"])
def test_states_that_are_put_back_leave_both_streams_as_they_were(what: str, running: bool) -> None:
    own, shared = zip(*on_each(leaving_no_trace(what, running)), strict=True)
    own_before, shared_before = zip(*on_each(leaving_no_trace("", running)), strict=True)
    if what == "others":
        assert running == distinct(list(own))
        return
    torch.testing.assert_close(own, own_before, rtol=0, atol=0)
    torch.testing.assert_close(shared, shared_before, rtol=0, atol=0)
    assert equal([first for first, _ in shared])


def test_a_state_that_is_none_is_the_functions_own_error() -> None:
    def cell(_: Scope) -> None:
        with pytest.raises(TypeError):
            torch.set_rng_state()
        with pytest.raises((TypeError, AttributeError, RuntimeError)):
            torch.set_rng_state("state")

    on_each(cell)


def test_replica_i_goes_on_from_the_seed_plus_i() -> None:
    def cell(_: Scope) -> list[float]:
        torch.manual_seed(seed=5)
        random.seed(a=5)
        np.random.seed(seed=5)
        net()(torch.ones(2, 3))
        return [float(torch.rand(1)), random.random(), float(np.random.rand())]

    for i, result in enumerate(on_each(cell)):
        torch.manual_seed(5 + i)
        random.seed(5 + i)
        np.random.seed(5 + i)
        assert result == [float(torch.rand(1)), random.random(), float(np.random.rand())]


def test_a_seed_that_torch_makes_a_whole_number_of_counts_as_that() -> None:
    def cell(_: Scope) -> float:
        torch.manual_seed(5.0)  # type: ignore[arg-type]
        net()(torch.ones(2, 3))
        return float(torch.rand(1))

    for i, result in enumerate(on_each(cell)):
        torch.manual_seed(5 + i)
        assert result == float(torch.rand(1))


def test_a_seeding_function_from_outside_the_scope_counts_too() -> None:
    seed = torch.manual_seed
    torch.manual_seed(0)
    expected = weights(net())

    def cell(_: Scope) -> tuple[Tensor, float]:
        seed(0)
        model = net()
        initial = weights(model)
        model(torch.ones(2, 3))
        return initial, float(torch.rand(1))

    for results in on_each(cell), on_each(lambda _: net()(torch.ones(2, 3)), cell):
        assert all(torch.equal(initial, expected) for initial, _ in results)
        for i, (_, draw) in enumerate(results):
            torch.manual_seed(i)
            assert draw == float(torch.rand(1))


def test_numpys_and_pythons_numbers_make_equal_initial_values() -> None:
    def cell(_: Scope) -> Tensor:
        net()(torch.ones(2, 3))
        nn.Identity()
        return torch.tensor([random.random(), np.random.rand()])

    assert equal(on_each(cell))


def test_a_constructor_that_runs_its_layers_goes_on_building() -> None:
    class Probing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 5)
            with torch.no_grad():
                size = self.first(torch.rand(1, 3)).shape[1]
            self.noise = nn.Parameter(torch.rand(size))
            self.last = nn.Linear(size, 2)

    torch.manual_seed(0)
    expected = weights(Probing())

    def cell(_: Scope) -> Tensor:
        torch.manual_seed(0)
        return weights(Probing())

    assert all(torch.equal(result, expected) for result in on_each(cell))


def test_a_lazy_module_is_initialised_alike_whatever_was_drawn_before() -> None:
    def cell(_: Scope) -> Tensor:
        model = nn.Sequential(nn.Dropout(0.5), nn.LazyLinear(2))
        model(torch.ones(5, 3))
        return weights(model)

    assert equal(on_each(cell))


def test_shared_randomness_gives_the_order_of_plain_pytorch() -> None:
    torch.manual_seed(0)
    net()
    expected = [torch.randperm(10) for _ in range(2)]

    def cell(scope: Scope) -> list[Tensor]:
        torch.manual_seed(0)
        model = net()
        orders = []
        for _ in range(2):
            scope.start_running()
            with scope.shared_randomness():
                orders.append(torch.randperm(10))
            model(torch.rand(2, 3))
        return orders

    for orders in on_each(cell):
        assert all(torch.equal(a, b) for a, b in zip(orders, expected, strict=True))


def test_shared_randomness_leaves_the_own_numbers_alone() -> None:
    def cell(scope: Scope, look: bool) -> list[float]:
        scope.start_running()
        if look:
            with scope.shared_randomness(), scope.shared_randomness():
                torch.rand(3), random.random(), np.random.rand()
        return [float(torch.rand(1)), random.random(), np.random.rand()]

    looked, plain = on_each(lambda s: cell(s, True)), on_each(lambda s: cell(s, False))
    assert looked == plain
    assert distinct(looked)


def test_shared_randomness_is_equal_for_python_and_numpy_too() -> None:
    def cell(scope: Scope) -> list[float]:
        scope.start_running()
        random.random(), np.random.rand(), torch.rand(scope._streams._replica_id + 1)  # type: ignore[union-attr]
        with scope.shared_randomness():
            return [float(torch.rand(1)), random.random(), np.random.rand()]

    assert equal(on_each(cell))


def test_shared_randomness_ends_with_an_error_too() -> None:
    scope = make(1)
    with scope:
        scope.start_running()
        with pytest.raises(ValueError, match="sampler"), scope.shared_randomness():
            raise ValueError("sampler")
        assert scope._streams is not None
        assert scope._streams.running


def test_a_gradient_ends_building() -> None:
    gradients = GradientSynchronizer(0, N)
    scope = Scope(0, N, CPU, gradients, 7)
    with scope:
        gradients.before_backward()
    assert scope._streams is not None
    assert scope._streams.running


def test_one_replica_is_plain_pytorch() -> None:
    before = torch.get_rng_state()
    functions = [nn.Module.__init__, nn.Module.__setstate__, torch.manual_seed, random.seed]
    scope = make(0, 1)
    assert torch.equal(torch.get_rng_state(), before)
    with scope, scope.shared_randomness():
        assert [nn.Module.__init__, nn.Module.__setstate__, torch.manual_seed, random.seed] == functions
        scope.start_running()
        first = weights(net())
    torch.set_rng_state(before)
    assert torch.equal(first, weights(net()))


# Modules


def test_parameters_are_tracked_in_order_with_names_that_say_what_they_are() -> None:
    scope = make()
    with scope:
        model = net()
    assert tracker(scope).names == [
        "Linear.weight",
        "Linear.bias",
        "BatchNorm1d.weight",
        "BatchNorm1d.bias",
        "Linear.weight",
        "Linear.bias",
    ]
    assert all(a is b for a, b in zip(tracker(scope).tracked, model.parameters(), strict=True))


def test_modules_made_outside_are_not_tracked() -> None:
    scope = make()
    with scope, scope:
        pass
    net()
    assert not tracker(scope).names


def test_the_scope_can_be_entered_inside_itself() -> None:
    scope = make()
    with scope:
        with scope:
            pass
        nn.Linear(1, 1)
    assert len(tracker(scope).names) == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_unpickled_modules_are_tracked(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = net()
    scope = make()
    with scope:
        other = copied(model)
    tracked = tracker(scope).tracked
    assert {id(parameter) for parameter in other.parameters()} == {id(parameter) for parameter in tracked}


def test_an_adopted_module_is_tracked_once_with_its_shared_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    scope = make()
    scope.adopt(model)
    scope.adopt(model)
    assert tracker(scope).names == ["Linear.weight", "Linear.bias", "Linear.bias"]


def test_what_ddp_wraps_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp = nn.parallel.DistributedDataParallel
    monkeypatch.setattr(
        ddp, "__init__", lambda self, module: (nn.Module.__init__(self), setattr(self, "module", module))[0]
    )
    scope = make()
    with scope:
        model = net()
        wrapper = ddp(model)
        plain = nn.Module()
        plain.module = model
    ((owner, parameters),) = tracker(scope).left
    assert owner is wrapper
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


def test_what_fsdp_shards_is_not_tracked() -> None:
    scope = make()
    with scope:
        module = nn.Module()
        flat = nn.Parameter(torch.ones(2))
        flat._is_flat_param = True  # type: ignore[attr-defined]
        module.flat = flat
    assert not tracker(scope).names


def test_everything_that_was_replaced_is_put_back_after_an_error() -> None:
    functions = (
        nn.Module.__init__,
        nn.Module.__setstate__,
        torch.manual_seed,
        torch.random.manual_seed,
        random.seed,
        np.random.seed,
    )
    hooks = nn.modules.module
    registered = (len(hooks._global_forward_pre_hooks), len(hooks._global_parameter_registration_hooks))

    def cell() -> None:
        with make():
            assert nn.Module.__init__ is not functions[0]
            assert nn.BatchNorm1d.forward is not nn.modules.batchnorm._BatchNorm.forward
            raise ValueError("cell")

    with pytest.raises(ValueError, match="cell"):
        cell()
    assert functions == (
        nn.Module.__init__,
        nn.Module.__setstate__,
        torch.manual_seed,
        torch.random.manual_seed,
        random.seed,
        np.random.seed,
    )
    assert nn.BatchNorm1d.forward is nn.modules.batchnorm._BatchNorm.forward
    assert nn.SyncBatchNorm.forward.__module__ == "torch.nn.modules.batchnorm"
    assert not hasattr(nn.SyncBatchNorm.forward, "__wrapped__")
    assert registered == (
        len(hooks._global_forward_pre_hooks),
        len(hooks._global_parameter_registration_hooks),
    )


def test_what_others_replaced_meanwhile_stays_and_calls_nothing_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scope = make()
    with scope:
        ours = nn.Module.__setstate__

        def theirs(module: nn.Module, state: Any) -> None:
            ours(module, state)

        monkeypatch.setattr(nn.Module, "__setstate__", theirs)
    assert nn.Module.__setstate__ is theirs
    copy.deepcopy(net())
    assert not tracker(scope).names
    with scope:
        copy.deepcopy(nn.Linear(1, 1))
    assert len(tracker(scope).names) == 4


def test_forward_passes_are_not_watched_while_running() -> None:
    hooks = nn.modules.module._global_forward_pre_hooks
    others = set(hooks)
    scope = make()
    with scope:
        model = net()
        assert set(hooks) - others
        model(torch.ones(2, 3))
        assert not set(hooks) - others


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_batch_norms_take_their_input_by_its_name(kind: type[nn.Module]) -> None:
    x = torch.randn(4, 3)
    with make():
        norm = kind(3).eval()
        assert torch.equal(norm(input=x), norm(x))


def test_an_empty_share_leaves_batch_norms_statistics_alone() -> None:
    norm = nn.BatchNorm1d(3)
    norm(torch.randn(4, 3))
    before = norm.running_mean.clone(), norm.running_var.clone()
    norm(torch.empty(0, 3))
    assert torch.equal(norm.running_mean, before[0])
    assert torch.equal(norm.running_var, before[1])


# Devices


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The tensors that were moved, in a process without a second device to move them to."""
    moved: list[Tensor] = []
    monkeypatch.setattr(scope_module, "_move", lambda tensor, device: moved.append(tensor))
    return moved


def test_parameters_and_buffers_are_moved_once_by_the_end_of_the_cell(moved: list[Tensor]) -> None:
    with make(device=ELSEWHERE):
        model = net()
        assert not moved
    assert {id(t) for t in (*model.parameters(), *model.buffers())} == {id(t) for t in moved}
    assert len(moved) == len({id(t) for t in moved})


@pytest.mark.parametrize("n", [1, N])
@pytest.mark.parametrize(
    "looks",
    [
        lambda layer: next(layer.parameters()),
        lambda layer: torch.optim.Adagrad([layer.weight]),
        lambda layer: layer(torch.ones(1, 1)),
    ],
    ids=["parameters", "optimizer", "forward"],
)
def test_a_module_is_on_the_device_when_it_matters(
    moved: list[Tensor], n: int, looks: Callable[[nn.Linear], object]
) -> None:
    with make(n=n, device=ELSEWHERE):
        layer = nn.Linear(1, 1)
        assert not moved
        looks(layer)
        assert len(moved) == 2
        second = nn.Linear(1, 1)
        second(torch.ones(1, 1))
        assert len(moved) == 4


def test_initial_values_are_drawn_on_the_cpu(moved: list[Tensor]) -> None:
    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = net()
            self.layers(torch.ones(2, 3))
            for parameter in self.parameters():
                assert not moved
                nn.init.normal_(parameter)

    with make(device=ELSEWHERE):
        Custom()
    assert moved


def test_an_error_while_moving_leaves_nothing_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(scope_module, "_move", fail)
    original = nn.Module.__init__
    with pytest.raises(MemoryError), make(device=ELSEWHERE):
        nn.Linear(1, 1)
    assert nn.Module.__init__ is original


@pytest.mark.gpu
def test_an_adopted_module_moves_to_the_device() -> None:
    model = net()
    make(device=torch.device("cuda", 0)).adopt(model)
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cuda"}


def test_a_network_that_arrives_without_values_gets_them_here() -> None:
    model = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2))
    scope = make()
    scope.adopt(model)
    assert model[0].weight.is_meta
    with scope:
        model[0].to_empty(device="cpu")
        assert any(model[0].weight is known for known in tracker(scope).tracked)


@pytest.mark.gpu
def test_on_a_gpu_the_weights_are_those_of_plain_pytorch_moved_there() -> None:
    torch.manual_seed(0)
    expected = weights(net())
    draws = []
    for i in range(N):
        scope = make(i, device=torch.device("cuda", 0))
        with scope:
            torch.manual_seed(0)
            model = net()
            assert torch.equal(weights(model).cpu(), expected)
            model(torch.ones(2, 3, device="cuda"))
            draws.append(torch.rand(3, device="cuda").cpu())
            with scope.shared_randomness():
                draws.append(torch.rand(3, device="cuda").cpu())
    assert distinct(draws[::2])
    assert equal(draws[1::2])


def test_every_replica_reports_the_users_seed_while_its_own_stream_differs():
    # accelerate's SeedableRandomSampler derives its order from torch.initial_seed().
    drawn = set()
    for replica_id in range(3):
        random_streams._plant_torch(42, replica_id)
        assert torch.initial_seed() == 42
        drawn.add(float(torch.rand(())))
    assert len(drawn) == 3


def test_the_tensors_of_an_optimizer_that_arrives_are_synchronised():
    gradients = GradientSynchronizer(0, 2)
    scope = Scope(0, 2, torch.device("cpu"), gradients, 0)
    loose = torch.zeros(2, requires_grad=True)
    scope.adopt_optimizer(torch.optim.SGD([loose], 0.1))
    assert gradients._agreement.find(loose) is not None


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copied", "loaded"]
)
@pytest.mark.filterwarnings("error")
def test_the_tensors_of_an_optimizer_that_is_copied_are_synchronised(again):
    gradients = GradientSynchronizer(0, 2)
    with Scope(0, 2, CPU, gradients, 0):
        optimizer = again(torch.optim.SGD([torch.zeros(2, requires_grad=True)], 0.1))
    assert gradients._agreement.find(optimizer.param_groups[0]["params"][0]) is not None


@pytest.mark.parametrize("method", ["step", "zero_grad"])
def test_a_tensor_that_is_put_in_the_place_of_an_optimizers_is_synchronised(method):
    gradients = GradientSynchronizer(0, 2)
    with Scope(0, 2, CPU, gradients, 0):
        optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], 0.1)
        larger = optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(3))
        getattr(optimizer, method)()
    assert gradients._agreement.find(larger) is not None


class Around(torch.optim.Optimizer):
    """An optimizer around another one, without parameter groups of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.defaults = inner, {}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)


def test_an_optimizer_that_is_around_another_may_be_copied():
    gradients = GradientSynchronizer(0, 2)
    with Scope(0, 2, CPU, gradients, 0):
        around = copy.deepcopy(Around(torch.optim.SGD([torch.zeros(2, requires_grad=True)], 0.1)))
    assert gradients._agreement.find(around.inner.param_groups[0]["params"][0]) is not None


def test_an_optimizer_may_have_a_tensor_that_is_computed():
    rate = torch.zeros(2, requires_grad=True)
    gradients = GradientSynchronizer(0, 2)
    with Scope(0, 2, CPU, gradients, 0):
        computed = rate * 2
        torch.optim.SGD([computed, rate], 0.1, differentiable=True)
    assert gradients._agreement.find(rate) is not None
    assert gradients._agreement.find(computed) is None


@pytest.mark.parametrize("at", ["made", "removed"])
def test_an_interrupted_scope_leaves_nothing_behind(monkeypatch, at):
    scope = Scope(0, 2, CPU, GradientSynchronizer(0, 2), 0)
    before = nn.Module.__setstate__, torch.manual_seed, torch.optim.Optimizer.add_param_group
    presses = [KeyboardInterrupt]

    class Interrupted(scope_module.Replaced):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if at == "made" and args[1] == "add_param_group":
                raise presses.pop()
            super().__init__(*args, **kwargs)

        def remove(self) -> None:
            if at == "removed" and presses:
                raise presses.pop()
            super().remove()

    monkeypatch.setattr(scope_module, "Replaced", Interrupted)
    with pytest.raises(KeyboardInterrupt), scope:
        pass
    assert (nn.Module.__setstate__, torch.manual_seed, torch.optim.Optimizer.add_param_group) == before
    assert not presses
    assert not scope._depth
    assert not scope._changes
