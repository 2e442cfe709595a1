"""Optimizers: one optax transformation from groups, decay, clipping and schedules."""

from ._build import make_optimizer
from ._decay import DecayInputs
from ._optimizer import Optimizer
from ._report import describe_optimizer
from ._table import RowLayout, StepTable

__all__ = [
    "DecayInputs",
    "Optimizer",
    "RowLayout",
    "StepTable",
    "describe_optimizer",
    "make_optimizer",
]
