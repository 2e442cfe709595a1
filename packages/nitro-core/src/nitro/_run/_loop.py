"""The one training loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import jax
import numpy as np

from nitro._journal import ending
from nitro._logs import log_block
from nitro._metrics import flat_arrays, flat_scalars
from nitro._programs import MemoryPlan, StepChecks
from nitro.errors import ConfigError, DivergenceError, HookError, warn

from ._best import refuse_restored_best, restore_best
from ._binding import binding_report
from ._divergence import (
    check_steering,
    end_error,
    first_end,
    refuse_not_finite,
    steering_metrics,
)
from ._earlier import part_from_earlier_run
from ._figures import keep_figures
from ._interrupts import OnInterrupt, end_by_signal, stop_on_signals
from ._leaks import LeakWatch
from ._memory_plan import check_memory_plan, make_memory_plan
from ._phases import Phase
from ._rescue import may_record, rescue
from ._session import Session
from ._steps import Call, StepRunner
from ._stopping import StopReason

_SLOW_DATA = 0.25
_WORTH_TELLING_S = 1.0


def run_training(session: Session, *, on_interrupt: OnInterrupt) -> None:
    """Trains from where the session stands, and ends logger, records and progress.

    Ctrl-C and SIGTERM become requests to stop while it runs; once everything is safe, they
    end the program, unless `on_interrupt` is "return".

    Raises:
        KeyboardInterrupt: Ctrl-C stopped the run.
        SystemExit: SIGTERM did.
    """
    session.is_stop_requested = False
    session.stop_reason = None
    session.open()
    session.new_reporter()
    part_from_earlier_run(session)
    session.journal.begin(session)
    session.is_training = True
    begun = session.step
    with session.in_phase(Phase.TRAINING, then=Phase.DONE):
        try:
            _begin_log(session)
            with stop_on_signals(session.request_stop) as interrupt:
                session.stop_reason = _run_epochs(session)
                session.close()
                check_steering(session)
        except BaseException as error:
            session.stop_reason = "failed"
            rescue(session, error, begun=begun)
            _end_after_error(session, error)
            raise
        finally:
            session.is_training = False
    session.reporter.end(reason=session.stop_reason)
    _finish(session)
    if session.setup.restores_best:
        restore_best(session)
    end_by_signal(session, interrupt, on_interrupt)


def end_resumed(session: Session) -> None:
    """Ends a resumed run that was over, as far as a kill behind its last record left that out."""
    source = session.setup.source
    if source.resumed is None or source.run is None or session.reattach_to is None:
        return
    session.stop_reason = _ending_of_resumed(session, source.resumed.entry.stop_reason)
    if session.journal.was_interrupted(session):
        session.open()
        try:
            session.journal.begin(session)
            _begin_log(session)
            _finish(session)
        finally:
            session.close()
    else:
        session.journal.settle(session)
    if session.setup.restores_best:
        restore_best(session)


def _ending_of_resumed(session: Session, recorded: str | None) -> str:
    """How a resumed run that takes no step has ended: at a horizon that may be another one now."""
    is_over = session.epoch >= session.setup.options.max_epochs
    return recorded if recorded == "early_stop" or (recorded and not is_over) else "completed"


def _finish(session: Session) -> None:
    """Says how the run ended: in the log, then in its file, which tells what a kill left out."""
    try:
        session.setup.logger.finish(ending(session.stop_reason or "completed"))
    finally:
        session.journal.end(session)


def record_now(session: Session) -> None:
    """Writes a record of a session that does not train.

    Raises:
        ConfigError: It has no optimizer, or the weights of another step than its optimizer.
    """
    if session.setup.optimizer is None:
        raise ConfigError(
            "A record needs an optimizer to be resumed, and this handle has none: there is no "
            "split `train`.",
            fix="build the handle with a training split; to hand weights over, `export_model`",
        )
    refuse_restored_best(session)
    refuse_not_finite(session)
    session.open()
    try:
        if may_record(session):
            session.save_record(None, session.stop_reason)
    finally:
        session.close()


def _begin_log(session: Session) -> None:
    """Logs the configuration; a log that goes on is told of changes only."""
    logger = session.setup.logger
    if session.reattach_to is not None:
        set_aside = getattr(logger, "set_aside", None)
        if session.cuts_other_run and set_aside is not None:
            set_aside()
        logger.reattach(session.reattach_to)
        session.reattach_to = None
    declared = session.declared_params()
    if declared != session.told_params:
        logger.params(session.logged_params())
        logger.other("binding", str(binding_report(session)))
        session.told_params = declared


def _end_after_error(session: Session, error: BaseException) -> None:
    """Ends what is open; what fails on the way is a warning, and `error` stays the error."""
    steps: dict[str, Callable[[], None]] = {
        "the progress reporter": lambda: session.reporter.end(reason="failed"),
        "the records": session.close,
        "the run's file": lambda: session.journal.end(session, error),
    }
    # A logger that could not go on with the record's run has nothing to end.
    if session.reattach_to is None:
        steps["the logger"] = lambda: session.setup.logger.finish("failed")
    for what, end in steps.items():
        try:
            end()
        except Exception as second:  # noqa: BLE001 - it must not hide why the run failed
            warn(f"Training failed; then ending {what} raised {type(second).__name__}: {second}")


def _run_epochs(session: Session) -> StopReason:
    """Runs epochs until the horizon, an early stop or a request; returns which it was.

    An epoch is: its steps, then validation, history, log, record. A request ends the
    epoch at the next call's end: what is left of it belongs to whoever resumes.
    """
    setup = session.setup
    assert setup.optimizer is not None
    session.reporter.begin(
        total_steps=setup.num_steps,
        done_steps=session.step,
        max_epochs=setup.options.max_epochs,
    )
    with session.in_phase(Phase.COMPILING):
        steps = StepRunner(session, setup.optimizer)
        session.evaluator.warm_up(session.state, session.device)
        session.memory = steps.memory_plan()
        check_memory_plan(session.memory, setup.owner)
    leaks = LeakWatch()
    while session.epoch < setup.options.max_epochs:
        if not _train_epoch(session, steps):
            _save(session, None, "stopped")
            return "stopped"
        metrics = _end_epoch(session, steps)
        reason = _stop_reason(session, metrics)
        _save(session, metrics, reason)
        leaks.epoch_end(session.epoch)
        if reason is not None:
            return reason
    return "completed"


def plan_memory(session: Session) -> MemoryPlan:
    """The memory plan of a handle, trained or not; compiles the programs that it needs."""
    session.evaluator.warm_up(session.state, session.device)
    optimizer = session.setup.optimizer
    if optimizer is None:
        return make_memory_plan(session)
    return StepRunner(session, optimizer).memory_plan()


def _train_epoch(session: Session, steps: StepRunner) -> bool:
    """Takes the rest of the epoch's steps; False if a request cut it short."""
    if session.steps_in_epoch == session.setup.steps_per_epoch:
        # Resumed where validation failed: to open the source would begin its next epoch.
        return True
    # Closed even while an exception holds on to this frame, so that no thread outlives it.
    with closing(steps.run_epoch()) as calls:
        return _take_calls(session, steps, calls)


