"""Several loggers at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from nitro.errors import CheckpointError, ConfigError, did_you_mean

from ._protocol import FinishStatus, Logger, check_ready, checked_logger, log_block

_Kind = TypeVar("_Kind")


class MultiLogger:
    """Passes everything on to several loggers, in order.

    Args:
        loggers: The loggers; each is checked, and bound to the run, as if it were alone.

    Raises:
        ConfigError: No logger, or one that lacks verbs.

    Example:
        >>> import nitro
        >>> logger = nitro.MultiLogger(nitro.JSONLinesLogger(), nitro.JSONLinesLogger("a.jsonl"))
        >>> [type(one).__name__ for one in logger.loggers]
        ['JSONLinesLogger', 'JSONLinesLogger']
    """

    def __init__(self, *loggers: Logger) -> None:
        if not loggers or None in loggers:  # pyright: ignore[reportUnnecessaryContains] - users pass anything
            raise ConfigError(
                f"`MultiLogger({', '.join(map(str, loggers))})`.",
                expected="one or more loggers",
                fix="pass `logger=None` to `Nitro` to log nothing",
            )
        self.loggers = tuple(checked_logger(logger, None) for logger in loggers)

    def bind(self, run_dir: Path) -> Self:
        """The same loggers, each bound to the run's directory; called by the handle."""
        bound = copy.copy(self)
        bound.loggers = tuple(checked_logger(logger, run_dir) for logger in self.loggers)
        return bound

    def check_ready(self) -> None:
        """Has each logger that can do so say whether it can log."""
        for logger in self.loggers:
            check_ready(logger)

    def metrics(
        self, values: Mapping[str, float], *, context: str, step: int, epoch: int, **more: Any
    ) -> None:
        """Passes them on."""
        for logger in self.loggers:
            logger.metrics(values, context=context, step=step, epoch=epoch, **more)

    def metrics_block(
        self,
        columns: Mapping[str, Sequence[float]],
        *,
        context: str,
        first_step: int,
        epoch: int,
        **_more: Any,
    ) -> None:
        """Passes them on: at once, or step by step, as each logger takes them."""
        for logger in self.loggers:
            log_block(logger, columns, context=context, first_step=first_step, epoch=epoch)

    def params(self, values: Mapping[str, Any], **more: Any) -> None:
        """Passes them on."""
        for logger in self.loggers:
            logger.params(values, **more)

    def tags(self, values: Mapping[str, str], **more: Any) -> None:
        """Passes them on."""
        for logger in self.loggers:
            logger.tags(values, **more)

    def other(self, name: str, value: Any, **more: Any) -> None:
        """Passes it on."""
        for logger in self.loggers:
            logger.other(name, value, **more)

    def figure(self, name: str, figure: Any, **facts: Any) -> bool:
        """Passes it on to those that show images; says whether there is one."""
        shows = [show for one in self.loggers if (show := getattr(one, "figure", None)) is not None]
        shown = [show(name, figure, **facts) for show in shows]
        return any(shown)

    def __getitem__(self, kind: type[_Kind]) -> _Kind:
        """The logger of a class, bound to the run: `run.logger[nitro.TensorBoardLogger]`.

        Raises:
            ConfigError: There is none; names the classes that there are.
        """
        for logger in self.loggers:
            if isinstance(logger, kind):
                return logger
        raise ConfigError(
            f"The MultiLogger has no {kind.__name__}.",
            expected=did_you_mean(kind.__name__, [type(one).__name__ for one in self.loggers]),
            fix="`logger.loggers` are all of them, in order",
        )

    def confusion(self, matrix: Any, *, step: int, epoch: int, **more: Any) -> None:
        """Passes it on."""
        for logger in self.loggers:
            logger.confusion(matrix, step=step, epoch=epoch, **more)

    def finish(self, status: FinishStatus, **more: Any) -> None:
        """Ends all runs, also after one of them cannot be ended."""
        errors: list[Exception] = []
        for logger in self.loggers:
            try:
                logger.finish(status, **more)
            # Raised below, once the others have ended.
            except Exception as error:  # noqa: BLE001
                errors.append(error)
        if errors:
            raise errors[0]

    def run_id(self) -> str | None:
        """The first id that a logger has."""
        return self._first(lambda logger: logger.run_id())

    def run_url(self) -> str | None:
        """The first page that a logger has."""
        return self._first(lambda logger: logger.run_url())

    def logger_state(self) -> Any:
        """The state of each logger, with its type."""
        return [{"type": type(one).__name__, "state": one.logger_state()} for one in self.loggers]

    def blank_state(self) -> Any:
        """The state of each logger, with its type, before it has logged anything."""
        return [{"type": type(one).__name__, "state": _blank(one)} for one in self.loggers]

    def set_aside(self) -> None:
        """Has each logger that can do so keep what is about to be cut off."""
        for logger in self.loggers:
            set_aside = getattr(logger, "set_aside", None)
            if set_aside is not None:
                set_aside()

    def reattach(self, state: Any) -> None:
        """Goes on with the run of each logger.

        Raises:
            CheckpointError: The record was logged by others.
        """
        saved, now = [one["type"] for one in state], [type(one).__name__ for one in self.loggers]
        if saved != now:
            raise CheckpointError(
                f"The record was logged by {', '.join(saved)}; this handle logs by {', '.join(now)}.",
                expected="the same loggers in the same order",
                fix=f"pass `MultiLogger({', '.join(f'{name}()' for name in saved)})`",
            )
        for logger, one in zip(self.loggers, state, strict=True):
            if one["state"] is not None:
                logger.reattach(one["state"])

    def _first(self, ask: Callable[[Logger], str | None]) -> str | None:
        return next((answer for one in self.loggers if (answer := ask(one)) is not None), None)


def _blank(logger: Any) -> Any:
    blank_state = getattr(logger, "blank_state", None)
    return None if blank_state is None else blank_state()
