"""Loggers: the protocol, JSON Lines, TensorBoard, MLflow, and several at once."""

from ._json_lines import JSONLinesLogger, plain
from ._mlflow import MLflowLogger
from ._multi import MultiLogger
from ._protocol import Logger, NullLogger, check_ready, checked_logger, checked_state, log_block
from ._tensorboard import TensorBoardLogger

__all__ = [
    "JSONLinesLogger",
    "Logger",
    "MLflowLogger",
    "MultiLogger",
    "NullLogger",
    "TensorBoardLogger",
    "check_ready",
    "checked_logger",
    "checked_state",
    "log_block",
    "plain",
]
