"""Values that either side changes in place, and who sees it."""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict, deque

import pytest
import torch
from two_sides import NET, TRAIN, Notebook

from mirror_nb.noticing import contents
from mirror_nb.noticing.kinds import is_own
from mirror_nb.noticing.slots import slots_of

CONFIG = """
import dataclasses
@dataclasses.dataclass
class Config:
    lr: float = 1
    sizes: list = dataclasses.field(default_factory=list)
"""


LARGE = [
    # With `little`: larger than what is compared whole.
    ("x = {'loss': [0.5] * 300}", "x['loss'].append(2)", "sum(x['loss'])"),
    ("x = {'loss': [0.5] * 300}", "x['loss'][7] = 2", "sum(x['loss'])"),
    ("x = {i: i for i in range(300)}", "x['y'] = x.pop(7)", "'y' in x"),
    ("x = [[i] for i in range(300)]", "x[7].append(2)", "list(x[7])"),
    ("x = [{'score': 0.5} for i in range(300)]", "x[7]['score'] = 2", "dict(x[7])"),
    ("x = [{i} for i in range(300)]", "x[7].add(2)", "set(x[7])"),
    ("x = ((1, [i]) for i in range(300)); x = tuple(x)", "x[7][1][0] = 2", "list(x[7][1])"),
    ("import collections; x = collections.deque((i, [i]) for i in range(300))", "x[7][1][0] = 2", "list(x[7][1])"),
    (
        "import collections; x = {'of': [collections.OrderedDict(a=i, b=i) for i in range(300)]}",
        "x['of'][7].move_to_end('a')",
        "list(x['of'][7])",
    ),
    ("import numpy as np; x = [np.zeros(3) for i in range(300)]", "x[7][0] = 2", "float(sum(map(sum, x)))"),
    ("x = [torch.zeros(3) for i in range(300)]", "x[7][0] = 2", "float(sum(map(sum, x)))"),
    ("x = {'all': [0.5] * 300, 'large': torch.zeros(100_000)}", "x['large'][0] = 2", "float(x['large'].sum())"),
    ("x = bytearray(1_000)", "x[7] = 2", "sum(x)"),
    ("x = [bytearray(1) for i in range(300)]", "x[7][0] = 2", "sum(map(sum, x))"),
    (f"{CONFIG}x = Config(); x.sizes = [0.5] * 300", "x.lr = 2", "x.lr"),
    (f"{CONFIG}x = Config(); x.sizes = [0.5] * 300", "x.sizes[7] = 2", "sum(x.sizes)"),
    (f"{CONFIG}x = [Config() for i in range(300)]", "x[7].lr = 2", "x[7].lr"),
    ("class Point: __slots__ = 'x', 'y'\nx = [Point() for i in range(300)]", "x[7].x = 2", "hasattr(x[7], 'x')"),
    ("class Lists(list): pass\nx = [Lists([i]) for i in range(300)]", "x[7].name = 2", "vars(x[7])"),
    (
        "class Odd(list):\n    def __iter__(self): return list.__iter__(self)\nx = [Odd([i]) for i in range(300)]",
        "x[7].append(2)",
        "len(x[7])",
    ),
    ("import random; x = [random.Random(i) for i in range(300)]", "x[7].seed(2)", "x[7].getstate()[1][0]"),
    (
        "import numpy as np; x = {'all': [0.5] * 300, 'rng': np.random.default_rng(1)}",
        "x['rng'].random()",
        "x['rng'].bit_generator.state['state']['state']",
    ),
    ("def x(seen=[0.5] * 300): return sum(seen)", "x.__defaults__[0][7] = 2", "x()"),
    (
        "def made():\n    seen = [0.5] * 300\n    return lambda: seen\nx = {'all': [0.5] * 300, 'seen': made()}",
        "x['seen']()[7] = 2",
        "sum(x['seen']())",
    ),
    ("import functools; x = functools.partial(sum, [0.5] * 300)", "x.args[0][7] = 2", "x()"),
    (
        "import pandas; x = {'all': [0.5] * 300, 'table': pandas.DataFrame({'a': [1, 2]})}",
        "x['table']['b'] = 3",
        "list(x['table'])",
    ),
    ("import pandas; x = pandas.DataFrame({'a': map(str, range(300))})", "x.loc[7, 'a'] = 'seven'", "x.a[7]"),
    ("import pandas; x = pandas.Series(map(str, range(300)))", "x[7] = 'seven'", "x[7]"),
]


@pytest.mark.parametrize(
    ("make", "change", "look"),
    [
        ("x = [1]", "x.append(2)", "list(x)"),
        ("x = {'lr': 1}", "x['lr'] = 2", "dict(x)"),
        ("x = {1}", "x.add(2)", "set(x)"),
        ("import numpy as np; x = np.zeros(3)", "x[0] = 1", "x.tolist()"),
        ("import numpy as np; x = np.zeros(1_000_000)", "x += 1", "float(x.sum())"),
        ("import numpy as np; x = {'a': np.zeros(100_000)}", "x['a'][9] = 1", "float(x['a'].sum())"),
        ("import pandas; x = pandas.DataFrame({'a': range(100_000)})", "x.loc[9, 'a'] = 0", "int(x.a.sum())"),
        ("x = torch.zeros(3)", "x[0] = 1", "x.tolist()"),
        ("x = torch.zeros(100_000)", "x[0] = 1", "float(x.sum())"),
        ("x = ([1], {})", "x[1]['a'] = 2", "repr(x)"),
        ("import types; x = types.SimpleNamespace(lr=1)", "x.lr = 2", "x.lr"),
        ("import argparse; x = argparse.Namespace(lr=1)", "x.lr = 2", "x.lr"),
        (f"{CONFIG}x = Config()", "x.lr = 2", "x.lr"),
        (f"{CONFIG}x = Config()", "x.sizes.append(2)", "list(x.sizes)"),
        (f"{CONFIG}x = {{'deep': [Config()]}}", "x['deep'][0].lr = 2", "x['deep'][0].lr"),
        (f"{CONFIG}x = Config(); x.large = torch.zeros(100_000)", "x.large[0] = 1", "float(x.large.sum())"),
        (f"{CONFIG}x = Config(); x.run = len", "x.run = sum", "x.run([2, 3])"),
        (f"{CONFIG}x = Config(); x.net = nn.Linear(1, 1)", "x.net = None", "x.net is None"),
        ("import collections; x = collections.UserDict(lr=1)", "x['lr'] = 2", "x['lr']"),
        ("import pandas; x = pandas.DataFrame({'a': [1, 2]})", "x['b'] = 3", "list(x)"),
        ("import pandas; x = pandas.DataFrame({'a': range(100_000)})", "x['b'] = 3", "list(x)"),
        ("import pandas; x = pandas.Series([1, 2])", "x[0] = 3", "x.tolist()"),
        ("import collections; x = collections.UserList([1])", "x.append(2)", "list(x)"),
        ("import string; x = string.Template('$a')", "x.template = '$b'", "x.template"),
        ("import numpy; x = numpy.poly1d([1.0, 2.0])", "x.coeffs[0] = 5", "x(1.0)"),
        ("x = torch.distributions.Normal(torch.zeros(2), torch.ones(2))", "x.loc += 1", "x.mean.tolist()"),
        ("import array; x = array.array('d', [1])", "x.append(2)", "x.tolist()"),
        ("import array; x = array.array('d', [1]) * 100_000", "x[7] = 2", "sum(x)"),
        (
            "import networkx; x = networkx.path_graph(3); x.edges",
            "x.add_edge(0, 2, weight=2.0)",
            "list(x.edges.data())",
        ),
        ("import networkx; x = networkx.path_graph(5_000)", "x.remove_node(7)", "x.number_of_edges()"),
        ("import scipy.sparse; x = scipy.sparse.lil_matrix((2, 2))", "x[0, 1] = 3", "x.toarray().tolist()"),
        ("import scipy.sparse; x = scipy.sparse.eye(9, format='csr')", "x.data *= 2", "float(x.sum())"),
    ],
)
def test_what_the_notebook_changed_in_place_is_sent_anew(notebook, make, change, look):
    changed_here(notebook, make, change, look)


def changed_here(notebook, make, change, look):
    if "scipy" in make:
        pytest.importorskip("scipy")
    notebook.here(make)
    notebook.cell(f"y = {look}")
    notebook.here(change)
    notebook.cell(f"y = {look}")
    assert notebook.user_ns["y"] == eval(look, notebook.user_ns)


@pytest.mark.parametrize(
    "unchanged",
    [
        f"{CONFIG}x = Config(); x.net = nn.Linear(1, 1); x.large = torch.zeros(100_000); x.run = lambda: 1",
        f"{CONFIG}x = Config(); x.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])",
        "x = (torch.utils.data.DataLoader([1, 2], generator=torch.Generator()), [nn.Linear(1, 1)])",
        "x = torch.utils.data.DataLoader([1, 2], shuffle=True, generator=torch.Generator())",
        "import pandas; x = pandas.DataFrame({'a': range(100_000)}); means = x.a.mean(), x.describe()",
        "import networkx; x = networkx.path_graph(3)",
    ],
)
def test_what_was_used_and_not_changed_is_not_sent_anew(notebook, unchanged):
    notebook.here(unchanged)
    notebook.cell("y = x")
    notebook.here("loaders = [part for part in (x if isinstance(x, tuple) else (x,)) if hasattr(part, 'batch_size')]")
    notebook.here("for loader in loaders: list(loader)")
    notebook.here("looked = [x.edges, x.degree, x.adj] if hasattr(x, 'edges') else None")
    notebook.cell("z = x is y")
    assert notebook.sent == []
    assert notebook.user_ns["z"] is True


@pytest.fixture
def little(monkeypatch) -> None:
    """What is compared whole is little: larger values need not be large."""
    monkeypatch.setattr(contents, "WATCHED_BYTES", 256)


@pytest.mark.parametrize(("make", "change", "look"), LARGE)
def test_what_the_notebook_changed_in_a_large_value_is_sent_anew(little, notebook, make, change, look):
    changed_here(notebook, make, change, look)


@pytest.mark.parametrize(("make", "change", "look"), LARGE)
def test_what_a_cell_changed_in_a_large_value_comes_back(little, notebook, make, change, look):
    notebook.here(make)
    notebook.cell(f"y = {look}")
    returned = notebook.cell(f"{change}\ny = {look}")
    assert "x" not in returned.altered
    assert eval(look, notebook.user_ns) == notebook.user_ns["y"]


@pytest.mark.parametrize(
    "unchanged",
    [
        "x = {'log': [[0.5] * 9, torch.zeros(3)] * 300, 'net': nn.Linear(1, 1)}; x['log'][7] = torch.zeros(100_000)",
        f"{CONFIG}x = [Config() for i in range(300)]; x[7].net = nn.Linear(1, 1); x.append(torch.Generator())",
        f"{CONFIG}x = Config(); x.all = [0.5] * 300; x.loader = torch.utils.data.DataLoader(x.all)",
        "import numpy as np; x = [{'loss': np.float32(0.5), 'at': len} for i in range(300)]",
        "x = [[0.5] for i in range(300)]; x.append(x); x.append({'x': x})",
    ],
)
def test_a_large_value_that_was_used_and_not_changed_is_not_sent_anew(little, notebook, unchanged):
    notebook.here(unchanged)
    notebook.cell("y = x")
    notebook.cell("z = x is y")
    assert notebook.sent == []
    assert notebook.user_ns["z"] is True


