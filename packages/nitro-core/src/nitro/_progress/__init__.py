"""Shows how far a run is: a bar, one line of a notebook, or plain lines for a log."""

from ._advance import Advance
from ._choose import make_reporter
from ._protocol import Reporter
from ._reporters import BarReporter, LineReporter

__all__ = [
    "Advance",
    "BarReporter",
    "LineReporter",
    "Reporter",
    "make_reporter",
]
