"""What the user sees raised, from reports that are built by hand."""

from __future__ import annotations

import linecache
import types
from typing import Any

import cloudpickle
import pytest
from driving import plain
from IPython.core.compilerop import CachingCompiler

from mirror_nb import RemoteException, ReplicaDied, ReplicaTimeout
from mirror_nb.devices import Device
from mirror_nb.messages import Done, Failure
from mirror_nb.notebook.closing_line import mended
from mirror_nb.pool.cells import told
from mirror_nb.pool.failures import raise_for, rebuilt
from mirror_nb.pool.report import Answer, Death, Report, alike

DEVICES = [Device("cuda", i) for i in range(4)]
OK = Answer(Done(1))


def plain_cell(monkeypatch: pytest.MonkeyPatch, text: str, number: int) -> str:
    """Have IPython know a cell; return the file that its code names."""
    monkeypatch.setattr(linecache, "cache", dict(linecache.cache))
    compiler = CachingCompiler()
    monkeypatch.setattr("IPython.get_ipython", lambda: types.SimpleNamespace(compile=compiler))
    return str(compiler.cache(text, number))


def failed(error: BaseException, **flags: Any) -> Answer:
    lines = ("Traceback", f"----> 3 {type(error).__name__} here", f"{type(error).__name__}: {error}")
    return Answer(Done(1, Failure(type(error).__name__, str(error), lines, cloudpickle.dumps(error), **flags)))


def freed() -> Answer:
    return failed(RuntimeError("freed"), secondary=True)


def stopped() -> Answer:
    return failed(KeyboardInterrupt(), interrupted=True)


def died(replica_id: int, by_us: bool = False, exit_code: int = -9) -> Answer:
    return Answer(None, None, Death(replica_id, DEVICES[replica_id], 70 + replica_id, exit_code, by_us))


