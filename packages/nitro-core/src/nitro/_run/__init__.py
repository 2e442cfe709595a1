"""The run: the handle, its setup, the training loop, evaluation and history."""

from ._handle import Nitro
from ._history import History
from ._phases import Phase

__all__ = ["History", "Nitro", "Phase"]
