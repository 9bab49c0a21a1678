"""What the notebook keeps when a mirrored cell binds a name to what it holds already, or to that distributed."""

from __future__ import annotations

import pytest
import torch
from driving import running

from mirror_nb.errors import ReplicaDied, TransferError, UsageError
from mirror_nb.values import Remote


@pytest.fixture
def run(shell):
    return running(shell)


LARGE = {
    "a tensor": ("torch.zeros(1_000_000)", "x = x.to(device)"),
    "text": ("'x' * 2_000_000", "x = str(x)"),
    "a list": ("list(range(400_000))", "x = x"),
    "a list of tensors": ("[torch.zeros(1_000_000)]", "x = x"),
    "an array": ("__import__('numpy').zeros(1_000_000)", "import numpy\nx = numpy.asarray(x)"),
    "small": ("torch.zeros(3)", "x = x.to(device)"),
}


@pytest.mark.parametrize(("make", "cell"), LARGE.values(), ids=LARGE)
def test_a_name_that_a_cell_binds_to_what_it_holds_keeps_it_in_the_notebook(notebook, make, cell):
    notebook.here(f"x = {make}\nbefore = x")
    for _ in range(2):
        returned = notebook.cell(cell)
        assert "x" not in returned.bound + returned.stayed
        assert notebook.user_ns["x"] is notebook.user_ns["before"]
    assert notebook.sent == []


CHANGED = {
    "a tensor written to": ("torch.zeros(1_000_000)", "x += 1"),
    "a tensor to be trained": ("torch.zeros(1_000_000)", "x = x.requires_grad_()"),
    "an array written to": ("__import__('numpy').zeros(1_000_000)", "x += 1"),
    "on one replica": ("torch.zeros(1_000_000)", "if replica_id: x = x + 1"),
    "a list of lists": ("[[0] * 9 for _ in range(60_000)]", "x[0].append(1)\nx = x"),
}


@pytest.mark.parametrize(("make", "cell"), CHANGED.values(), ids=CHANGED)
def test_a_name_whose_value_a_cell_changes_and_binds_is_the_replicas(notebook, make, cell):
    notebook.here(f"x = {make}\nbefore = x")
    notebook.cell(cell)
    assert notebook.user_ns["x"] is not notebook.user_ns["before"]


def test_a_small_object_of_a_library_that_is_changed_and_bound_comes_back(notebook):
    notebook.here("import random\nx = random.Random(1)\nbefore = x.getstate()")
    notebook.cell("x.random()\nx = x")
    assert notebook.user_ns["x"].getstate() != notebook.user_ns["before"]


def test_a_number_that_the_notebook_has_bound_anew_is_the_cells(notebook):
    notebook.here("n = 5")
    notebook.cell("m = n")
    notebook.here("n = 6")
    notebook.cell("n = 5")
    assert notebook.user_ns["n"] == 5


LOADER = """
import torch
class Rows(torch.utils.data.Dataset):
    def __init__(self, many): self.many = torch.zeros(many)
    def __len__(self): return 10
    def __getitem__(self, i): return i
"""


@pytest.mark.parametrize("many", [1, 400_000])
def test_a_loader_that_is_distributed_under_its_name_stays_the_notebooks_loader(run, many):
    run(f"{LOADER}loader = before = torch.utils.data.DataLoader(Rows({many}), batch_size=4)")
    for _ in range(2):
        run("%%mirrored --quiet\nloader = strategy.distribute_dataset(loader)\nn = len(loader.dataset), len(loader)")
        assert run("loader is before, n") == (True, (10, 3))
    run("%%mirrored --quiet\ndistributed = strategy.distribute_dataset(loader)\nsizes = [len(b) for b in distributed]")
    assert run("distributed is before, sizes") == (True, [2, 2, 1])
    run("loader = torch.utils.data.DataLoader(Rows(1), batch_size=5)")
    run("%%mirrored --quiet\nloader = strategy.distribute_dataset(loader)\nn = len(loader)")
    assert run("loader.batch_size, n") == (5, 2)


SCALED = """
import torch
from torch.utils.data import DataLoader
class Scaled(torch.utils.data.Dataset):
    scale = 1
    def __len__(self): return 4
    def __getitem__(self, i): return i * self.scale
"""
SOURCES = {
    "a loader": ("source = DataLoader(Scaled(), batch_size=2)", "source", "source.dataset.scale = 2"),
    "a loader of a named data set": (
        "rows = Scaled()\nsource = DataLoader(rows, batch_size=2)",
        "source",
        "rows.scale = 2",
    ),
    "a tensor": ("source = torch.arange(4)", "source, batch_size=2", "source *= 2"),
    "a tuple": ("source = (torch.arange(4),)", "source, batch_size=2", "source[0].mul_(2)"),
    "a dict": ("source = {'x': torch.arange(4)}", "source, batch_size=2", "source['x'] = torch.arange(4) * 2"),
}


