"""What the controller sets for all of its code: told where it has changed, and set in the replicas."""

from __future__ import annotations

import enum
import importlib
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import matplotlib
import numpy as np
import pandas
import pytest
import torch
from cycler import cycler
from IPython.core.events import EventManager, available_events

import mirror_nb as mnb
from mirror_nb.environment import plot_settings, surroundings
from mirror_nb.environment.reporting import Filter, Logger, filters, rest, set_filters, set_loggers, settle
from mirror_nb.environment.surroundings import changes, current, follow


@pytest.fixture
def own() -> Iterator[None]:
    """Leave this process as it was."""
    path, folder, before = list(sys.path), os.getcwd(), current()
    yield
    sys.path[:] = path
    now = current()
    # pytest has other filters in each phase of a test.
    before.others["warnings"] = now.others["warnings"]
    after = changes(now, before)
    if after is not None:
        follow(after)
    assert os.getcwd() == folder
    assert current() == before


def test_a_process_that_has_set_nothing_tells_nothing(own):
    torch.set_default_dtype(torch.float32)
    assert changes(current(), current()) is None
    made = "from mirror_nb import Model; from mirror_nb.environment import surroundings as it"
    fresh = f"{made}; print(it.changes(it.at_start(), it.current()))"
    done = subprocess.run([sys.executable, "-c", fresh], capture_output=True, text=True, timeout=120)
    assert done.stdout == "None\n", done.stderr


@pytest.mark.parametrize("module", ["numpy", "numpy.exceptions"], ids=["NumPy 1", "NumPy 2"])
def test_what_numpy_filters_by_itself_is_not_told(module):
    before = filters()
    with warnings.catch_warnings():
        warnings.simplefilter("always", type("RankWarning", (UserWarning,), {"__module__": module}))
        assert filters() == before


def test_what_has_changed_is_told_and_followed(own, tmp_path, monkeypatch):
    monkeypatch.setenv("MIRROR_NB_KEPT", "1")
    monkeypatch.setenv("MIRROR_NB_GONE", "1")
    before = current()
    os.chdir(tmp_path)
    sys.path.insert(0, str(tmp_path))
    monkeypatch.setenv("MIRROR_NB_NEW", "2")
    monkeypatch.delenv("MIRROR_NB_GONE")
    torch.set_default_dtype(torch.float64)
    torch.backends.cudnn.benchmark = True
    now = current()
    told = changes(before, now)
    assert told is not None
    assert told.environment == {"MIRROR_NB_NEW": "2", "MIRROR_NB_GONE": None}
    back = changes(now, before)
    assert back is not None
    follow(back)
    assert "MIRROR_NB_NEW" not in os.environ
    assert os.environ["MIRROR_NB_GONE"] == "1"
    assert torch.get_default_dtype() is torch.float32
    follow(told)
    # Paths are only added: what a cell of the replica put there stays.
    assert current() == now


class Own(UserWarning):
    pass


class Level(enum.IntEnum):
    LOUD = 5


REPORTS = {
    "nothing is warned of": ("warnings", lambda: warnings.simplefilter("ignore")),
    "some warnings": ("warnings", lambda: warnings.filterwarnings("error", "odd .*", Own, "mine", 3)),
    "a level": ("logging", lambda: logging.getLogger("mirror_nb_test").setLevel(logging.INFO)),
    "a level of one's own": ("logging", lambda: logging.getLogger("mirror_nb_test").setLevel(Level.LOUD)),
    "an import's level": ("logging", lambda: logging.getLogger("torch_of_mine").setLevel(logging.INFO)),
    "nothing is logged": ("logging", lambda: logging.disable(logging.ERROR)),
    "a logger is off": ("logging", lambda: setattr(logging.getLogger("mirror_nb_test"), "disabled", True)),
    "a logger by itself": ("logging", lambda: setattr(logging.getLogger("mirror_nb_test"), "propagate", False)),
    "warnings are logged": ("logged warnings", lambda: logging.captureWarnings(True)),
    "tensors": ("tensors", lambda: torch.set_printoptions(precision=2, sci_mode=False)),
    "arrays": ("arrays", lambda: np.set_printoptions(precision=2, suppress=True)),
    "tables": ("tables", lambda: pandas.set_option("display.max_rows", 5, "display.float_format", "{:.1f}".format)),
    "plots": ("plots", lambda: matplotlib.rcParams.update({"lines.linewidth": 7, "axes.prop_cycle": cycler(c="rg")})),
}


