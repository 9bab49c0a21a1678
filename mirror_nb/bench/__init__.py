"""Measures cross-device ops on the replicas that run: how fast they are alone, and under a model's training step.

`all_reduce(strategy)` and `steps(strategy, model)`; `%mirror bench` and `python -m mirror_nb bench` call the same.
"""

from mirror_nb.bench.collectives import AllReduceRow, AllReduceTable, all_reduce
from mirror_nb.bench.steps import StepRow, StepTable, steps

__all__ = ["AllReduceRow", "AllReduceTable", "StepRow", "StepTable", "all_reduce", "steps"]
