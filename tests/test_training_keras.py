"""Unchanged Keras 3 models: in a cell and in a script they end on the weights of one device."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from driving import doing, launch, press_ctrl_c
from driving import run_cell as run_one
from torch.utils.data import DataLoader, TensorDataset
from two_sides import with_torch

import mirror_nb as mnb
from mirror_nb.pool.local import LocalPool

os.environ["KERAS_BACKEND"] = "torch"
keras = pytest.importorskip("keras", minversion="3.8", reason="needs Keras 3: pip install mirror_nb[keras]")
layers = keras.layers
# The replicas of the controller have no tests on their path: the classes travel as a notebook's do.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

LONG = 150.0
# Seconds. The first cell that imports Keras takes some ten on a busy machine.


LEAN = "import sys\nsys.modules.update(sklearn=None, matplotlib=None)\n"
# Keras would import both if they were there, which is half of the time that it takes a process to load it.


@contextlib.contextmanager
def lean(n: int, **options: Any) -> Iterator[mnb.MirroredStrategy]:
    with mnb.MirroredStrategy([f"cpu:{i}" for i in range(n)], **options) as strategy:
        assert not run_one(strategy._place._ready(), LEAN).errors
        yield strategy


@pytest.fixture(scope="module")
def two() -> Iterator[mnb.MirroredStrategy]:
    with lean(2) as strategy:
        yield strategy


@pytest.fixture(scope="module")
def three() -> Iterator[mnb.MirroredStrategy]:
    with lean(3) as strategy:
        yield strategy


@pytest.fixture(scope="module")
def replicas(replicas, two, three) -> Callable[[int], LocalPool]:
    """Give a pool for cells: that of a strategy, whose replicas have imported Keras, which costs each five seconds."""
    strategies = {2: two, 3: three}
    return lambda n: strategies[n]._place._ready() if n in strategies else replicas(n)


def run_cell(pool, source):
    ran = run_one(pool, source, timeout=LONG)
    for failure in ran.report.failures.values():
        print("\n".join(failure.traceback))
    return ran


CELL = """
import keras, numpy as np, torch