def test_an_equal_number_in_the_place_of_another_is_no_change_of_a_large_value(little, notebook):
    notebook.here("x = {'best': 0.25, 'loss': [0.5] * 300}")
    notebook.cell("y = len(x)")
    notebook.here("x['best'] = float('0.25')")
    notebook.cell("y = len(x)")
    assert notebook.sent == []


def test_of_more_objects_than_can_be_looked_at_those_of_the_outer_levels_are(little, notebook, monkeypatch):
    monkeypatch.setattr(contents, "WATCHED_OBJECTS", 2_000)
    notebook.here(f"{CONFIG}x = Config(); x.sizes = [[0.5] * 10 for i in range(200)]")
    notebook.cell("y = x.lr")
    notebook.here("x.sizes[7][0] = 2")
    notebook.cell("y = x.sizes[7][0]")
    assert notebook.user_ns["y"] == 0.5
    notebook.here("x.lr = 2")
    notebook.cell("y = x.lr, x.sizes[7][0]")
    assert notebook.user_ns["y"] == (2, 2)


@pytest.mark.parametrize("made", ["torch.zeros(3)", "nn.Linear(1, 1)", "Config()"])
def test_what_a_large_value_has_let_go_of_is_not_kept(little, notebook, made):
    notebook.here(f"{CONFIG}x = {{'outputs': [{made} for i in range(100)], 'all': [0.5] * 300}}")
    notebook.cell("y = len(x)")
    output = weakref.ref(notebook.user_ns["x"]["outputs"][7])
    notebook.here("x['outputs'].clear()")
    assert output() is None


def test_the_same_objects_in_another_order_are_a_change_of_a_large_value(little, notebook):
    notebook.here("x = [(i, [0.5]) for i in range(300)]; x[7] = x[8]")
    notebook.cell("y = len(x)")
    notebook.here("x[7] = x[9]")
    notebook.cell("y = x[7][0], x[7] is x[9]")
    assert notebook.user_ns["y"] == (9, True)


def test_a_generator_that_torch_gives_no_weak_references_is_known_again_too(notebook, monkeypatch):
    real = weakref.ref

    class AsTorch211(real):
        def __new__(cls, obj, *callback):
            if isinstance(obj, torch.Generator):
                raise TypeError("cannot create weak reference to 'torch._C.Generator' object")
            return real.__new__(cls, obj, *callback)

    monkeypatch.setattr(weakref, "ref", AsTorch211)
    notebook.here("x = torch.utils.data.DataLoader([1, 2], shuffle=True, generator=torch.Generator())")
    notebook.cell("y = x")
    notebook.cell("z = x is y")
    assert (notebook.sent, notebook.user_ns["z"]) == ([], True)


def test_what_is_put_in_the_place_of_a_large_tensor_is_another_wherever_it_lies(notebook):
    notebook.here("x = [torch.zeros(100_000)]")
    for value in range(1, 5):
        notebook.here(f"x[0] = None; x[0] = torch.full((100_000,), {value}.)")
        notebook.cell("y = float(x[0][0])")
        assert notebook.user_ns["y"] == value


def test_what_a_table_of_pandas_keeps_of_a_reading_is_no_change(notebook):
    dates = "index = pandas.date_range('2020', periods=3); prices = pandas.Series([1., 2., 3.], index=index)"
    notebook.here(f"import pandas; {dates}")
    assert notebook.cell("price = prices.loc['2020-01-02']").altered == []
    assert notebook.cell("prices.loc['2020-01-02'] = 5").bound == ["prices"]


CONFIGS = {
    "of a class": "class Config: pass\nconfig = Config()",
    "of a class on another one": "class Base: pass\nclass Config(Base): pass\nconfig = Config()",
    "a dataclass": "import dataclasses\n@dataclasses.dataclass\nclass Config:\n    x: int = 0\nconfig = Config()",
    "a simple namespace": "import types\nconfig = types.SimpleNamespace()",
    "argparse's": "import argparse\nconfig = argparse.Namespace()",
}


@pytest.mark.parametrize("make", CONFIGS.values(), ids=CONFIGS)
def test_who_holds_an_object_that_the_notebook_changes_sees_the_change(notebook, make):
    notebook.here(
        f"{make}\nconfig.rate, config.old = 1, 1\nclass Trainer: pass\nours = Trainer()\nours.config = config"
    )
    notebook.cell("theirs = Trainer()\ntheirs.config = config\nheld = [config]\nours")
    notebook.here("config.rate = 2\ndel config.old\nconfig.itself = config")
    notebook.cell(
        "one = config is theirs.config is held[0] is ours.config is config.itself\n"
        "rate, old = theirs.config.rate, hasattr(config, 'old')"
    )
    assert [notebook.user_ns[name] for name in ("one", "rate", "old")] == [True, 2, False]


DICTS = {
    "for attributes": "class Config(dict): __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__",
    "of attributes": "class Config(dict):\n    def __init__(self, **own): self.__dict__ = self; self.update(own)",
}


@pytest.mark.parametrize("make", DICTS.values(), ids=DICTS)
def test_who_holds_a_dict_of_a_class_of_its_own_sees_what_either_side_changes_in_it(notebook, make):
    notebook.here(f"{make}\nconfig = Config(rate=1)\nclass Trainer: pass\nours = Trainer()\nours.config = config")
    notebook.cell(f"{NET}\nnet.config = config\nheld = [config]\nours")
    notebook.here("config.rate = 2")
    notebook.cell("one = config is net.config is held[0] is ours.config\nrate = net.config.rate")
    assert (notebook.user_ns["one"], notebook.user_ns["rate"]) == (True, 2)
    notebook.cell("net.config.rate = 3")
    notebook.here("one = config is net.config is held[0] is ours.config\nrate = config.rate")
    assert (notebook.user_ns["one"], notebook.user_ns["rate"]) == (True, 3)


@pytest.mark.parametrize("make", CONFIGS.values(), ids=CONFIGS)
def test_what_a_cell_changes_by_a_network_that_has_it_is_not_told_of_as_changed_in_the_replicas_alone(notebook, make):
    notebook.here(f"{make}\nconfig.rate = 1\n{NET}\nnet.config = config")
    returned = notebook.cell("net.config.rate = 2")
    assert (returned.bound, returned.altered, notebook.user_ns["config"].rate) == (["config", "net"], [], 2)
    notebook.cell("rate, one = config.rate, net.config is config")
    assert (notebook.user_ns["rate"], notebook.user_ns["one"], notebook.names.withheld) == (2, True, [])
    notebook.here("config.rate = 3")
    notebook.cell("rate, one = config.rate, net.config is config")
    assert (notebook.user_ns["rate"], notebook.user_ns["one"], notebook.names.withheld) == (3, True, [])


# The others as they are seen from here: what pickle asks of such a class is a function of that module.
ATTRS = "import attrs\n@attrs.define\nclass Config:\n    rate: int = 1\n    sizes: list = attrs.Factory(list)"
DECLARED = {"attrs": ATTRS} | {
    module: "class Config:\n    def __init__(self): self.rate, self.sizes = 1, []\n"
    f"    def __getstate__(self): return dict(vars(self))\nConfig.__getstate__.__module__ = {module!r}"
    for module in ("pydantic.main", "omegaconf.basecontainer", "ml_collections.config_dict.config_dict")
}


@pytest.mark.parametrize("make", DECLARED.values(), ids=DECLARED)
def test_an_object_of_a_class_that_a_library_pickles_by_its_attributes_stays_itself(notebook, make):
    notebook.here(f"{make}\nconfig = Config(); held = [config]")
    returned = notebook.cell("config.rate = 2; config.sizes.append(3)")
    config = notebook.user_ns["config"]
    assert (returned.bound, returned.altered, config.rate, config.sizes) == (["config"], [], 2, [3])
    assert notebook.user_ns["held"][0] is config
    notebook.here("config.rate = 4")
    notebook.cell("seen, one = config.rate, held[0] is config")
    assert (notebook.user_ns["seen"], notebook.user_ns["one"], notebook.names.withheld) == (4, True, [])


def test_a_mapping_of_a_library_is_one_whatever_its_class_derives_from():
    ways = {name: getattr(dict, name) for name in ("keys", "__getitem__", "__setitem__")}
    kinds = [type("Config", (), {"__module__": "json", **own}) for own in (ways, {"keys": dict.keys})]
    made = [kind() for kind in kinds]
    for one in made:
        one.inside = object()
    assert [is_own(one) for one in made] == [True, False]


def test_an_object_whose_class_has_a_say_in_what_it_holds_is_another_one_after_a_change_also_in_what_holds_it(
    notebook,
):
    notebook.here(
        "class Picky:\n    def __getstate__(self): return {'rate': 1 + self.rate}\npicky = Picky()\npicky.rate = 1"
    )
    notebook.cell("held = [picky]")
    notebook.here("picky.rate = 2")
    notebook.cell("rates = [picky.rate, held[0].rate]")
    assert notebook.user_ns["rates"] == [3, 3]


SLOTS = """
import dataclasses
class Point:
    __slots__ = ("x", "__hidden")
    def __init__(self, x): self.x, self.__hidden = x, 3
    def hidden(self): return self.__hidden
class Named(Point): __slots__ = {"name": "what it is called"}
class Open(Point): __slots__ = ("__dict__",)
@dataclasses.dataclass(frozen=True, slots=True)
class Frozen: x: int
"""
LOOK = "[(one.x, hasattr(one, '__dict__')) for one in points], [p.hidden() for p in points[:3]], points[1].name"


@pytest.mark.parametrize("first", ["here", "cell"])
def test_objects_with_slots_and_no_dictionary_go_to_and_fro(notebook, first):
    getattr(notebook, first)(f"{SLOTS}points = [Point(1), Named(1), Open(1), Frozen(1)]\npoints[1].name = 'a'")
    notebook.cell("for p in points[:3]: p.x += 1\npoints[3] = dataclasses.replace(points[3], x=2)\npoints = points")
    notebook.here("for p in points[:3]: p.x += 1\npoints[3] = dataclasses.replace(points[3], x=3)\npoints = points[:]")
    notebook.cell(f"seen = {LOOK}")
    expected = [(3, False), (3, False), (3, True), (3, False)], [3, 3, 3], "a"
    assert notebook.user_ns["seen"] == eval(LOOK, notebook.user_ns) == expected


@pytest.mark.parametrize("kind", ["Point", "Named", "Open"])
def test_an_object_with_slots_stays_itself_whichever_side_changes_it(notebook, kind):
    notebook.here(f"{SLOTS}point = {kind}([1]); held = [point]")
    more = "" if kind == "Point" else "point.name = 'a'\n"
    notebook.cell(f"point._Point__hidden = 4\npoint.x.append(2)\n{more}")
    point = notebook.user_ns["point"]
    assert (point.x, point.hidden(), getattr(point, "name", "")) == ([1, 2], 4, "" if kind == "Point" else "a")
    notebook.here("del point.x")
    notebook.cell("same, gone = held[0] is point, not hasattr(held[0], 'x')")
    assert (notebook.user_ns["same"], notebook.user_ns["gone"]) == (True, True)
    assert notebook.user_ns["held"][0] is point


def test_what_has_slots_is_told_in_the_order_of_its_class():
    class Wide:
        __slots__ = tuple("qwertyuiop")

    class Wider(Wide):
        __slots__ = ("__dict__", "asdf")

    assert slots_of(Wider) == ("asdf", *"qwertyuiop")


