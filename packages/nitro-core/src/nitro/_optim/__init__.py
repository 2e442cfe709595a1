"""Optimizers: one optax transformation from groups, decay, clipping and schedules."""

from ._build import make_optimizer
from ._decay import DecayInputs
from ._manual import ManualOptimizers, make_manual_optimizers
from ._optimizer import Optimizer
from ._report import describe_optimizer

__all__ = [
    "DecayInputs",
    "ManualOptimizers",
    "Optimizer",
    "describe_optimizer",
    "make_manual_optimizers",
    "make_optimizer",
]