@pytest.mark.parametrize("name", ["batches", "source"])
@pytest.mark.parametrize("made", SOURCES)
def test_what_a_cell_has_distributed_is_divided_still_after_a_change_here(run, made, name):
    makes, arguments, changes = SOURCES[made]
    run(f"{SCALED}{makes}")
    run(f"%%mirrored --quiet\n{name} = strategy.distribute_dataset({arguments})")
    run(changes)
    read = f"values = [leaf.tolist() for b in {name} for leaf in torch.utils._pytree.tree_leaves(b)]"
    run(f"%%mirrored --quiet\n{read}")
    assert run("values").values == ([[0], [4]], [[2], [6]])


HOLDERS = {"a list": "holder[0]", "a dict": "holder['data']", "an object": "holder.data"}
MAKES = {"a list": "holder = [{}]", "a dict": "holder = {{'data': {}}}", "an object": "holder = Holder({})"}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("made", [made for made in SOURCES if made != "a dict"])
def test_a_change_here_of_what_is_distributed_inside_a_value_is_seen_in_the_replicas(run, made, holder):
    makes, arguments, changes = SOURCES[made]
    run(f"{SCALED}{makes}\nclass Holder:\n    def __init__(self, data): self.data = data")
    run("%%mirrored --quiet\n" + MAKES[holder].format(f"strategy.distribute_dataset({arguments})"))
    # Whatever names there are: what is held is the source all the same.
    run(f"source = {HOLDERS[holder]}.source\n{changes}" if "rows" not in changes else changes)
    read = f"values = [leaf.tolist() for b in {HOLDERS[holder]} for leaf in torch.utils._pytree.tree_leaves(b)]"
    run(f"%%mirrored --quiet\n{read}")
    assert run("values").values == ([[0], [4]], [[2], [6]])


def test_what_a_function_has_dealt_out_is_divided_still_after_a_change_here(run):
    run(SCALED)
    run(
        "%%mirrored --quiet\nrows = Scaled()\n"
        "dealt = strategy.distribute_datasets_from_function(lambda context: DataLoader(rows, batch_size=1))"
    )
    run("rows.scale = 2")
    run("%%mirrored --quiet\nvalues = [batch.tolist() for batch in dealt]")
    assert run("values").values == ([[0], [4]], [[2], [6]])


def test_what_a_cell_makes_and_distributes_is_in_the_notebook_undivided(run):
    run(
        "%%mirrored --quiet\nimport torch\nx = torch.arange(4)\nbatches = strategy.distribute_dataset(x, batch_size=2)"
    )
    assert run("batches").tolist() == [0, 1, 2, 3]
    run(f"%%mirrored --quiet\n{LOADER}made = strategy.distribute_dataset(torch.utils.data.DataLoader(Rows(1)))")
    assert len(run("made.dataset")) == 10
    run("%%mirrored --quiet\nbatches = strategy.distribute_dataset(batches)\nsize = len(next(iter(batches)))")
    assert run("size") == 1
    assert not isinstance(run("batches"), Remote)
    assert isinstance(run("%%mirrored --quiet\nbatches"), torch.Tensor)


def test_an_epoch_that_a_cell_has_begun_goes_on_in_cells_under_any_name(run):
    run("%%mirrored --quiet\nimport torch\nbatches = iter(strategy.distribute_dataset(torch.arange(6), batch_size=2))")
    assert run("%%mirrored --quiet\nnext(batches)").values == (0, 1)
    with pytest.raises(UsageError, match=r"`batches` \(DistributedIterator\) is in the replicas, not in the note"):
        run("next(batches)")
    run("again, held = batches, {'batches': batches}")
    assert run("%%mirrored --quiet\nnext(again)").values == (2, 3)
    assert run("%%mirrored --quiet\nnext(held['batches'])").values == (4, 5)


def test_a_name_that_cannot_be_pulled_stays_what_it_was(run):
    run("class Config: pass\nconfig = held = Config()")
    run("%%mirrored --quiet\nimport threading\nconfig.lock = threading.Lock()")
    with pytest.raises(
        TransferError, match=r"`config` cannot be brought to the notebook: Config cannot be sent: .*lock"
    ):
        run("%mirror pull config")
    assert run("config is held, vars(config)") == (True, {})
    assert run("%%mirrored --quiet\nhasattr(config, 'lock')") is True


def test_a_pull_that_one_replica_cannot_answer_changes_nothing_and_says_why(run):
    run("z = held = [1]")
    run("%%mirrored --quiet\nz")
    run("%%mirrored --quiet\nif replica_id: del globals()['z']\nelse: globals().__getitem__('z').append(3)")
    with pytest.raises(UsageError, match=r"^replica 1 has no name `z`$") as error:
        run("%mirror pull z")
    assert run("z is held, z") == (True, [1])
    assert getattr(error.value, "__notes__", []) == []


