"""What ends a run at a step: a loss or weights that are not finite, or a loss over nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nitro._checkpoint import open_record
from nitro._programs import StepChecks
from nitro.errors import CheckpointError, DivergenceError, HookError, NitroError

from ._odd_values import odd_fields
from ._session import Session
from ._steps import Call


def first_end(session: Session, losses: np.ndarray, checks: StepChecks) -> int | None:
    """Where the first step of a call is that ends the run; None if it goes on.

    Args:
        session: The session.
        losses: The losses of the steps that the call took.
        checks: Its checks, on the host.
    """
    ends = np.zeros(len(losses), bool)
    if checks.count is not None:
        ends |= checks.count[: len(losses)] == 0
    if session.setup.options.check_divergence:
        ends |= ~(np.isfinite(losses) & checks.is_finite[: len(losses)])
    return int(np.argmax(ends)) if ends.any() else None


def end_error(
    session: Session, call: Call, losses: np.ndarray, checks: StepChecks, index: int
) -> NitroError:
    """Says why the run ends at a step: nothing counts, or the loss or a weight is not finite."""
    at, loss = f"at step {call.first + index} of epoch {session.epoch + 1}", float(losses[index])
    if checks.count is not None and checks.count[index] == 0:
        return HookError(
            f"The counts that `{session.setup.owner}.loss` returned add up to 0 {at}.",
            expected="a count above 0 over the micro-batches of each step",
            fix="leave out batches in which nothing counts, make them larger, or raise `accum`",
        )
    cause = _cause(session, call, index)
    if cause:
        what = f"loss is {loss}" if not math.isfinite(loss) else f"loss of {loss:.6g} broke weights"
        return DivergenceError(
            f"The {what} {at}, and what the step reads is not finite: {cause}.",
            expected="finite numbers in the fields that `forward` and `loss` name",
            fix="mend or leave out these rows; where they stand for what is missing, replace them "
            "before `forward` and `loss` compute with them, and count them out",
        )
    if not math.isfinite(loss):
        return DivergenceError(
            f"The loss is {loss} {at}.",
            expected="a finite loss",
            fix=_way_back(session) + "; or clip the gradient (`gradient_clip_norm=1.0`)",
        )
    return DivergenceError(
        f"The update {at} made weights that are not finite, of a loss of {loss:.6g}: "
        f"{_shown(not_finite(session))}.",
        expected="a finite gradient",
        fix="look in `forward` and `loss` for a derivative that is infinite where the value is "
        "not (`sqrt`, `log` or a norm at 0, a `where` around one); or " + _way_back(session),
    )


def _cause(session: Session, call: Call, index: int) -> str:
    """What a step reads that is not finite: derived values, Device fields, or its batch."""
    derived = session.setup.derived
    causes = [f"`derive` made `{name}` so" for name, value in derived.items() if _is_odd(value)]
    causes += [
        f"the Device field `{name}`"
        for name, value in session.device.items()
        if name not in derived and _is_odd(value)
    ]
    fields, samples = call.rows_of(index)
    odd = odd_fields(fields, samples=samples)
    return "; ".join([*causes, *([f"in `train` {odd}"] if odd else [])])


def steering_metrics(session: Session) -> dict[str, str]:
    """The metrics of the validation that steer the run, and how they do."""
    policy, stopper = session.setup.checkpointer, session.setup.stopper
    steers = {} if policy is None else {policy.metric: "by which checkpoints are ranked"}
    watched: str | None = getattr(stopper, "metric", None)
    return steers if watched is None else {watched: "which early stopping watches", **steers}


def check_steering(session: Session) -> None:
    """Tells at the end of a run that a metric that steers it was not finite in any epoch.

    Raises:
        DivergenceError: Names the metric.
    """
    for metric, how in steering_metrics(session).items():
        values = [row[metric] for row in session.history.rows if metric in row]
        if values and not any(value is not None and math.isfinite(value) for value in values):
            raise DivergenceError(
                f"The metric `{metric}`, {how}, is {values[-1]}, and was not finite in any of "
                f"{len(values)} epochs.",
                expected="a finite number in one epoch at least: no checkpoint has a score",
                fix="look at what it is computed from on the split `val`, or name another "
                "metric; the newest checkpoint holds the last epoch",
            )


def refuse_not_finite(session: Session) -> None:
    """Refuses a record of weights that are not finite, where divergence is checked.

    Raises:
        DivergenceError: Names the weights.
    """
    names = not_finite(session) if session.setup.options.check_divergence else []
    if names:
        raise DivergenceError(
            f"No record of step {session.step}: the weights {_shown(names)} are not finite.",
            expected="weights that training can go on from",
            fix=_way_back(session) + "; `check_divergence=False` allows such records",
        )


def not_finite(session: Session) -> list[str]:
    """The weights that are not finite now, by dotted name."""
    return [name for name, leaf in session.state.params.items() if not _is_finite(leaf)]


def _way_back(session: Session) -> str:
    record = _newest_healthy(session)
    if record is None:
        return "start again with a lower learning rate: there is no record of finite weights"
    return (
        "go on from the newest record of finite weights with a lower learning rate: "
        f'`Nitro(..., resume="{record}")`'
    )


def _newest_healthy(session: Session) -> Path | None:
    """The newest record of this run whose weights are finite."""
    records = session.records
    if records is None:
        return None
    with suppress(CheckpointError):
        records.wait()
    for entry in sorted(records.own(), key=lambda entry: -entry.step):
        path = records.directory / entry.name
        params = open_record(path).read("params", session.state.params)
        if all(map(_is_finite, params.values())):
            return path
    return None


def _is_odd(value: Any) -> bool:
    return not all(map(_is_finite, jax.tree.leaves(value)))


def _is_finite(leaf: Any) -> bool:
    array = np.asarray(leaf)
    return not jnp.issubdtype(array.dtype, jnp.inexact) or bool(np.isfinite(array).all())


def _shown(names: Sequence[str]) -> str:
    shown = [f"`{name}`" for name in names[:3]]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