keras.utils.set_random_seed(5)
X = np.random.rand(EXAMPLES, 6).astype("float32")
Y = np.random.randint(0, 3, EXAMPLES)
with strategy.scope():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)])
    model.compile(
        optimizer=OPTIMIZER,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
history = model.fit(X, Y, epochs=3, batch_size=BATCH, verbose=0, validation_split=0.25).history
scores = model.evaluate(X, Y, batch_size=BATCH, verbose=0)
guesses = torch.tensor(model.predict(X, batch_size=BATCH, verbose=0))
weights = torch.cat([torch.tensor(w).flatten() for w in model.get_weights()])
"""


class Alone:
    """Stands for the strategy where there is one process."""

    def scope(self):
        return contextlib.nullcontext()


def in_one_process(source: str) -> dict[str, object]:
    names: dict[str, object] = {"strategy": Alone()}
    exec(source, names)
    return names


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize(
    ("examples", "batch", "optimizer"),
    [
        (48, 12, "'adam'"),
        # The last batches are uneven, and hold fewer examples than there are replicas.
        (50, 9, "keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.3)"),
        (29, 7, "keras.optimizers.AdamW(1e-2, weight_decay=1e-2, gradient_accumulation_steps=2)"),
    ],
)
def test_a_keras_model_in_a_cell_ends_on_the_weights_of_one_process(replicas, n, examples, batch, optimizer):
    source = CELL.replace("EXAMPLES", str(examples)).replace("BATCH", str(batch)).replace("OPTIMIZER", optimizer)
    alone = in_one_process(source)
    ran = run_cell(replicas(n), source)
    assert ran.errors == {}, ran.text
    for replica_id in range(n):
        values = ran.values[replica_id]
        assert abs(values["weights"] - alone["weights"]).max() < 1e-5
        assert abs(values["guesses"] - alone["guesses"]).max() < 1e-5
        assert values["scores"] == pytest.approx(alone["scores"], abs=1e-5)
        for name, numbers in alone["history"].items():
            assert values["history"][name] == pytest.approx(numbers, abs=1e-5)


SHUFFLED = """
import keras, numpy as np, torch

class Shuffled(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.order = np.arange(29)

    def __len__(self):
        return 5

    def __getitem__(self, number):
        part = self.order[number * 6 : number * 6 + 6]
        return X[part], Y[part]

    def on_epoch_end(self):
        np.random.shuffle(self.order)

X = np.linspace(-1, 1, 29 * 6, dtype="float32").reshape(29, 6)
Y = np.arange(29) % 3
with strategy.scope():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
keras.utils.set_random_seed(5)
data = Shuffled()
model.fit(data, epochs=3, verbose=0)
order = data.order.tolist()
weights = torch.cat([torch.tensor(w).flatten() for w in model.get_weights()])
"""


def test_a_dataset_that_shuffles_itself_in_a_cell_has_one_order_and_that_of_one_process(replicas):
    alone = in_one_process(SHUFFLED)
    ran = run_cell(replicas(2), SHUFFLED)
    assert ran.errors == {}, ran.text
    for values in ran.values.values():
        assert values["order"] == alone["order"]
        assert abs(values["weights"] - alone["weights"]).max() < 1e-5


WITHIN = """
import keras, numpy as np, torch

class Seen(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.inputs = []

    def call(self, x):
        if not x.is_meta:
            self.inputs.append(x.detach().clone())
        return x

"""


def test_each_replica_computes_its_share_alone(replicas):
    source = (
        WITHIN
        + """
X = np.arange(14, dtype="float32")[:, None]
model = keras.Sequential([keras.layers.Input((1,)), Seen(), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(X, X, batch_size=5, shuffle=False, verbose=0)
seen = [x.flatten().tolist() for x in model.layers[0].inputs]
"""
    )
    ran = run_cell(replicas(3), source)
    assert ran.errors == {}
    # ceil(5 / 3) = 2 examples each; what is left for the last one of a batch may be fewer, or none.
    assert ran.values[0]["seen"] == [[0, 1], [5, 6], [10, 11]]
    assert ran.values[1]["seen"] == [[2, 3], [7, 8], [12, 13]]
    assert ran.values[2]["seen"][:2] == [[4], [9]]


def test_dropout_drops_other_units_on_each_replica(replicas):
    source = (
        WITHIN
        + """
keras.utils.set_random_seed(3)
X = np.ones((8, 50), "float32")
layers = [keras.layers.Input((50,)), keras.layers.Dropout(0.5), Seen(), keras.layers.Dense(1)]
model = keras.Sequential(layers)
model.compile("sgd", "mse")
model.fit(X, X[:, :1], batch_size=8, epochs=2, verbose=0)
seen = model.layers[1].inputs
state = int(model.layers[0].seed_generator.state.value[0])
"""
    )
    ran = run_cell(replicas(2), source)
    assert ran.errors == {}
    first, second = (ran.values[replica_id]["seen"] for replica_id in range(2))
    assert len(first) == 2
    assert not any((a == b).all() for a in first for b in second)
    assert ran.values[0]["state"] == ran.values[1]["state"]


def test_moving_statistics_are_averaged_over_the_replicas(replicas):
    source = """
import keras, numpy as np, torch
X = np.arange(8, dtype="float32")[:, None]
model = keras.Sequential([keras.layers.Input((1,)), keras.layers.BatchNormalization(momentum=0.0)])
model.compile("sgd", "mse")
model.fit(X, X, batch_size=8, shuffle=False, verbose=0)
mean, variance = (float(v.value[0]) for v in model.non_trainable_variables)
"""
    ran = run_cell(replicas(2), source)
    assert ran.errors == {}
    for replica_id in range(2):
        # The means 1.5 and 5.5 of the halves, and their variance.
        assert ran.values[replica_id]["mean"] == pytest.approx(3.5)
        assert ran.values[replica_id]["variance"] == pytest.approx(1.25)


def test_moving_statistics_are_averaged_where_a_callback_ends_the_epoch(replicas):
    source = """
import keras, numpy as np, torch
class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, step, logs=None):
        self.model.stop_training = True
        self.seen = float(self.model.non_trainable_variables[0].value[0])
X = np.arange(16, dtype="float32")[:, None]
model = keras.Sequential([keras.layers.Input((1,)), keras.layers.BatchNormalization(momentum=0.0)])
model.compile("sgd", "mse", metrics=["mae"])
stop = Stop()
model.fit(X, X, batch_size=8, shuffle=False, verbose=0, callbacks=[stop])
mean, variance = (float(v.value[0]) for v in model.non_trainable_variables)
counted = float(model.metrics[0].count.value)
found = [stop.seen, mean, variance, counted]
"""
    ran = run_cell(replicas(2), source)
    assert ran.errors == {}
    for replica_id in range(2):
        assert ran.values[replica_id]["found"] == pytest.approx([3.5, 3.5, 1.25, 8])


def test_keras_does_not_synchronise_a_second_time(replicas):
    # As Keras 3.16 does it: with a distribution set, the train function goes through DistributedDataParallel.
    source = (
        CELL.replace("EXAMPLES", "29").replace("BATCH", "7").replace("OPTIMIZER", "'sgd'")
        + """
wrapped = hasattr(model, "_ddp_model")
left = keras.distribution.distribution()
"""
    )
    setting = """
import keras
from torch.nn.parallel import DistributedDataParallel
from keras.src.backend.torch.trainer import TorchTrainer

chosen = ["theirs"]
saved = keras.distribution.distribution, keras.distribution.set_distribution, TorchTrainer.make_train_function
keras.distribution.distribution = lambda: chosen[0]
keras.distribution.set_distribution = lambda value: chosen.__setitem__(0, value)

def make_train_function(self, force=False):
    if keras.distribution.distribution() is not None:
        object.__setattr__(self, "_ddp_model", DistributedDataParallel(self))
    return saved[2](self, force)

TorchTrainer.make_train_function = make_train_function
"""
    unset = """
keras.distribution.distribution, keras.distribution.set_distribution, TorchTrainer.make_train_function = saved
"""
    pool = replicas(2)
    try:
        assert run_cell(pool, setting).errors == {}
        ran = run_cell(pool, source)
    finally:
        run_cell(pool, unset)
    assert ran.errors == {}
    alone = in_one_process(CELL.replace("EXAMPLES", "29").replace("BATCH", "7").replace("OPTIMIZER", "'sgd'"))
    for replica_id in range(2):
        assert ran.values[replica_id]["wrapped"] is False
        assert ran.values[replica_id]["left"] == "theirs"
        assert abs(ran.values[replica_id]["weights"] - alone["weights"]).max() < 1e-5


def test_a_callback_that_goes_by_a_clock_stops_all_replicas_of_a_cell_alike(replicas):
    source = """
import keras, numpy as np
class Late(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        # One replica's clock is ahead.
        if epoch == 1 + 2 * replica_id:
            self.model.stop_training = True
class LateStep(keras.callbacks.Callback):
    def on_train_batch_end(self, step, logs=None):
        if step == 2 + replica_id:
            self.model.stop_training = True
X = np.ones((8, 2), "float32")
model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
epochs = model.fit(X, X[:, :1], epochs=9, verbose=0, callbacks=[Late()]).epoch
before = int(model.optimizer.iterations.value)
model.fit(X, X[:, :1], batch_size=1, verbose=0, callbacks=[LateStep()])
steps = int(model.optimizer.iterations.value) - before
"""
    ran = run_cell(replicas(2), source)
    assert ran.errors == {}
    for replica_id in range(2):
        assert ran.values[replica_id]["epochs"] == [0, 1]
        assert ran.values[replica_id]["steps"] == 3


def test_callbacks_that_write_files_run_on_the_first_replica_of_a_cell_alone(replicas, tmp_path):
    source = f"""
import keras, numpy as np
X = np.ones((4, 2), "float32")
class Heard(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.epochs = []
    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(epoch)
        if epoch == 1:
            self.model.stop_training = True
heard = Heard()
model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
log = keras.callbacks.CSVLogger(r"{tmp_path}/log%d.csv" % replica_id)
history = model.fit(X, X[:, :1], epochs=5, callbacks=[heard, log])
epochs = heard.epochs
"""
    ran = run_cell(replicas(2), source)
    assert ran.errors == {}
    assert [ran.values[replica_id]["epochs"] for replica_id in range(2)] == [[0, 1], [0, 1]]
    assert [path.name for path in tmp_path.iterdir()] == ["log0.csv"]
    # One History, as far as the notebook sees: it is the same on all replicas.
    assert vars(ran.values[0]["history"]) == vars(ran.values[1]["history"])
    assert "Epoch 2/5" in ran.text[0]
    assert ran.text[1] == ""


# ---------------------------------------------------------------------- in a script, or a plain cell


RANDOM = np.random.default_rng(0)
X = RANDOM.random((37, 8)).astype("float32")
LABELS = RANDOM.integers(0, 3, 37)
VALUES = RANDOM.random((37, 1)).astype("float32")
WORDS = RANDOM.integers(0, 6, (37, 5))
TAGS = RANDOM.random((37, 5, 1)).astype("float32")
WEIGHTS = RANDOM.random(37).astype("float32")


def crossentropy(**options: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def classifier(**options: Any) -> Any:
    model = keras.Sequential([layers.Dense(5, activation="tanh", kernel_regularizer="l2"), layers.Dense(3)])
    model.compile("adam", loss=crossentropy(**options), metrics=["accuracy"], weighted_metrics=["accuracy"])
    return model


def summed() -> Any:
    return classifier(reduction="sum")


def weighted_mean() -> Any:
    return classifier(reduction="mean_with_sample_weight")


def masked() -> Any:
    recurrent = layers.LSTM(4, return_sequences=True)
    model = keras.Sequential([layers.Embedding(6, 4, mask_zero=True), recurrent, layers.Dense(1)])
    model.compile("rmsprop", "mse", metrics=["mae"])
    return model


def two_outputs() -> Any:
    given = keras.Input((8,))
    hidden = layers.Dense(4, activation="tanh")(given)
    outputs = {"kind": layers.Dense(3, name="kind")(hidden), "size": layers.Dense(1, name="size")(hidden)}
    model = keras.Model(given, outputs)
    losses, shares = {"kind": crossentropy(), "size": "mae"}, {"kind": 1.0, "size": 0.3}
    model.compile("adam", losses, loss_weights=shares, metrics={"kind": ["accuracy"], "size": ["mse"]})
    return model


def ranked() -> Any:
    model = keras.Sequential([layers.Dense(4), layers.Dense(1, activation="sigmoid")])
    metrics = [keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision")]
    model.compile("sgd", "binary_crossentropy", metrics=metrics)
    return model


class Own(keras.Model):
    """A model with a training step of its own, an attribute that no configuration knows, and a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last = layers.Dense(4, activation="relu"), layers.Dense(1)
        self.seen = keras.metrics.Mean(name="seen")
        self.scale = {"loss": 2.0}

    def call(self, x: Any) -> Any:
        return self.last(self.hidden(x))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        self.zero_grad()
        loss = self.scale["loss"] * keras.ops.mean((self(x) - y) ** 2)
        loss.backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([weight.value.grad for weight in weights], weights)
        self.seen.update_state(loss, sample_weight=len(x))
        return {"seen": self.seen.result(), "latest": loss}


def own() -> Any:
    model = Own()
    model.compile("adam")
    return model


def both(strategy: Any, make: Callable[[], Any]) -> tuple[Any, Any]:
    """Return the model made twice: for Keras alone, and in the scope."""
    keras.utils.set_random_seed(1)
    alone = make()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        return alone, make()


def assert_equal(mirrored: Any, alone: Any) -> None:
    for here, there in zip(mirrored.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(here, there, rtol=0, atol=1e-5)


def seeded(call: Callable[[], Any]) -> Any:
    keras.utils.set_random_seed(7)
    return call()


@pytest.mark.parametrize(
    ("make", "x", "y", "options"),
    [
        (classifier, X, LABELS, {"sample_weight": WEIGHTS}),
        (classifier, X, LABELS, {"class_weight": {0: 1.0, 1: 3.0, 2: 0.2}}),
        (classifier, X, LABELS, {"validation_split": 0.3, "validation_freq": 2, "steps_per_epoch": 3}),
        (summed, X, LABELS, {}),
        (weighted_mean, X, LABELS, {"sample_weight": WEIGHTS, "shuffle": "batch"}),
        (masked, WORDS, TAGS, {"validation_data": (WORDS[:5], TAGS[:5])}),
        (two_outputs, X, {"kind": LABELS, "size": VALUES}, {}),
        (ranked, X, (VALUES > 0.5).astype("float32"), {}),
        (own, X, VALUES, {}),
    ],
)
def test_an_unchanged_model_ends_on_the_weights_of_one_device(three, make, x, y, options):
    alone, mirrored = both(three, make)
    # Four examples for three replicas leave the last one none, and the last batch holds one.
    wanted = {"epochs": 3, "batch_size": 4, "verbose": 0, **options}
    expected = seeded(lambda: alone.fit(x, y, **wanted)).history
    next_number = torch.rand(1)
    found = seeded(lambda: mirrored.fit(x, y, **wanted)).history
    assert torch.equal(torch.rand(1), next_number)
    assert_equal(mirrored, alone)
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5)


def test_a_strategy_that_sums_gradients_trains_keras_models_alike():
    with lean(2, gradient_reduction=mnb.ReduceOp.SUM) as strategy:
        alone, mirrored = both(strategy, regressor)
        for model in (alone, mirrored):
            seeded(lambda model=model: model.fit(X, VALUES, batch_size=9, epochs=2, verbose=0))
        assert_equal(mirrored, alone)


@pytest.mark.parametrize(
    ("make", "x", "y"),
    [(classifier, X, LABELS), (two_outputs, X, {"kind": LABELS, "size": VALUES}), (masked, WORDS, TAGS)],
)
@pytest.mark.parametrize("examples", [1, 2, 37])
def test_evaluate_and_predict_are_exact_for_every_number_of_examples(three, make, x, y, examples):
    alone, mirrored = both(three, make)
    x = x[:examples]
    y = {name: values[:examples] for name, values in y.items()} if isinstance(y, dict) else y[:examples]
    if examples == 37:
        # Before anything else: the model is not built yet.
        expected, outputs = alone.predict(x, batch_size=5, verbose=0), mirrored.predict(x, batch_size=5, verbose=0)
        for name in outputs if isinstance(outputs, dict) else [...]:
            assert outputs[name].shape == expected[name].shape
            np.testing.assert_allclose(outputs[name], expected[name], atol=1e-6)
    scores = alone.evaluate(x, y, batch_size=5, verbose=0, return_dict=True)
    found = mirrored.evaluate(x, y, batch_size=5, verbose=0, return_dict=True)
    assert (found, list(found)) == (pytest.approx(scores, abs=1e-5), list(scores))


class Squares(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        part = slice(number * 8, number * 8 + 8)
        return X[part], VALUES[part]


def generated() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    while True:
        for start in range(0, 37, 8):
            yield X[start : start + 8], VALUES[start : start + 8]


def loader() -> DataLoader:
    return DataLoader(TensorDataset(torch.tensor(X), torch.tensor(VALUES)), batch_size=8, shuffle=True)


def regressor() -> Any:
    model = keras.Sequential([layers.Dense(4, activation="relu"), layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (Squares, {}),
        (generated, {"steps_per_epoch": 5}),
        (loader, {}),
    ],
    ids=["PyDataset", "generator", "DataLoader"],
)
def test_all_that_keras_takes_feeds_the_replicas(two, source, options):
    alone, mirrored = both(two, regressor)
    expected = seeded(lambda: alone.fit(source(), epochs=3, verbose=0, shuffle=False, **options)).history
    found = seeded(lambda: mirrored.fit(source(), epochs=3, verbose=0, shuffle=False, **options)).history
    assert_equal(mirrored, alone)
    np.testing.assert_allclose(found["mae"], expected["mae"], atol=1e-6)
    # More batches than one message takes, where they come with messages.
    steps = {"steps": 20} if source is generated else {}
    outputs = [seeded(lambda model=model: model.predict(source(), verbose=0, **steps)) for model in (mirrored, alone)]
    np.testing.assert_allclose(*outputs, atol=1e-6)


class Shuffled(Squares):
    """Shuffles its examples after each epoch, as the documents of Keras show it; Keras shuffles the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.order = np.arange(37)

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        part = self.order[number * 8 : number * 8 + 8]
        return X[part], VALUES[part]

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)


def test_what_keras_and_a_dataset_shuffle_is_in_the_order_of_one_device(two):
    alone, mirrored = both(two, regressor)
    for model in (alone, mirrored):
        seeded(lambda model=model: model.fit(Shuffled(), epochs=3, verbose=0))
    assert_equal(mirrored, alone)
    numbers = []
    for model in (alone, mirrored):
        seeded(lambda model=model: model.fit(Shuffled(), epochs=1, verbose=0))
        numbers.append((random.random(), np.random.random(), torch.rand(()).item()))
    assert numbers[0] == numbers[1]


def test_a_loaders_generator_stands_after_a_fit_where_one_device_leaves_it(two):
    models = both(two, regressor)
    for model in models:
        shuffled = loader()
        shuffled.generator = shuffled.sampler.generator = torch.Generator().manual_seed(3)
        for _ in range(2):
            model.fit(shuffled, epochs=2, verbose=0, shuffle=False)
    assert_equal(*models)


# ---------------------------------------------------------------------- callbacks


class Diary(keras.callbacks.Callback):
    """Writes down each hook, and what it was told."""

    def __init__(self, batches: bool) -> None:
        super().__init__()
        self.pages: list[tuple[Any, ...]] = []
        for name in dir(keras.callbacks.Callback):
            if name.startswith("on_") and (batches or "batch" not in name):
                setattr(self, name, self._writing(name))

    def _writing(self, name: str) -> Callable[..., None]:
        def write(*args: Any, **logs: Any) -> None:
            told = [sorted(arg) if isinstance(arg, dict) else arg for arg in [*args, *logs.values()]]
            weights = [weight.tolist() for weight in self.model.get_weights()]
            self.pages.append((name, told, np.round(np.concatenate([np.ravel(w) for w in weights]), 4).tolist()))

        return write


@pytest.mark.parametrize("batches", [False, True])
def test_callbacks_hear_and_see_what_they_do_on_one_device(two, batches):
    alone, mirrored = both(two, regressor)
    pages = []
    for model in (alone, mirrored):
        diary = Diary(batches)
        split = {"validation_data": (X[:9], VALUES[:9]), "verbose": 0, "batch_size": 8, "callbacks": [diary]}
        seeded(lambda split=split, model=model: model.fit(X, VALUES, epochs=2, **split))
        model.evaluate(X, VALUES, batch_size=16, verbose=0, callbacks=[diary])
        model.predict(X, batch_size=16, verbose=0, callbacks=[diary])
        pages.append(diary.pages)
    assert [page[:2] for page in pages[1]] == [page[:2] for page in pages[0]]
    for (name, _, found), (_, _, expected) in zip(*reversed(pages), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-4, err_msg=name)


class StopAtFirst(keras.callbacks.Callback):
    """Ends its first evaluation and its first prediction after two batches, and writes down what it hears."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[str, int]] = []

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.heard.append(("test", batch))
        if self.heard == [("test", 0), ("test", 1)]:
            self.model.stop_evaluating = True

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self.heard.append(("predict", batch))
        if [what for what, _ in self.heard].count("predict") == 2:
            self.model.stop_predicting = True


def batches_of(x: Any, y: Any, size: int = 4) -> Iterator[Any]:
    while True:
        for i in range(0, len(x), size):
            yield x[i : i + size], y[i : i + size]


@pytest.mark.parametrize("drawn_here", [False, True], ids=["arrays", "a generator"])
def test_a_callback_that_stops_an_evaluation_stops_that_one_alone(two, drawn_here):
    alone, mirrored = both(two, regressor)
    heard, scores = [], []
    for model in (alone, mirrored):
        stop = StopAtFirst()
        data, steps = (X[:12], VALUES[:12]), None
        if drawn_here:
            # Keras goes on with a generator where it stopped; so long all batches are the same.
            data, steps = batches_of(*(np.repeat(of[:1], 12, 0) for of in data)), 3
        options = {"validation_data": data, "validation_batch_size": 4 if steps is None else None}
        seeded(
            lambda model=model, stop=stop, options=options, steps=steps: model.fit(
                X, VALUES, epochs=2, verbose=0, shuffle=False, validation_steps=steps, callbacks=[stop], **options
            )
        )
        found = [values for name, values in model.history.history.items() if name.startswith("val_")]
        scores.append([value for values in found for value in values])
        for _ in range(2):
            model.predict(X[:12], batch_size=4, verbose=0, callbacks=[stop])
        heard.append(stop.heard)
    assert heard[1] == heard[0]
    assert [batch for what, batch in heard[0] if what == "test"] == [0, 1, 0, 1, 2]
    assert [batch for what, batch in heard[0] if what == "predict"] == [0, 1, 0, 1, 2]
    np.testing.assert_allclose(scores[1], scores[0], atol=2e-4)


@pytest.mark.parametrize("drawn_here", [False, True], ids=["arrays", "a generator"])
def test_each_validation_begins_with_the_first_batch_as_on_one_device(two, drawn_here):
    alone, mirrored = both(two, regressor)
    found = []
    for model in (alone, mirrored):
        data, size = (batches_of(X, VALUES), None) if drawn_here else ((X, VALUES), 4)
        options = {"validation_data": data, "validation_batch_size": size, "validation_steps": 2}
        fit = {"epochs": 3, "verbose": 0, "batch_size": 8, **options}
        found.append(seeded(lambda model=model, fit=fit: model.fit(X, VALUES, **fit)).history)
    for name in found[0]:
        np.testing.assert_allclose(found[1][name], found[0][name], atol=1e-6, err_msg=name)


class Asking(keras.callbacks.Callback):
    """Evaluates and predicts with the model that is trained, and with another one."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.other = other
        self.found: list[float] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for model in (self.model, self.other):
            self.found += model.evaluate(X[:10], VALUES[:10], verbose=0)
            self.found += np.ravel(model.predict(X[:3], verbose=0)).tolist()


def test_a_callback_evaluates_and_predicts_in_the_middle_of_a_fit(two):
    found = []
    models, others = both(two, regressor), both(two, regressor)
    for model, other in zip(models, others, strict=True):
        asking = Asking(other)
        history = seeded(
            lambda model=model, asking=asking: model.fit(
                X, VALUES, epochs=3, batch_size=8, verbose=0, validation_split=0.2, callbacks=[asking]
            )
        )
        found.append([*asking.found, *history.history["loss"], *history.history["val_loss"], *torch.rand(3).tolist()])
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)
    assert_equal(*models)


def test_an_error_in_what_a_callback_asks_for_leaves_the_fit_as_it_was(two):
    class Mistaken(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            with pytest.raises(Exception, match=r"shape|matmul|incompatible"):
                self.model.evaluate(X[:, :3], VALUES, verbose=0)

    alone, mirrored = both(two, regressor)
    for model in (alone, mirrored):
        model.fit(X, VALUES, epochs=2, verbose=0, shuffle=False, callbacks=[Mistaken()])
    assert_equal(mirrored, alone)


def test_a_fit_that_is_stopped_before_its_first_step_does_that_one_as_on_one_device(two):
    def stop(epoch: int, logs: Any = None) -> None:
        model.stop_training = epoch == 1

    models = both(two, regressor)
    for model in models:
        stopping = keras.callbacks.LambdaCallback(on_epoch_begin=stop)
        keras.utils.set_random_seed(7)
        model.fit(X, VALUES, epochs=3, batch_size=8, verbose=0, callbacks=[stopping])
    assert [int(model.optimizer.iterations.value) for model in models] == [6, 6]
    assert_equal(*models)


@pytest.mark.skipif(not hasattr(keras.config, "set_max_epochs"), reason="this Keras has no such limits")
def test_kerass_own_limits_hold_on_the_replicas(two):
    keras.config.set_max_epochs(2)
    keras.config.set_max_steps_per_epoch(3)
    models = both(two, regressor)
    try:
        for model in models:
            with pytest.warns(UserWarning, match="Limiting epochs to 2"):
                seeded(lambda model=model: model.fit(X, VALUES, epochs=4, batch_size=4, verbose=0))
    finally:
        keras.config.set_max_epochs(None)
        keras.config.set_max_steps_per_epoch(None)
    assert [int(model.optimizer.iterations.value) for model in models] == [6, 6]
    assert_equal(*models)


def test_what_a_callback_writes_reaches_the_replicas(two):
    class Halving(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = 0.1 / 2**epoch
            bias = self.model.layers[-1].bias
            bias.assign(bias + 1.0)

    alone, mirrored = both(two, regressor)
    for model in (alone, mirrored):
        seeded(lambda model=model: model.fit(X, VALUES, epochs=3, verbose=0, callbacks=[Halving()]))
    assert_equal(mirrored, alone)
    assert float(mirrored.optimizer.learning_rate.value) == pytest.approx(0.025)


class Counting(keras.Model):
    """Weighs its loss by an attribute that a callback sets, and by another that its own step sets."""

    def __init__(self) -> None:
        super().__init__()
        self.last = layers.Dense(1)
        self.beta, self.steps = 1.0, 0

    def call(self, x: Any) -> Any:
        return self.last(x)

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool = True) -> Any:
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        if not loss.is_meta:
            self.steps += 1
        return loss * self.beta / (1 + self.steps)


def test_plain_attributes_are_the_same_on_both_sides(two):
    class Annealing(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            seen.append(self.model.steps)
            self.model.beta = 1.0 + epoch
            self.model.last.note = f"epoch {epoch}"
            self.model.optimizer.momentum = 0.9 - epoch / 10

    def counting() -> Any:
        model = Counting()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse")
        return model

    models = both(two, counting)
    found = []
    for model in models:
        seen: list[int] = []
        for _ in range(2):
            fit = {"epochs": 3, "batch_size": 8, "verbose": 0, "callbacks": [Annealing()]}
            seeded(lambda model=model, fit=fit: model.fit(X, VALUES, **fit))
        found.append([*seen, model.steps, model.beta, model.last.note])
    assert found[1] == found[0] == [0, 5, 10, 15, 20, 25, 30, 3.0, "epoch 2"]
    assert_equal(*models)


def test_stock_callbacks_act_once_and_alike(two, tmp_path):
    alone, mirrored = both(two, regressor)
    epochs = []
    for name, model in (("alone", alone), ("mirrored", mirrored)):
        callbacks = [
            keras.callbacks.EarlyStopping("loss", min_delta=1e9, patience=1, restore_best_weights=True),
            keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=1e9),
            keras.callbacks.CSVLogger(tmp_path / f"{name}.csv"),
            keras.callbacks.ModelCheckpoint(tmp_path / f"{name}.keras"),
        ]
        wanted = {"epochs": 9, "batch_size": 8, "verbose": 0, "callbacks": callbacks}
        epochs.append(len(seeded(lambda model=model, wanted=wanted: model.fit(X, VALUES, **wanted)).epoch))
    assert epochs == [2, 2]
    assert_equal(mirrored, alone)
    assert float(mirrored.optimizer.learning_rate.value) == float(alone.optimizer.learning_rate.value)
    assert len((tmp_path / "mirrored.csv").read_text().splitlines()) == 3
    saved = [keras.models.load_model(tmp_path / f"{name}.keras") for name in ("mirrored", "alone")]
    assert_equal(*saved)


def test_a_model_that_is_dropped_while_the_replicas_hear_of_others_is_told_by_the_next_fit(two, monkeypatch):
    from mirror_nb.training import keras as module
    from mirror_nb.training import keras_job

    told: list[tuple[str, ...]] = []
    command = two._place.command

    def slow(fn: Any, args: Any = (), **options: Any) -> Any:
        if fn is keras_job.has:
            told.append(args[2])
            if len(told) == 1:
                module._released.setdefault(two, []).append("keras late")
        return command(fn, args, **options)

    monkeypatch.setattr(two._place, "command", slow)
    module._released.setdefault(two, [])[:] = ["keras early"]
    _, mirrored = both(two, regressor)
    for _ in range(2):
        mirrored.fit(X, VALUES, epochs=1, verbose=0)
    assert "keras early" in told[0]
    assert "keras late" in told[1]


def test_the_progress_line_is_printed_by_the_controller_alone(two, capsys):
    _, mirrored = both(two, regressor)
    mirrored.fit(X, VALUES, epochs=2, batch_size=8, verbose=2)
    printed = capsys.readouterr().out
    assert printed.count("Epoch 1/2") == 1
    assert printed.count("5/5") == 2
    assert "[replica" not in printed


def test_a_list_of_callbacks_that_a_user_has_made_is_taken_as_it_is(two, capsys):
    for model in both(two, regressor):
        made = keras.callbacks.CallbackList([], model=model, add_history=True, add_progbar=False, epochs=1)
        assert model.fit(X, VALUES, callbacks=made).epoch == [0]
        assert capsys.readouterr().out == ""


# ---------------------------------------------------------------------- TensorFlow's numbers

GOLDEN = {
    case["name"]: case
    for case in json.loads((Path(__file__).parent / "golden" / "tf_keras.json").read_text())["cases"]
}


def golden_model(*first: Any) -> Any:
    model = keras.Sequential([layers.Input((1,)), *first, layers.Dense(1, kernel_initializer="zeros")])
    model.layers[-1].kernel.assign([[0.5]])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


def golden_data(name: str) -> tuple[np.ndarray, np.ndarray]:
    inputs = GOLDEN[name]["inputs"]
    return tuple(np.array(inputs[key], "float32")[:, None] for key in ("X", "Y"))


DIVISIBLE = "keras/fit/divisible/n2"
FOUR = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}


def flat(values: Any) -> np.ndarray:
    return np.concatenate([flat(value) for value in values]) if isinstance(values, list) else np.ravel(values)


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(flat(found), flat(expected), rtol=1e-5, atol=1e-6)


def test_fit_gives_tensorflows_weights_and_history(two):
    with two.scope():
        model = golden_model()
    history = model.fit(*golden_data(DIVISIBLE), **FOUR).history
    expected = GOLDEN[DIVISIBLE]["outputs"]
    close(model.get_weights(), expected["weights"])
    for name, values in expected["history"].items():
        close(history[name], values)
    assert int(model.optimizer.iterations.value) == expected["iterations"]


def test_evaluate_and_predict_give_tensorflows_numbers(two):
    with two.scope():
        model = golden_model()
    name = "keras/evaluate_init/last_partial_even/n2"
    close(model.evaluate(*golden_data(name), batch_size=4, verbose=0), GOLDEN[name]["outputs"])
    name = "keras/predict_init/empty_replica/n2"
    close(model.predict(golden_data(name)[0], batch_size=4, verbose=0), GOLDEN[name]["outputs"])


@pytest.mark.parametrize("name", ["keras/fit/empty_replica/n2", "tf_keras/fit/batch_not_divisible/n2"])
def test_uneven_batches_give_the_weights_of_one_device_where_tensorflow_does_not(two, name):
    # Decision 4: shares weigh in by their examples. TensorFlow gives each replica's own mean the weight 1/n.
    with two.scope():
        model = golden_model()
    alone = golden_model()
    wanted = {**FOUR, "batch_size": GOLDEN[name]["inputs"]["batch_size"]}
    model.fit(*golden_data(name), **wanted)
    alone.fit(*golden_data(name), **wanted)
    assert_equal(model, alone)
    assert np.abs(flat(model.get_weights()) - flat(GOLDEN[name]["outputs"]["weights"])).max() > 1e-3


def test_batch_normalization_gives_tensorflows_weights_and_averaged_statistics(two):
    with two.scope():
        # The momentum of the record: its moving mean is more than 0.99 allows.
        model = golden_model(layers.BatchNormalization(momentum=0.5))
    model.fit(*golden_data(DIVISIBLE), **FOUR)
    expected = dict(enumerate(GOLDEN["tf_keras/batchnorm"]["outputs"]["weights"]))
    for i, weight in enumerate(model.get_weights()):
        close(weight, expected[i])


def test_a_saved_model_loads_plain_and_mirrored_as_with_tensorflow(two, tmp_path):
    expected = GOLDEN["keras/save_load"]["outputs"]
    data = golden_data(DIVISIBLE)
    with two.scope():
        model = golden_model()
    model.fit(*data, **FOUR)
    close(model.get_weights(), expected["trained"])
    model.save(tmp_path / "model.keras")
    plain = keras.models.load_model(tmp_path / "model.keras")
    close(plain.get_weights(), expected["keras_outside"]["w"])
    assert int(plain.optimizer.iterations.value) == expected["keras_outside"]["it"]
    with two.scope():
        again = keras.models.load_model(tmp_path / "model.keras")
    for loaded in (plain, again):
        loaded.fit(*data, **{**FOUR, "epochs": 1})
        close(loaded.get_weights(), expected["keras_inside"]["one_more_epoch"])


def test_backup_and_restore_ends_where_an_undisturbed_run_does(two, tmp_path):
    expected = GOLDEN["keras/backup_and_restore"]["outputs"]
    data, wanted = golden_data(DIVISIBLE), {**FOUR, "epochs": 4}

    def killed(epoch: int, logs: Any = None) -> None:
        if epoch == 2:
            raise RuntimeError("killed")

    def fit(*more: Any) -> Any:
        with two.scope():
            model = golden_model()
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
        models.append(model)
        model.fit(*data, **wanted, callbacks=[backup, *more])
        return model

    models: list[Any] = []
    with pytest.raises(RuntimeError, match="killed"):
        fit(keras.callbacks.LambdaCallback(on_epoch_begin=killed))
    interrupted = models[0]
    close(interrupted.get_weights(), expected["interrupted"][1])
    resumed = fit()
    close(resumed.get_weights(), expected["resumed"][1])
    close(resumed.get_weights(), expected["uninterrupted"])
    assert int(resumed.optimizer.iterations.value) == expected["resumed"][2]


# ---------------------------------------------------------------------- when something goes wrong


class Breaking(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.left = 3

    def call(self, x: Any) -> Any:
        if not x.is_meta:
            self.left -= 1
            if self.left == 0:
                raise ArithmeticError("the third batch")
        return x


def test_an_error_in_a_layer_comes_here_and_the_session_goes_on(two):
    with two.scope():
        model = keras.Sequential([layers.Input((8,)), Breaking(), layers.Dense(1)])
        model.compile("sgd", "mse")
    before = model.get_weights()
    with pytest.raises(ArithmeticError, match="the third batch"):
        model.fit(X, VALUES, batch_size=8, verbose=0)
    # Two steps were made.
    assert int(model.optimizer.iterations.value) == 2
    assert np.abs(model.get_weights()[0] - before[0]).max() > 0
    assert np.isfinite(model.fit(X[:16], VALUES[:16], batch_size=8, verbose=0).history["loss"][0])


class Marking(layers.Layer):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.mark = path

    def call(self, x: Any) -> Any:
        if not x.is_meta:
            Path(self.mark).touch()
        return x


def test_an_interrupt_leaves_a_usable_model(two, tmp_path):
    path = tmp_path / "began"
    with two.scope():
        model = keras.Sequential([layers.Input((8,)), Marking(str(path)), layers.Dense(1)])
        model.compile("adam", "mse")
    with pytest.raises(KeyboardInterrupt), doing(press_ctrl_c, path.exists):
        model.fit(X, VALUES, batch_size=2, epochs=10**6, verbose=0)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    # Here and on all replicas the same values again.
    clean = keras.Sequential([layers.Input((8,)), layers.Dense(1)])
    clean.compile("adam", "mse")
    clean.set_weights(model.get_weights())
    assert model.evaluate(X, VALUES, verbose=0) == pytest.approx(clean.evaluate(X, VALUES, verbose=0), abs=1e-6)


def test_what_cannot_travel_is_named(two):
    with two.scope():
        model = regressor()
    model.lock = threading.Lock()
    with pytest.raises(mnb.TransferError, match="cannot be sent to the replicas"):
        model.fit(X, VALUES, verbose=0)
    del model.lock
    model.fit(X, VALUES, verbose=0)


def test_a_model_from_outside_the_scope_is_refused_inside_it(two):
    model = regressor()
    with two.scope(), pytest.raises(mnb.UsageError, match="made outside the scope"):
        model.fit(X, VALUES, verbose=0)


def test_fit_inside_run_is_refused(two):
    with two.scope():
        model = regressor()
    model.build((None, 8))

    def step() -> None:
        model.fit(X, VALUES, verbose=0)

    with pytest.raises(mnb.ContextError, match=r"Model\.fit"):
        two.run(step)


def test_without_a_strategy_and_with_one_replica_keras_is_left_alone(monkeypatch):
    def refuse(*_: Any) -> None:
        raise AssertionError("no replica was to be asked")

    monkeypatch.setattr("mirror_nb.training.keras._team", refuse)
    with mnb.MirroredStrategy(["cpu:0"]) as one, one.scope():
        model = regressor()
    model.fit(X, VALUES, verbose=0)
    regressor().fit(X, VALUES, verbose=0)


def test_a_model_goes_between_the_notebook_and_its_cells_with_its_own_attributes(replicas):
    pool = replicas(2)
    ran = run_cell(
        pool,
        """
import keras, numpy as np
class Noted(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.note = {"by": "hand"}
    def call(self, x):
        return self.dense(x)
model = Noted()
model.compile("adam", "mse")
model.fit(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"), verbose=0)
bias = float(model.dense.bias.value[0])
""",
    )
    assert ran.errors == {}
    model = ran.values[0]["model"]
    assert model.note == {"by": "hand"}
    assert float(model.dense.bias.value[0]) == ran.values[0]["bias"] != 0
    # An optimizer that knows its variables in the copy too.
    model.fit(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"), verbose=0)
    assert int(model.optimizer.iterations.value) == 2


def test_a_model_that_the_notebook_has_evaluated_learns_in_cells_as_before():
    notebook = with_torch()
    notebook.here("import keras, numpy as np\nx, y = np.ones((4, 2), 'float32'), np.ones((4, 1), 'float32')")
    notebook.cell(
        "model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])\nmodel.compile('sgd', 'mse')\nmodel(x)"
    )
    # Keras has other parts in it since.
    notebook.here("model.evaluate(x, y, verbose=0)")
    notebook.cell(
        "model(x).sum().backward()\nlearns = [weight.value.grad is not None for weight in model.trainable_weights]"
    )
    assert notebook.user_ns["learns"] == [True, True]


def test_what_each_replica_has_of_its_own_in_a_model_of_a_loop_is_not_told_as_trained_apart(two, recwarn):
    with two.scope():
        parts = layers.Dense(2), layers.BatchNormalization(), layers.Dropout(0.5)
        model = keras.Sequential([keras.Input((3,)), *parts])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        replica_id = mnb.get_replica_context().replica_id_in_sync_group
        model(torch.randn(4, 3) + replica_id, training=True).sum().backward()
        optimizer.step()
        if replica_id:
            model(torch.zeros(1, 3), training=True)
            if replica_id > alike:
                model.trainable_variables[0].value.data.add_(1)

    alike = 1
    two.run(step)
    model.state_dict()
    assert not [told for told in recwarn if "parameters differ" in str(told.message)]
    alike = 0
    two.run(step)
    with pytest.warns(UserWarning, match="parameters differ"):
        model.state_dict()


def test_a_function_may_use_keras_and_torch_at_once(two):
    def sums() -> Any:
        return keras.ops.sum(torch.ones(3))

    assert two.run(sums).values == (torch.tensor(3.0), torch.tensor(3.0))


def test_what_keras_was_told_in_the_controller_holds_on_the_replicas(two):
    def told() -> str:
        return f"{layers.Dense(2).compute_dtype} {keras.config.epsilon()}"

    def told_again() -> str:
        return told()

    keras.config.set_dtype_policy("mixed_bfloat16")
    keras.config.set_epsilon(1e-5)
    try:
        assert two.run(told) == "bfloat16 1e-05"
    finally:
        keras.config.set_dtype_policy("float32")
        keras.config.set_epsilon(1e-7)
    assert two.run(told_again) == "float32 1e-07"


SCRIPT = """
import os, sys
import mirror_nb as mnb

strategy = mnb.MirroredStrategy()
SOURCE
if strategy.replica_id == 0:
    torch.save([weights, guesses, history], sys.argv[1])
strategy.close()
"""


def test_a_script_that_a_launcher_starts_once_per_device_ends_on_the_same_weights(tmp_path):
    source = CELL.replace("EXAMPLES", "29").replace("BATCH", "7").replace("OPTIMIZER", "'adam'")
    (tmp_path / "script.py").write_text(LEAN + SCRIPT.replace("SOURCE", source))
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "saved.pt")]
    here = str(Path(mnb.__file__).parent.parent)
    launch(command, 2, {"KERAS_BACKEND": "torch", "PYTHONPATH": here}, seconds=LONG)
    alone = in_one_process(source)
    weights, guesses, history = torch.load(tmp_path / "saved.pt")
    assert abs(weights - alone["weights"]).max() < 1e-5
    assert abs(guesses - alone["guesses"]).max() < 1e-5
    assert history["val_loss"] == pytest.approx(alone["history"]["val_loss"], abs=1e-5)


def test_what_we_use_of_keras_is_there():
    trainer = sys.modules["keras.src.backend.torch.trainer"]
    for name in ("_assert_compile_called", "_symbolic_build", "_should_eval", "_flatten_metrics_in_order"):
        assert callable(getattr(trainer.TorchTrainer, name)), name
    assert callable(trainer.TorchEpochIterator.enumerate_epoch)
    assert isinstance(sys.modules["keras.src.losses.loss"].reduce_weighted_values, types.FunctionType)
    assert isinstance(sys.modules["keras.src.optimizers.base_optimizer"].BaseOptimizer.apply, types.FunctionType)
    model = regressor()
    model.build((None, 8))
    assert "_trainable_variables_indices" in vars(model.optimizer)
    assert {"stored_ids", "config"} <= vars(model._tracker).keys()
    assert keras.metrics.Mean().variables[0].aggregation == "sum"
    assert layers.Dropout(0.5).seed_generator.state.name == "seed_generator_state"
    assert keras.callbacks.Callback().on_train_batch_end._is_default