def test_a_function_of_ones_own_that_prints_arrays_stays(own):
    if "override_repr" not in np.get_printoptions():
        pytest.skip("needs NumPy 2.1")
    before = current()
    try:
        np.set_printoptions(precision=2, override_repr=lambda array: "an array")
        told = changes(before, current())
        assert told is not None
        assert pickle.loads(pickle.dumps(told)).others["arrays"]["precision"] == 2
    finally:
        np.set_printoptions(override_repr=None)


@pytest.mark.parametrize(("name", "change"), REPORTS.values(), ids=REPORTS)
def test_how_a_process_reports_is_told_alone_and_followed(own, name, change):
    with warnings.catch_warnings():
        before = current()
        change()
        now = current()
        told, back = changes(before, now), changes(now, before)
        assert told is not None
        assert back is not None
        assert list(told.others) == [name]
        assert (told.settings, told.environment, told.path) == ({}, {}, ())
        pickled = pickle.dumps((told, back))
        # The other side has no class of this side's.
        assert Level.__name__.encode() not in pickled
        told, back = pickle.loads(pickled)
        # Followed alone it takes nothing away that was here.
        follow(told)
        assert current() == now
        if name != "warnings":
            follow(back)
            assert current() == before


def test_how_figures_look_is_as_there_once_matplotlib_is_imported_and_where_they_are_drawn_is_not_told(own):
    followed = (
        "import sys; from mirror_nb.environment import plot_settings as it; "
        "it.set_settings({'lines.linewidth': 7.0}); assert 'matplotlib' not in sys.modules; "
        "import matplotlib; print(matplotlib.rcParams['lines.linewidth'], it.settings()); "
        "it.set_settings({}); print(matplotlib.rcParams['lines.linewidth'], it.settings())"
    )
    done = subprocess.run([sys.executable, "-c", followed], capture_output=True, text=True, timeout=120)
    assert done.stdout == "7.0 {'lines.linewidth': 7.0}\n1.5 {}\n", done.stderr
    with matplotlib.rc_context({"backend": "svg", "interactive": True}):
        assert current().others["plots"] == {}


def test_how_pandas_shows_tables_is_as_there_once_it_is_imported(own):
    followed = (
        "import sys; from mirror_nb.environment import table_settings as it; "
        "wanted = {'display.max_rows': 5, 'display.float_format': '{:.1f}', 'display.no_such': 1}; "
        "it.set_settings(wanted); assert 'pandas' not in sys.modules; "
        "import pandas; print(pandas.Series([1.25]).to_string(), list(it.settings())); "
        "pandas.set_option('display.max_rows', 9); it.set_settings({**wanted, 'display.width': 50}); "
        "print(pandas.get_option('display.max_rows'), pandas.get_option('display.width')); "
        "it.set_settings({}); print(pandas.get_option('display.max_rows'), it.settings()); "
        "pandas.set_option('display.float_format', lambda x: 'x'); print(it.settings())"
    )
    done = subprocess.run([sys.executable, "-c", followed], capture_output=True, text=True, timeout=120)
    shown = "0   1.2 ['display.float_format', 'display.max_rows']\n9 50\n60 {}\n{}\n"
    assert done.stdout == shown, done.stderr


def test_colours_of_an_array_and_effects_of_the_notebooks_own_hinder_no_cell(own):
    class Here:
        __module__ = "__main__"

    with matplotlib.rc_context({"path.effects": [Here()]}):
        assert current().others["plots"] == {}
        # Once of as many colours as there were before: they are compared.
        for colours in (10, 5):
            matplotlib.rcParams["axes.prop_cycle"] = cycler(color=np.linspace(0, 1, 4 * colours).reshape(colours, 4))
            before = current()
            assert changes(before, current()) is None
            matplotlib.rcParams["axes.prop_cycle"] = cycler(color=np.ones((colours, 4)))
            assert list(changes(before, current()).others) == ["plots"]


def test_what_a_cell_has_set_of_figures_stays_where_the_notebook_sets_something_else(own):
    with matplotlib.rc_context():
        plot_settings.set_settings({"lines.linewidth": 7.0})
        matplotlib.rcParams["lines.linewidth"] = 9.0
        plot_settings.set_settings({"lines.linewidth": 7.0, "savefig.bbox": None, "font.size": 4.0})
        assert [matplotlib.rcParams[name] for name in ("lines.linewidth", "font.size")] == [9.0, 4.0]
        plot_settings.set_settings({})
        assert matplotlib.rcParams["lines.linewidth"] == matplotlib.rcParamsOrig["lines.linewidth"]