def test_an_object_with_slots_that_replicas_left_different_stays_there_whole(notebook):
    notebook.here(f"{SLOTS}point = Point(1)")
    assert notebook.cell("point.x = replica_id").altered == ["point"]
    notebook.here("point.x = 7")
    notebook.cell("seen = point.x")
    assert list(notebook.user_ns["seen"].values) == [0, 1]
    assert notebook.names.withheld == ["point", "point"]


PAIR = """
from typing import Generic, NamedTuple, TypeVar
T = TypeVar("T")
class Pair(NamedTuple):
    x: int
    y: int = 2
    def total(self): return self.x + self.y
class Triple(Pair):
    __slots__ = ()
    def total(self): return super().total() + 1
class Of(NamedTuple, Generic[T]):
    x: T
    def total(self): return self.x
"""


@pytest.mark.parametrize("first", ["here", "cell"])
def test_named_tuples_of_the_notebooks_own_go_to_and_fro(notebook, first):
    getattr(notebook, first)(f"{PAIR}pairs = [Pair(1), Triple(1), Of[int](1)]")
    notebook.cell("pairs = [pair._replace(x=pair.x + 1) for pair in pairs]")
    notebook.here("pairs = [pair._replace(x=pair.x + 1) for pair in pairs]")
    look = "pairs, [p.total() for p in pairs], [type(p).__name__ for p in pairs], hasattr(Pair(5), '__dict__')"
    notebook.cell(f"seen = {look}")
    expected = [(3, 2), (3, 2), (3,)], [5, 6, 3], ["Pair", "Triple", "Of"], False
    assert notebook.user_ns["seen"] == eval(look, notebook.user_ns) == expected


def test_an_object_whose_name_one_replica_has_deleted_is_there_again_after_a_change(notebook):
    notebook.here("import types\nclass Config: pass\nconfig, simple = Config(), types.SimpleNamespace()")
    notebook.here("config.rate = simple.rate = 1")
    notebook.cell("config, simple\nif replica_id: del config, simple")
    notebook.here("config.rate = simple.rate = 2")
    notebook.cell("rates = [config.rate, simple.rate]")
    assert notebook.user_ns["rates"] == [2, 2]


def test_an_object_that_was_given_another_class_has_it_in_the_replicas_too(notebook):
    notebook.here("class First: pass\nclass Second: pass\nconfig = First()\nconfig.rate = 1")
    notebook.cell("held = config")
    notebook.here("config.__class__ = Second\nconfig.rate = 2")
    notebook.cell("found = held is config, type(held).__name__, held.rate")
    assert notebook.user_ns["found"] == (True, "Second", 2)


TRAINER = """
class Trainer:
    def __init__(self): self.losses, self.best, self.config, self.other = [], None, config, None
    def epoch(self):
        self.paths, self.log = (path, log)
        self.losses.append(0.5)
        self.best = (0.5, torch.ones(2))
        self.config.lr = 3
        self.itself = self
trainer = held = Trainer()
"""


def test_an_object_that_a_cell_changes_in_all_replicas_alike_is_changed_here_too(notebook):
    notebook.here("import logging, pathlib\npath, log = pathlib.Path('a'), logging.getLogger('a')")
    notebook.here(f"{CONFIG}config = Config(){TRAINER}")
    returned = notebook.cell("trainer.epoch()")
    assert (returned.bound, returned.altered) == (["config", "trainer"], [])
    notebook.here("same = trainer is held, trainer.config is config, trainer.itself is trainer")
    assert notebook.user_ns["same"] == (True, True, True)
    trainer = notebook.user_ns["held"]
    assert (trainer.losses, trainer.best[1].tolist(), trainer.config.lr) == ([0.5], [1, 1], 3)
    notebook.here("trainer.losses.append(0.25)")
    notebook.cell("trainer.epoch()")
    assert trainer.losses == [0.5, 0.25, 0.5]
    notebook.cell("trainer")
    assert notebook.sent == []