def test_pulling_an_object_refills_the_notebooks_own(run):
    run("class Config: pass\nclass Trainer: pass\ncfg, tr = Config(), Trainer()\ncfg.lr, tr.cfg = 5, cfg")
    run("%%mirrored --quiet\nimport torch\ncfg.lr, cfg.large = 7, torch.zeros(1_000_000)")
    assert run("cfg.lr") == 5
    run("%mirror pull cfg")
    assert run("tr.cfg is cfg, cfg.lr") == (True, 7)
    run("cfg.lr = 9")
    run("%%mirrored --quiet\nlr = cfg.lr")
    assert run("lr") == 9


TRAINER = """%%mirrored --quiet
import torch
from torch.utils.data import DataLoader, TensorDataset
class Trainer:
    def __init__(self):
        self.strategy, self.model, self.rate = strategy, torch.nn.Linear(2, 1), 0.1
        self.data = strategy.distribute_dataset((torch.arange(4.),), batch_size=4)
    def total(self):
        return float(self.strategy.reduce("sum", torch.tensor(self.rate)))
class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 1)
        self.strategy = strategy
trainer, net = Trainer(), Net()
dealt = strategy.distribute_datasets_from_function(lambda c: DataLoader(TensorDataset(torch.arange(4.)), batch_size=2))
"""
USED = """%%mirrored --quiet
here = trainer.strategy is strategy, net.strategy is strategy, trainer.total()
mine = [batch[0].tolist() for batch in trainer.data], [batch[0].tolist() for batch in dealt]
"""
SHARES = ([[0.0, 1.0]], [[0.0, 1.0]]), ([[2.0, 3.0]], [[2.0, 3.0]])


def test_an_object_that_keeps_what_the_cells_distribute_by_comes_back_and_goes_again(run):
    run(TRAINER)
    assert run("trainer.rate, isinstance(trainer.model, torch.nn.Linear), type(net) is Net") == (0.1, True, True)
    assert run("repr(trainer.strategy), repr(net.strategy)") == ("<MirroredStrategy of the replicas>",) * 2
    with pytest.raises(AttributeError, match=r"`reduce` of a strategy .* use it in a %%mirrored cell"):
        run("trainer.total()")
    run("import mirror_nb as mnb\nalone = mnb.OneDeviceStrategy('cpu:0')\nboth = mnb.MirroredStrategy('cpu:0,cpu:1')")
    for use in ("list", "len", "alone.distribute_dataset", "both.distribute_dataset"):
        with pytest.raises(
            UsageError, match="made of a tuple, is distributed in the replicas: go through it in a %%m"
        ):
            run(f"{use}(trainer.data)")
    assert torch.equal(run("trainer.data.source[0]"), torch.arange(4.0))
    assert repr(run("trainer.data")) == "<tuple that is distributed in the replicas>"
    run("trainer.rate = 0.5")
    run(USED)
    assert run("here") == (True, True, 1.0)
    assert run("mine").values == SHARES


def test_a_replica_that_takes_a_dead_ones_place_distributes_by_its_own(run):
    run(TRAINER)
    with pytest.raises(ReplicaDied):
        run("%%mirrored --quiet\nimport os\nos._exit(1) if replica_id else strategy.reduce('sum', 1)")
    run(USED)
    assert run("here") == (True, True, pytest.approx(0.2))
    assert run("mine").values == SHARES


@pytest.mark.parametrize(
    "value", ["[1]", "{'a': 1}", "torch.ones(2)", "torch.ones(2, requires_grad=True)", "types.SimpleNamespace(x=1)"]
)
def test_names_that_a_cell_gives_to_one_value_have_one_value_here(notebook, value):
    notebook.here("import types, numpy as np")
    notebook.cell(f"import types, torch\nzero = one = {value}\nown = [zero]")
    assert notebook.user_ns["zero"] is notebook.user_ns["one"]
    notebook.cell("two = one")
    assert notebook.user_ns["two"] is notebook.user_ns["one"]


def test_a_change_under_one_of_its_names_is_one_under_all(notebook):
    notebook.cell("numbers = same = [1]")
    notebook.cell("numbers.append(2)")
    assert notebook.user_ns["same"] is notebook.user_ns["numbers"]
    assert notebook.user_ns["same"] == [1, 2]
    notebook.here("same.append(3)")
    notebook.cell("numbers.append(4); same.append(5)")
    assert notebook.user_ns["same"] is notebook.user_ns["numbers"]
    assert notebook.user_ns["numbers"] == [1, 2, 3, 4, 5]
    assert notebook.there("numbers", 1) is notebook.there("same", 1)


def test_names_that_are_one_value_on_one_replica_alone_are_each_replicas_own(notebook):
    notebook.cell("first = [0]\nsecond = first if replica_id else [1]")
    assert notebook.user_ns["first"] == [0]
    assert list(notebook.user_ns["second"]) == [[1], [0]]
