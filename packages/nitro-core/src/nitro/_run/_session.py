"""The live state of a handle: what its setup fixed, and what a run moves."""

from __future__ import annotations

import functools
import secrets
import threading
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from nitro._checkpoint import DirectoryLock, RecordEntry, RecordWriter, newest
from nitro._experiment import field_values, resolve_options
from nitro._journal import History
from nitro._logs import plain
from nitro._programs import MemoryPlan
from nitro._progress import Reporter, make_reporter
from nitro._state import TrainState
from nitro._trees import Flat
from nitro.errors import CheckpointError, ConfigError, DriftWarning, warn

from ._evaluate import Evaluator
from ._journaling import RunJournal, SilentJournal, make_journal
from ._phases import Monitors, Phase, PhaseEvent
from ._record_meta import fixed_meta, record_items, record_meta
from ._restore import loggable
from ._running_mean import RunningMean
from ._setup import Setup


@dataclass(kw_only=True, repr=False)
class Session:
    """Everything behind one handle.

    Attributes:
        setup: What the handle was built with.
        state: The weights, model state and optimizer state now.
        device: The Device fields now, on the device.
        evaluator: Runs the forward program.
        reporter: Shows progress.
        journal: Keeps `run.json` up to date.
        records: Writes records, or None.
        lock: Keeps other runs out of the directory while this one writes.
        step: Finished optimizer steps.
        epoch: Finished epochs.
        phase: What the handle is doing.
        history: The finished epochs.
        memory: The memory plan, once there is one.
        steps_in_epoch: Finished optimizer steps of the epoch that is under way.
        loader_state: Where the training source stands, if it can say so.
        epoch_loss: The losses of the epoch that is under way.
        epoch_metrics: Its train metrics, by name.
        is_stop_requested: Whether somebody asked for a graceful stop.
        stop_reason: Why training ended, once it has.
        is_record_requested: Whether somebody asked for a record.
        has_released: Whether the splits were released.
        has_told_slow_data: Whether it was told that training waits for data.
        has_told_unranked: Whether it was told that records are not ranked.
        told_non_finite: The metrics that were told to be not finite, by context.
        last_loss: The loss of the last step that was read.
        is_training: Whether training is under way, whatever the phase.
        training_lock: Held while a thread trains.
        training_thread: The id of the thread that trains, or None.
        reattach_to: What the logger goes on from once training begins, after a resume.
        cuts_other_run: Whether that cuts off lines that this run did not write.
        told_params: The configuration that the log holds already, after a resume.
        lineage: What was changed at each resume of the run, as JSON values.
        has_ended: Whether the resumed run was over.
        restored_best: The record whose weights replaced the trained ones, or None.
        resume_command: What to type to go on, where the command line started the run.
        monitors: Who is told of phases.
        handle: The handle, for those who are told.
    """

    setup: Setup
    state: TrainState
    device: Flat
    evaluator: Evaluator
    reporter: Reporter
    journal: RunJournal
    records: RecordWriter | None
    lock: DirectoryLock
    step: int = 0
    epoch: int = 0
    phase: Phase = Phase.READY
    history: History = field(default_factory=History)
    memory: MemoryPlan | None = None
    steps_in_epoch: int = 0
    loader_state: Any = None
    epoch_loss: RunningMean = field(default_factory=RunningMean)
    epoch_metrics: defaultdict[str, RunningMean] = field(
        default_factory=lambda: defaultdict(RunningMean)
    )
    is_stop_requested: bool = False
    stop_reason: str | None = None
    is_record_requested: bool = False
    has_released: bool = False
    has_told_slow_data: bool = False
    has_told_unranked: bool = False
    told_non_finite: defaultdict[str, set[str]] = field(
        default_factory=lambda: defaultdict(set[str])
    )
    last_loss: float | None = None
    is_training: bool = False
    training_lock: threading.Lock = field(default_factory=threading.Lock)
    training_thread: int | None = None
    reattach_to: Any = None
    cuts_other_run: bool = False
    told_params: dict[str, Any] | None = None
    lineage: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    has_ended: bool = False
    restored_best: RecordEntry | None = None
    resume_command: str | None = None
    monitors: Monitors = field(default_factory=Monitors)
    handle: Any = None
    _is_in_verb: bool = False
    _evaluated: tuple[str | None, bool] = (None, False)
    _told_options: set[str] = field(default_factory=set[str])

    @contextmanager
    def in_phase(self, phase: Phase, *, then: Phase | None = None) -> Generator[None]:
        """Enters a phase; afterwards comes `then`, or what was before.

        An exception leaves FAILED where `then` is given, else what was before.
        """
        before = self.phase
        self.enter(phase)
        try:
            yield
        except BaseException:
            self.enter(before if then is None else Phase.FAILED)
            raise
        if self.phase is phase:
            self.enter(then or before)

    def new_reporter(self) -> None:
        """Takes a fresh reporter, so that progress goes where the output goes now."""
        self.reporter = make_reporter(progress=self.setup.options.progress)

    def enter(self, phase: Phase, metrics: Mapping[str, Any] | None = None) -> None:
        """Moves to a phase and tells the monitors."""
        before, self.phase = self.phase, phase
        self.reporter.phase(phase.value)
        self._publish(phase, before, metrics)

    @contextmanager
    def as_trainer(self) -> Generator[None]:
        """Makes this thread the one that trains.

        Raises:
            ConfigError: This handle is training already, here or in another thread.
        """
        if not self.training_lock.acquire(blocking=False):
            raise ConfigError(
                f"{self.setup.owner} is training already, at step {self.step}.",
                expected="one `train()` of a handle at a time",
                fix="wait until it returns; `request_stop()` ends it early",
            )
        self.training_thread = threading.get_ident()
        try:
            yield
        finally:
            self.training_thread = None
            self.training_lock.release()

    def refuse_other_thread(self) -> None:
        """Refuses what reads the weights while another thread trains and overwrites them.

        Raises:
            ConfigError: Another thread trains.
        """
        if self.training_thread not in (None, threading.get_ident()):
            raise ConfigError(
                f"{self.setup.owner} is training in another thread, at step {self.step}, which "
                "overwrites the weights that this call would read.",
                expected="calls from a monitor, or while no other thread trains",
                fix="call it from `run.on_phase(...)`, or give a second handle the weights of a "
                "record: `Nitro(..., checkpoint=...)`",
            )

    @contextmanager
    def verb(self) -> Generator[None]:
        """One call of the user's: tells of drift first, and last that control is back."""
        self.refuse_other_thread()
        if self._is_in_verb:
            yield
            return
        self._is_in_verb = True
        try:
            self.report_drift()
            yield
        finally:
            self._is_in_verb = False
            self._publish(Phase.IDLE, self.phase, None)

    def _publish(self, phase: Phase, before: Phase, metrics: Mapping[str, Any] | None) -> None:
        is_evaluation = Phase.EVALUATING in (phase, before)
        split, by_user = self._evaluated if is_evaluation else (None, False)
        self.monitors.publish(
            PhaseEvent(
                phase=phase,
                before=before,
                run=self.handle,
                step=self.step,
                epoch=self.epoch,
                metrics=metrics or {},
                split=split,
                by_user=by_user,
            )
        )

    def report_drift(self) -> None:
        """Warns of code and configuration that moved since the handle was built.

        Called by every entry point; each change is told once.
        """
        lines = [*self.setup.programs.drift(), *self._moved_options()]
        if lines:
            warn(
                "Moved since this handle was built: " + "; ".join(lines) + ".\n"
                "  The handle goes on with the programs and options that it has; a new "
                "`Nitro(...)` picks the change up.",
                DriftWarning,
            )

    def _moved_options(self) -> Iterator[str]:
        options = self.setup.options
        from_experiment = {n for n, source in options.sources.items() if source == "experiment"}
        now = resolve_options(self.setup.experiment, {})
        for name in sorted(from_experiment - self._told_options):
            before, after = getattr(options, name), getattr(now, name)
            if before != after:
                self._told_options.add(name)
                yield f"{self.setup.owner}.{name}: {before!r} → {after!r}"

    def evaluate(self, split: str, *, by_user: bool = False) -> dict[str, Any]:
        """The finalised metrics of a split, with the current weights."""
        before = self.phase
        self._evaluated = (split, by_user)
        with self.in_phase(Phase.EVALUATING):
            metrics = self.evaluator.evaluate(self.state, self.device, split)
            self.enter(before, metrics)
        return metrics

    def predict(self, batch: Any) -> Any:
        """The outputs for one batch, with the current weights."""
        with self.in_phase(Phase.PREDICTING):
            return self.evaluator.predict(self.state, self.device, batch)

    def config(self) -> dict[str, Any]:
        """The experiment's fields as JSON values; arrays by dtype and shape."""
        values = field_values(self.setup.experiment)
        return {name: loggable(value) for name, value in values.items()}

    def logged_params(self) -> dict[str, Any]:
        """The fields and the run options, as the logger gets them."""
        return {**self.declared_params(), **self.device_config()}

    def declared_params(self) -> dict[str, Any]:
        """The same, with the Device fields as they were declared."""
        run = self.run_options()
        preset = {} if self.setup.preset is None else {"preset": self.setup.preset}
        return {**self.config(), **run, **preset}

    def run_options(self) -> dict[str, Any]:
        """The run options as JSON values."""
        options = self.setup.options
        return {name: plain(getattr(options, name)) for name in options.sources}

    def device_config(self) -> dict[str, Any]:
        """The Device fields as they are now, as JSON values; arrays by dtype and shape."""
        host = jax.tree.map(_as_written, jax.device_get(self.device))
        return {name: loggable(value) for name, value in host.items()}

    def best_record(self) -> Path | None:
        """The directory of the best record of this run that is on disk, if there is one."""
        return None if self.records is None else self.records.best()

    def request_stop(self) -> None:
        """Asks training to stop at the next boundary between calls."""
        self.is_stop_requested = True

    def open(self) -> None:
        """Takes the run's directory for writing, unless the run leaves nothing there.

        Raises:
            CheckpointError: Another run writes into it, it cannot be written, or the run has
                been trained on by another handle.
        """
        if not isinstance(self.journal, SilentJournal):
            self.lock.acquire()
        try:
            self._refuse_if_overtaken()
        except CheckpointError:
            self.lock.release()
            raise

    def _refuse_if_overtaken(self) -> None:
        own = [] if self.records is None else self.records.own()
        if own and newest(own).step > self.step:
            raise CheckpointError(
                f"This handle stands at step {self.step} of the run {newest(own).run}, which has "
                f"been trained on to step {newest(own).step} since.",
                expected="the newest record of the run: what came later would be overwritten",
                fix='build the handle again with `resume="auto"`',
            )

    def close(self) -> None:
        """Waits for the last record, ends background threads, and gives the directory up."""
        try:
            if self.records is not None:
                self.records.close()
        finally:
            self.lock.release()

    def save_record(self, metrics: Mapping[str, float] | None, reason: str | None) -> None:
        """Starts writing a record of this moment, unless the run writes none."""
        if self.records is not None:
            self.records.save(
                record_items(self),
                step=self.step,
                epoch=self.epoch,
                metrics=self._ranking_metrics(metrics),
                stop_reason=reason,
                meta=record_meta(self, metrics),
            )

    def _ranking_metrics(self, metrics: Mapping[str, float] | None) -> Mapping[str, float] | None:
        """What a record is ranked by; nothing where only the default policy misses its metric."""
        policy = self.setup.checkpointer
        is_default = self.setup.sources["checkpointer"] == "default"
        if policy is None or metrics is None or not is_default or policy.metric in metrics:
            return metrics
        if not self.has_told_unranked:
            self.has_told_unranked = True
            warn(
                f"Records are not ranked: the default checkpointer ranks by `{policy.metric}`, "
                f"and `{self.setup.owner}.metrics` emits {', '.join(f'`{m}`' for m in metrics)}. "
                "Only the newest record is kept.\n"
                f'  fix: pass `checkpointer=nitro.TopK(metric="{next(iter(metrics), "acc")}", '
                "mode=...)`, or have `metrics` emit it"
            )
        return None

    @functools.cached_property
    def run_id(self) -> str:
        """The id of the run, which its records carry; one of its own where it writes none."""
        if self.records is not None:
            return self.records.run
        return self.setup.source.run or secrets.token_hex(4)

    @functools.cached_property
    def fixed_meta(self) -> dict[str, Any]:
        """What all records of this session say alike."""
        return fixed_meta(self)