AVERAGES = """
import weakref
import torch.utils.data
class Averages:
    def __init__(self, parameters):
        self.of = [weakref.ref(p) for p in parameters]
        self.means, self.updates = [p().detach().clone() for p in self.of], 0
    def update(self):
        self.updates += 1
        for mean, p in zip(self.means, self.of): mean.lerp_(p().detach(), 0.5)
    def state_dict(self): return {"means": self.means, "updates": self.updates}
    def load_state_dict(self, state): self.means, self.updates = state["means"], state["updates"]
class Stream(Averages):
    def __iter__(self): return iter(self.means)
class Tokenizer:
    def __init__(self): self.special, self.inside, self.deprecation_warnings, self.cache = {}, Averages([]), {}, {}
    def add_tokens(self, more): self.inside.means += more
    def __len__(self): return len(self.inside.means)
    def save_pretrained(self, folder): pass
    def pad(self):
        self.deprecation_warnings["slow"] = self.cache["word"] = True
        return self.special["pad"], len(self)
class Unfinished(Tokenizer):
    def __len__(self): raise NotImplementedError
class Config:
    def __init__(self): self.layers, self._attn_implementation_internal = 1, None
    def save_pretrained(self, folder): pass
    def to_dict(self): return vars(self)
    def network(self):
        self._attn_implementation_internal = "sdpa"
        return self.layers
class Pipeline:
    calls = 0
    def save_pretrained(self, folder): pass
    def __call__(self): self.calls += 1
class Records:
    def __init__(self): self.rows, self.form = list(map(str, range(20000))), None
    def __len__(self): return len(self.rows)
    def __getitem__(self, i): return self.form
    def set_format(self, form): self.form = form
class Images(torch.utils.data.Dataset):
    def __init__(self): self.transform, self.read = None, 0
    def __len__(self): return 4
    def __getitem__(self, i):
        self.read += 1
        return self.transform(i) if self.transform else i
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A module of nobody's own, `averages`."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "averages.py").write_text(AVERAGES)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    yield
    sys.modules.pop("averages", None)


def test_what_a_library_keeps_of_a_training_is_changed_on_both_sides(notebook, library):
    notebook.here(f"from averages import Averages\n{NET}\nmean = Averages(net.parameters()); kept = [mean]")
    notebook.cell(f"{TRAIN}mean.update()")
    returned = notebook.cell(f"{TRAIN}mean.update()")
    assert (returned.bound, returned.altered) == (["mean", "net", "p"], [])
    notebook.here("same = kept[0] is mean, all(torch.equal(p(), q) for p, q in zip(mean.of, net.parameters()))")
    assert (notebook.user_ns["same"], notebook.user_ns["mean"].updates) == ((True, True), 2)
    before = [p.detach().clone() for p in notebook.user_ns["net"].parameters()]
    for mean, p in zip(notebook.user_ns["mean"].means, before, strict=True):
        assert torch.allclose(mean, p - 1 + 0.25)
    notebook.here("mean.updates = 7; mean.means[0].zero_()")
    notebook.cell("mean.update(); found = mean.updates, float(mean.means[0].sum())")
    assert notebook.sent == ["mean"]
    expected = 8, float(before[0].sum()) / 2
    assert notebook.user_ns["found"] == pytest.approx(expected)


def test_what_the_notebook_sets_of_a_librarys_tokenizer_is_so_in_cells_and_what_one_has_warned_of_is_no_change(
    notebook, library
):
    notebook.here("from averages import Tokenizer\ntokenizer = Tokenizer(); tokenizer.special['pad'] = None")
    assert notebook.cell("found = tokenizer.pad()").altered == []
    for change in ("tokenizer.special['pad'] = 'x'", "tokenizer.add_tokens([1, 2])"):
        notebook.here(change)
        notebook.cell("found = tokenizer.pad()")
        assert notebook.sent == ["tokenizer"]
    assert notebook.user_ns["found"] == ("x", 2)
    notebook.cell("tokenizer.pad()")
    assert notebook.sent == []
    assert notebook.cell("tokenizer.special['pad'] = 'y'").altered == ["tokenizer"]


def test_a_format_that_the_notebook_sets_is_that_of_a_librarys_data_set_in_cells_too_whatever_holds_it(
    notebook, library
):
    notebook.here("from averages import Records\nrecords = Records(); both = {'train': records, 'test': Records()}")
    notebook.here("loader = torch.utils.data.DataLoader(records, batch_size=2)")
    look = "found = records[0], both['train'][0], loader.dataset[0]"
    notebook.cell(look)
    notebook.here("records.set_format('x')")
    notebook.cell(look)
    assert notebook.user_ns["found"] == ("x", "x", "x")
    notebook.cell(look)
    assert notebook.sent == []


def test_a_transform_that_the_notebook_sets_on_a_librarys_data_set_is_that_of_cells_too_whatever_holds_it(
    notebook, library
):
    notebook.here("from averages import Images\nimages = Images(); both = {'train': images}")
    notebook.here("part = torch.utils.data.random_split(images, [2, 2])[0]; part.indices = [1, 2]")
    look = "found = images[1], both['train'][1], part[0]"
    notebook.cell(look)
    notebook.here("images.transform = float; images[0]")
    notebook.cell(look)
    assert str(notebook.user_ns["found"]) == "(1.0, 1.0, 1.0)"
    notebook.here("images[0]")
    assert notebook.cell(look).altered == []
    assert notebook.sent == []


def test_a_librarys_data_set_that_a_cell_has_changed_past_its_settings_comes_back_where_it_is_bound_again(
    notebook, library
):
    notebook.here("from averages import Images\nimages = Images(); images.transform = abs; box = [images]")
    notebook.here("def relabelled(images):\n    images.labels = [7]\n    return images")
    notebook.here("def all_relabelled(box):\n    relabelled(box[0])\n    return box")
    notebook.cell("images")
    notebook.cell("images = relabelled(images)")
    assert notebook.user_ns["images"].labels == [7]
    notebook.here("box[0] = Images(); box[0].transform = abs")
    notebook.cell("box")
    notebook.cell("box = all_relabelled(box)")
    assert notebook.user_ns["box"][0].labels == [7]


def test_a_transform_in_the_place_of_one_that_is_gone_is_another(notebook, library):
    notebook.here("from averages import Images\nimages = Images()")
    notebook.here("class Times:\n    def __call__(self, i): return self.by * i")
    for by in (2, 3, 4):
        # The id of what is let go of is that of the next.
        notebook.here(f"images.transform = None; images.transform = Times(); images.transform.by = {by}")
        notebook.cell("found = images[1]")
        assert notebook.user_ns["found"] == by


def test_a_librarys_configuration_that_a_cell_makes_a_network_by_is_not_told_of_and_set_in_the_notebook(
    notebook, library
):
    notebook.here("from averages import Config\nconfig = Config()")
    assert notebook.cell("found = config.network()").altered == []
    notebook.here("config.layers = 2")
    notebook.cell("found = config.network()")
    assert notebook.user_ns["found"] == 2


def test_a_librarys_pipeline_that_counts_its_calls_is_not_told_of_and_a_tokenizer_without_a_length_may_be_used(
    notebook, library
):
    notebook.here("from averages import Pipeline, Unfinished\npipeline, tokenizer = Pipeline(), Unfinished()")
    assert notebook.cell("pipeline(); tokenizer.cache['word'] = 1").altered == []


def test_where_each_side_is_in_data_that_a_library_goes_through_is_its_own(notebook, library):
    notebook.here(f"from averages import Stream\n{NET}\nstream = Stream(net.parameters())")
    notebook.cell("stream")
    returned = notebook.cell("stream.update()")
    assert (returned.bound, returned.altered) == ([], [])
    notebook.here("stream.update()")
    notebook.cell("stream")
    assert (notebook.sent, notebook.names.withheld) == ([], [])


def test_an_object_that_differs_is_not_taken_for_changed_here_where_one_inside_it_has_come_back(notebook):
    notebook.here(f"{CONFIG}config = Config(){TRAINER}")
    returned = notebook.cell("trainer.config.lr = 3; trainer.other = replica_id")
    assert (returned.bound, returned.altered) == (["config"], ["trainer"])
    notebook.cell("trainer")
    assert (notebook.names.withheld, notebook.sent) == ([], [])
    notebook.here("config.lr = 4")
    notebook.cell("trainer")
    assert (notebook.sent, notebook.there("trainer").config.lr) == (["config"], 4)


def test_objects_that_each_replica_has_of_its_own_are_changed_here_each_by_itself(notebook):
    notebook.here(CONFIG)
    notebook.cell("x = Config(); x.lr = 1 + replica_id")
    notebook.here("held = list(x)")
    assert notebook.cell("x.lr *= 10; x.itself = x").bound == ["x"]
    notebook.here("seen = [(one.lr, one.itself is one) for one in held], x[1] is held[1]")
    assert notebook.user_ns["seen"] == ([(10, True), (20, True)], True)
    assert notebook.cell("x.lr = 3").bound == ["x"]
    notebook.here("seen = [one.lr for one in held], x[0] is held[0]")
    assert notebook.user_ns["seen"] == ([3, 3], True)


@pytest.mark.parametrize("replica", [0, 1])
def test_an_object_that_one_replica_alone_has_is_changed_here(notebook, replica):
    notebook.here(CONFIG)
    notebook.cell("x = Config(); y = x", replicas=[replica])
    notebook.here("held = x")
    notebook.cell("y.lr = 5 + replica_id")
    notebook.here("seen = held.lr, held is x")
    assert notebook.user_ns["seen"] == (5 + replica, True)


@pytest.mark.parametrize("replica", [0, 1])
def test_of_objects_that_each_replica_has_of_its_own_one_is_changed_by_another_name(notebook, replica):
    notebook.here(CONFIG)
    notebook.cell("x = Config(); x.lr = replica_id")
    notebook.here("y = x")
    notebook.cell("y.lr += 5", replicas=[replica])
    notebook.cell("found = x.lr, x is y")
    assert notebook.user_ns["found"][replica] == (5 + replica, True)
    assert notebook.user_ns["found"][1 - replica][0] == 1 - replica


def test_objects_that_hold_each_other_and_what_the_cell_has_made_stay_one_in_each_of_them(notebook):
    notebook.here(f"{CONFIG}config = Config(){TRAINER}config.trainer = trainer")
    returned = notebook.cell(
        "made = [trainer]; trainer.made = config.made = made; config.lr = 7; early = [made, config]"
    )
    assert (returned.bound, returned.altered) == (["config", "early", "made", "trainer"], [])
    notebook.here(
        "same = [one is held for one in (trainer, config.trainer, made[0])]\n"
        "same += [one is made for one in (held.made, config.made, early[0])]\n"
        "same += [trainer.config is config, early[1] is config]"
    )
    assert (notebook.user_ns["same"], notebook.user_ns["config"].lr) == ([True] * 8, 7)


def test_a_configuration_loaded_from_a_file_is_one_on_both_sides_with_what_its_functions_read(notebook, tmp_path):
    (tmp_path / "configuration.py").write_text(
        "rate = 1\nsizes = [1]\nclass Kind: pass\ndef both(): return rate, sizes\n"
    )
    notebook.here(
        "import importlib.util\n"
        "def load():\n"
        f"    spec = importlib.util.spec_from_file_location('configuration', {str(tmp_path / 'configuration.py')!r})\n"
        "    made = importlib.util.module_from_spec(spec)\n"
        "    spec.loader.exec_module(made)\n"
        "    return made\n"
        "config = load()"
    )
    notebook.cell("found = config.both()")
    notebook.here("config.rate = 2; config.sizes.append(2)")
    notebook.cell("found = config.both(); config.rate = 3; kind = config.Kind()")
    assert notebook.user_ns["found"] == (2, [1, 2])
    notebook.here("seen = config.rate, config.both(), type(kind) is config.Kind")
    assert notebook.user_ns["seen"] == (3, (3, [1, 2]), True)
    notebook.cell("found = config.both()")
    assert notebook.sent == []
    notebook.cell("other = load()")
    notebook.here("other.rate = 5")
    notebook.cell("found = other.both()")
    assert notebook.user_ns["found"] == (5, [1])


@pytest.mark.parametrize("side", ["cell", "here"])
@pytest.mark.parametrize(
    ("make", "change", "look"),
    [
        (
            "pandas.DataFrame({'a': [1, 2]})",
            "x.loc[2] = 3; x['b'] = list('xyz'); x.attrs['c'] = 1",
            "x.to_dict(), x.attrs",
        ),
        ("pandas.DataFrame({'a': [1, 2]})", "del x['a']; x.index = [5, 6]", "x.shape, list(x.index)"),
        ("pandas.Series([1, 2], name='a')", "x.loc[2] = 3; x.name = 'b'", "x.tolist(), x.name"),
        ("string.Template('$a')", "x.template = '$b'; x.seen = [1]", "x.template, x.seen"),
        ("networkx.path_graph(3)", "x.remove_edge(0, 1); x.nodes[0]['a'] = 1", "list(x.edges), x.nodes[0]"),
        ("torch.distributions.Normal(torch.zeros(2), torch.ones(2))", "x.loc += 1; x.of = 3", "x.loc.tolist(), x.of"),
        ("array.array('d', [1])", "x.append(2); x[0] = 3", "x.tolist()"),
    ],
)
def test_a_table_or_the_like_that_either_side_changes_is_changed_on_the_other_wherever_it_is_held(
    notebook, side, make, change, look
):
    notebook.here(f"import array, networkx, pandas, string; x = {make}; held = [x]")
    notebook.cell("there = {'x': x}")
    getattr(notebook, side)(change)
    notebook.here(f"seen = x is held[0], {look}")
    notebook.cell(f"found = x is there['x'], {look}")
    notebook.here(f"x = {make}\n{change}\nexpected = True, {look}")
    assert notebook.user_ns["seen"] == notebook.user_ns["found"] == notebook.user_ns["expected"]


@pytest.mark.parametrize(
    "change",
    [
        "trainer.other = replica_id",
        "if replica_id: trainer.other = 1",
        "import threading; trainer.other = threading.Lock()",
        "trainer.other = torch.zeros(1_000_000)",
    ],
)
def test_an_object_that_cannot_be_here_what_it_is_there_is_told_of(notebook, change):
    notebook.here(f"{CONFIG}config = Config(){TRAINER}")
    assert "trainer" in notebook.cell(change).altered
    notebook.here("same = trainer is held, trainer.config is config, trainer.other")
    assert notebook.user_ns["same"] == (True, True, None)


def test_an_object_that_a_cell_changes_stays_as_it_is_on_both_sides_where_replicas_differ_and_is_told_of(notebook):
    notebook.here(f"{CONFIG}x = Config(); same = x")
    assert notebook.cell("x.lr = 5 + replica_id").altered == ["x"]
    assert notebook.cell("x.lr = 6 + replica_id").altered == []
    assert notebook.user_ns["same"] is notebook.user_ns["x"]
    assert (notebook.user_ns["x"].lr, notebook.there("x").lr) == (1, 6)
    assert notebook.names.withheld == []
    notebook.here("x.sizes.append(3)")
    notebook.cell("x")
    assert notebook.names.withheld == ["x", "x"]
    assert (notebook.sent, notebook.there("x").sizes) == ([], [])
    for replica in range(2):
        # As `%mirror push` does.
        notebook.names.shared.outdate(replica, ["x"])
    notebook.cell("x")
    assert (notebook.sent, notebook.there("x").lr) == (["x"], 1)
    notebook.here("x.lr = 2")
    notebook.cell("x")
    assert notebook.there("x").lr == 2


def test_a_container_that_a_cell_changes_comes_back_though_objects_are_in_it(notebook):
    notebook.here(f"{CONFIG}x = [Config()]")
    assert notebook.cell("x[0].lr = 5").bound == ["x"]
    assert notebook.user_ns["x"][0].lr == 5


@pytest.mark.parametrize(
    ("change", "look"),
    [
        ("CFG.lr = 2", "CFG.lr"),
        ("CFG.lr = 2", "rate()"),
        ("CFG.layers.append(3)", "CFG.layers"),
        ("CFG.twice = lambda self: 20", "CFG().twice()"),
        ("def more(self): return 5\nCFG.more = more", "made.more()"),
    ],
)
def test_what_the_notebook_changed_of_a_class_is_sent_anew(notebook, change, look):
    notebook.here(
        "class CFG:\n    lr = 1\n    layers = [1, 2]\n    def twice(self): return 2 * self.lr\n"
        "made = CFG()\ndef rate(): return CFG.lr"
    )
    notebook.cell("y = CFG.lr, rate(), made.twice()")
    notebook.cell("y = CFG.lr, rate(), made.twice()")
    assert notebook.sent == []
    notebook.here(change)
    notebook.cell(f"y = {look}")
    assert notebook.user_ns["y"] == eval(look, notebook.user_ns)


FILLS = """
import functools
history, stats, kept = [], {}, []
def log(x): history.append(x)
@torch.no_grad()
def note(x): stats['last'] = x
class Log:
    def add(self, x): kept.append(x)
logger, both = Log(), functools.partial(log, 3.0)
"""


@pytest.mark.parametrize("call", ["log(3.0)", "note(3.0)", "logger.add(3.0)", "both()", "Log().add(3.0)"])
def test_what_functions_fill_comes_back_though_the_cell_does_not_name_it(notebook, call):
    notebook.here(FILLS)
    notebook.cell(call)
    assert 3.0 in [*notebook.user_ns["history"], *notebook.user_ns["kept"], *notebook.user_ns["stats"].values()]


KEEPS = """
import functools
def make():
    n = 0
    def count():
        nonlocal n
        n += 1
        return n
    return count
def default(seen=[]):
    seen.append(1)
    return len(seen)
def counted(function):
    @functools.wraps(function)
    def calls():
        calls.count = 1 + getattr(calls, "count", 0)
        return function()
    return calls
class Log:
    n = 0
    def add(self, by=1):
        self.n += by
        return self.n
