"""What a logger must be able to do."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from nitro.errors import ConfigError

FinishStatus = Literal["completed", "early_stop", "stopped", "failed"]
VERBS = (
    "metrics",
    "params",
    "tags",
    "other",
    "confusion",
    "finish",
    "run_id",
    "run_url",
    "logger_state",
    "reattach",
)


class Logger(Protocol):
    """Receives what a run reports. Extra keywords may come with later versions.

    Six more methods are called where a logger has them: `bind(run_dir)` returns the logger
    for a run; `check_ready()` raises at the setup of a handle that trains where it could not
    log; `metrics_block(columns, *, context, first_step, epoch, **more)` takes the steps of one
    call of the program at once, instead of a call of `metrics` for each; `set_aside()`
    comes before `reattach` where that cuts off what another run has logged; `blank_state()`
    returns what `reattach` gets where a process was killed before its first record, and its
    run starts over; `figure(name, figure, *, context, step, epoch, **more)` shows a matplotlib
    figure, and returns whether it did.
    """

    def metrics(
        self, values: Mapping[str, float], *, context: str, step: int, epoch: int, **more: Any
    ) -> None:
        """Logs finite scalars under a context: "train", "val" or "data"."""
        ...

    def params(self, values: Mapping[str, Any], **more: Any) -> None:
        """Logs the run's configuration, once, before the first compile; keys are flat."""
        ...

    def tags(self, values: Mapping[str, str], **more: Any) -> None:
        """Logs short labels of the run."""
        ...

    def other(self, name: str, value: Any, **more: Any) -> None:
        """Logs anything else that is worth keeping, as JSON values."""
        ...

    def confusion(self, matrix: Any, *, step: int, epoch: int, **more: Any) -> None:
        """Logs a confusion matrix; only user code calls it."""
        ...

    def finish(self, status: FinishStatus, **more: Any) -> None:
        """Ends the run; called once."""
        ...

    def run_id(self) -> str | None:
        """The back end's identifier of the run, if it has one."""
        ...

    def run_url(self) -> str | None:
        """Where a person can look at the run."""
        ...

    def logger_state(self) -> Any:
        """Plain data that a record keeps, so that `reattach` can go on; or None."""
        ...

    def reattach(self, state: Any) -> None:
        """Goes on with the run that `logger_state` described; called before logging."""
        ...


def checked_logger(logger: Any, run_dir: Path | None) -> Logger:
    """The logger bound to the run's directory; None becomes one that drops everything.

    Without a directory it is checked only.

    Raises:
        ConfigError: Verbs are missing; lists all of them.
    """
    if logger is None:
        return NullLogger()
    if isinstance(logger, type | str):
        raise ConfigError(
            f"`logger` is {logger!r}.",
            expected="a logger: an object with the verbs of `nitro.Logger`",
            fix="make one, such as `logger=nitro.TensorBoardLogger()`",
        )
    missing = [verb for verb in VERBS if not callable(getattr(logger, verb, None))]
    if missing:
        raise ConfigError(
            f"The logger {type(logger).__name__} lacks {', '.join(missing)}.",
            expected=f"the verbs {', '.join(VERBS)}",
            fix="add them, or pass `logger=None` to log nothing",
        )
    bind = getattr(logger, "bind", None)
    return bind(run_dir) if bind is not None and run_dir is not None else logger


def check_ready(logger: Logger) -> None:
    """Has a logger say whether it can log, if it can say so.

    Raises:
        ConfigError: It cannot.
    """
    check = getattr(logger, "check_ready", None)
    if check is not None:
        check()


def checked_state(logger: Logger) -> Any:
    """What `logger_state` returns, checked to be plain data.

    Raises:
        ConfigError: It holds something that JSON cannot; names the logger.
    """
    state = logger.logger_state()
    try:
        return json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"`{type(logger).__name__}.logger_state` returned what no record can hold: {error}.",
            expected="None, or plain data: dicts, lists, strings, numbers",
            fix="return what finds the run again, such as its id, and open it in `reattach`",
        ) from error


def log_block(
    logger: Logger,
    columns: Mapping[str, Sequence[float]],
    *,
    context: str,
    first_step: int,
    epoch: int,
) -> None:
    """Logs consecutive steps: at once where the logger can do that, else one by one.

    Args:
        logger: Who gets them.
        columns: Finite scalars by name, one for each step, as Python numbers.
        context: As in `Logger.metrics`.
        first_step: The step of the first row.
        epoch: The epoch of all rows.
    """
    if _takes_blocks(logger):
        block: Any = logger
        block.metrics_block(columns, context=context, first_step=first_step, epoch=epoch)
        return
    for step, row in enumerate(zip(*columns.values(), strict=True), first_step):
        values = dict(zip(columns, row, strict=True))
        logger.metrics(values, context=context, step=step, epoch=epoch)


def _takes_blocks(logger: Any) -> bool:
    """Whether it has `metrics_block`, and no `metrics` that was written over an inherited one."""
    for namespace in (vars(logger) if hasattr(logger, "__dict__") else {}, *_namespaces(logger)):
        if "metrics_block" in namespace or "metrics" in namespace:
            return "metrics_block" in namespace
    return False


def _namespaces(logger: Any) -> Iterator[Mapping[str, Any]]:
    return (vars(kind) for kind in type(logger).__mro__)


class NullLogger:
    """Drops everything: what `logger=None` means."""

    def metrics(self, values: Mapping[str, float], **more: Any) -> None:
        """Drops them."""

    def metrics_block(self, columns: Mapping[str, Sequence[float]], **more: Any) -> None:
        """Drops them."""

    def params(self, values: Mapping[str, Any], **more: Any) -> None:
        """Drops them."""

    def tags(self, values: Mapping[str, str], **more: Any) -> None:
        """Drops them."""

    def other(self, name: str, value: Any, **more: Any) -> None:
        """Drops it."""

    def confusion(self, matrix: Any, **more: Any) -> None:
        """Drops it."""

    def finish(self, status: FinishStatus, **more: Any) -> None:
        """Does nothing."""

    def run_id(self) -> str | None:
        """None: there is no back end."""
        return None

    def run_url(self) -> str | None:
        """None: there is nothing to look at."""
        return None

    def logger_state(self) -> Any:
        """None: there is nothing to go on with."""
        return None

    def reattach(self, state: Any) -> None:
        """Does nothing."""
