"""Random numbers of NumPy and Python, files in memory, and estimators: they stand where either side left them."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

from mirror_nb.noticing.streams import is_stream, move, place

STREAMS = {
    "numpy": ("import numpy as np; x = np.random.default_rng(1)", "x.random()"),
    "numpy, half used": ("import numpy as np; x = np.random.default_rng(1)", "int(x.integers(9, dtype='int32'))"),
    "numpy, old": ("import numpy as np; x = np.random.RandomState(1)", "x.randn()"),
    "python": ("import random; x = random.Random(1)", "x.gauss()"),
    "text": ("import io; x = io.StringIO('first')", "x.seek(x.tell() + 1), x.write('more'), x.getvalue()"),
    "bytes": ("import io; x = io.BytesIO(b'first')", "x.write(b'more'), x.truncate(3), x.getvalue(), x.tell()"),
}


@pytest.mark.parametrize(("make", "draw"), STREAMS.values(), ids=STREAMS)
def test_notebook_and_cells_go_on_from_where_the_other_one_left_a_stream(notebook, make, draw):
    notebook.here(f"{make}\nheld = [x]")
    for number in range(6):
        (notebook.cell if number % 2 else notebook.here)(f"drawn_{number} = {draw}")
        notebook.cell("same = held[0] is x")
        assert notebook.user_ns["same"]
    assert notebook.user_ns["held"] == [notebook.user_ns["x"]]
    alone: dict[str, object] = {}
    exec(make, alone)
    drawn = [eval(draw, alone) for _ in range(6)]
    assert [notebook.user_ns[f"drawn_{number}"] for number in range(6)] == drawn


def test_a_stream_that_replicas_left_in_different_places_stays_in_each_until_it_is_pulled(notebook):
    notebook.here("import numpy as np; rng = np.random.default_rng(1)")
    returned = notebook.cell("drawn = [rng.random() for _ in range(replica_id)]")
    assert "rng" in returned.altered
    notebook.here("first = rng.random()")
    assert notebook.user_ns["first"] == notebook.user_ns["drawn"][1][0]


def test_what_a_process_draws_from_by_itself_is_no_stream_that_travels():
    generators = random.random.__self__, np.random.random.__self__  # type: ignore[attr-defined]
    assert not any(map(is_stream, generators))
    assert is_stream(random.Random(1))


def test_functions_of_random_draw_from_what_each_process_has(notebook):
    notebook.here("import random as r\nfrom random import randint, random\nfrom numpy.random import rand")
    returned = notebook.cell("randint(0, 9), rand(), random(); r.seed(1); drawn = random()")
    assert not returned.altered
    assert notebook.user_ns["drawn"] == random.Random(1).random()
    functions = {"randint": random.randint, "random": random.random, "rand": np.random.rand}
    for names in (notebook.user_ns, notebook.replicas[1].names):
        assert {name: names[name] for name in functions} == functions


def test_the_environment_by_its_own_name_is_that_of_each_process(notebook, monkeypatch):
    monkeypatch.setenv("MIRROR_NB_TEST", "before")
    notebook.here("import os\nfrom os import environ\nheld = {'variables': environ}")
    returned = notebook.cell("environ['MIRROR_NB_TEST'] = 'after'; own = held['variables'] is environ is os.environ")
    assert notebook.user_ns["own"]
    assert not returned.altered
    assert notebook.user_ns["environ"] is notebook.user_ns["held"]["variables"] is os.environ


def test_a_stream_is_not_bound_to_the_one_that_it_was_moved_to():
    one, other = np.random.default_rng(1), np.random.default_rng(2)
    where = place(one)
    first = one.random()
    move(other, where)
    assert other.random() == first


def test_an_estimator_that_either_side_fits_is_fitted_on_both(notebook):
    pytest.importorskip("sklearn")
    notebook.here("from sklearn.preprocessing import StandardScaler\nscaler = StandardScaler(); steps = [scaler]")
    notebook.cell("_ = scaler.fit([[1.], [3.]])")
    scaler = notebook.user_ns["scaler"]
    assert scaler.mean_.tolist() == [2.0]
    assert notebook.user_ns["steps"] == [scaler]
    notebook.here("_ = scaler.fit([[5.]])")
    notebook.cell("mean = steps[0].mean_.tolist()")
    assert notebook.user_ns["mean"] == [5.0]
