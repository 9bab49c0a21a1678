"""The command line, `python -m mirror_nb`: parses and hands over."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import mirror_nb


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out a command line and return its exit code."""
    given = _parser().parse_args(arguments)
    return int(given.run(given))


def _watch(given: argparse.Namespace) -> int:
    # Imported when asked for: the demo loads torch, which takes a second that the watch does not need.
    from mirror_nb.watch import command

    return command.run(command.Options(pid=given.pid, once=given.once, every=given.every))


def _demo(given: argparse.Namespace) -> int:
    from mirror_nb.demo import command

    return command.run(
        command.Options(
            devices=given.devices,
            data=given.data,
            epochs=given.epochs,
            picture=given.picture,
            seed=given.seed,
        )
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mirror_nb",
        description="mirror_nb is used in notebooks: %load_ext mirror_nb. Its demo runs without one.",
    )
    parser.add_argument("--version", action="version", version=f"mirror_nb {mirror_nb.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    watch = commands.add_parser("watch", help="show how your strategies train that other processes control")
    watch.set_defaults(run=_watch)
    watch.add_argument("pid", nargs="?", type=int, metavar="PID", help="the controller's process; none: all of yours")
    watch.add_argument("--once", action="store_true", help="show it once and end; 1 is returned if nothing trains")
    watch.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between two pictures; none: 1")
    demo = commands.add_parser("demo", help="train a network on all GPUs, or on two CPU replicas")
    demo.set_defaults(run=_demo)
    demo.add_argument("--devices", help="e.g. cpu:0,cpu:1 or cuda:0,cuda:1; none: all GPUs, else two CPU replicas")
    demo.add_argument(
        "--data", metavar="DIR", help="Fashion-MNIST's four idx files; none: scikit-learn's handwritten digits"
    )
    demo.add_argument("--epochs", type=int, metavar="N", help="none: 20 for the digits, 4 for Fashion-MNIST")
    demo.add_argument("--picture", metavar="FILE", default="demo.png", help="none: demo.png")
    demo.add_argument("--seed", type=int, default=0, help="of initial values and random draws; none: 0")
    return parser


if __name__ == "__main__":
    sys.exit(main())
