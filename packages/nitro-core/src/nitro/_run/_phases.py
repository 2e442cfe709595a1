"""What a handle can be doing."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """What a handle is doing."""

    READY = "ready"
    TRAINING = "training"
    VALIDATING = "validating"
    PREDICTING = "predicting"
    DONE = "done"
    FAILED = "failed"
