"""A real notebook kernel, driven as a front end drives it: what a user types, and what appears under the cell."""

from __future__ import annotations

import os
import queue
import signal
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from driving import DEADLINE, eventually, gone, plain
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager

CELL_SECONDS = 60.0


@dataclass(slots=True)
class Shown:
    """What one cell showed, in order."""

    outputs: list[dict[str, Any]] = field(default_factory=list)
    error: tuple[str, str, str] | None = None
    # Name, message, traceback as plain text.

    @property
    def stdout(self) -> str:
        return "".join(o["text"] for o in self.outputs if o.get("name") == "stdout")

    @property
    def stderr(self) -> str:
        return "".join(o["text"] for o in self.outputs if o.get("name") == "stderr")

    @property
    def closing(self) -> str:
        """The text under the cell that says what happened."""
        texts = [o["data"].get("text/plain", "") for o in self.outputs if o["type"] == "display_data"]
        return texts[-1] if texts else ""

    @property
    def result(self) -> str | None:
        return next((o["data"]["text/plain"] for o in self.outputs if o["type"] == "execute_result"), None)

    @property
    def kinds(self) -> list[str]:
        return [o.get("name") or o["type"] for o in self.outputs]


class Notebook:
    """A kernel and the client that sends it cells."""

    def __init__(self, folder: Path) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(folder))
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=CELL_SECONDS)

    @property
    def pid(self) -> int:
        return self.manager.provisioner.pid

    def run(self, source: str, during: Callable[[Shown], None] = lambda shown: None) -> Shown:
        """Run a cell. `during` is called after each output, to act while the cell runs."""
        number = self.client.execute(textwrap.dedent(source), stop_on_error=True)
        shown, deadline = Shown(), time.monotonic() + CELL_SECONDS
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"the cell did not end within {CELL_SECONDS} s; it showed {shown}") from None
            if message["parent_header"].get("msg_id") != number:
                continue
            if self._take(message, shown):
                break
            during(shown)
        self.client.get_shell_msg(timeout=CELL_SECONDS)
        return shown

    def _take(self, message: dict[str, Any], shown: Shown) -> bool:
        content = message["content"]
        match message["msg_type"]:
            case "status":
                return content["execution_state"] == "idle"
            case "stream" | "display_data" | "execute_result" | "update_display_data" as kind:
                shown.outputs.append({"type": kind, **content})
            case "error":
                shown.error = (content["ename"], content["evalue"], plain("\n".join(content["traceback"])))
        return False

    def value(self, expression: str) -> str:
        """What an ordinary cell shows for an expression."""
        shown = self.run(expression)
        assert shown.error is None, shown.error
        return shown.result or ""

    def family(self) -> set[int]:
        """Every process below the kernel."""
        return {child.pid for child in psutil.Process(self.pid).children(recursive=True)}

    def shut_down(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    made = Notebook(tmp_path_factory.mktemp("notebook"))
    assert made.run("%load_ext mirror_nb\n%mirror start --devices cpu:0,cpu:1").error is None
    yield made
    family = made.family()
    made.shut_down()
    eventually(lambda: all(map(gone, family)), "everything ends with the kernel")


@pytest.fixture
def notebook(kernel: Notebook) -> Notebook:
    """The shared kernel, with replicas that run, and torch as users import it."""
    shown = kernel.run("import torch\nimport torch.nn.functional as F\nfrom torch import nn")
    assert shown.error is None
    return kernel


# ---------------------------------------------------------------------- the cell


def test_a_cell_trains_on_every_replica_and_the_trained_model_is_here(notebook):
    setup = notebook.run(
        """
        from torch.utils.data import DataLoader, TensorDataset
        torch.manual_seed(0)
        inputs = torch.randn(250, 1, 8, 8)
        labels = (inputs.flatten(1)[:, :10]).argmax(1)
        train_loader = DataLoader(TensorDataset(inputs, labels), batch_size=64, shuffle=True)
        def accuracy(model):
            with torch.no_grad():
                return float((model(inputs).argmax(1) == labels).float().mean())
        """
    )
    assert setup.error is None
    shown = notebook.run(
        """
        %%mirrored
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for epoch in range(5):
            for x, y in strategy.distribute_dataset(train_loader):
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad(); loss.backward(); optimizer.step()
        shares = len(x)
        there = accuracy(model)
        """
    )
    assert shown.error is None, shown.error
    assert "2 replicas" in shown.closing
    assert "sent" in shown.closing
    assert "model" in shown.closing
    assert float(notebook.value("accuracy(model)")) > 0.8
    assert notebook.value("accuracy(model) == there") == "True"
    # The last batch of 250 % 64 = 58 examples, cut in two.
    assert notebook.value("shares") == "29"


# ---------------------------------------------------------------------- names


def test_names_travel_there_and_back(notebook):
    notebook.run("scale = 2\ndef grow(x): return x * scale\nlosses = [0.5]")
    shown = notebook.run("%%mirrored\ny = grow(replica_id + 1)\nlosses.append(float(replica_id * 0))\ntotal = 7")
    assert shown.error is None, shown.error
    assert notebook.value("y") == "PerReplica:{\n  0: 2,\n  1: 4\n}"
    assert notebook.value("losses, total") == "([0.5, 0.0], 7)"
    notebook.run("scale = 10")
    notebook.run("%%mirrored\ny = grow(1)")
    assert notebook.value("y") == "10"


def test_classes_and_closures_travel(notebook):
    notebook.run(
        """
        class Scaled(nn.Module):
            def __init__(self, k):
                super().__init__()
                self.inner, self.k = nn.Linear(2, 2), k
            def forward(self, x):
                return self.inner(x) * self.k + offset
        offset = 1.0
        def adder(n):
            return lambda x: x + n
        add5 = adder(5)
        """
    )
    shown = notebook.run("%%mirrored\nnet = Scaled(3)\nout = net(torch.zeros(1, 2)).shape\nsix = add5(1)")
    assert shown.error is None, shown.error
    assert notebook.value("type(net) is Scaled, tuple(out), six") == "(True, (1, 2), 6)"


def test_a_class_made_in_a_cell_is_a_class_here(notebook):
    notebook.run("%%mirrored\nclass Tiny(nn.Module):\n    def forward(self, x): return x + 1\ntiny = Tiny()")
    assert notebook.value("isinstance(tiny, Tiny), int(Tiny()(torch.tensor(1)))") == "(True, 2)"


OF_MINE = "from torch import nn\nclass Mine(nn.Linear):\n    def __init__(self): super().__init__(2, 2)\n"


def test_a_folder_that_a_cell_imports_from_is_one_for_the_notebook_too(notebook, tmp_path):
    (tmp_path / "nets_of_mine.py").write_text(OF_MINE)
    shown = notebook.run(
        f"%%mirrored\nimport sys; sys.path.insert(0, {str(tmp_path)!r})\nimport nets_of_mine\n"
        "net = nets_of_mine.Mine()"
    )
    assert shown.error is None, shown.error
    assert notebook.value("type(net) is nets_of_mine.Mine, float(net.weight.sum()) != 0") == "(True, True)"
    assert notebook.value(f"sys.path.index({str(tmp_path)!r})") == "0"


def test_a_network_whose_class_the_notebook_cannot_import_stays_and_costs_no_other_name(notebook, tmp_path):
    (tmp_path / "nets_elsewhere.py").write_text(OF_MINE)
    shown = notebook.run(
        f"%%mirrored\nimport sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom nets_elsewhere import Mine\n"
        "sys.path.pop(0)\nnet = Mine(); number = 5"
    )
    assert shown.error is None, shown.error
    assert "stays in the replicas: Mine, net" in shown.closing
    assert "it cannot be rebuilt here: No module named 'nets_elsewhere'" in notebook.value("net")
    assert notebook.value("number") == "5"
    notebook.run("%%mirrored\nshape = tuple(net(torch.ones(1, 2)).shape)")
    assert notebook.value("shape") == "(1, 2)"


def test_a_network_of_the_notebook_is_trained_and_keeps_its_identity(notebook):
    notebook.run(
        "net = nn.Linear(3, 1)\noptimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "before, same, first = net.weight.detach().clone(), net, net.weight"
    )
    shown = notebook.run("%%mirrored\nnet(torch.ones(4, 3) * (replica_id + 1)).sum().backward()\noptimizer.step()")
    assert shown.error is None, shown.error
    assert notebook.value("net is same, net.weight is first") == "(True, True)"
    # The mean over both replicas of a gradient of 4 and of 8.
    assert notebook.value("torch.allclose(net.weight, before - 0.1 * 6)") == "True"


def test_values_loaded_in_the_notebook_are_seen_in_the_replicas(notebook):
    notebook.run("net = nn.Linear(2, 2)")
    notebook.run("%%mirrored\nnet")
    notebook.run("net.load_state_dict({name: torch.full_like(t, 3.0) for name, t in net.state_dict().items()})")
    shown = notebook.run("%%mirrored\nseen = float(net.weight.sum() + net.bias.sum())")
    assert shown.error is None, shown.error
    assert notebook.value("seen") == "18.0"


def test_a_helper_of_the_notebook_uses_the_replicas_model(notebook):
    notebook.run("def weight_sum(): return float(helped.weight.sum())")
    shown = notebook.run("%%mirrored\nhelped = nn.Linear(2, 2)\nnn.init.ones_(helped.weight)\ns = weight_sum()")
    assert shown.error is None, shown.error
    assert notebook.value("s, weight_sum()") == "(4.0, 4.0)"


def test_batch_norm_statistics_are_averaged_here(notebook):
    notebook.run(
        "%%mirrored\nnorm = nn.BatchNorm1d(1, momentum=1.0)\nnorm(torch.full((4, 1), float(replica_id)));\n"
        "own = float(norm.running_mean)"
    )
    assert notebook.value("own") == "PerReplica:{\n  0: 0.0,\n  1: 1.0\n}"
    assert notebook.value("float(norm.running_mean)") == "0.5"


def test_what_cannot_be_sent_is_named_before_anything_runs(notebook):
    notebook.run("import threading\nguard = threading.Lock()")
    shown = notebook.run("%%mirrored\nran_anyway = True\nguard")
    assert shown.error[0] == "TransferError"
    assert "`guard`" in shown.error[1]
    assert notebook.value("'ran_anyway' in globals()") == "False"


def test_a_name_that_one_replica_could_not_open_is_sent_to_it_again(notebook):
    notebook.run(
        """
        def taste():
            import os
            if os.environ.get('RANK') == '1':
                raise ValueError('sour')
        class Fruit:
            def __reduce__(self):
                return taste, ()
        fruit = Fruit()
        """
    )
    for _ in range(2):
        shown = notebook.run("%%mirrored\nfruit")
        assert shown.error[:2] == ("ValueError", "sour")
        assert "replica 1 (cpu:1)" in shown.error[2]


def test_what_is_too_large_stays_and_is_fetched_on_request(notebook):
    shown = notebook.run("%%mirrored\nlarge = torch.arange(1_000_000.)")
    assert "stays in the replicas: large" in shown.closing
    assert "in the replicas" in notebook.value("large")
    assert notebook.value("float(large.fetch()[-1])") == "999999.0"
    notebook.run("%%mirrored\ntail = float(large[-1])")
    assert notebook.value("tail") == "999999.0"


# ---------------------------------------------------------------------- options


def test_out_binds_the_result_and_quiet_says_nothing(notebook):
    shown = notebook.run("%%mirrored --out got --quiet\nprint('hello')\nreplica_id")
    assert shown.kinds == ["stdout"]
    assert notebook.value("got.values") == "(0, 1)"


def test_a_cell_on_one_replica(notebook):
    shown = notebook.run("%%mirrored --replicas 1\nprint('I am', replica_id)\nwho = replica_id\nwho")
    assert shown.stdout == "I am 1\n"
    assert shown.result == "1"
    assert "1 replica" in shown.closing


def test_a_replica_that_is_not_there_is_an_error(notebook):
    shown = notebook.run("%%mirrored --replicas 0,5\n1")
    assert shown.error[:2] == ("UsageError", "there is no replica 5; there are 2: 0–1")
    # A mistake in the call shows one line, not the frames of the magic.
    assert len(shown.error[2].splitlines()) < 3


def test_without_synchronisation_gradients_stay_local(notebook):
    source = (
        "net = nn.Linear(1, 1)\nnet(torch.full((1, 1), replica_id + 1.0)).backward()\ngrad = float(net.weight.grad)"
    )
    notebook.run(f"%%mirrored --no-sync\n{source}")
    assert notebook.value("grad.values") == "(1.0, 2.0)"
    notebook.run(f"%%mirrored\n{source}")
    assert notebook.value("grad") == "1.5"


def test_a_cell_that_takes_too_long_is_stopped(notebook):
    shown = notebook.run("%%mirrored --timeout 0.5\nkept = 11\nwhile True:\n    pass")
    assert shown.error[0] == "ReplicaTimeout"
    assert "neither of the 2 replicas finished within 0.5 s" in shown.error[1]
    notebook.run("%%mirrored\nagain = kept")
    assert notebook.value("again") == "11"


# ---------------------------------------------------------------------- what appears


def test_the_last_expression_is_the_cells_result(notebook):
    assert notebook.run("%%mirrored\n6 * 7").result == "42"
    assert notebook.run("%%mirrored\nreplica_id").result == "PerReplica:{\n  0: 0,\n  1: 1\n}"
    assert notebook.run("%%mirrored\n6 * 7;").result is None
    assert notebook.run("%%mirrored\nnone = None\nnone").result is None
    notebook.run("%%mirrored\n'kept in Out'")
    assert notebook.value("_") == "'kept in Out'"


def test_await_time_shell_and_run_work_in_a_cell(notebook):
    notebook.run("%%writefile script.py\nimport sys\nfrom_script = sys.argv[1] + '!'\nprint('script ran')")
    shown = notebook.run(
        "%%mirrored\nimport asyncio\nawait asyncio.sleep(0)\n!echo from the shell\n"
        "%run script.py hi\ngot = from_script"
    )
    assert shown.error is None, shown.error
    assert shown.stdout.index("from the shell") < shown.stdout.index("script ran")
    assert notebook.value("got") == "'hi!'"


def test_a_timed_cell_reads_and_binds_names(notebook):
    notebook.run("n = 5")
    shown = notebook.run("%%mirrored\n%%time\n!echo hi\nm = n + 1\nprint(m)")
    assert shown.error is None, shown.error
    assert "Wall time" in shown.stdout
    assert notebook.value("m") == "6"


def test_outputs_appear_in_the_order_in_which_they_were_made(notebook):
    shown = notebook.run(
        """
        %%mirrored
        import sys
        from IPython.display import HTML, display
        print('one')
        print('two', file=sys.stderr)
        display(HTML('<b>three</b>'))
        print('four')
        'five'
        """
    )
    assert shown.error is None, shown.error
    assert shown.stdout == "one\nfour\n"
    assert shown.stderr == "two\n"
    kinds = [k for k in shown.kinds if k != "update_display_data"]
    # The status lines' place is first, the closing line last but for the value.
    assert kinds == ["display_data", "stdout", "stderr", "display_data", "stdout", "display_data", "execute_result"]
    assert shown.outputs[kinds.index("stderr") + 1]["data"]["text/html"] == "<b>three</b>"


def test_differing_output_of_the_others_is_folded(notebook):
    shown = notebook.run("%%mirrored\nprint('the same')\nprint('I am', replica_id)")
    assert shown.stdout == "the same\nI am 0\n"
    assert "replica 1: 2 lines, differing from replica 0\n    the same\n    I am 1" in shown.closing
    assert "replica 1: the same output" in notebook.run("%%mirrored\nprint('the same')").closing


def test_prints_appear_while_the_cell_runs(notebook, tmp_path):
    go = tmp_path / "go"
    seen: list[str] = []

    def during(shown: Shown) -> None:
        if "early" in shown.stdout and not go.exists():
            seen.append("early")
            go.touch()

    shown = notebook.run(
        f"""
        %%mirrored
        import os, time
        print('early')
        while not os.path.exists({str(go)!r}): time.sleep(0.01)
        """,
        during,
    )
    assert shown.error is None
    assert seen == ["early"]


def test_figures_appear_as_images(notebook):
    shown = notebook.run("%%mirrored\nimport matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.title('t')\nplt.show()")
    assert shown.error is None, shown.error
    assert sum("image/png" in o.get("data", {}) for o in shown.outputs) == 1
    shown = notebook.run("%%mirrored\nplt.plot([1, 2]);")
    assert sum("image/png" in o.get("data", {}) for o in shown.outputs) == 1


@pytest.mark.parametrize("magic", ["", "%%mirrored --quiet"], ids=["an ordinary cell", "a mirrored cell"])
def test_what_a_mirrored_cell_shows_is_updated_by(magic, notebook):
    shown = notebook.run("%%mirrored --quiet\nh = display('first', display_id=True)\nboth = {'h': h}")
    (first,) = (o for o in shown.outputs if o["data"].get("text/plain") == "'first'")
    updated = notebook.run(f"{magic}\nboth['h'].update('second')\nh.update('third')".lstrip())
    assert updated.error is None, updated.error
    assert [o["type"] for o in updated.outputs if o["transient"]] == ["update_display_data"] * 2
    assert all(o["transient"] == first["transient"] for o in updated.outputs if o["transient"])


def test_progress_bars_appear(notebook):
    shown = notebook.run("%%mirrored\nfrom tqdm import tqdm\nfor i in tqdm(range(30)): pass")
    assert "100%" in shown.stderr
    assert "30/30" in shown.stderr
    shown = notebook.run("%%mirrored\nfrom tqdm.auto import tqdm as bar\nfor i in bar(range(3)): pass")
    assert shown.error is None, shown.error
    assert any("application/vnd.jupyter.widget-view+json" in o.get("data", {}) for o in shown.outputs[1:])
    # By that an older tqdm tells a notebook.
    assert notebook.run("%%mirrored\n'IPKernelApp' in get_ipython().config").result == "True"


def test_the_kernel_lets_go_of_replicas_widgets_that_are_closed_and_of_all_at_a_restart(notebook):
    notebook.run("from mirror_nb.notebook.output import CommProxy")
    known = "sum(isinstance(comm, CommProxy) for comm in get_ipython().kernel.comm_manager.comms.values())"
    notebook.run("%%mirrored --quiet\nimport ipywidgets\nslider = ipywidgets.IntSlider()")
    made = int(notebook.value(known))
    notebook.run("%%mirrored --quiet\nslider.close()")
    assert int(notebook.value(known)) == made - 2 > 0
    notebook.run("%mirror restart")
    assert notebook.value(known) == "0"


@pytest.mark.parametrize("line", ["%mirror", "%mirror dashboard"])
def test_what_was_closed_with_all_other_widgets_can_be_shown_again(notebook, line):
    notebook.run("%mirror start")
    notebook.run(line)
    shown = notebook.run(f"import ipywidgets\nipywidgets.Widget.close_all()\n{line}")
    assert shown.error is None, shown.error
    assert "application/vnd.jupyter.widget-view+json" in shown.outputs[-1]["data"]


def test_much_output_arrives_whole_and_in_order(notebook):
    shown = notebook.run("%%mirrored --quiet\nfor i in range(20_000): print(i)")
    assert shown.stdout.split() == [str(i) for i in range(20_000)]
    assert len(shown.outputs) < 500


# ---------------------------------------------------------------------- when it goes wrong


def test_an_exception_is_raised_with_its_own_type_and_the_users_lines(notebook):
    shown = notebook.run(
        "%%mirrored\nx = 1\n\nif replica_id:\n    raise LookupError('nothing here')\nstrategy.reduce('sum', 1)"
    )
    assert shown.error[:2] == ("LookupError", "nothing here")
    assert "----> 5     raise LookupError('nothing here')" in shown.error[2]
    assert "raised by replica 1 (cpu:1)" in shown.error[2]
    assert "replica 0 (cpu:0)" in shown.error[2]
    # The frames of mirror_nb itself are not the user's.
    assert "mirror_nb/" not in shown.error[2]
    assert notebook.run("%%mirrored\nfine = int(strategy.reduce('sum', x))").error is None
    assert notebook.value("fine") == "2"


def test_an_exceptions_traceback_shows_the_lines_of_the_notebooks_own_functions(notebook):
    notebook.run("def divide(a, b):\n    quotient = a / b\n    return quotient")
    local, shown = notebook.run("divide(1, 0)"), notebook.run("%%mirrored\ndivide(1, 0)")
    assert shown.error[0] == "ZeroDivisionError"
    assert "----> 2     quotient = a / b" in local.error[2]
    lines = local.error[2].splitlines()
    # From the heading "Cell In[n], line 2, in divide(a, b)" on, as if it had run here.
    start = next(i for i, line in enumerate(lines) if "in divide" in line)
    assert "\n".join(lines[start : start + 4]) in shown.error[2]


@pytest.mark.parametrize(
    ("define", "message"),
    [
        ("class Own(Exception): pass", "boom"),
        ("class Own(Exception):\n    def __init__(self, a, b): super().__init__('boom')", "boom"),
        ("class Own(Exception):\n    def __reduce__(self): raise TypeError('never')", "boom"),
    ],
    ids=["plain", "other arguments", "cannot be pickled"],
)
def test_an_exception_whose_class_was_made_in_the_cell(notebook, define, message):
    raised = "Own(1, 2)" if "a, b" in define else "Own('boom')"
    shown = notebook.run(f"%%mirrored\n{define}\nraise {raised}")
    assert shown.error[:2] == ("Own", message)
    assert f"raise {raised}" in shown.error[2]
    assert notebook.run("%%mirrored\n1").error is None


def test_an_exception_can_be_caught_by_its_class_of_the_notebook(notebook):
    notebook.run("class Mine(Exception): pass")
    shown = notebook.run(
        "try:\n    get_ipython().run_cell_magic('mirrored', '', 'raise Mine(3)')\n"
        "except Mine as error:\n    print('caught', error)"
    )
    assert "caught 3" in shown.stdout


def test_a_syntax_error_is_shown_with_its_place(notebook):
    shown = notebook.run("%%mirrored\nx = 1\ny = )")
    assert shown.error[0] == "SyntaxError"
    assert "line 3" in shown.error[2]


def test_leaving_with_exit_ends_neither_the_kernel_nor_a_replica(notebook):
    pid = notebook.value("import os; os.getpid()")
    shown = notebook.run("%%mirrored\nkept = 8\nimport sys; sys.exit('enough')")
    assert shown.error is not None
    said = shown.stdout + shown.stderr + shown.error[2]
    # As in an ordinary cell, and who.
    assert [
        said.count(text) for text in ("An exception has occurred", "SystemExit: enough", "UserWarning: To exit")
    ] == [1] * 3
    assert "raised by all 2 replicas" in said
    assert notebook.value("os.getpid()") == pid
    assert notebook.run("%%mirrored\nkept").result == "8"


def test_input_is_refused_with_a_way_out(notebook):
    shown = notebook.run("%%mirrored\nname = input('name? ')")
    assert shown.error[0] == "StdinNotImplementedError"
    assert "ask in an ordinary cell" in shown.error[1]


@pytest.mark.parametrize(
    "source", ["while True: pass", "if replica_id == 0: strategy.reduce('sum', 1)\nwhile True: pass"]
)
def test_the_stop_square_stops_a_cell_and_names_are_kept(notebook, source):
    shown = interrupted(notebook, f"%%mirrored\nheld = 9\nprint('started')\n{source}")
    assert shown.error[0] == "KeyboardInterrupt"
    assert "interrupted on all 2 replicas" in shown.error[2]
    assert notebook.run("%%mirrored\nheld * int(strategy.reduce('sum', 1))").result == "18"


def interrupted(notebook: Any, source: str) -> Shown:
    pressed: list[bool] = []

    def during(shown: Shown) -> None:
        if "started" in shown.stdout and not pressed:
            pressed.append(True)
            notebook.manager.interrupt_kernel()

    return notebook.run(source, during)


def test_an_interrupt_that_the_cell_catches_is_no_error(notebook):
    loop = "try:\n    print('started')\n    while True: pass\nexcept KeyboardInterrupt:\n    print('early')\nleft = 5"
    shown = interrupted(notebook, f"%%mirrored\n{loop}")
    assert shown.error is None
    assert "early" in shown.stdout
    # In the rest of that cell there is nothing to be reduced with.
    shown = interrupted(notebook, f"%%mirrored\n{loop}\nstrategy.reduce('sum', 1)")
    assert shown.error[0] == "KeyboardInterrupt"
    assert "PeerFailed: this was interrupted; replicas reduce and gather again in the next one" in shown.error[2]
    assert notebook.run("%%mirrored\nleft * int(strategy.reduce('sum', 1))").result == "10"


def test_a_replica_that_dies_while_no_cell_runs_is_told_at_once_and_once(notebook):
    notebook.run("%%mirrored --out pids\nimport os\nos.getpid()")
    os.kill(int(notebook.value("pids[1]")), signal.SIGKILL)
    told = ""
    deadline = time.monotonic() + CELL_SECONDS
    while "SIGKILL" not in told and time.monotonic() < deadline:
        message = notebook.client.get_iopub_msg(timeout=CELL_SECONDS)
        told += message["content"].get("text", "") if message["msg_type"] == "stream" else ""
    assert "replica 1 (cpu:1, pid" in told
    shown = notebook.run("%%mirrored\n'goes on'")
    assert shown.error is None, shown.error
    assert shown.closing.count("started anew") == 1


def test_a_replica_that_died_is_named_and_the_next_cell_starts_it_again(notebook):
    notebook.run("%%mirrored\nkept = [1, 2]\nmine = nn.Linear(2, 2)\nopt = torch.optim.SGD(mine.parameters(), lr=1.0)")
    shown = notebook.run(
        "%%mirrored\nimport os\nif replica_id == 1: os.kill(os.getpid(), 9)\nstrategy.reduce('sum', 1)"
    )
    assert shown.error[0] == "ReplicaDied"
    assert "replica 1 (cpu:1, pid" in shown.error[1]
    assert "SIGKILL" in shown.error[1]
    shown = notebook.run("%%mirrored\nmine(torch.ones(1, 2)).sum().backward(); opt.step()\nlen(kept)")
    assert shown.error is None, shown.error
    assert shown.result == "2"
    assert "started anew" in shown.closing
    notebook.run("%%mirrored\nspread = float((strategy.reduce('mean', mine.weight) - mine.weight).abs().max())")
    assert notebook.value("spread") == "0.0"


def test_pushing_pulling_status_and_restart(notebook):
    notebook.run("pushed = {'a': 1}")
    assert "sent pushed" in notebook.run("%mirror push pushed").stdout
    notebook.run("%%mirrored\nlarge = torch.ones(1_000_000) * (replica_id + 1)")
    assert "pulled large" in notebook.run("%mirror pull --replica 1 large").stdout
    assert notebook.value("float(large[0])") == "2.0"
    status = notebook.run("%mirror status").stdout
    assert status.count("ready") == 2
    assert "ready in" in notebook.run("%mirror restart").stdout
    assert notebook.run("%mirror status").stdout != status
    # The notebook still has its names, and sends them to the new replicas.
    assert notebook.run("%%mirrored\npushed['a'] + int(strategy.reduce('sum', 1))").result == "3"


# ---------------------------------------------------------------------- the end


def ours(pid: int) -> bool:
    """Whether it still runs, and is not Python's own tracker of resources, which ends with the kernel."""
    try:
        return not gone(pid) and "resource_tracker" not in " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def test_a_first_cell_starts_the_replicas_and_a_restart_of_the_kernel_leaves_nothing(tmp_path):
    notebook = Notebook(tmp_path)
    try:
        assert notebook.run("%load_ext mirror_nb").error is None
        shown = notebook.run("%%mirrored\nimport subprocess\nchild = subprocess.Popen(['sleep', '1000'])\nchild.pid")
        assert shown.error is None, shown.error
        assert "1 replica" in shown.closing
        family = notebook.family() | {int(shown.result)}
        assert len(family) >= 4
        notebook.manager.restart_kernel(now=True)
        notebook.client.wait_for_ready(timeout=CELL_SECONDS)
        eventually(lambda: all(map(gone, family)), "replicas, their children, forkserver and nanny end", DEADLINE)
        assert notebook.run("%load_ext mirror_nb\n%mirror start --devices cpu:0,cpu:1").error is None
        family = notebook.family()
        assert notebook.run("%mirror stop").error is None
        eventually(lambda: not any(map(ours, family)), "%mirror stop leaves nothing", DEADLINE)
        assert notebook.run("%mirror start --devices cpu:0,cpu:1").error is None
        family = notebook.family()
        os.kill(notebook.pid, 9)
        eventually(lambda: all(map(gone, family)), "kill -9 of the kernel leaves nothing", DEADLINE)
    finally:
        notebook.shut_down()
