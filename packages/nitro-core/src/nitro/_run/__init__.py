"""The run: the handle, its setup, the training loop, evaluation and history."""

from ._handle import Nitro, session_of
from ._history import History
from ._phases import Phase
from ._session import Session

__all__ = ["History", "Nitro", "Phase", "Session", "session_of"]
