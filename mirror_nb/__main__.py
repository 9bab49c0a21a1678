"""The command line, `python -m mirror_nb`: parses and hands over."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import mirror_nb


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out a command line and return its exit code."""
    given = vars(_parser().parse_args(arguments))
    run: Callable[[dict[str, Any]], int] = given.pop("run")
    return run(given)


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
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_watch(commands)
    _add_demo(commands)
    _add_bench(commands)
    return parser


def _add_watch(commands: _Commands) -> None:
    watch = commands.add_parser("watch", help="show how your strategies train that other processes control")
    watch.set_defaults(run=_watch)
    watch.add_argument("pid", nargs="?", type=int, metavar="PID", help="the controller's process; none: all of yours")
    watch.add_argument("--once", action="store_true", help="show it once and end; 1 is returned if nothing trains")
    watch.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between two pictures; none: 1")


def _add_demo(commands: _Commands) -> None:
    demo = commands.add_parser("demo", help="train a network on all GPUs, or on two CPU replicas")
    demo.set_defaults(run=_demo)
    demo.add_argument("--devices", help="e.g. cpu:0,cpu:1 or cuda:0,cuda:1; none: all GPUs, else two CPU replicas")
    demo.add_argument(
        "--data", metavar="DIR", help="Fashion-MNIST's four idx files; none: scikit-learn's handwritten digits"
    )
    demo.add_argument("--epochs", type=int, metavar="N", help="none: 20 for the digits, 4 for Fashion-MNIST")
    demo.add_argument("--picture", metavar="FILE", default="demo.png", help="none: demo.png")
    demo.add_argument("--seed", type=int, default=0, help="of initial values and random draws; none: 0")


def _add_bench(commands: _Commands) -> None:
    bench = commands.add_parser("bench", help="time the cross-device ops, alone or under a model's training step")
    bench.set_defaults(run=_bench)
    bench.add_argument("--devices", help="e.g. cpu:0,cpu:1 or cuda:0,cuda:1; none: all GPUs, else two CPU replicas")
    bench.add_argument("--ops", metavar="NAMES", help="e.g. shared_memory,gloo; none: all that fit the devices")
    bench.add_argument(
        "--largest", metavar="SIZE", help="tensors from 1K up to this, e.g. 4M; none: 64M, on GPUs 256M"
    )
    bench.add_argument("--seconds", type=float, help="for each size (none: 0.4), or for the model (none: 8)")
    bench.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="time the training steps of what this function returns: an nn.Module, or (module, inputs[, loss]); "
        "e.g. my_models:make for make() in my_models.py",
    )
    bench.add_argument(
        "--shape", help="of one example for the model, e.g. 1,28,28, where its function gives no inputs"
    )
    bench.add_argument("--batch", type=int, default=64, help="examples of the global batch; none: 64")
    bench.add_argument("--optimizer", default="SGD", help="one of torch.optim; none: SGD")
    bench.add_argument("--picture", metavar="FILE", help="draw the table there")


_Commands = Any
# argparse has no public name for it.

if __name__ == "__main__":
    sys.exit(main())
