"""Optimizers: one optax transformation from groups, decay, clipping and schedules."""

from ._optimizer import Optimizer

__all__ = ["Optimizer"]
