"""Optimizers: one optax transformation from groups, decay, clipping and schedules."""

from ._optimizer import Optimizer, default_no_decay

__all__ = ["Optimizer", "default_no_decay"]
