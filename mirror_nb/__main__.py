"""The command line, `python -m mirror_nb`: parses and hands over."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import mirror_nb

INTERRUPTED, UNREAD = 130, 141
# As a shell calls the ends by SIGINT and SIGPIPE.


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out a command line and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A sign that a terminal lacks costs no table.
            stream.reconfigure(errors="replace")
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    if "run" not in given:
        parser.print_help(sys.stderr)
        parser.exit(2)
    run: Callable[[dict[str, Any]], int] = given.pop("run")
    try:
        code = run(given)
        print(end="", flush=True)
    except KeyboardInterrupt:
        # While torch loads.
        print("mirror_nb: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Nobody reads on, as after `| head`. Python writes the rest when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    return code


# Imported when asked for: torch takes a second to load, which the watch does not need.


def _watch(given: dict[str, Any]) -> int:
    from mirror_nb.watch import command

    return command.run(command.Options(**given))


def _demo(given: dict[str, Any]) -> int:
    from mirror_nb.demo import command

    return command.run(command.Options(**given))


def _bench(given: dict[str, Any]) -> int:
    from mirror_nb.bench import command

    return command.run(command.Options(**given))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mirror_nb",
        description="mirror_nb is used in notebooks: %load_ext mirror_nb. Its demo runs without one.",
    )
    parser.add_argument("--version", action="version", version=f"mirror_nb {mirror_nb.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_watch(commands)
    _add_demo(commands)
    _add_bench(commands)
    return parser


def _command(commands: _Commands, name: str, what: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    return parser


def _add_watch(commands: _Commands) -> None:
    watch = _command(commands, "watch", "show how your strategies train that other processes control")
    watch.set_defaults(run=_watch)
    watch.add_argument("pid", nargs="?", type=int, metavar="PID", help="the controller; default: all of yours")
    watch.add_argument("--once", action="store_true", help="show it once and end; 1 is returned if nothing trains")
    watch.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between two pictures; default: 1")


def _add_demo(commands: _Commands) -> None:
    demo = _command(commands, "demo", "train a network on all GPUs, or on two CPU replicas")
    demo.set_defaults(run=_demo)
    demo.add_argument("--devices", help="e.g. cpu:0,cpu:1 or cuda:0,cuda:1; default: all GPUs, else two CPU replicas")
    demo.add_argument(
        "--data", metavar="DIR", help="Fashion-MNIST's four idx files; default: scikit-learn's handwritten digits"
    )
    demo.add_argument("--epochs", type=int, metavar="N", help="default: 20 for the digits, 3 for Fashion-MNIST")
    demo.add_argument("--picture", metavar="FILE", default="demo.png", help="default: demo.png")
    demo.add_argument("--seed", type=int, default=0, help="of initial values and random draws; default: 0")


def _add_bench(commands: _Commands) -> None:
    bench = _command(commands, "bench", "time the cross-device ops, alone or under a model's training step")
    bench.set_defaults(run=_bench)
    bench.add_argument("--devices", help="e.g. cpu:0,cpu:1 or cuda:0,cuda:1; default: all GPUs, else two CPU replicas")
    bench.add_argument("--ops", metavar="NAMES", help="e.g. shared_memory,gloo; default: all that fit the devices")
    bench.add_argument(
        "--largest", metavar="SIZE", help="tensors from 1K up to this, e.g. 4M; default: 256M, or what memory allows"
    )
    bench.add_argument("--seconds", type=float, help="for each size (default: 0.4), or for the model (default: 8)")
    bench.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="time the training steps of what this function returns: an nn.Module, or (module, inputs[, loss]); "
        "e.g. my_models:make for make() in my_models.py",
    )
    bench.add_argument(
        "--shape", help="of one example for the model, e.g. 1,28,28, where its function gives no inputs"
    )
    bench.add_argument("--batch", type=int, default=64, help="examples of the global batch; default: 64")
    bench.add_argument("--optimizer", default="SGD", help="one of torch.optim; default: SGD")
    bench.add_argument("--picture", metavar="FILE", help="draw the table there")


_Commands = Any
# argparse has no public name for it.

if __name__ == "__main__":
    sys.exit(main())
