"""The live state of a handle: what its setup fixed, and what a run moves."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from nitro._checkpoint import RecordWriter
from nitro._experiment import Residency, resolve_options
from nitro._logs import plain
from nitro._programs import MemoryPlan
from nitro._progress import Reporter, make_reporter
from nitro._state import TrainState
from nitro._trees import Flat
from nitro._version import __version__
from nitro.errors import DriftWarning

from ._evaluate import Evaluator
from ._history import History
from ._phases import Monitors, Phase, PhaseEvent
from ._restore import loggable
from ._setup import Setup


class RunningMean:
    """A mean that can be put down and taken up again without a change of bits."""

    def __init__(self) -> None:
        self._total = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        """Adds a value."""
        self._total += value
        self._count += 1

    def take(self) -> float:
        """The mean so far; starts anew."""
        mean = self._total / self._count if self._count else float("nan")
        self.set_state({"total": 0.0, "count": 0})
        return mean

    def get_state(self) -> dict[str, Any]:
        """What was added so far, as JSON values."""
        return {"total": self._total, "count": self._count}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `get_state` returned."""
        self._total, self._count = float(state["total"]), int(state["count"])


@dataclass(kw_only=True, repr=False)
class Session:
    """Everything behind one handle.

    Attributes:
        setup: What the handle was built with.
        state: The weights, model state and optimizer state now.
        device: The Device fields now, on the device.
        evaluator: Runs the forward program.
        reporter: Shows progress.
        records: Writes records, or None.
        step: Finished optimizer steps.
        epoch: Finished epochs.
        phase: What the handle is doing.
        history: The finished epochs.
        memory: The memory plan, once there is one.
        steps_in_epoch: Finished optimizer steps of the epoch that is under way.
        loader_state: Where the training source stands, if it can say so.
        epoch_loss: The losses of the epoch that is under way.
        stop_requested: Whether somebody asked for a graceful stop.
        stop_reason: Why training ended, once it has.
        record_requested: Whether somebody asked for a record.
        monitors: Who is told of phases.
        handle: The handle, for those who are told.
    """

    setup: Setup
    state: TrainState
    device: Flat
    evaluator: Evaluator
    reporter: Reporter
    records: RecordWriter | None
    step: int = 0
    epoch: int = 0
    phase: Phase = Phase.READY
    history: History = field(default_factory=History)
    memory: MemoryPlan | None = None
    steps_in_epoch: int = 0
    loader_state: Any = None
    epoch_loss: RunningMean = field(default_factory=RunningMean)
    stop_requested: bool = False
    stop_reason: str | None = None
    record_requested: bool = False
    told_slow_data: bool = False
    monitors: Monitors = field(default_factory=Monitors)
    handle: Any = None
    _in_verb: bool = False
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

    def enter(self, phase: Phase, metrics: Mapping[str, Any] | None = None) -> None:
        """Moves to a phase and tells the monitors."""
        before, self.phase = self.phase, phase
        self._publish(phase, before, metrics)

    @contextmanager
    def verb(self) -> Generator[None]:
        """One call of the user's: tells of drift first, and last that control is back."""
        if self._in_verb:
            yield
            return
        self._in_verb = True
        try:
            self.report_drift()
            yield
        finally:
            self._in_verb = False
            self._publish(Phase.IDLE, self.phase, None)

    def _publish(self, phase: Phase, before: Phase, metrics: Mapping[str, Any] | None) -> None:
        self.monitors.publish(
            PhaseEvent(
                phase=phase,
                before=before,
                run=self.handle,
                step=self.step,
                epoch=self.epoch,
                metrics=metrics or {},
            )
        )

    def report_drift(self) -> None:
        """Warns of code and configuration that moved since the handle was built.

        Called by every entry point; each change is told once.
        """
        lines = [*self.setup.programs.drift(), *self._moved_options()]
        if lines:
            warnings.warn(
                "Moved since this handle was built: " + "; ".join(lines) + ".\n"
                "  The handle goes on with the programs and options that it has; a new "
                "`Nitro(...)` picks the change up.",
                DriftWarning,
                stacklevel=4,
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

    def evaluate(self, split: str) -> dict[str, Any]:
        """The finalised metrics of a split, with the current weights."""
        before = self.phase
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
        experiment = self.setup.experiment
        return {name: loggable(getattr(experiment, name)) for name in experiment.fields()}

    def logged_params(self) -> dict[str, Any]:
        """The fields and the run options, as the logger gets them."""
        options = self.setup.options
        run = {name: plain(getattr(options, name)) for name in options.sources}
        return {**self.config(), **run}

    def request_stop(self) -> None:
        """Asks training to stop at the next boundary between calls."""
        self.stop_requested = True

    def wait_for_record(self) -> None:
        """Waits until the last record is on disk."""
        if self.records is not None:
            self.records.wait()

    def close(self) -> None:
        """Waits for the last record and ends background threads."""
        if self.records is not None:
            self.records.close()

    def save_record(self, metrics: Mapping[str, float] | None, reason: str | None) -> None:
        """Starts writing a record of this moment, unless the run writes none."""
        if self.records is not None:
            self.records.save(
                self.state,
                step=self.step,
                epoch=self.epoch,
                metrics=metrics,
                meta={**self._record_meta(), "metrics": dict(metrics or {}), "stop_reason": reason},
            )

    def _record_meta(self) -> dict[str, Any]:
        """What a record says of its run besides the arrays, as JSON values."""
        setup = self.setup
        fields = setup.experiment.fields().values()
        get_stopper_state = getattr(setup.stopper, "get_state", None)
        return {
            "nitro_version": __version__,
            "experiment": f"{type(setup.experiment).__module__}:{setup.owner}",
            "config": self.config(),
            "graph_const": [f.name for f in fields if f.residency is Residency.GRAPH_CONST],
            "seed": setup.options.seed,
            "steps_in_epoch": self.steps_in_epoch,
            "loader_state": self.loader_state,
            "epoch_loss": self.epoch_loss.get_state(),
            "history": self.history.rows,
            "stopper": get_stopper_state() if get_stopper_state else None,
            "logger": {
                "type": type(setup.logger).__name__,
                "state": setup.logger.logger_state(),
            },
        }


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
        records=None if policy is None else RecordWriter(directory, policy),
    )
