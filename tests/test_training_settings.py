"""What compile was told: every form that an optimizer and a scheduler may have, and every mistake named at once."""

from __future__ import annotations

import functools
import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from mirror_nb.errors import UsageError
from mirror_nb.training.settings import CompileSettings, make_optimizer


@pytest.fixture
def network():
    return nn.Linear(2, 3)


def settings(**given):
    return CompileSettings(**given)


@pytest.mark.parametrize(
    ("asked", "kind", "learning_rate"),
    [
        ("adam", torch.optim.Adam, 0.001),
        ("AdamW", torch.optim.AdamW, 0.001),
        ("SGD", torch.optim.SGD, 0.001),
        ("rms_prop", torch.optim.RMSprop, 0.01),
        (("sgd", {"lr": 0.5}), torch.optim.SGD, 0.5),
        (["sgd", {"lr": 0.5}], torch.optim.SGD, 0.5),
        (torch.optim.Adagrad, torch.optim.Adagrad, 0.01),
        ((torch.optim.Adagrad, {"lr": 0.25}), torch.optim.Adagrad, 0.25),
        (functools.partial(torch.optim.Adam, lr=0.125), torch.optim.Adam, 0.125),
        (lambda parameters: torch.optim.SGD(parameters, lr=2.0, momentum=0.9), torch.optim.SGD, 2.0),
    ],
)
def test_an_optimizer_is_made_of_the_networks_parameters(asked, kind, learning_rate, network):
    optimizer, scheduler = make_optimizer(settings(optimizer=asked), network)
    assert type(optimizer) is kind
    assert optimizer.param_groups[0]["lr"] == learning_rate
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert [id(parameter) for parameter in held] == [id(parameter) for parameter in network.parameters()]
    assert scheduler is None


def test_every_optimizer_of_torch_has_a_name(network):
    classes = [value for value in vars(torch.optim).values() if inspect.isclass(value)]
    kinds = {kind for kind in classes if issubclass(kind, torch.optim.Optimizer)} - {torch.optim.Optimizer}
    assert {torch.optim.Adam, torch.optim.SGD, torch.optim.LBFGS} <= kinds
    for kind in kinds:
        # This one is not for every shape.
        if kind.__name__ != "Muon":
            assert type(make_optimizer(settings(optimizer=kind.__name__.lower()), network)[0]) is kind


def test_an_optimizer_of_ones_own_stays_itself(network):
    mine = torch.optim.SGD([network.weight], lr=0.1)
    assert make_optimizer(settings(optimizer=mine), network)[0] is mine


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        (("StepLR", {"step_size": 2}), schedulers.StepLR),
        (("step", {"step_size": 2}), schedulers.StepLR),
        (("cosine_annealing", {"T_max": 5}), schedulers.CosineAnnealingLR),
        ((schedulers.ExponentialLR, {"gamma": 0.5}), schedulers.ExponentialLR),
        ("reduce_lr_on_plateau", schedulers.ReduceLROnPlateau),
        (schedulers.ConstantLR, schedulers.ConstantLR),
        (lambda optimizer: schedulers.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)), schedulers.LambdaLR),
        (
            lambda optimizer: schedulers.ChainedScheduler([schedulers.ConstantLR(optimizer)]),
            schedulers.ChainedScheduler,
        ),
    ],
)
def test_a_scheduler_moves_the_optimizers_learning_rate(asked, kind, network):
    optimizer, scheduler = make_optimizer(settings(scheduler=asked), network)
    assert type(scheduler) is kind
    assert scheduler.optimizer is optimizer


