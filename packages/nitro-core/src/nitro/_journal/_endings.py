"""How a run ends, in one vocabulary for handle, log, checkpoint and `run.json`."""

from __future__ import annotations

from typing import Literal, cast

Ending = Literal["completed", "early_stop", "stopped", "failed"]
"""The horizon was reached, a stopper stopped it, somebody did, or an error ended it."""

_FORMER = {"requested": "stopped", "error": "failed"}


def ending(word: str) -> Ending:
    """The word for an ending, also for what former versions wrote."""
    return cast(Ending, _FORMER.get(word, word))