def _as_written(value: Any) -> Any:
    """A float32 scalar as the shortest number that is it: 0.1, not 0.10000000149."""
    is_short = np.ndim(value) == 0 and value.dtype in (np.float32, np.float16)
    return float(str(value)) if is_short else value


def release_sources(session: Session) -> None:
    """Calls `release()`, once, of each split that was built for this handle and has one."""
    if session.has_released or not session.setup.owns_data:
        return
    session.has_released = True
    for split, source in session.setup.splits.items():
        release = getattr(source, "release", None)
        if release is None:
            continue
        try:
            release()
        except Exception as error:  # noqa: BLE001 - the run is over, and has its results
            warn(f"The split `{split}` could not be released: {type(error).__name__}: {error}")


def make_history(setup: Setup) -> History:
    """An empty history, ranked as records are, else as early stopping watches."""
    ranks: Any = setup.checkpointer or setup.stopper
    return History(metric=getattr(ranks, "metric", "val_loss"), mode=getattr(ranks, "mode", "min"))


def make_session(setup: Setup) -> Session:
    """The session that a setup starts with."""
    policy = setup.checkpointer
    directory = setup.options.run_dir / "checkpoints"
    return Session(
        setup=setup,
        state=setup.state,
        device=dict(setup.device),
        evaluator=Evaluator(setup),
        reporter=make_reporter(progress=setup.options.progress),
        journal=make_journal(setup),
        records=None
        if policy is None
        else RecordWriter(directory, policy, run=setup.source.run, parent=setup.source.parent),
        lock=DirectoryLock(setup.options.run_dir),
        history=make_history(setup),
    )