"""
KEEPING = {
    "a name of the function around it": "make()",
    "a default": "default",
    "an attribute": "counted(lambda: x.count)",
    "the function that it is around": "counted(make())",
    "an object of a partial": "functools.partial(Log().add, 1)",
}


@pytest.mark.parametrize("make", KEEPING.values(), ids=KEEPING)
def test_what_a_function_keeps_from_call_to_call_is_one_on_both_sides(notebook, make):
    notebook.here(f"{KEEPS}x = {make}; held = [x]")
    notebook.cell("x, held")
    notebook.here("own = x; y = x()")
    returned = notebook.cell("y = x()")
    assert (returned.bound, returned.altered) == (["x", "y"], [])
    notebook.here("assert y == 2; assert own is x is held[0]; assert held[0]() == 3")
    notebook.cell("y = held[0]()")
    notebook.here("assert y == 4; assert held[0] is own; assert x() == 5")


def test_what_a_function_keeps_of_each_replica_is_told_of(notebook):
    notebook.here(f"{KEEPS}x = default")
    notebook.cell("x")
    assert notebook.cell("x([replica_id]); x() if replica_id else None").altered == ["x"]
    notebook.here("assert x() == 1")
    assert notebook.fetch("x", 1)() == 2


def test_what_the_object_of_a_method_keeps_is_sent_anew_and_told_of(notebook):
    notebook.here(f"{KEEPS}x = Log().add")
    notebook.cell("x")
    notebook.here("y = x()")
    assert notebook.cell("y = x()").altered == ["x"]
    assert notebook.user_ns["y"] == 2
    notebook.user_ns["x"] = notebook.fetch("x", 0)
    assert notebook.user_ns["x"]() == 3


def test_a_function_has_names_of_the_one_around_it_bound_and_unbound_on_both_sides(notebook):
    notebook.here(
        "def make():\n    def x(value):\n        nonlocal n\n        if value: n = value\n        else: del n\n"
        "    if False: n = 0\n    return x\nx = make()"
    )
    notebook.cell("x(3)")
    notebook.here("assert x.__closure__[0].cell_contents == 3")
    notebook.cell("x(0)")
    with pytest.raises(ValueError, match="empty"):
        notebook.here("x.__closure__[0].cell_contents")


def test_a_function_in_a_container_is_another_once_it_keeps_something_else(notebook):
    notebook.here(f"{KEEPS}x = {{'count': make()}}")
    notebook.cell("x")
    notebook.here("x['count']()")
    assert notebook.cell("y = x['count']()").bound == ["x", "y"]
    assert notebook.user_ns["y"] == 2
    assert notebook.user_ns["x"]["count"]() == 3


def test_a_function_that_keeps_itself_is_sent_once(notebook):
    notebook.here("def make():\n    def down(n): return n and down(n - 1)\n    return down\nx = make()")
    notebook.cell("x(3)")
    assert notebook.cell("y = x(3)").altered == []
    assert notebook.sent == []


@pytest.mark.parametrize("over", ["data", "Subset(data, [1, 0])", "ConcatDataset([Subset(data, [1, 0]), data])"])
def test_a_data_set_that_is_changed_behind_its_loader_is_so_in_the_replicas(notebook, over):
    notebook.here(
        "from torch.utils.data import ConcatDataset, DataLoader, Subset\n"
        "class Data:\n    factor = 1\n    def __len__(self): return 2\n"
        f"    def __getitem__(self, i): return self.factor * (i + 1)\ndata = Data(); loader = DataLoader({over})"
    )
    look = "y = torch.cat(list(loader)).tolist()"
    notebook.cell(look)
    notebook.here("data.factor = 10")
    notebook.cell(look)
    assert notebook.user_ns["y"] == eval(look[4:], notebook.user_ns)
    notebook.cell(look)
    assert notebook.sent == []


@pytest.mark.parametrize("over", ["Data()", "Subset(Data(), [1, 0])", "ConcatDataset([Data(), Data()])"])
@pytest.mark.parametrize("held", ["loader", "loaders['train']"])
@pytest.mark.parametrize("examples", [2, 20_000])
def test_a_data_set_without_a_name_is_changed_behind_its_loader(notebook, over, held, examples):
    notebook.here(
        "from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset\n"
        f"class Data(Dataset):\n    factor = 1\n    def __init__(self): self.names = ['x'] * {examples}\n"
        "    def __len__(self): return 2\n"
        f"    def __getitem__(self, i): return self.factor * (i + 1)\nloader = DataLoader({over})\n"
        "loaders = {'train': loader}"
    )
    look = f"y = torch.cat(list({held})).tolist()"
    notebook.cell(look)
    notebook.here(
        "inner = loader.dataset\n"
        "while not isinstance(inner, Data):\n"
        "    inner = inner.datasets[0] if hasattr(inner, 'datasets') else inner.dataset\n"
        "inner.factor = 10; del inner"
    )
    notebook.cell(look)
    assert notebook.user_ns["y"] == eval(look[4:], notebook.user_ns)
    notebook.cell(look)
    assert notebook.sent == []


EXAMPLES = {
    "named tensors": ("x = torch.ones(2, 1)\ndata = TensorDataset(x)", "x.mul_(3)"),
    "large named tensors": ("x = torch.ones(2, 20_000)\ndata = TensorDataset(x)", "x.mul_(3)"),
    "tensors": ("data = TensorDataset(torch.ones(2, 1))", "data.tensors[0].mul_(3)"),
    "large tensors": (
        "data = Subset(TensorDataset(torch.ones(2, 20_000)), [0, 1])",
        "data.dataset.tensors[0].mul_(3)",
    ),
    "a tensor": ("data = torch.ones(2, 1)", "data.mul_(3)"),
    "a list": ("data = [1.0, 1.0]", "data[:] = [3.0, 3.0]"),
    "an object with a large tensor": ("data = Data(torch.ones(2, 20_000))", "data.x.mul_(3)"),
    "an object with a large array": ("data = Data(np.ones((2, 20_000)))", "data.x *= 3"),
    "an object of a class derived from torch's": ("data = Mine(torch.ones(2, 1))", "data.factor = 3"),
}


@pytest.mark.parametrize("forgotten", [False, True])
@pytest.mark.parametrize("examples", EXAMPLES)
def test_examples_that_are_changed_behind_their_loader_are_so_in_the_replicas(notebook, examples, forgotten):
    makes, changes = EXAMPLES[examples]
    notebook.here(
        "import numpy as np\nfrom torch.utils.data import DataLoader, Dataset, Subset, TensorDataset\n"
        "class Data(Dataset):\n    def __init__(self, x): self.x = x\n    def __len__(self): return len(self.x)\n"
        "    def __getitem__(self, i): return self.x[i]\n"
        "class Mine(TensorDataset):\n    factor = 1\n"
        "    def __getitem__(self, i): return self.factor * self.tensors[0][i]\n"
        f"{makes}\nloader = DataLoader(data)\ndef change(data): {changes}" + ("\ndel data" if forgotten else "")
    )
    look = "y = float(sum((batch[0] if type(batch) is list else batch).mean() for batch in loader))"
    notebook.cell(look)
    assert notebook.user_ns["y"] == 2
    notebook.here("change(loader.dataset)")
    notebook.cell(look)
    assert notebook.user_ns["y"] == 6
    notebook.cell(look)
    assert notebook.sent == []


AROUND = {
    "a sampler": ("by = Order()\nloader = DataLoader(rows, sampler=by)", "loader.sampler.last = True"),
    "a sampler of batches": (
        "by = BatchSampler(Order(), 2, False)\nloader = DataLoader(rows, batch_sampler=by)",
        "loader.batch_sampler.sampler.last = True",
    ),
    "weights": (
        "by = WeightedRandomSampler(torch.tensor([1.0, 0.0]), 4)\nloader = DataLoader(rows, sampler=by)",
        "loader.sampler.weights[:] = torch.tensor([0.0, 1.0])",
    ),
    "a collate_fn": ("by = Collate()\nloader = DataLoader(rows, collate_fn=by)", "loader.collate_fn.plus = 1"),
    "options of a collate_fn": (
        "by = {'plus': 0}\nloader = DataLoader(rows, collate_fn=partial(Collate.joined, by))",
        "loader.collate_fn.args[0]['plus'] = 1",
    ),
}


@pytest.mark.parametrize("forgotten", [False, True])
@pytest.mark.parametrize("around", AROUND)
def test_samplers_and_functions_of_a_loader_that_are_changed_are_so_in_the_replicas(notebook, around, forgotten):
    makes, changes = AROUND[around]
    notebook.here(
        "from functools import partial\n"
        "from torch.utils.data import BatchSampler, DataLoader, Sampler, WeightedRandomSampler\n"
        "class Order(Sampler):\n    last = False\n    def __init__(self): pass\n    def __len__(self): return 2\n"
        "    def __iter__(self): return iter([int(self.last)] * 2)\n"
        "class Collate:\n    plus = 0\n    def __call__(self, rows): return self.joined(vars(self), rows)\n"
        "    @staticmethod\n    def joined(options, rows): return torch.tensor(rows[:1]) + options.get('plus', 0)\n"
        f"rows = [0, 1]\n{makes}" + ("\ndel by" if forgotten else "")
    )
    look = "y = next(iter(loader))[0].item()"
    notebook.cell(look)
    assert notebook.user_ns["y"] == 0
    notebook.here(changes)
    notebook.cell(look)
    assert notebook.user_ns["y"] == 1
    notebook.cell(look)
    assert notebook.sent == []


KEPT = ("loader", "by", "rows", "x")
BEHIND = {
    "a sampler": ("loader.sampler.last = 1", "by.last"),
    "a sampler that counts": ("list(loader)", "by.passes"),
    "a list of examples": ("rows[0] = 1", "rows[0]"),
    "a tensor": ("x; loader.dataset.datasets[1].tensors[0].fill_(1)", "x.item()"),
}


@pytest.mark.parametrize("behind", BEHIND)
def test_what_a_cell_changes_behind_a_loader_and_has_a_name_is_here_too(notebook, behind):
    changes, now = BEHIND[behind]
    notebook.here(
        "import torch\nfrom torch.utils.data import ConcatDataset, DataLoader, Sampler, TensorDataset\n"
        "class Order(Sampler):\n    last = passes = 0\n    def __init__(self): pass\n    def __len__(self): return 2\n"
        "    def __iter__(self):\n        self.passes += 1\n        return iter([self.last] * 2)\n"
        "by, rows, x = Order(), [0, 2, 3], torch.zeros(1)\n"
        "loader = DataLoader(ConcatDataset([rows, TensorDataset(x)]), sampler=by)\nmade = loader, by, rows, x"
    )
    returned = notebook.cell(f"loader; {changes}")
    assert returned.altered == []
    assert eval(now, notebook.user_ns) == 1
    assert all(now is one for now, one in zip(map(notebook.user_ns.get, KEPT), notebook.user_ns["made"], strict=True))
    notebook.cell("loader")
    assert notebook.sent == []
    notebook.here("by.last = 2")
    notebook.cell("y = next(iter(loader)).item()")
    assert notebook.user_ns["y"] == 3


def test_what_is_changed_behind_a_loader_without_a_name_or_by_each_replica_in_its_own_way_stays_there(notebook):
    notebook.here(
        "from torch.utils.data import DataLoader\nclass Data(list):\n    seen = 0\n"
        "data, x = Data([1]), [1]\nnamed, nameless, plain = DataLoader(data), DataLoader(Data([1])), DataLoader(x)"
    )
    assert notebook.cell("named.dataset.seen = replica_id + 1").altered == ["data"]
    assert notebook.cell("nameless.dataset.seen = 1").altered == ["nameless"]
    assert notebook.cell("plain.dataset[0] = replica_id").altered == ["plain"]
    assert (notebook.user_ns["data"].seen, notebook.user_ns["x"]) == (0, [1])


def test_a_loader_of_a_stream_and_one_without_examples_are_sent_once(notebook):
    notebook.here(
        "from torch.utils.data import DataLoader, IterableDataset, Sampler\n"
        "class Stream(IterableDataset):\n    last = 2\n    def __iter__(self): return iter(range(self.last))\n"
        "class Nothing(Sampler):\n    def __init__(self): pass\n    def __len__(self): return 0\n"
        "    def __iter__(self): return iter([])\n"
        "stream, none = DataLoader(Stream()), DataLoader([1], batch_sampler=Nothing())"
    )
    look = "y = len(list(stream)), len(list(none))"
    notebook.cell(look)
    notebook.here("stream.dataset.last = 3")
    notebook.cell(look)
    assert notebook.user_ns["y"] == (3, 0)
    notebook.cell(look)
    assert notebook.sent == []


def test_what_cells_change_of_a_class_is_here_unless_each_replica_changes_it_in_its_own_way(notebook):
    notebook.here("class CFG:\n    best = None\n    lr = 1\ndef note(x): CFG.best = x\nmade, known = CFG(), CFG")
    notebook.cell("CFG.best = 5")
    assert notebook.user_ns["made"].best == 5
    notebook.cell("note(6)")
    notebook.here("CFG.lr = 2")
    notebook.cell("y = CFG.best, CFG.lr")
    assert notebook.user_ns["y"] == (6, 2)
    returned = notebook.cell("CFG.best = replica_id")
    assert returned.altered == ["CFG"]
    assert notebook.user_ns["CFG"] is notebook.user_ns["known"]
    assert notebook.user_ns["CFG"].best == 6


CONTAINERS = {
    "list": ("[1]", "x.append(2)", [1, 2]),
    "dict": ("{'a': 1}", "x['b'] = 2", {"a": 1, "b": 2}),
    "set": ("{1}", "x.add(2)", {1, 2}),
    "bytearray": ("bytearray(b'1')", "x.append(50)", bytearray(b"12")),
    "deque": ("collections.deque([1], maxlen=2)", "x.append(2)", deque([1, 2])),
    "defaultdict": ("collections.defaultdict(list, a=1)", "x['b'] = 2", {"a": 1, "b": 2}),
    "Counter": ("collections.Counter(a=1)", "x['b'] = 2", {"a": 1, "b": 2}),
    "OrderedDict": ("collections.OrderedDict(a=1)", "x['b'] = 2; x.move_to_end('a')", OrderedDict(b=2, a=1)),
}


@pytest.mark.parametrize(("made", "change", "then"), CONTAINERS.values(), ids=CONTAINERS)
def test_who_has_a_container_in_the_notebook_sees_what_a_cell_changes_in_it(notebook, made, change, then):
    notebook.here(f"import collections\nx = {made}; other = x; held = [x]")
    assert notebook.cell(change).bound == ["x"]
    assert notebook.user_ns["x"] == then
    assert notebook.user_ns["other"] is notebook.user_ns["held"][0] is notebook.user_ns["x"]
    notebook.cell("x")
    assert notebook.sent == []


@pytest.mark.parametrize(("made", "change", "then"), CONTAINERS.values(), ids=CONTAINERS)
def test_who_has_a_container_in_the_replicas_sees_what_the_notebook_changes_in_it(notebook, made, change, then):
    notebook.here(f"import collections\nx = {made}")
    notebook.cell("class Holder: pass\nholder = Holder(); holder.x = x")
    notebook.here(change)
    notebook.cell("seen = x; same = holder.x is x")
    assert notebook.user_ns["seen"] == then
    assert notebook.user_ns["same"]


def test_a_defaultdict_has_the_factory_that_it_was_given_last(notebook):
    notebook.here("import collections\nx = collections.defaultdict(int)")
    notebook.cell("x['a']; x.default_factory = str")
    assert notebook.user_ns["x"]["b"] == ""
    notebook.here("x.default_factory = float")
    notebook.cell("seen = x['c']")
    assert type(notebook.user_ns["seen"]) is float


def test_a_list_that_a_cell_extends_by_an_operator_is_the_same_list(notebook):
    notebook.here("x = [1]; other = x")
    notebook.cell("x += [2]")
    assert notebook.user_ns["other"] is notebook.user_ns["x"]
    assert notebook.user_ns["other"] == [1, 2]


def test_a_container_that_a_cell_makes_anew_is_another_one(notebook):
    notebook.here("x = [1]; other = x")
    notebook.cell("x = [*x, 2]")
    assert (notebook.user_ns["x"], notebook.user_ns["other"]) == ([1, 2], [1])


def test_a_container_that_became_another_on_each_replica_leaves_the_notebooks_as_it_was(notebook):
    notebook.here("x = [1]; other = x")
    notebook.cell("x.append(replica_id)")
    assert notebook.user_ns["x"].values == ([1, 0], [1, 1])
    assert notebook.user_ns["other"] == [1]


def test_two_names_of_one_container_stay_two_names_of_one_container(notebook):
    notebook.here("x = y = [1]")
    notebook.cell("x.append(2); y.append(3)")
    assert notebook.user_ns["x"] is notebook.user_ns["y"]
    assert notebook.user_ns["x"] == [1, 2, 3]
    notebook.here("x.append(4)")
    notebook.cell("same = x is y; n = len(x)")
    assert notebook.user_ns["same"]
    assert notebook.user_ns["n"] == 4


def test_a_container_that_holds_itself_is_changed_too(notebook):
    notebook.here("x = [1]; x.append(x)")
    notebook.cell("x")
    notebook.here("x.append(2)")
    notebook.cell("seen = x[1] is x, len(x)")
    assert notebook.user_ns["seen"] == (True, 3)


def test_what_one_container_has_of_another_is_that_other_one_in_the_replicas(notebook):
    notebook.here("losses = [1]; logs = {'loss': losses}")
    notebook.cell("logs, losses")
    notebook.here("losses.append(2); logs['n'] = 2")
    notebook.cell("same = logs['loss'] is losses; n = len(losses)")
    assert notebook.user_ns["same"]
    assert notebook.user_ns["n"] == 2


IMAGE = "img = MAKE; opt = torch.optim.SGD([img], 0.1)"


STEP = "opt.zero_grad(); ((img - 1) ** 2).sum().backward(); opt.step()"


@pytest.mark.parametrize("make", ["torch.zeros(3, requires_grad=True)", "nn.Parameter(torch.zeros(3))"])
def test_what_an_optimizer_trains_in_no_network_is_one_tensor_on_either_side(notebook, make):
    notebook.here(IMAGE.replace("MAKE", make))
    notebook.cell(STEP)
    assert notebook.user_ns["opt"].param_groups[0]["params"][0] is notebook.user_ns["img"]
    assert notebook.user_ns["img"].tolist() == pytest.approx([0.2] * 3)
    notebook.here("with torch.no_grad(): img.clamp_(0, 0.1)")
    notebook.cell(STEP)
    assert notebook.user_ns["img"].tolist() == pytest.approx([0.28] * 3)
    notebook.here(STEP)
    assert notebook.user_ns["img"].tolist() == pytest.approx([0.424] * 3)
    notebook.here("img.data = torch.zeros(2)")
    notebook.cell("seen = opt.param_groups[0]['params'][0] is img, img.shape[0]")
    assert notebook.user_ns["seen"] == (True, 2)


def test_a_tensor_of_no_network_that_a_cell_gives_an_optimizer_is_so_here(notebook):
    notebook.here("temp = nn.Parameter(torch.ones(1)); net = nn.Linear(2, 1)")
    notebook.here("opt = torch.optim.SGD(net.parameters(), 0.1)")
    notebook.cell("opt.add_param_group({'params': [temp], 'lr': 0.5})")
    groups = notebook.user_ns["opt"].param_groups
    assert [len(group["params"]) for group in groups] == [2, 1]
    assert groups[1]["params"][0] is notebook.user_ns["temp"]
    assert groups[1]["lr"] == 0.5


def test_an_optimizer_that_a_cell_makes_over_tensors_of_no_network_is_here_with_them(notebook):
    notebook.cell(IMAGE.replace("MAKE", "nn.Parameter(torch.zeros(3))") + "; held = {'opt': opt}")
    image, opt = notebook.user_ns["img"], notebook.user_ns["opt"]
    assert opt.param_groups[0]["params"][0] is image
    assert notebook.user_ns["held"]["opt"] is opt
    notebook.cell(STEP)
    assert notebook.user_ns["img"] is image
    assert image.tolist() == pytest.approx([0.2] * 3)
    notebook.here(STEP)
    notebook.cell("again = torch.optim.SGD([img], 0.1); " + STEP)
    assert notebook.user_ns["again"].param_groups[0]["params"][0] is image
    assert image.tolist() == pytest.approx([0.488] * 3)


def test_an_optimizer_over_tensors_without_a_name_says_why_it_stays(notebook):
    returned = notebook.cell("many = [nn.Parameter(torch.zeros(3))]; opt = torch.optim.SGD(many, 0.1)")
    assert returned.stayed == ["opt"]
    assert "it is over a tensor that has no name of its own" in repr(notebook.user_ns["opt"])


LOOSE = """
class Line:
    def __init__(self): self.w, self.rest = MAKE, [1]