def _take_calls(session: Session, steps: StepRunner, calls: Iterator[Call]) -> bool:
    pending: Call | None = None
    every = session.setup.options.checkpoint_every_steps
    try:
        for call in calls:
            # Scalars are read one call late, so that the device never waits for the host.
            due, pending = pending, call
            if due is not None:
                _report(session, due, steps)
            at_boundary = every is not None and session.step % every == 0
            if session.is_stop_requested or session.is_record_requested or at_boundary:
                pending = None
                _report(session, call, steps)
                at_end = session.steps_in_epoch == session.setup.steps_per_epoch
                if session.is_stop_requested and not at_end:
                    return False
                if not at_end:
                    _save(session, None, None)
    except Exception as error:
        # What came after a step that ends the run is of no interest.
        if pending is not None and not isinstance(error, DivergenceError | HookError):
            _report_last(session, pending, steps)
        raise
    if pending is not None:
        _report(session, pending, steps)
    return True


def _report_last(session: Session, call: Call, steps: StepRunner) -> None:
    """Reports what was done before something raised: its losses belong to the epoch."""
    try:
        _report(session, call, steps)
    except DivergenceError:
        raise
    except Exception:  # noqa: BLE001 - what raised first is what the user must see
        return


def _report(session: Session, call: Call, steps: StepRunner) -> None:
    """Logs the steps of one call and adds up their losses."""
    host, checks = jax.device_get((call.scalars, call.checks))
    host = {n: v[: call.count] for n, v in host.items()}
    end = first_end(session, host["loss"], checks)
    # First: whatever the log makes of it, the steps were taken.
    _add_to_means(session, {n: v[:end] for n, v in host.items()}, checks)
    _log_steps(session, {n: v[:end] for n, v in host.items()}, call.first)
    loss = float(host["loss"][-1])
    if end is not None:
        raise end_error(session, call, host["loss"], checks, end)
    session.last_loss = loss
    session.reporter.advance(
        step=call.first + call.count - 1,
        epoch=session.epoch + 1,
        loss=loss,
        data_wait_frac=steps.data_wait_share(),
    )
    session.journal.update(session)


def _log_steps(session: Session, host: dict[str, np.ndarray], first: int) -> None:
    """Logs a row for each step, all at once unless something in them is not finite."""
    columns = {name: column.tolist() for name, column in host.items()}
    logger, epoch = session.setup.logger, session.epoch + 1
    if all(np.isfinite(column).all() for column in host.values()):
        log_block(logger, columns, context="train", first_step=first, epoch=epoch)
    else:
        for step, row in enumerate(zip(*columns.values(), strict=True), first):
            values = _finite(session, dict(zip(columns, row, strict=True)), "train", step)
            logger.metrics(values, context="train", step=step, epoch=epoch)