def test_a_scheduler_of_ones_own_belongs_to_the_optimizer(network):
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    mine = schedulers.ConstantLR(optimizer)
    assert make_optimizer(settings(optimizer=optimizer, scheduler=mine), network)[1] is mine
    with pytest.raises(UsageError, match="`scheduler` moves another optimizer"):
        make_optimizer(settings(optimizer="sgd", scheduler=mine), network)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": "adm"}, "no optimizer 'adm'; did you mean 'adam'\\? known are adadelta"),
        ({"optimizer": None}, "`optimizer` is None; give a name, a class of torch.optim"),
        ({"optimizer": nn.Linear}, "function of the parameters"),
        ({"optimizer": ("sgd", 0.1)}, r"a tuple is \(name or class, \{argument: value, …\}\)"),
        ({"optimizer": ("sgd", {}, {})}, "a tuple is"),
        ({"scheduler": "stp"}, "no scheduler 'stp'.*steplr"),
        ({"scheduler": torch.optim.SGD}, "function of the optimizer"),
        ({"loss": "cross_entrpy"}, "no loss 'cross_entrpy'; did you mean 'cross_entropy'"),
        ({"loss_weights": [1.0]}, "`loss_weights` has no `loss`"),
        ({"loss": "mse", "loss_weights": [1.0]}, "for several outputs"),
        ({"metrics": ["acuracy"]}, "no metric 'acuracy'"),
        ({"weighted_metrics": ["acuracy"]}, "no metric 'acuracy'"),
        ({"scheduler_interval": "batch"}, "`scheduler_interval` is 'batch'; it is 'epoch' or 'step'"),
        ({"clip_norm": 0}, "`clip_norm` is 0; it is a number above 0"),
        ({"clip_norm": float("nan")}, "`clip_norm` is nan"),
        ({"clip_value": "1"}, "`clip_value` is '1'"),
        ({"clip_value": True}, "`clip_value` is True"),
        ({"accumulate_steps": 0}, "`accumulate_steps` is 0; it is a whole number of global batches from 1"),
        ({"accumulate_steps": 1.5}, "`accumulate_steps` is 1.5"),
        ({"precision": "float16"}, "`precision` is 'float16'; it is 'bf16', 'fp16' or None"),
        ({"compile": "yes"}, "`compile` is 'yes'"),
        ({"channels_last": 1}, "`channels_last` is 1; it is True or False"),
        ({"sync_batch_norm": None}, "`sync_batch_norm` is None; it is True or False"),
    ],
)
def test_mistakes_are_named_before_anything_is_made(given, message):
    with pytest.raises(UsageError, match=message):
        settings(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": ("sgd", {"rate": 1})}, r"cannot make the optimizer SGD with \{'rate': 1\}: .*give \('sgd', \{"),
        ({"optimizer": ("sgd", {"lr": -1})}, "cannot make the optimizer SGD .*Invalid learning rate"),
        ({"optimizer": lambda parameters: 3}, "`optimizer` returned a int when called with the parameters"),
        ({"scheduler": "step"}, "cannot make the scheduler StepLR without arguments: .*step_size"),
        ({"scheduler": lambda optimizer: None}, "`scheduler` returned a NoneType"),
        ({"optimizer": torch.optim.SGD(nn.Linear(4, 5).parameters())}, r"holds 2 tensors .*first of shape \(5, 4\)"),
    ],
)
def test_what_cannot_be_made_is_named(given, message, network):
    with pytest.raises(UsageError, match=message):
        make_optimizer(settings(**given), network)


def test_a_network_without_parameters_cannot_be_trained():
    with pytest.raises(UsageError, match="ReLU has no parameters to train"):
        make_optimizer(settings(), nn.ReLU())


def test_an_error_in_a_users_function_is_its_own(network):
    def broken(parameters):
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        make_optimizer(settings(optimizer=broken), network)


def test_settings_travel():
    given = settings(
        optimizer=("adam", {"lr": 0.01}),
        loss={"a": nn.CrossEntropyLoss(), "b": "mse"},
        metrics={"a": ["accuracy"]},
        loss_weights={"a": 2.0},
        scheduler=("step", {"step_size": 3}),
        clip_norm=1.0,
        precision="bf16",
    )
    again = pickle.loads(pickle.dumps(given))
    assert again.optimizer == given.optimizer
    assert again.precision == "bf16"
    with pytest.raises(AttributeError):
        again.precision = "fp16"