x = HOLDER; opt = torch.optim.SGD([WHERE], 0.1)
"""


@pytest.mark.parametrize("make", ["torch.zeros(3, requires_grad=True)", "nn.Parameter(torch.zeros(3))"])
@pytest.mark.parametrize(
    ("holder", "where"),
    [("{'w': MAKE}", "x['w']"), ("[MAKE]", "x[0]"), ("Line()", "x.w"), ("[Line()]", "x[0].w"), ("(MAKE,)", "x[0]")],
)
@pytest.mark.parametrize("earlier", ["pass", "y = x"])
def test_a_tensor_without_a_name_that_an_optimizer_trains_is_one_on_both_sides(notebook, make, holder, where, earlier):
    step = f"opt.zero_grad(); (1 - {where}).sum().backward(); opt.step()"
    trained = f"{where}, opt.param_groups[0]['params'][0]"
    notebook.here(LOOSE.replace("HOLDER", holder).replace("WHERE", where).replace("MAKE", make))
    notebook.cell(earlier)
    for i in range(3):
        notebook.cell(step)
        held, own = eval(trained, notebook.user_ns)
        assert held is own
        assert held.tolist() == pytest.approx([0.2 * i + 0.1] * 3)
        notebook.here(step)
        assert own.tolist() == pytest.approx([0.2 * i + 0.2] * 3)
    notebook.cell(f"same = {where} is opt.param_groups[0]['params'][0]; values = {where}.tolist()")
    assert notebook.user_ns["same"]
    assert notebook.user_ns["values"] == pytest.approx([0.6] * 3)


def test_a_tensor_without_a_name_stays_that_of_its_optimizer_where_it_gets_another_one(notebook):
    notebook.here("x = [torch.zeros(3, requires_grad=True)]; opt = torch.optim.SGD(x, 0.1)")
    notebook.cell("opt.step()")
    notebook.here("again = x[0]; more = torch.optim.Adam(x); twice = [again, x[0]]")
    notebook.cell("y = more; x[0].data += 1; one = twice[0] is twice[1] is x[0] is more.param_groups[0]['params'][0]")
    assert notebook.user_ns["one"]
    assert notebook.user_ns["more"].param_groups[0]["params"][0] is notebook.user_ns["again"]
    assert notebook.user_ns["twice"][1] is notebook.user_ns["x"][0] is notebook.user_ns["again"]
    assert notebook.user_ns["again"].tolist() == [1] * 3


@pytest.mark.parametrize(
    ("make", "where"),
    [
        ("x = [nn.Parameter(torch.zeros(1))]; opt = torch.optim.SGD(x, 0.1, 0.5)", "x[0]"),
        ("net = nn.Linear(1, 1); net.weight.data[:] = 0; opt = torch.optim.SGD([net.weight], 0.1, 0.5)", "net.weight"),
    ],
)
def test_other_parameters_that_the_notebook_has_put_into_an_optimizer_are_trained_in_cells(notebook, make, where):
    step = f"opt.zero_grad(); {where}.sum().backward(); opt.step()"
    notebook.here(make)
    notebook.cell("y = opt")
    notebook.here(step)
    notebook.here(
        f"old, {where} = {where}, nn.Parameter({where}.detach() + 1)\n"
        f"opt.param_groups[0]['params'][0] = {where}; opt.state[{where}] = opt.state.pop(old); del old"
    )
    notebook.cell(f"{step}; y = {where}.tolist()")
    parameter = eval(where, notebook.user_ns)
    assert notebook.user_ns["opt"].param_groups[0]["params"][0] is parameter
    # With the moments that it has there.
    assert parameter.flatten().tolist() == [pytest.approx(0 - 0.1 + 1 - 0.1 * 1.5)]
    assert parameter.tolist() == notebook.user_ns["y"]


def test_a_larger_tensor_that_a_cell_puts_in_the_place_of_an_optimizers_has_its_place_here(notebook):
    notebook.here("x = [nn.Parameter(torch.zeros(1))]; opt = torch.optim.SGD(x, 0.1)")
    own = notebook.user_ns["x"][0]
    notebook.cell("x[0] = opt.param_groups[0]['params'][0] = nn.Parameter(torch.ones(3))")
    assert notebook.user_ns["opt"].param_groups[0]["params"][0] is notebook.user_ns["x"][0] is own
    assert own.tolist() == [1] * 3
    notebook.cell("same = x[0] is opt.param_groups[0]['params'][0]; x[0].data += 1")
    assert notebook.user_ns["same"]
    assert own.tolist() == [2] * 3


def test_a_tensor_without_a_name_that_differs_is_each_replicas_own_beside_that_of_the_optimizer(notebook):
    notebook.here("x = [nn.Parameter(torch.zeros(3))]; opt = torch.optim.SGD(x, 0.1)")
    own = notebook.user_ns["x"][0]
    notebook.cell("opt.step(); x = [x[0]] * 2; x[0].data += 1 + replica_id")
    values = notebook.user_ns["x"]
    assert [value[0].tolist() for value in values] == [[1] * 3, [2] * 3]
    assert all(type(value[0]) is type(own) and value[0] is value[1] and value[0] is not own for value in values)
    assert own.tolist() == [0] * 3


def test_an_attribute_that_either_side_deletes_from_a_class_is_gone_on_the_other(notebook):
    notebook.here(
        "class Base:\n    lr = 1\nclass CFG(Base):\n    lr, wd, kept = 2, 3, 4\n    def f(self): return self.kept"
    )
    notebook.cell("x = CFG.lr, CFG.wd")
    notebook.here("del CFG.wd, CFG.lr")
    notebook.cell("x = hasattr(CFG, 'wd'), CFG.lr, CFG().f()")
    assert notebook.user_ns["x"] == (False, 1, 4)
    notebook.cell("del CFG.kept\nCFG.new = 5")
    assert not hasattr(notebook.user_ns["CFG"], "kept")
    assert notebook.user_ns["CFG"].new == 5


def test_a_container_whose_name_a_thread_has_given_to_another_kind_is_there_anew(notebook):
    notebook.here("x = [1]")
    notebook.cell("x")
    for replica in notebook.replicas:
        replica.names["x"] = {}
    notebook.here("x.append(2)")
    notebook.cell("seen = x")
    assert notebook.user_ns["seen"] == [1, 2]


def test_a_view_and_what_it_looks_at_share_their_memory_in_the_replicas(notebook):
    notebook.here("flat = torch.zeros(100); head = flat[:10]")
    notebook.cell("flat += 1\nfound = float(head[0])")
    assert notebook.user_ns["found"] == 1


def test_what_a_class_does_with_each_new_one_like_it_is_done_once(notebook):
    base = (
        "class Base:\n    known = []\n    def __init_subclass__(cls, *, of): Base.known.append((cls.__name__, of))\n"
    )
    notebook.here(f"{base}class Own(Base, of=1): pass\nown = Own()")
    notebook.cell("found = list(type(own).known)")
    assert notebook.user_ns["found"] == [("Own", 1)]
    notebook.cell("class More(Base, of=2): pass\nmore = More()\nfound = list(Base.known)")
    assert notebook.user_ns["found"] == [("Own", 1), ("More", 2)]
    assert notebook.user_ns["Base"].known == [("Own", 1), ("More", 2)]
    # Of those that are made here it hears as before.
    notebook.here("class Last(Base, of=3): pass")
    assert notebook.user_ns["Base"].known[-1] == ("Last", 3)


META = """
class Meta({base}):
    known = {{}}
    def __new__(mcs, name, bases, own, *, of):
        made = super().__new__(mcs, name, bases, own)
        mcs.known[name] = made
        return made
    def __init__(cls, name, bases, own, *, of):
        super().__init__(name, bases, own)
        cls.order = len(Meta.known), of