def _add_to_means(session: Session, columns: dict[str, np.ndarray], checks: StepChecks) -> None:
    """Adds to the means of the epoch, in which a loss counts as often as what it counts."""
    for name, column in columns.items():
        if name == "loss" and checks.count is not None:
            for loss, weight in zip(column.tolist(), checks.count.tolist(), strict=False):
                session.epoch_loss.add(loss, weight)
            continue
        mean = session.epoch_loss if name == "loss" else session.epoch_metrics[name]
        for value in column.tolist():
            mean.add(value)


def _end_epoch(session: Session, steps: StepRunner) -> dict[str, float] | None:
    """Validates, and writes the epoch into history and log; returns what was validated."""
    losses = session.epoch_loss.get_state()
    mean_loss = session.epoch_loss.take()
    metric_states = {name: mean.get_state() for name, mean in session.epoch_metrics.items()}
    means = {name: mean.take() for name, mean in session.epoch_metrics.items()}
    session.epoch += 1
    session.steps_in_epoch = 0
    row = {"epoch": session.epoch, "step": session.step, "loss": mean_loss}
    try:
        if steps.has_drawn:
            _report_data_wait(session, *steps.take_data_wait())
        validated, metrics = _validate(session)
    except BaseException:
        # Whoever goes on validates first: the epoch has all its steps, and is not over.
        session.history.append(row)
        session.epoch -= 1
        session.steps_in_epoch = session.setup.steps_per_epoch
        session.epoch_loss.set_state(losses)
        for name, state in metric_states.items():
            session.epoch_metrics[name].set_state(state)
        raise
    # A validation metric keeps its name; the mean over training steps makes way.
    trained = {f"train_{n}" if n in validated else n: value for n, value in means.items()}
    session.history.append({**row, **trained, **validated})
    session.reporter.epoch_end(epoch=session.epoch, metrics={"loss": mean_loss, **(metrics or {})})
    return metrics


def _report_data_wait(session: Session, waited_s: float, share: float) -> None:
    values = {"data_wait_frac": share}
    session.setup.logger.metrics(values, context="data", step=session.step, epoch=session.epoch)
    if share > _SLOW_DATA and waited_s > _WORTH_TELLING_S and not session.has_told_slow_data:
        session.has_told_slow_data = True
        warn(
            f"Training waited for data for {share:.0%} of epoch {session.epoch}: it could be up "
            f"to {1 / (1 - min(share, 0.99)):.1f} times as fast.\n"
            "  fix: make the loader faster (fewer Python steps per sample, more workers), or keep "
            "the data in an ArrayLoader"
        )


def _validate(session: Session) -> tuple[dict[str, Any], dict[str, float] | None]:
    """All metrics by flat name, for the history; and the scalars, if there is a split."""
    if "val" not in session.setup.splits:
        return {}, None
    session.evaluator.draws = True
    try:
        metrics = session.evaluate("val")
    finally:
        session.evaluator.draws = False
    keep_figures(
        session.evaluator.figures,
        logger=session.setup.logger,
        run_dir=session.setup.options.run_dir,
        split="val",
        step=session.step,
        epoch=session.epoch,
    )
    scalars = flat_scalars(metrics)
    finite = _finite(session, scalars, "val", session.step)
    session.setup.logger.metrics(finite, context="val", step=session.step, epoch=session.epoch)
    return {**flat_arrays(metrics), **scalars}, scalars


def _finite(
    session: Session, values: dict[str, float], context: str, step: int
) -> dict[str, float]:
    """The values that a log can hold; tells once of each name that it cannot."""
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    steering = steering_metrics(session) if context == "val" else {}
    for name in sorted(values.keys() - finite.keys() - session.told_non_finite[context]):
        session.told_non_finite[context].add(name)
        steers = "it counts as worse than every number" if name in steering else None
        warn(
            f"The metric `{name}` of `{context}` is {values[name]} at step {step}.\n"
            "  Values that are not finite are left out of the log; "
            f"{steers or 'nothing steers by this one'}."
        )
    return finite


def _stop_reason(session: Session, metrics: dict[str, float] | None) -> StopReason | None:
    """Why the run ends after this epoch, if it does; the stopper is always asked."""
    stopper: Any = session.setup.stopper
    stops = stopper is not None and stopper.should_stop(session.epoch, metrics or {})
    if session.epoch >= session.setup.options.max_epochs:
        return "completed"
    if stops:
        return "early_stop"
    return "stopped" if session.is_stop_requested else None


def _save(session: Session, metrics: dict[str, float] | None, reason: StopReason | None) -> None:
    session.is_record_requested = False
    if session.records is not None and may_record(session):
        with session.in_phase(Phase.CHECKPOINTING):
            session.save_record(metrics, reason)
