"""The command line, `python -m mirror_nb`: parses and hands over."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import mirror_nb
from mirror_nb.demo import command


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out a command line and return its exit code."""
    given = _parser().parse_args(arguments)
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
    demo = commands.add_parser("demo", help="train a network on all GPUs, or on two CPU replicas")
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
