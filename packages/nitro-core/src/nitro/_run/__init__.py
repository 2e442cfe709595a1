"""The run: the handle, its setup, the training loop, evaluation and history."""

from nitro._checkpoint import open_record

from ._handle import Nitro, session_of
from ._phases import Phase, PhaseEvent, on_phase
from ._recipes import build_from_record, class_of_record, load_experiment
from ._session import Session
from ._stopping import EarlyStop
from ._weights import Weights

__all__ = [
    "EarlyStop",
    "Nitro",
    "Phase",
    "PhaseEvent",
    "Session",
    "Weights",
    "build_from_record",
    "class_of_record",
    "load_experiment",
    "on_phase",
    "open_record",
    "session_of",
]
