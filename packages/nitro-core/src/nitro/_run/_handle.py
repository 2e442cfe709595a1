"""The handle: one experiment, set up, with its state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flax import nnx

from nitro._checkpoint import RecordWriter
from nitro._experiment import UNSET, Experiment, Residency
from nitro._logs import plain
from nitro._progress import make_reporter
from nitro._version import __version__
from nitro.errors import ConfigError, did_you_mean

from ._binding import binding_report
from ._evaluate import Evaluator
from ._history import History
from ._loop import train
from ._phases import Phase
from ._setup import set_up


class Nitro:
    """One experiment, set up: trains, evaluates, predicts, and hands out its model.

    Construction runs the setup only: it builds data and model, checks everything that
    can be checked, and compiles no training program. Options resolve in this order:
    keyword, attribute of the experiment, default.

    Args:
        experiment: An instance of an `Experiment`.
        seed: The root of every random stream; default 0.
        run_dir: Where the log and the records go; default `runs/<Class>`.
        n_devices: How many devices to train on; 1 for now.
        accum: Micro-batches folded into one optimizer step; default 1.
        max_epochs: How many epochs `train` runs to; default 1.
        logger: A logger; default JSON Lines in `run_dir`; None logs nothing.
        checkpointer: A `TopK`; default the newest and the 3 lowest `val_loss`; None
            writes no records.
        check_divergence: Whether a non-finite loss stops the run; default True.
        progress: Whether to draw a progress bar; default None: on terminals.
        data: The splits to use instead of `build_data`'s; `{}` for serving and export.
        checkpoint: A record to take weights from: a run's directory, with or without
            `@best` or `@latest` behind it, or a record's directory.

    Raises:
        ExperimentError: A class that lacks a hook, or declares one wrongly.
        ConfigError: An option that cannot be used.
        DataError: A split or a first batch that does not fit the hooks.
        CheckpointError: A record that is missing or does not fit.
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        seed: int = UNSET,
        run_dir: str | Path = UNSET,
        n_devices: int = UNSET,
        accum: int = UNSET,
        max_epochs: int = UNSET,
        logger: Any = UNSET,
        checkpointer: Any = UNSET,
        check_divergence: bool = UNSET,
        progress: bool | None = UNSET,
        data: Mapping[str, Any] | None = None,
        checkpoint: str | Path | None = None,
    ) -> None:
        given = {
            name: value
            for name, value in locals().items()
            if name not in ("self", "experiment")
        }
        self._setup = set_up(experiment, given)
        self._state = self._setup.state
        self._device = dict(self._setup.device)
        self._step = 0
        self._epoch = 0
        self._phase = Phase.READY
        self._evaluator = Evaluator(self._setup)
        self._reporter = make_reporter(self._setup.options.progress)
        self._records = self._make_records()
        self.history = History()

    @property
    def experiment(self) -> Experiment:
        """The declaration that the handle was built with."""
        return self._setup.experiment

    @property
    def run_dir(self) -> Path:
        """Where the log and the records are."""
        return self._setup.options.run_dir

    @property
    def step(self) -> int:
        """Finished optimizer steps."""
        return self._step

    @property
    def epoch(self) -> int:
        """Finished epochs."""
        return self._epoch

    @property
    def phase(self) -> Phase:
        """What the handle is doing."""
        return self._phase

    @property
    def model(self) -> nnx.Module:
        """A module with the current weights, in evaluation mode; a copy."""
        layout = self._setup.hooks.layout
        return layout.merge(layout.eval, self._state.params, self._state.model_state)

    @property
    def binding(self) -> str:
        """The binding report: every option with its source, every split, the hooks."""
        return binding_report(self._setup)

    def train(self) -> Self:
        """Trains to `max_epochs`, then returns the handle.

        Raises:
            ConfigError: There is no training split.
            DivergenceError: The loss, or the metric that ranks records, is not finite.
        """
        if "train" not in self._setup.splits:
            raise ConfigError(
                f"`{self._setup.owner}` has no split `train` here, so setup built no optimizer.",
                expected="data with a split `train`: this handle is for evaluation and export",
                fix="build a handle without `data=`, or with a training split in it",
            )
        logger = self._setup.logger
        with self._in_phase(Phase.TRAINING, then=Phase.DONE):
            try:
                logger.params(self._params())
                train(self)
                if self._records is not None:
                    self._records.wait()
            except BaseException:
                logger.finish("error")
                raise
            finally:
                self._reporter.end()
                self.close()
        logger.finish("completed")
        return self

    def validate(self) -> dict[str, Any]:
        """The finalised metrics of the split `val`."""
        return self.evaluate("val")

    def evaluate(self, split: str = "test") -> dict[str, Any]:
        """The finalised metrics of a split.

        Raises:
            ConfigError: No such split; lists those that there are.
        """
        if split not in self._setup.splits:
            raise ConfigError(
                f"There is no split `{split}`.", expected=did_you_mean(split, self._setup.splits)
            )
        with self._in_phase(Phase.VALIDATING):
            return self._evaluator.evaluate(self._state, self._device, split, lambda: None)

    def predict(self, batch: Any) -> Any:
        """`forward` in evaluation mode.

        Args:
            batch: A mapping of `forward`'s fields, arrays with the batch axis first and
                any number of rows; or an iterable of such mappings.

        Returns:
            NumPy arrays in `forward`'s structure, one row per sample; for an iterable,
            an iterator over them.

        Raises:
            DataError: Fields are missing, are no arrays, or disagree on the rows.
        """
        is_many = not hasattr(batch, "keys") and not hasattr(batch, "shape")
        if is_many and hasattr(batch, "__iter__"):
            return self._evaluator.predict_all(self._state, self._device, batch)
        with self._in_phase(Phase.PREDICTING):
            return self._evaluator.predict(self._state, self._device, batch)

    def close(self) -> None:
        """Waits for the last record and ends background threads; may be called again."""
        if self._records is not None:
            self._records.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        num_params = sum(p.size for p in self._state.params.values())
        return (
            f"Nitro({self._setup.owner}: {self._phase.value}, epoch {self.epoch}, step "
            f"{self.step}, {num_params:,} parameters, {self.run_dir})"
        )

    def _make_records(self) -> RecordWriter | None:
        policy = self._setup.checkpointer
        return None if policy is None else RecordWriter(self.run_dir / "checkpoints", policy)

    def _params(self) -> dict[str, Any]:
        options = self._setup.options
        run = {name: getattr(options, name) for name in options.sources}
        fields = {n: v for n, v in self._config().items() if n not in run}
        return {**fields, **{name: plain(value) for name, value in run.items()}}

    def _config(self) -> dict[str, Any]:
        """The experiment's fields as JSON values; arrays by type and shape."""
        experiment = self.experiment
        return {name: _loggable(getattr(experiment, name)) for name in experiment.fields()}

    def _record_meta(self, metrics: Mapping[str, float] | None) -> dict[str, Any]:
        structural = [
            name
            for name, f in self.experiment.fields().items()
            if f.residency is Residency.GRAPH_CONST
        ]
        return {
            "nitro_version": __version__,
            "experiment": f"{type(self.experiment).__module__}:{self._setup.owner}",
            "config": self._config(),
            "graph_const": structural,
            "seed": self._setup.options.seed,
            "metrics": dict(metrics or {}),
        }

    @contextmanager
    def _in_phase(self, phase: Phase, then: Phase | None = None) -> Iterator[None]:
        before = self._phase
        self._phase = phase
        try:
            yield
        except BaseException:
            self._phase = Phase.FAILED if then is not None else before
            raise
        self._phase = then or before


def _loggable(value: Any) -> Any:
    if hasattr(value, "shape") and hasattr(value, "dtype") and getattr(value, "ndim", 0):
        return f"{value.dtype}{tuple(value.shape)}"
    return plain(value)


