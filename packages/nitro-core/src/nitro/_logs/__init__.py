"""Loggers: the protocol, and JSON Lines."""

from ._json_lines import JSONLinesLogger, plain
from ._protocol import FinishStatus, Logger, NullLogger, checked_logger

__all__ = ["FinishStatus", "JSONLinesLogger", "Logger", "NullLogger", "checked_logger", "plain"]
