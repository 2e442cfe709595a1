"""The live state of a handle: what its setup fixed, and what a run moves."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from nitro._checkpoint import RecordWriter
from nitro._experiment import Residency, resolve_options
from nitro._logs import plain
from nitro._programs import MemoryPlan
from nitro._progress import Reporter, make_reporter
from nitro._state import TrainState
from nitro._trees import Flat, describe_array
from nitro._version import __version__
from nitro.errors import DriftWarning

from ._evaluate import Evaluator
from ._history import History
from ._phases import Phase
from ._setup import Setup


@dataclass(kw_only=True)
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
    _told_options: set[str] = field(default_factory=set[str])

    @contextmanager
    def in_phase(self, phase: Phase, *, then: Phase | None = None) -> Generator[None]:
        """Enters a phase; afterwards comes `then`, or what was before.

        An exception leaves FAILED where `then` is given, else what was before.
        """
        before, self.phase = self.phase, phase
        try:
            yield
        except BaseException:
            self.phase = before if then is None else Phase.FAILED
            raise
        self.phase = then or before

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
        with self.in_phase(Phase.VALIDATING):
            return self.evaluator.evaluate(self.state, self.device, split)

    def predict(self, batch: Any) -> Any:
        """The outputs for one batch, with the current weights."""
        with self.in_phase(Phase.PREDICTING):
            return self.evaluator.predict(self.state, self.device, batch)

    def predict_all(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The outputs for each batch, one after the other."""
        for batch in batches:
            yield self.predict(batch)

    def config(self) -> dict[str, Any]:
        """The experiment's fields as JSON values; arrays by dtype and shape."""
        experiment = self.setup.experiment
        return {name: _loggable(getattr(experiment, name)) for name in experiment.fields()}

    def logged_params(self) -> dict[str, Any]:
        """The fields and the run options, as the logger gets them."""
        options = self.setup.options
        run = {name: plain(getattr(options, name)) for name in options.sources}
        return {**self.config(), **run}

    def record_meta(self, metrics: Mapping[str, float] | None) -> dict[str, Any]:
        """What a record says of its run, as JSON values."""
        fields = self.setup.experiment.fields().values()
        return {
            "nitro_version": __version__,
            "experiment": f"{type(self.setup.experiment).__module__}:{self.setup.owner}",
            "config": self.config(),
            "graph_const": [f.name for f in fields if f.residency is Residency.GRAPH_CONST],
            "seed": self.setup.options.seed,
            "metrics": dict(metrics or {}),
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


def _loggable(value: Any) -> Any:
    """A field as JSON; the arrays in it by dtype and shape, however deep."""
    if isinstance(value, Mapping):
        return {str(name): _loggable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_loggable(item) for item in value]
    is_array = hasattr(value, "shape") and hasattr(value, "dtype") and len(value.shape) > 0
    return describe_array(value) if is_array else plain(value)