def raised(*answers: Answer, interrupted: bool = False, timed_out: bool = False) -> tuple[BaseException, str]:
    """The exception of such a report, and what IPython shows of it."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        raise_for(Report(dict(enumerate(answers)), interrupted, timed_out), DEVICES, 2.0)
    error: Any = caught.value
    return error, plain("\n".join(error._render_traceback_()))


def test_nothing_is_raised_when_all_went_well():
    raise_for(Report({0: OK, 1: OK}, False, False), DEVICES)


def test_one_replicas_error_is_raised_as_itself_and_says_who_raised_it():
    error, shown = raised(OK, failed(KeyError("x")), OK)
    assert type(error) is KeyError
    assert error.args == ("x",)
    assert "----> 3 KeyError here" in shown
    assert shown.endswith("raised by replica 1 (cuda:1)")


def test_a_line_that_only_the_controller_knows_is_shown_with_its_text(monkeypatch):
    monkeypatch.setitem(linecache.cache, "<cell>", (5, None, ["x = 1\n", "y = x / 0\n"], "<cell>"))
    monkeypatch.setitem(linecache.cache, "/torch.py", (9, None, ["text of now\n"] * 9, "/torch.py"))
    trace = (
        "Traceback (most recent call last):",
        '  File "<cell>", line 2, in f',
        '  File "/torch.py", line 7, in g',
        "    text that the replica knew",
        '  File "<nowhere>", line 1, in h',
        "ZeroDivisionError: division by zero",
    )
    _, shown = raised(Answer(Done(1, Failure("ZeroDivisionError", "division by zero", trace, None))))
    assert shown.splitlines()[1:6] == [trace[1], "    y = x / 0", *trace[2:5]]


def test_a_line_of_a_plain_cell_is_named_as_the_notebook_names_it(monkeypatch):
    file = plain_cell(monkeypatch, "y = 1 / 0\n", 5)
    trace = (
        "Traceback (most recent call last):",
        f'  File "{file}", line 1, in f',
        '  File "/torch.py", line 7, in g',
        "ZeroDivisionError: division by zero",
    )
    _, shown = raised(Answer(Done(1, Failure("ZeroDivisionError", "division by zero", trace, None))))
    assert shown.splitlines()[1:4] == ["  Cell In[5], line 1, in f", "    y = 1 / 0", trace[2]]


def test_another_line_is_one_of_the_plain_cell_too(monkeypatch):
    file = plain_cell(monkeypatch, "f(1)\nf(2)\n", 7)
    _, shown = raised(failed(ValueError("a"), line=f"{file}, line 1"), failed(ValueError("a"), line=f"{file}, line 2"))
    assert shown.endswith("raised by all 2 replicas\nreplica 1 (cuda:1) at Cell In[7], line 2: f(2)")
    _, shown = raised(failed(ValueError("a"), line=f"{file}, line 1"), failed(ValueError("a"), line=""))
    assert shown.endswith("raised by all 2 replicas")


def test_where_ipython_gives_cells_no_names_a_line_has_its_files(monkeypatch):
    monkeypatch.setattr("IPython.get_ipython", lambda: types.SimpleNamespace(compile=object()))
    assert told("/nowhere/f.py, line 2") == "f.py, line 2"


def test_a_file_that_nobody_can_read_is_told_by_its_name():
    assert told("/nowhere/f.py, line 2") == "f.py, line 2"
    for read in ("g.py, line 3: x = 1", "g.py, line 3: x = y / 2  # as in h.py, line 4"):
        assert told(read) == read


def test_outside_of_ipython_the_same_is_told_below_pythons_own_traceback():
    error, shown = raised(failed(ValueError("bad")))
    assert error.__notes__ == [shown]
    assert "raised by replica 0 (cuda:0)" in shown
    error, shown = raised(failed(SystemExit("bye")))
    assert error.__notes__ == ["raised by replica 0 (cuda:0)"]


def test_the_same_error_of_all_is_shown_once():
    error, shown = raised(*[failed(ValueError("bad"))] * 4)
    assert type(error) is ValueError
    assert shown.count("----> 3") == 1
    assert shown.endswith("raised by all 4 replicas")


def test_different_errors_are_told_in_a_line_each():
    _, shown = raised(failed(ValueError("a")), failed(OSError("b")), failed(ValueError("a")), OK)
    assert "raised by replicas 0, 2 (cuda:0, cuda:2)" in shown
    assert "replica 1 (cuda:1) raised OSError: b" in shown
    assert shown.count("----> 3") == 1


def test_who_only_waited_for_the_one_that_failed_is_not_the_error():
    error, shown = raised(freed(), failed(ValueError("bad")), stopped())
    assert type(error) is ValueError
    assert "raised by replica 1 (cuda:1)" in shown
    assert "replicas 0, 2 (cuda:0, cuda:2) waited for it and were freed" in shown


def test_an_interrupt_that_the_users_code_has_raised_is_the_error_of_those_who_waited_for_it():
    error, shown = raised(freed(), stopped())
    assert type(error) is KeyboardInterrupt
    assert "raised by replica 1" in shown
    assert "replica 0 (cuda:0) waited for it and was freed" in shown
    error, shown = raised(stopped(), failed(ValueError("bad")))
    assert type(error) is ValueError
    error, shown = raised(OK, freed())
    assert type(error) is RuntimeError
    assert "raised by replica 1" in shown


def test_who_failed_for_want_of_examples_is_told_so():
    empty, single = ValueError("no maximum of nothing"), ValueError("no variance of one")
    _, text = raised(freed(), freed(), failed(empty, shares=(0, 4)), failed(empty, shares=(0, 4)))
    assert "\nreplicas 2–3 (cuda:2, cuda:3) had none of the batch's 4 examples: make batches larger" in text
    _, text = raised(freed(), freed(), failed(single, shares=(1, 5)), failed(empty, shares=(0, 5)))
    assert "\nreplica 2 (cuda:2) had 1 of the batch's 5 examples" in text
    assert "\nreplica 3 (cuda:3) had none of the batch's 5 examples" in text
    for others in (failed(empty, shares=(2, 4)), failed(empty)):
        _, text = raised(freed(), others, failed(empty, shares=(0, 4)))
        assert "examples" not in text
    _, text = raised(freed(), failed(single, shares=(1, 2)))
    assert "examples" not in text


def test_a_death_is_told_with_who_and_how_and_what_is_next():
    error, shown = raised(freed(), died(1), freed())
    assert type(error) is ReplicaDied
    assert "replica 1 (cuda:1, pid 71) was killed by signal 9 (SIGKILL)" in shown
    assert "Replicas 0, 2 kept their names" in shown
    assert "or strategy.run, starts it anew (%mirror restart: all)" in shown
    assert str(error) in shown.replace("ReplicaDied: ", "")


def test_a_signal_without_a_name_is_told_by_its_number():
    assert died(0, exit_code=-63).death.how() == "was killed by signal 63 (signal 63)"


def test_when_all_died_nobody_is_said_to_have_kept_anything():
    _, shown = raised(died(0), died(1))
    assert "kept" not in shown
    assert "or strategy.run, starts them anew" in shown
    assert "replica 0 (cuda:0, pid 70)" in shown
    assert "replica 1 (cuda:1, pid 71)" in shown


def test_how_replicas_died_is_told_once_where_they_died_alike():
    _, shown = raised(died(0), died(1, exit_code=7), died(2), died(3))
    who = "replica 0 (cuda:0, pid 70), replica 2 (cuda:2, pid 72) and replica 3 (cuda:3, pid 73)"
    assert f"{who} were killed by signal 9 (SIGKILL): kill -9, or the system was out of memory; replica 1 (" in shown
    assert shown.count("SIGKILL") == 1


def test_replicas_that_died_alike_are_told_of_once_where_they_were_started_anew():
    deaths = [found for i in range(3) if (found := died(i, exit_code=i // 2).death) is not None]
    one, other = [mended(each, 3, ["f"]) for each in alike(deaths)]
    kept = "with the names of replica 3, except f, which cannot travel"
    assert one.endswith(f"and replica 1 (cuda:1, pid 71) ended with exit code 0; they were started anew {kept}")
    assert other.endswith(f"replica 2 (cuda:2, pid 72) ended with exit code 1; it was started anew {kept}")


def test_the_users_error_stands_before_the_end_of_who_would_not_stop_for_it():
    error, shown = raised(failed(ValueError("bad")), died(1, by_us=True))
    assert type(error) is ValueError
    assert "----> 3 ValueError here" in shown
    assert "replica 1 (cuda:1, pid 71) did not stop when asked and was ended" in shown
    for other in (freed(), stopped(), OK):
        assert type(raised(other, died(1, by_us=True))[0]) is ReplicaDied


def test_a_real_death_stands_before_errors_that_it_may_have_caused():
    error, _ = raised(failed(ValueError("bad")), died(1))
    assert type(error) is ReplicaDied


def test_an_interrupt_shows_where_the_replicas_were():
    error, shown = raised(stopped(), stopped(), interrupted=True)
    assert type(error) is KeyboardInterrupt
    assert "----> 3 KeyboardInterrupt here" in shown
    assert "interrupted on all 2 replicas" in shown


def test_an_interrupt_that_the_users_code_has_caught_is_none():
    raise_for(Report({0: OK, 1: Answer(Done(1, interrupted=True))}, True, False), DEVICES)


def test_an_interrupt_that_came_too_late_for_any_replica_is_one_still():
    error, _ = raised(OK, OK, interrupted=True)
    assert type(error) is KeyboardInterrupt


def test_an_interrupt_tells_who_would_not_stop():
    _, shown = raised(stopped(), died(1, by_us=True), interrupted=True)
    assert "replica 1 (cuda:1, pid 71) did not stop when asked and was ended" in shown


def test_a_timeout_says_how_long_and_who_was_late():
    error, shown = raised(OK, stopped(), stopped(), timed_out=True)
    assert type(error) is ReplicaTimeout
    assert "replicas 1–2 (cuda:1, cuda:2) did not finish within 2 s" in shown
    assert "----> 3 KeyboardInterrupt here" in shown


def test_a_timeout_that_no_replica_noticed_names_them_all():
    _, shown = raised(OK, OK, timed_out=True)
    assert "neither of the 2 replicas finished within 2 s; they were stopped" in shown


class Picky(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_an_error_whose_class_cannot_be_rebuilt_keeps_its_name_and_message():
    failure = Failure("Picky", "1 and 2", (), cloudpickle.dumps(Picky(1, 2)))
    error = rebuilt(failure)
    assert isinstance(error, RemoteException)
    assert type(error).__name__ == "Picky"
    assert str(error) == "1 and 2"
    assert type(rebuilt(Failure("Gone", "m", (), None))).__name__ == "Gone"


def test_a_syntax_error_is_shown_as_the_replicas_shell_showed_it():
    assert not isinstance(rebuilt(failed(SyntaxError("bad")).failure), SyntaxError)