def test_a_filter_for_warnings_of_a_module_comes_when_that_is_imported(own, tmp_path, monkeypatch):
    (tmp_path / "mirror_nb_warns.py").write_text(
        "class Odd(UserWarning): pass\nclass Home:\n    class Odd(Odd): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    wanted = (
        Filter("error", "", "mirror_nb_warns:Home.Odd", "", 0),
        Filter("ignore", "", "mirror_nb_warns:Odd", "", 0),
        Filter("error", "", "mirror_nb_warns:Missing", "", 0),
    )
    with warnings.catch_warnings():
        set_filters(wanted)
        assert "mirror_nb_warns" not in sys.modules
        settle()
        module = importlib.import_module("mirror_nb_warns")
        settle()
        warnings.warn("not seen", module.Odd, stacklevel=1)
        with pytest.raises(module.Home.Odd):
            warnings.warn("seen", module.Home.Odd, stacklevel=1)
        set_filters(())
        with pytest.warns(module.Home.Odd):
            warnings.warn("seen", module.Home.Odd, stacklevel=1)


def test_lines_for_the_screen_and_for_a_file_are_written_as_there(own, tmp_path, capsys, monkeypatch):
    class Loud(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return super().format(record).upper()

    before, logger, path = current(), logging.getLogger("mirror_nb_test"), str(tmp_path / "lines.log")
    handlers = [
        logging.StreamHandler(sys.__stdout__),
        logging.StreamHandler(sys.__stderr__),
        logging.FileHandler(path),
    ]
    for handler, formatter in zip(
        handlers, (logging.Formatter("%(levelname)s %(message)s"), Loud(), None), strict=True
    ):
        handler.setFormatter(formatter)
        logger.addHandler(handler)
    handlers[1].setLevel(logging.ERROR)
    told = changes(before, current())
    for handler in handlers:
        logger.removeHandler(handler)
        handler.close()
    assert told is not None
    follow(told)
    logger.warning("one")
    logger.error("two")
    assert capsys.readouterr() == ("WARNING one\nERROR two\n", "TWO\n")
    assert Path(path).read_text() == "one\ntwo\n"
    monkeypatch.setenv("RANK", "1")
    follow(told)
    # The first replica writes it.
    logger.error("three")
    assert capsys.readouterr() == ("ERROR three\n", "THREE\n")
    assert Path(path).read_text() == "one\ntwo\n"


def test_lines_of_a_handler_that_has_a_console_are_written_to_its_file(own, capsys):
    before, logger, handler = current(), logging.getLogger("mirror_nb_test"), logging.Handler()
    # As rich's has one.
    handler.console = types.SimpleNamespace(file=sys.__stdout__)  # type: ignore[attr-defined]
    logger.addHandler(handler)
    told = changes(before, current())
    logger.removeHandler(handler)
    assert told is not None
    follow(told)
    logger.error("one")
    assert capsys.readouterr().out == "one\n"


def test_names_of_levels_are_as_there(own, monkeypatch):
    before = current()
    monkeypatch.setattr(logging, "_levelToName", dict(logging._levelToName))
    monkeypatch.setattr(logging, "_nameToLevel", dict(logging._nameToLevel))
    logging.addLevelName(25, "NOTICE")
    logging.addLevelName(logging.WARNING, "careful")
    told = changes(before, current())
    monkeypatch.undo()
    assert told is not None
    assert told.others == {"levels": {"NOTICE": 25, "careful": logging.WARNING}}
    monkeypatch.setattr(logging, "_levelToName", dict(logging._levelToName))
    monkeypatch.setattr(logging, "_nameToLevel", dict(logging._nameToLevel))
    follow(told)
    assert (logging.getLevelName(25), logging.getLevelName(logging.WARNING)) == ("NOTICE", "careful")


class Kept(logging.Handler):
    """Keeps what it gets, as a user's class does."""

    def __init__(self, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def kept() -> Iterator[list[Kept]]:
    """Two handlers of a logger, the second of them for errors alone."""
    logger, handlers = logging.getLogger("mirror_nb_test"), [Kept(), Kept(logging.ERROR)]
    for handler in handlers:
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handlers
    logger.setLevel(logging.NOTSET)
    for handler in handlers:
        logger.removeHandler(handler)


def test_handlers_of_ones_own_class_get_what_the_first_replica_logs(two, kept):
    def log() -> None:
        logger = logging.getLogger("mirror_nb_test.part")
        logger.debug("too little")
        logger.info("%s of %d", torch.ones(1), 2, extra={"of_mine": torch.zeros(1)})
        try:
            {}["no such key"]
        except KeyError:
            logger.exception("an error")

    two.run(log)
    every, errors = kept
    assert [record.getMessage() for record in every.records] == ["tensor([1.]) of 2", "an error"]
    assert every.records[0].of_mine == "tensor([0.])"
    assert [record.getMessage() for record in errors.records] == ["an error"]
    assert (
        logging.Formatter("%(name)s: %(message)s")
        .format(errors.records[0])
        .startswith("mirror_nb_test.part: an error\nTraceback")
    )


def test_handlers_of_ones_own_class_get_what_a_mirrored_cell_logs_and_nothing_is_shown_for_it(shell, capsys, kept):
    shell.run_cell("%%mirrored\nimport logging\nlogging.getLogger('mirror_nb_test').info('in a cell')")
    assert [record.getMessage() for record in kept[0].records] == ["in a cell"]
    shown = capsys.readouterr()
    assert "in a cell" not in shown.out + shown.err
    assert "differing" not in shown.out


def test_a_workers_lines_for_a_handler_of_ones_own_are_shown(two, kept, capfd):
    def log() -> None:
        process = multiprocessing.get_context("fork").Process(
            target=lambda: logging.getLogger("mirror_nb_test").info("a line")
        )
        process.start()
        process.join()

    two.run(log)
    assert kept[0].records == []
    assert "a line" in capfd.readouterr().err


@pytest.mark.parametrize("make", [lambda: logging.StreamHandler(sys.__stdout__), Kept], ids=["screen", "own class"])
def test_a_handler_that_user_code_has_added_on_both_sides_gets_each_line_once(own, make):
    before, logger, handler = current(), logging.getLogger("mirror_nb_test"), make()
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.addHandler(handler)
    told = changes(before, current())
    assert told is not None
    follow(told)
    assert logger.handlers == [handler]
    logger.removeHandler(handler)
    follow(told)
    assert len(logger.handlers) == 1


def test_a_log_file_that_is_written_anew_has_the_lines_of_both_sides(own, tmp_path):
    before, logger = current(), logging.getLogger("mirror_nb_test")
    handler = logging.FileHandler(tmp_path / "lines.log", mode="w")
    logger.addHandler(handler)
    told = changes(before, current())
    assert told is not None
    logger.removeHandler(handler)
    follow(told)
    for number in range(3):
        logger.error(f"there {number}")
        handler.emit(logging.makeLogRecord({"msg": f"here {number}"}))
    handler.close()
    text = "".join(f"there {number}\nhere {number}\n" for number in range(3))
    assert (tmp_path / "lines.log").read_text() == text


def test_what_filters_drop_is_dropped_there_too(own, capsys):
    before, logger = current(), logging.getLogger("mirror_nb_test")
    handler = logging.StreamHandler(sys.__stdout__)
    handler.addFilter(lambda record: "key" not in record.getMessage())
    logger.addFilter(shy := logging.Filter("mirror_nb_test"))
    logger.addFilter(quiet := lambda record: "token" not in record.getMessage())
    logger.addHandler(handler)
    told = changes(before, current())
    logger.removeHandler(handler)
    for one in (shy, quiet):
        logger.removeFilter(one)
    assert told is not None
    told = pickle.loads(pickle.dumps(told))
    for _ in range(2):
        follow(told)
        for text in ("a key", "a token", "a line"):
            logger.warning(text)
        assert capsys.readouterr().out == "a line\n"
        assert len(logger.filters) == 2


def test_a_file_that_cannot_be_written_is_told_and_costs_nothing_else(own, tmp_path):
    before, logger = current(), logging.getLogger("mirror_nb_test")
    logger.addHandler(handler := logging.FileHandler(tmp_path / "lines.log"))
    told = changes(before, current())
    logger.removeHandler(handler)
    handler.close()
    (tmp_path / "lines.log").unlink()
    tmp_path.rmdir()
    assert told is not None
    with pytest.warns(UserWarning, match=r"what replicas log does not go to .*lines\.log"):
        follow(told)


def test_a_librarys_logger_is_set_again_when_the_library_is_imported_and_sets_its_own(own, tmp_path, monkeypatch):
    (tmp_path / "mirror_nb_logs.py").write_text(
        "import logging\nlogging.getLogger('mirror_nb_logs').setLevel(logging.INFO)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    logger = logging.getLogger("mirror_nb_logs")
    rest()
    set_loggers((Logger("mirror_nb_logs", logging.ERROR, None, False, ()),))
    importlib.import_module("mirror_nb_logs")
    assert logger.level == logging.ERROR
    # More of it is imported.
    logger.setLevel(logging.INFO)
    settle()
    assert logger.level == logging.ERROR
    logger.setLevel(logging.DEBUG)
    settle()
    assert logger.level == logging.DEBUG, "only once"
    rest()


def test_a_library_that_user_code_imports_is_set_up_by_that_from_then_on(own, tmp_path, monkeypatch):
    (tmp_path / "mirror_nb_logs_too.py").write_text(
        "import logging\nlogging.getLogger('mirror_nb_logs_too').setLevel(logging.INFO)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    logger = logging.getLogger("mirror_nb_logs_too")
    set_loggers((Logger("mirror_nb_logs_too", logging.ERROR, None, False, ()),))
    settle()
    importlib.import_module("mirror_nb_logs_too")
    assert logger.level == logging.ERROR
    logger.setLevel(logging.DEBUG)
    rest()
    settle()
    assert logger.level == logging.DEBUG
    rest()


def test_a_logger_that_a_replica_has_set_up_for_itself_stays(own):
    mine = logging.getLogger("mirror_nb_test_mine")
    mine.setLevel(logging.DEBUG)
    before = current()
    logging.getLogger("mirror_nb_test").setLevel(logging.INFO)
    told = changes(before, current())
    assert told is not None
    mine.addHandler(handler := logging.NullHandler())
    follow(told)
    assert mine.level == logging.DEBUG
    assert mine.handlers == [handler]
    mine.removeHandler(handler)


def test_what_libraries_log_to_they_set_up_by_themselves(own):
    theirs, before = logging.getLogger("numpy.ours"), current()
    theirs.addHandler(handler := logging.StreamHandler(sys.__stderr__))
    theirs.propagate = False
    assert changes(before, current()) is None
    theirs.setLevel(logging.ERROR)
    told = changes(before, current())
    assert told is not None
    theirs.setLevel(logging.NOTSET)
    follow(told)
    assert (theirs.level, theirs.propagate, theirs.handlers) == (logging.ERROR, False, [handler])
    theirs.setLevel(logging.NOTSET)
    theirs.propagate = True
    theirs.removeHandler(handler)


def test_variables_that_each_replica_has_its_own_of_are_not_told(own, monkeypatch):
    before = current()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "7")
    told = changes(before, current())
    assert told is not None
    assert told.environment == {}


def test_a_folder_that_is_gone_is_not_followed(own, tmp_path):
    here, before = os.getcwd(), current()
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    now = current()
    (tmp_path / "gone").rmdir()
    assert current().folder == ""
    os.chdir(here)
    told = changes(before, now)
    assert told is not None
    follow(told)
    assert os.getcwd() == here


def look() -> tuple[object, ...]:
    settings = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    return os.getcwd(), os.environ.get("MIRROR_NB_NEW"), *settings


def test_replicas_follow_before_each_call_and_in_all_in_each_cell_of_a_notebook(two, own, tmp_path, monkeypatch):
    (tmp_path / "mirror_nb_lying_here.py").write_text("VALUE = 5")
    two.run(look)
    sys.path.append(str(tmp_path))
    os.chdir(tmp_path)
    monkeypatch.setenv("MIRROR_NB_NEW", "1")
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = True

    def imports() -> int:
        import mirror_nb_lying_here

        return int(mirror_nb_lying_here.VALUE)

    assert two.run(imports) == 5
    assert two.run(look) == (str(tmp_path), "1", torch.float64, True, True)
    monkeypatch.setenv("MIRROR_NB_NEW", "2")
    torch.set_default_dtype(torch.float32)
    assert two.run(look)[1:3] == ("2", torch.float32)
    monkeypatch.delenv("MIRROR_NB_NEW")
    os.chdir("/")
    assert two.run(look)[:2] == ("/", None)
    torch.backends.cudnn.benchmark = False
    surroundings.new_moment()
    assert two.run(look)[4] is False


def test_kernels_that_the_notebook_does_without_replicas_do_without(two, own):
    def allowed() -> tuple[bool, ...]:
        cublas = torch.backends.cuda.matmul
        halves = cublas.allow_fp16_reduced_precision_reduction, cublas.allow_bf16_reduced_precision_reduction
        return torch.backends.cudnn.enabled, *halves

    assert two.run(allowed) == (True, True, True)
    torch.backends.cudnn.enabled = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    surroundings.new_moment()
    assert two.run(allowed) == (False, True, False)


def test_what_is_set_in_a_module_of_the_users_holds_in_the_replicas(two, own, tmp_path, monkeypatch):
    (tmp_path / "mirror_nb_rates.py").write_text("RATE = 0.5\ndef rate(): return RATE\n")
    monkeypatch.syspath_prepend(tmp_path)
    rates = importlib.import_module("mirror_nb_rates")

    def read() -> float:
        return float(rates.rate())

    assert [two.run(read) for _ in range(3)] == [0.5] * 3
    for rate in (0.25, 0.125):
        rates.RATE = rate
        assert two.run(read) == rate

    def set_there() -> None:
        rates.RATE = 3.0

    two.run(set_there)
    assert (two.run(read), rates.RATE) == (3.0, 0.125)
    with pytest.raises(mnb.ReplicaDied):
        two.run(lambda: os._exit(3) if mnb.get_replica_context().replica_id_in_sync_group else None)
    assert two.local_results(two.run(read)) == (3.0, 0.125)
    del sys.modules["mirror_nb_rates"]


@pytest.mark.parametrize(
    "change",
    [
        lambda: os.environ.update(MIRROR_NB_NEW="4"),
        lambda: sys.path.append("/nowhere"),
        lambda: os.chdir("/"),
        lambda: warnings.simplefilter("ignore"),
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.autograd.set_detect_anomaly(True),
        lambda: torch.set_float32_matmul_precision("high"),
    ],
)
def test_a_change_between_two_calls_shows_by_its_sign(own, change):
    with warnings.catch_warnings(), mock.patch.dict(os.environ):
        signs = surroundings.Signs()
        assert signs.hold()
        with torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled()):
            change()
            assert not signs.hold()
        assert surroundings.Signs().hold()


def test_a_moment_begins_with_each_cell_of_a_notebook_however_often_that_is_asked_for(monkeypatch):
    shell = mock.Mock()
    shell.events = EventManager(shell, available_events)
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    surroundings.follow_cells()
    surroundings.follow_cells()
    before = surroundings.moment
    shell.events.trigger("pre_run_cell", None)
    assert surroundings.moment == before + 1


def test_a_replica_that_is_started_anew_follows_too(two, own):
    assert two.run(torch.get_default_dtype) is not None
    torch.set_default_dtype(torch.float64)
    two.run(torch.get_default_dtype)
    with pytest.raises(mnb.ReplicaDied):
        two.run(lambda: os._exit(3) if mnb.get_replica_context().replica_id_in_sync_group else None)
    assert two.run(torch.get_default_dtype) is torch.float64


def test_a_variable_that_went_between_the_forkserver_and_a_replica_is_gone(two, monkeypatch):
    assert two.run(lambda: os.environ["TMPDIR"]) == os.environ["TMPDIR"]
    monkeypatch.delenv("TMPDIR")
    with mnb.MirroredStrategy(["cpu:0"]) as later:
        assert later.run(lambda: os.environ.get("TMPDIR")) is None


def test_what_a_replica_sets_for_itself_stays(two, own, monkeypatch):
    def sets() -> None:
        torch.backends.cudnn.deterministic = True

    two.run(sets)
    monkeypatch.setenv("MIRROR_NB_NEW", "3")
    surroundings.new_moment()
    assert two.run(lambda: torch.backends.cudnn.deterministic) is True


def test_precision_is_followed_by_its_new_names(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "import mirror_nb as mnb\n"
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'\n"
        "torch.backends.cudnn.conv.fp32_precision = 'ieee'\n"
        "with mnb.MirroredStrategy(['cpu:0', 'cpu:1']) as strategy:\n"
        "    b = torch.backends\n"
        "    print(strategy.run(lambda: (b.cuda.matmul.fp32_precision, b.cudnn.conv.fp32_precision)))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "('tf32', 'ieee')\n", done.stderr