class Base(metaclass=Meta, of=1):
    def way(self): return 1
"""


@pytest.mark.parametrize(("base", "own"), [("type", "Own"), ("abc.ABCMeta", "Abstract")])
@pytest.mark.parametrize("first", ["here", "cell"])
def test_a_metaclass_that_keeps_its_classes_has_those_that_have_the_names(notebook, first, base, own):
    look = "[(one is globals()[one.__name__], one().way(), *one.order) for one in Meta.known.values()]"
    seen = [(True, 1, 1, 1), (True, 2, 2, 2), (True, 3, 3, 3)]
    own += first  # All tests' classes are in this process.
    notebook.here("import abc")
    getattr(notebook, first)(META.format(base=base))
    notebook.cell(f"class {own}(Base, of=2):\n    def way(self): return 2\nseen = {look}")
    assert notebook.user_ns["seen"] == eval(look, notebook.user_ns) == seen[:2]
    notebook.here(f"class More({own}, of=3):\n    def way(self): return 3")
    notebook.cell(f"more = More()\nseen = {look}")
    assert notebook.user_ns["seen"] == eval(look, notebook.user_ns) == seen


def test_a_class_that_keeps_its_objects_has_here_those_that_a_cell_makes_and_what_it_changes_in_them(notebook):
    notebook.here(
        "class Run:\n    all = {}\n    def __init__(self, name): self.losses = []; Run.all[name] = self\n"
        "Run('a'); Run('b')"
    )
    assert notebook.cell("for run in Run.all.values(): run.losses.append(1)\nRun('c')").altered == []
    assert eval("[run.losses for run in Run.all.values()]", notebook.user_ns) == [[1], [1], []]


def test_flags_that_a_cell_combines_are_no_change_of_their_class(notebook):
    notebook.here("import enum\nclass Flags(enum.Flag): A, B, C = 1, 2, 4")
    assert notebook.cell("both = Flags.A | Flags.B").altered == []
    notebook.here("others = Flags.A | Flags.C")
    notebook.cell("all = others | both")
    assert notebook.sent == ["others"]
    assert notebook.user_ns["all"] is notebook.user_ns["Flags"](7)


LEARNER = """
class Learner:
    def __init__(self): self.rate, self.losses, self.old, self.net = 1, [], 1, nn.Linear(1, 1)
    def fit(self): self.loss = (replica_id, self.rate, hasattr(self, "old"))
