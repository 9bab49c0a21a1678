"""Stop and Pause: all replicas obey after the same step."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror_nb as mnb
from mirror_nb.errors import TrainingStopped
from mirror_nb.messages import Steer, Word
from mirror_nb.steps.steering import Steering
from mirror_nb.telemetry.samples import Mark
from mirror_nb.telemetry.snapshot import State


def together(*replicas: Steering) -> None:
    """What their gradients carry, in a step of all of them."""
    sums = [sum(flags) for flags in zip(*(replica.flags() for replica in replicas), strict=True)]
    for replica in replicas:
        replica.agree(sums)


def test_a_word_that_one_replica_heard_ends_the_same_step_on_all():
    marks: list[list[Mark]] = [[], []]
    first, second = Steering(marks[0].append), Steering(marks[1].append)
    together(first, second)
    first.hear(Steer(1, Word.STOP))
    # It came after the gradients of this step had left.
    first.boundary()
    second.boundary()
    together(first, second)
    second.hear(Steer(1, Word.STOP))
    for replica in (first, second):
        with pytest.raises(TrainingStopped, match="end of a step"):
            replica.boundary()
    assert marks == [[Mark.STOPPED], [Mark.STOPPED]]


def test_a_pause_lasts_until_the_word_to_go_on():
    marks: list[Mark] = []
    replica = Steering(marks.append)
    replica.hear(Steer(1, Word.PAUSE))
    holding = threading.Thread(target=replica.boundary, daemon=True)
    holding.start()
    holding.join(0.2)
    assert holding.is_alive()
    replica.hear(Steer(2, Word.GO))
    holding.join(10)
    assert not holding.is_alive()
    assert marks == [Mark.PAUSED, Mark.RUNNING]
    replica.boundary()


def test_a_stop_during_a_pause_ends_it():
    replica = Steering(lambda mark: None)
    replica.hear(Steer(1, Word.PAUSE))
    raised: list[BaseException] = []

    def hold() -> None:
        try:
            replica.boundary()
        except TrainingStopped as stopped:
            raised.append(stopped)

    holding = threading.Thread(target=hold, daemon=True)
    holding.start()
    replica.hear(Steer(2, Word.STOP))
    holding.join(10)
    assert len(raised) == 1


def test_a_word_between_two_requests_is_for_the_next_one_unless_it_is_taken_back():
    replica = Steering(lambda mark: None)
    replica.hear(Steer(1, Word.STOP))
    replica.begin()
    with pytest.raises(TrainingStopped):
        replica.boundary()
    replica.begin()
    replica.boundary()
    replica.hear(Steer(2, Word.STOP))
    replica.hear(Steer(3, Word.GO))
    replica.begin()
    replica.boundary()


def test_between_two_epochs_nobody_obeys_alone_what_the_others_may_hear_later():
    first, second = Steering(lambda mark: None), Steering(lambda mark: None)
    together(first, second)
    for replica in (first, second):
        replica.boundary()
    # The first batch of the next epoch is asked for: no step was made since.
    first.hear(Steer(1, Word.STOP))
    first.hear(Steer(2, Word.COMPARE))
    first.boundary()
    second.boundary()
    together(first, second)
    second.hear(Steer(1, Word.STOP))
    for replica in (first, second):
        with pytest.raises(TrainingStopped):
            replica.boundary()


def test_where_steps_carry_nothing_a_word_is_obeyed_also_after_steps_that_did():
    replica = Steering(lambda mark: None)
    together(replica)
    replica.boundary()
    replica.hear(Steer(1, Word.STOP))
    replica.boundary()
    with pytest.raises(TrainingStopped):
        replica.boundary()


def test_parameters_are_compared_once_after_the_same_step_and_the_training_goes_on():
    marks: list[Mark] = []
    replicas, compared = [Steering(marks.append), Steering(marks.append)], []
    for replica_id, replica in enumerate(replicas):
        replica.compare = lambda replica_id=replica_id: compared.append(replica_id) or {}
        replica.hear(Steer(1, Word.COMPARE))
    for _ in range(3):
        together(*replicas)
        for replica in replicas:
            replica.boundary()
    assert (compared, marks) == ([0, 1], [])


def test_parameters_are_compared_during_a_pause_too():
    replica, compared = Steering(lambda mark: None), threading.Event()
    replica.compare = lambda: compared.set() or {}
    replica.hear(Steer(1, Word.PAUSE))
    holding = threading.Thread(target=replica.boundary, daemon=True)
    holding.start()
    replica.hear(Steer(2, Word.COMPARE))
    assert compared.wait(10)
    assert holding.is_alive()
    replica.hear(Steer(3, Word.GO))
    holding.join(10)
    assert not holding.is_alive()


def test_where_gradients_carry_nothing_a_fit_does_not_obey_alone():
    replica = Steering(lambda mark: None)
    replica.hear(Steer(1, Word.STOP))
    replica.boundary(alone=False)
    with pytest.raises(TrainingStopped):
        replica.boundary()


@pytest.fixture(scope="module")
def strategy():
    with mnb.MirroredStrategy(["cpu:0", "cpu:1"]) as made:
        yield made


def paused_then_stopped(strategy: mnb.MirroredStrategy, states: list[list[tuple[State, int]]]) -> threading.Thread:
    """Pause the training as soon as it runs, note where the replicas stand, and end it."""
    strategy.run(lambda: None)
    pool = strategy._place._pool
    timeline = pool.timeline()
    timeline.update()
    begun = timeline.snapshot().replicas[0].step

    def stand() -> list[tuple[State, int]]:
        timeline.update()
        return [(replica.state, replica.step) for replica in timeline.snapshot().replicas]

    def steer() -> None:
        pause = threading.Event()
        for _ in range(1000):
            if all(step > begun + 2 for _, step in stand()):
                break
            pause.wait(0.02)
        pool.steer(Word.PAUSE)
        for _ in range(1000):
            if all(state is State.PAUSED for state, _ in stand()):
                break
            pause.wait(0.02)
        states.append(stand())
        pool.steer(Word.STOP)

    thread = threading.Thread(target=steer, daemon=True)
    thread.start()
    return thread


def test_a_loop_stops_after_the_same_step_on_all_replicas(strategy):
    with strategy.scope():
        network = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01)

    def train() -> None:
        for _ in range(1_000_000):
            optimizer.zero_grad()
            F.mse_loss(network(torch.rand(3, 4)), torch.rand(3, 2)).backward()
            optimizer.step()

    states: list[list[tuple[State, int]]] = []
    steering = paused_then_stopped(strategy, states)
    with pytest.raises(TrainingStopped, match="variables are those of that step"):
        strategy.run(train)
    steering.join(30)
    (standing,) = states
    assert {state for state, _ in standing} == {State.PAUSED}
    assert len({step for _, step in standing}) == 1
    weights = strategy.run(lambda: network.weight.detach().clone())
    assert torch.equal(weights[0], weights[1])


def test_fit_ends_as_if_a_callback_had_stopped_it(strategy):
    with strategy.scope():
        model = mnb.Model(nn.Linear(4, 2))
        model.compile(optimizer="sgd", loss="mse")
    states: list[list[tuple[State, int]]] = []
    steering = paused_then_stopped(strategy, states)
    history = model.fit(torch.rand(4096, 4), torch.rand(4096, 2), batch_size=4, epochs=1000, verbose=0)
    steering.join(30)
    assert 1 <= len(history.epoch) < 1000
    assert len({step for _, step in states[0]}) == 1
    assert model.stop_training
