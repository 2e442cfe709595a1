"""Optimizers: one optax transformation from groups, decay, clipping and schedules."""

from ._build import make_optimizer
from ._decay import DecayInputs
from ._groups import FROZEN
from ._manual import ManualOptimizers, make_manual_optimizers
from ._optimizer import Optimizer, frozen_names
from ._report import describe_optimizer

__all__ = [
    "FROZEN",
    "DecayInputs",
    "ManualOptimizers",
    "Optimizer",
    "describe_optimizer",
    "frozen_names",
    "make_manual_optimizers",
    "make_optimizer",
]