"""


@pytest.fixture
def learner(notebook) -> Notebook:
    """A notebook with an object, `learn`, that each replica has changed in its own way."""
    notebook.here(f"{LEARNER}learn = also = Learner(); trainers = [learn]")
    assert notebook.cell("learn.fit(); learn.losses.append(replica_id)").altered == ["learn"]
    return notebook


def test_what_the_notebook_sets_in_an_object_that_differs_in_the_replicas_is_sent(learner):
    for rate in (2, 3):
        learner.here(f"learn.rate = {rate}\nif rate == 3: del learn.old".replace("rate ==", f"{rate} =="))
        learner.cell("learn.fit(); y = learn.loss; z = learn.losses")
        assert (learner.sent, learner.names.withheld) == (["learn"], [])
        assert learner.user_ns["y"].values == ((0, rate, rate == 2), (1, rate, rate == 2))
        assert learner.user_ns["z"].values == ([0], [1])
    learner.cell("y = learn.rate, also is learn is trainers[0]")
    assert learner.user_ns["y"] == (3, True)
    assert learner.sent == ["also", "trainers"]


def test_what_it_held_is_not_kept(learner):
    learner.here("learn.output = torch.zeros(3)")
    learner.cell("learn.fit()")
    kept = [learner.user_ns["learn"].output, learner.there("learn").output]
    outputs = [weakref.ref(output) for output in kept]
    del kept
    learner.cell("learn.fit(); learn.output = None; import gc; gone = gc.collect()")
    learner.here("learn.output = None")
    assert [output() for output in outputs] == [None, None]


def test_a_network_that_is_set_there_is_mirrored(learner):
    learner.here("learn.net = nn.Linear(2, 1)")
    learner.cell("with torch.no_grad():\n    for p in learn.net.parameters(): p.fill_(7)")
    assert learner.names.withheld == []
    assert learner.user_ns["learn"].net.weight.tolist() == [[7, 7]]


@pytest.mark.parametrize(
    "change",
    [
        "learn.loss = 1",
        "learn.losses.append(7)",
        "learn.rate = 2; learn.losses.append(7)",
        "learn.rate = 2; learn.loss = 1",
    ],
)
def test_what_both_sides_have_changed_in_an_object_stays_as_it_is_on_both(learner, change):
    learner.here(change)
    learner.cell("y = learn.losses, learn.rate")
    assert (learner.sent, learner.names.withheld) == ([], ["learn", "learn"])
    assert learner.user_ns["y"].values == (([0], 1), ([1], 1))


def test_what_replicas_set_later_is_theirs_from_then_on(learner):
    learner.here("learn.rate = 2")
    learner.cell("learn.rate += 1 + replica_id")
    learner.here("learn.rate = 9")
    learner.cell("y = learn.rate")
    assert learner.names.withheld == ["learn", "learn"]
    assert learner.user_ns["y"].values == (3, 4)


def test_what_a_replica_that_begins_anew_is_filled_with_has_what_the_notebook_sets(learner):
    learner.names.restored(1, 0, ())
    learner.here("learn.rate = 2")
    learner.cell("y = learn.rate")
    assert (learner.names.withheld, learner.user_ns["y"]) == ([], 2)


UNBOUND = {
    "in a branch": "if replica_id > 5: x = made = 0",
    "in a loop over nothing": "for x in (): pass",
    "in a handler": "try: pass\nexcept ValueError as x: pass",
    "after the end": "try:\n    1 / 0\n    x = 0\nexcept ZeroDivisionError: pass",
    "in a match": "match 1:\n    case [x]: pass",
    "by an import": "if replica_id > 5: import os as x",
    "in a condition": "replica_id > 5 and (x := 0)",
}
VALUES = {
    "another number": ("x = 1", "x = 2", "x"),
    "another list": ("x = [1]", "x = [2]", "x"),
    "a list in place": ("x = [1]", "x.append(2)", "x"),
    "a tensor in place": ("x = torch.ones(2)", "x += 1", "x.tolist()"),
    "an object": ("import types; x = types.SimpleNamespace(y=1)", "x.y = 2", "x.y"),
    "a function": ("def x(): return 1", "def x(): return 2", "x()"),
    "nothing": ("x = 1", "x = None", "x"),
    "a network": ("x = nn.Linear(2, 2)", "x = nn.Linear(2, 3)", "x.out_features"),
    "a part of a network": ("x = nn.Sequential(nn.Tanh())", "x[0] = nn.ReLU()", "repr(x)"),
    "values of a network": (
        "x = nn.Linear(1, 1)",
        "with torch.no_grad(): x.weight.fill_(2)",
        "float(x.weight.detach().sum())",
    ),
}


@pytest.mark.parametrize("first", ["here", "there"])
@pytest.mark.parametrize("source", UNBOUND.values(), ids=UNBOUND)
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_what_a_cell_binds_on_no_line_that_runs_stays_what_it_is_here(notebook, first, source, value):
    made, changed, look = value
    notebook.here("import torch; from torch import nn")
    notebook.here(made) if first == "here" else notebook.cell("import torch; from torch import nn\n" + made)
    notebook.cell("x")
    notebook.here(changed)
    notebook.here(f"before = {look}")
    notebook.cell(source)
    notebook.here(f"assert {look} == before, {look}")
    notebook.cell(f"there = {look}")
    notebook.here("assert there == before, there")


@pytest.mark.parametrize("value", ["None", "1", "[1]", "'a'"])
def test_what_a_cell_binds_to_the_very_value_that_it_had_there_is_here(notebook, value):
    notebook.here(f"x = {value}")
    notebook.cell("x")
    notebook.here("x = 2")
    notebook.cell(f"if True: x = {value}")
    notebook.here(f"assert x == {value}")


def test_what_one_replica_alone_binds_is_here_as_a_new_name_would_be(notebook):
    notebook.here("x = 1")
    notebook.cell("x")
    notebook.here("x = 2")
    notebook.cell("if replica_id == 1: x = 3")
    notebook.here("assert x == 3")


@pytest.mark.parametrize("body", ["x = 1", "\n    if False: x = 3", "return [g() for g in [lambda: set_it()]]"])
@pytest.mark.parametrize("where", ["here", "there before", "there"])
def test_what_a_function_binds_is_here_and_what_it_does_not_bind_stays(notebook, body, where):
    source = f"def set_it():\n    global x\n    x = 1\ndef change():\n    global x\n    {body}"
    notebook.here("x = 1")
    notebook.cell("x" if where != "there before" else f"x\n{source}")
    notebook.here("x = 2")
    if where == "here":
        notebook.here(source)
    notebook.cell(f"{source if where == 'there' else 'pass'}\nchange()")
    notebook.here(f"assert x == {2 if 'False' in body else 1}, x")


@pytest.mark.parametrize(
    "source",
    [
        "for i in (): x = i\nx.y = 2",
        "x.y = 2\nif replica_id > 5: x = 0",
        "x.y = 2; x = x",
        "def change(it):\n    it.y = 2\n    return it\nx = change(x)",
    ],
)
def test_an_object_that_a_cell_changes_and_may_bind_is_one_with_what_holds_it(notebook, source):
    notebook.here("class It: y = 0\nx = It()")
    notebook.cell("held = [x, {'x': x}]")
    notebook.here("own = x")
    notebook.cell(source)
    notebook.here("assert x is own is held[0] is held[1]['x']; assert x.y == 2")
    notebook.cell("x.y = 3")
    notebook.here("assert own.y == 3")


@pytest.mark.parametrize("how", ["x = None", "del x", "x, y = 1, x", "x = type(x)()", "import copy; x = copy.copy(x)"])
@pytest.mark.parametrize("where", ["here", "there"])
@pytest.mark.parametrize(
    ("made", "changed", "look"),
    [
        ("x = {'loss': []}", "x['loss'].append(2)", "kept[0]['loss']"),
        ("x = []", "x.append(2)", "kept[0]"),
        ("class It: y = []\nx = It()", "x.y = [2]", "kept[0].y"),
        ("import torch; x = torch.zeros(1)", "x += 2", "kept[0].tolist()"),
    ],
)
def test_what_a_cell_has_changed_and_let_go_of_is_changed_where_it_is_kept(notebook, how, where, made, changed, look):
    if where == "here":
        notebook.here(f"{made}\nkept = [x]; apart = [1]")
    else:
        notebook.cell(f"{made}\nkept = [x]; apart = [1]")
    notebook.here("own = kept")
    returned = notebook.cell(f"{changed}\n{how}")
    notebook.here(f"assert {look} == [2], {look}\nassert own is kept")
    assert {*returned.bound, *returned.deleted} <= {"x", "y", "copy"}
    assert {name for name in notebook.user_ns if "before" in name} == set()
    assert all({name for name in replica.names if "before" in name} == set() for replica in notebook.replicas)


@pytest.mark.parametrize("changed", ["", "x.append(3); "])
@pytest.mark.parametrize("swap", ["x, y = y, x", "z = x; x = y; y = z; del z"])
def test_names_that_a_cell_swaps_have_each_others_objects(notebook, swap, changed):
    notebook.here("x, y = [1], [2]; held = {'x': x, 'y': y}")
    notebook.cell(f"{changed}{swap}")
    notebook.here("assert x is held['y'] and y is held['x'], (x, y, held)")
    notebook.here(f"assert (x, y) == ([2], {[1, 3] if changed else [1]}), (x, y)")
    notebook.cell("y.append(4)")
    notebook.here("assert held['x'][-1] == 4")


def test_a_container_that_is_given_an_equal_object_has_that_one(notebook):
    notebook.here("x, y = [1], [1]; held = [x]")
    notebook.cell("held[0] = y")
    notebook.here("assert held[0] is y; y.append(2)")
    notebook.cell("n = len(held[0])")
    notebook.here("assert n == 2")


@pytest.mark.parametrize("made", ["def it(): return 1", "class it: pass", "it = lambda: 1"])
@pytest.mark.parametrize("where", ["here", "there"])
def test_a_function_or_a_class_is_the_one_that_has_the_name_wherever_a_cell_puts_it(notebook, made, where):
    notebook.here("import functools\nclass Holder: pass\nx, holder = {}, Holder()")
    if where == "here":
        notebook.here(made)
    notebook.cell(f"{made if where == 'there' else 'it'}\nx['it'] = it; holder.it = it; y = functools.partial(it)")
    notebook.here("assert x['it'] is holder.it is y.func is it")


def test_an_object_comes_back_though_a_list_of_its_class_has_a_name(notebook):
    notebook.here(
        "class It:\n    n = 0\n    all = []\nx = It(); everything = []; It.all = everything; x.all.append(1)"
    )
    assert notebook.cell("x.n += 1").altered == []
    notebook.here("assert x.n == 1; assert It.all is everything and type(x) is It")


def test_a_class_has_what_its_base_has_too(notebook):
    notebook.here("class A:\n    n = 0\nclass B(A): pass")
    notebook.cell("B.n += 1; A.n += 1")
    notebook.here("assert vars(B)['n'] == 1; A.n += 1; assert B.n == 1")
    notebook.cell("A.n = 5; n = B.n")
    notebook.here("assert n == 1")


def test_a_list_that_a_cell_gives_a_network_is_the_one_that_has_the_name(notebook):
    notebook.here(f"{NET}\nlosses = [1]")
    notebook.cell("net.losses = losses")
    notebook.here("assert net.losses is losses")
    notebook.cell("losses.append(2)")
    notebook.cell("net.losses.append(3)")
    notebook.here("assert net.losses is losses; assert losses == [1, 2, 3], losses")


@pytest.mark.parametrize("where", ["here", "there"])
def test_a_part_of_a_network_that_is_gone_here_is_told_of(notebook, where):
    made = "part = nn.Linear(2, 1)\nnet = nn.Sequential(part, nn.Linear(1, 1))"
    if where == "here":
        notebook.here(made)
    notebook.cell(made if where == "there" else "net, part")
    notebook.here("net = nn.Sequential(part, nn.Linear(1, 1))")
    notebook.cell("with torch.no_grad(): part.weight.fill_(3)")
    notebook.here("assert part.weight.tolist() == [[3, 3]], part.weight; assert net[0] is part")
    notebook.cell("with torch.no_grad(): net[0].weight.mul_(2); net[1].bias.fill_(1)")
    notebook.here("assert part.weight.tolist() == [[6, 6]]; assert net[1].bias.item() == 1")
    notebook.cell("with torch.no_grad(): part.weight.fill_(4)")
    notebook.here("assert part.weight.tolist() == [[4, 4]]")


def test_a_function_of_a_cell_reads_the_notebooks_value_of_what_no_line_has_bound(notebook):
    notebook.here("x = 1")
    notebook.cell("x")
    notebook.here("x = 2")
    notebook.cell("def look(): return x\nif replica_id > 5: x = 3\nseen = look()")
    notebook.here("assert (seen, x) == (2, 2), (seen, x)")


def test_a_list_that_a_class_has_is_the_one_that_has_the_name(notebook):
    notebook.here("class It: pass\nx = []; It.all = x")
    notebook.cell("It.all.append(1)")
    notebook.here("assert It.all is x; assert x == [1]")
    notebook.cell("x.append(2)")
    notebook.cell("It.all = x = [3]")
    notebook.here("assert It.all is x; assert x == [3]; x.append(4)")
    notebook.cell("n = sum(It.all)")
    notebook.here("assert n == 7")


def test_an_object_comes_back_whose_network_and_optimizer_a_cell_has_made_anew(notebook):
    notebook.here(
        "class Trainer:\n    def build(self):\n        self.net = nn.Linear(1, 1)\n"
        "        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)\n"
        "        with torch.no_grad(): self.net.weight.fill_(3)\n"
        "trainer = Trainer(); trainer.build(); own = trainer.net"
    )
    for _ in range(2):
        assert notebook.cell("trainer.build()").altered == []
        notebook.here("assert trainer.net is not own; own = trainer.net; assert own.weight.item() == 3")
        notebook.here("assert trainer.optimizer.param_groups[0]['params'][0] is own.weight")


@pytest.mark.parametrize("make", ["iter([0, 1, 2])", "iter(range(3))", "map(int, '012')", "zip([0, 1, 2])"])
def test_an_iterator_goes_on_from_where_the_other_side_has_left_it(notebook, make):
    notebook.here(f"x = {make}")
    notebook.cell("first = next(x)")
    notebook.here("second = next(x)")
    notebook.cell("third = next(x)")
    given = [notebook.user_ns[name] for name in ("first", "second", "third")]
    assert [one[0] if isinstance(one, tuple) else one for one in given] == [0, 1, 2]


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="this Python pickles no itertools")
@pytest.mark.filterwarnings("ignore:Pickle, copy, and deepcopy support:DeprecationWarning")
def test_a_count_goes_on_from_where_the_other_side_has_left_it(notebook):
    notebook.here("import itertools; x = itertools.count()")
    notebook.cell("first = next(x)")
    notebook.here("second = next(x)")
    notebook.cell("third = next(x)")
    assert [notebook.user_ns[name] for name in ("first", "second", "third")] == [0, 1, 2]


def test_examples_that_the_notebook_chooses_anew_are_those_of_the_next_cell(notebook):
    notebook.here(
        "from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset\n"
        "data = TensorDataset(torch.arange(6.)); chosen = Subset(data, [0, 1, 2])\n"
        "loader = DataLoader(data, sampler=SubsetRandomSampler([0])); loaders = {'chosen': DataLoader(chosen)}"
    )
    notebook.cell("seen = len(loaders['chosen']), len(loader)")
    notebook.here("chosen.indices.append(3); loader.sampler.indices.append(1)")
    notebook.cell("seen = len(loaders['chosen']), len(loader)")
    assert notebook.user_ns["seen"] == (4, 2)
