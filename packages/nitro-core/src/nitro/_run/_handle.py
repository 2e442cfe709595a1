"""The handle: one experiment, set up, with its state."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
from flax import nnx

from nitro._experiment import UNSET, Experiment, preset_keywords
from nitro._journal import History, Report, plot_history
from nitro._logs import Logger
from nitro._paths import local_path
from nitro._programs import MemoryPlan
from nitro._progress import Reporter
from nitro.errors import ConfigError, did_you_mean

from ._best import check_weights, evaluate_best, refuse_restored_best
from ._binding import binding_report, summary_report
from ._device_fields import device_field, set_device_fields
from ._interrupts import check_on_interrupt
from ._keywords import known_keywords
from ._loop import end_resumed, plan_memory, record_now, run_training
from ._params import Params
from ._phases import Monitor, Phase, subscribe
from ._render import RenderRequest, render
from ._resume import resume_session, start_session
from ._retention import refuse_unranked_record, tell_retention
from ._sanity import check_one_batch
from ._session import Session, make_session, release_sources
from ._setup import set_up


class Nitro:
    """One experiment, set up: trains, evaluates, predicts, and hands out its model.

    Construction runs the setup only: it builds data and model, checks everything that
    can be checked, one batch of validation included, and compiles no training program.
    Options resolve in this order: keyword, attribute of the experiment, default.

    Args:
        experiment: An instance of an `Experiment`.
        seed: The root of every random stream; default 0.
        run_dir: Where the log and the records go; default `runs/<Class>`.
        n_devices: How many devices to train on; 1 for now.
        accum: Micro-batches folded into one optimizer step; default 1.
        max_epochs: How many epochs `train` runs to; default 1.
        gradient_clip_norm: The largest norm of all gradients together, after `accum`;
            default 0: no clipping.
        schedules: What changes with the step, in place of the experiment's `schedules`.
        logger: A logger; default JSON Lines in `run_dir`; None logs nothing.
        checkpointer: A `TopK`; default the newest and the 3 lowest `val_loss`; None
            writes no records.
        checkpoint_every_steps: Also write a record each time so many optimizer steps are
            done, in the middle of an epoch too; default None: after each epoch only.
        early_stop: An `EarlyStop`, or an object with `should_stop(epoch, metrics)`;
            default None.
        check_divergence: Whether a non-finite loss stops the run; default True.
        steps_per_call: How many optimizer steps one call of the compiled program takes
            at most; default None: chosen from the program, the platform and the batches.
        progress: What shows how far training is. Default None: a bar on a terminal, one
            updating line in a notebook, elsewhere a plain line for each epoch, at most one a
            second. True draws the bar where `CI` is set, too; False shows nothing; or a
            `Reporter`.
        compile_options: XLA flags for every program of the handle, not for exports.
        max_constant_bytes: How many bytes of captured arrays a program may hold, exports
            too; default 1 MiB; None for any.
        slow_compile_s: A compile that takes longer, in seconds, warns and says what is
            large; default 30.
        memory_limit_bytes: The memory that the plan is checked against; default None:
            what the device says, the host's RAM on the CPU.
        data: The splits to use instead of `build_data`'s; `{}` for serving and export.
        resume: A record to go on from exactly, as `checkpoint` names one, but a run's
            directory means its newest; "auto" takes the newest in `run_dir`, and starts anew
            where there is none. The newest record of a run in `run_dir` goes on as that run,
            any other one branches off as a new run.
        allow_code_change: Whether `resume` goes on, with a warning, after a change of the
            code that is traced, of the model's settings or of the optimizer's.
        checkpoint: A record to take weights from: a run's directory, with or without
            `#<run id>` and `@best` or `@latest` behind it, a record's directory, or an entry of
            `nitro.checkpoints`. Of a run's directory alone it is the best record.
        weights: Weights to start from: another handle, a module, a mapping of arrays by
            dotted name or nested, or a bundle; a bundle's path, or what `checkpoint` takes; or
            a `nitro.Weights`, where they fit in part only. Copied, in the model's dtypes.
        restore_optimizer: Whether the record of `checkpoint` gives its optimizer state, too.
        restore_best: Whether `train` ends with the weights of this run's best record.
        sanity_check: Whether setup takes the first batch of `val`, and of other splits that can
            be scored, through the hooks `metrics` and `finalize_metrics`, so that their mistakes
            and misspelt metrics are told before anything is trained; default True. It compiles
            the programs of validation earlier, and leaves all random streams as they are.
        w0: What decay toward `"init"` means: the weights as `"build_model"` makes them, the
            `"weights"` that training starts from, or a tree of arrays.

    Raises:
        ExperimentError: A class that lacks a hook, or declares one wrongly.
        ConfigError: An option that cannot be used.
        DataError: A split or a first batch that does not fit the hooks.
        CheckpointError: A record that is missing or does not fit.
    """

    @known_keywords
    def __init__(
        self,
        experiment: Experiment,
        *,
        seed: int = UNSET,
        run_dir: str | Path = UNSET,
        n_devices: int = UNSET,
        accum: int = UNSET,
        max_epochs: int = UNSET,
        gradient_clip_norm: float = UNSET,
        schedules: Mapping[str, Any] = UNSET,
        logger: Any = UNSET,
        checkpointer: Any = UNSET,
        checkpoint_every_steps: int | None = UNSET,
        early_stop: Any = UNSET,
        check_divergence: bool = UNSET,
        steps_per_call: int | None = UNSET,
        progress: Reporter | bool | None = UNSET,
        compile_options: Mapping[str, Any] | None = None,
        max_constant_bytes: int | None = UNSET,
        slow_compile_s: float = UNSET,
        memory_limit_bytes: int | None = UNSET,
        data: Mapping[str, Any] | None = None,
        resume: str | os.PathLike[str] | bool = False,
        allow_code_change: bool = False,
        checkpoint: str | os.PathLike[str] | None = None,
        weights: Any = None,
        restore_optimizer: bool = False,
        restore_best: bool = False,
        sanity_check: bool = True,
        w0: Any = "build_model",
    ) -> None:
        given = {
            name: value for name, value in locals().items() if name not in ("self", "experiment")
        }
        self._open(experiment, given, preset=None)

    def _open(
        self, experiment: Experiment, given: Mapping[str, Any], *, preset: str | None
    ) -> None:
        self._session = make_session(set_up(experiment, given, preset=preset))
        self._session.handle = self
        if self._session.records is not None and "train" in self._session.setup.splits:
            tell_retention(self._session.records, self._session.setup.splits)
        source = self._session.setup.source
        if source.resumed is not None:
            resume_session(self._session, source.resumed)
        else:
            start_session(self._session)
        if given["sanity_check"]:
            check_one_batch(self._session)

    @classmethod
    def from_preset(cls, experiment: type[Experiment], preset: str, /, **keywords: Any) -> Self:
        """Builds a handle on one of the presets of a class, and records its name.

        Args:
            experiment: The class, whose `presets` declares the preset.
            preset: The preset's name.
            keywords: Options of the handle, and field values that beat the preset's. A
                name that is both is the handle's.

        Raises:
            ConfigError: No such preset; a name that is neither; or `data`, which belongs to
                an experiment that is there already.
        """
        parameters = inspect.signature(Nitro.__init__).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        options, values = preset_keywords(experiment, preset, keywords, defaults)
        run = cls.__new__(cls)
        run._open(experiment.from_preset(preset, **values), {**defaults, **options}, preset=preset)
        return run

    @property
    def experiment(self) -> Experiment:
        """The declaration that the handle was built with, and the values derived for it."""
        return self._session.setup.experiment

    @property
    def preset(self) -> str | None:
        """The preset that the handle was built from, if it was."""
        return self._session.setup.preset

    @property
    def run_dir(self) -> Path:
        """Where the log and the records are."""
        return self._session.setup.options.run_dir

    @property
    def step(self) -> int:
        """Finished optimizer steps."""
        return self._session.step

    @property
    def epoch(self) -> int:
        """Finished epochs."""
        return self._session.epoch

    @property
    def phase(self) -> Phase:
        """What the handle is doing."""
        return self._session.phase

    @property
    def stop_reason(self) -> str | None:
        """Why training ended: "completed", "early_stop", "stopped" or "failed"; else None."""
        return self._session.stop_reason

    @property
    def history(self) -> History:
        """The finished epochs of this handle."""
        return self._session.history

    @property
    def model(self) -> nnx.Module:
        """A module with the current weights, in evaluation mode; a copy."""
        self._session.refuse_other_thread()
        layout, state = self._session.setup.hooks.layout, self._session.state
        # Copies: the next step overwrites the run's own arrays.
        params, model_state = jax.tree.map(jnp.copy, (state.params, state.model_state))
        return layout.merge(layout.eval, params, model_state)

    @property
    def params(self) -> Params:
        """The parameters by dotted name: a mapping of NumPy arrays, copies of what they are now.

        Its `num_trained` and `num_frozen` count the numbers in them, and `frozen` names those
        that training leaves alone; none on a handle without a split `train`.
        """
        self._session.refuse_other_thread()
        return Params(self._session.state.params, frozen=self._session.setup.frozen)

    @property
    def binding(self) -> Report:
        """The binding report: options with their sources, splits, hooks, the memory plan."""
        return binding_report(self._session)

    def train(self, *, on_interrupt: Literal["raise", "return"] = "raise") -> Self:
        """Trains to `max_epochs`, then returns the handle; nothing where it is there already.

        The first Ctrl-C or SIGTERM stops it at the next step boundary, with a checkpoint, and
        says where that is and how to resume; a second Ctrl-C aborts.

        Args:
            on_interrupt: What comes after the checkpoint of a run that a signal stopped. Default
                "raise": the program ends, unless somebody catches it, so that a sweep does not
                continue with the next run. "return" returns, as after `request_stop()`;
                `stop_reason` is then "stopped".

        Raises:
            ConfigError: There is no training split, or the handle is training already.
            DivergenceError: The loss, an updated weight, or the metric that ranks records, is
                not finite.
            HookError: The counts that `loss` returned add up to 0 over a step.
            KeyboardInterrupt: Ctrl-C stopped it.
            SystemExit: SIGTERM stopped it; the code is 143.
        """
        check_on_interrupt(on_interrupt)
        if "train" not in self._session.setup.splits:
            raise ConfigError(
                f"`{self._session.setup.owner}` has no split `train` here, so setup built no optimizer.",
                expected="data with a split `train`: this handle is for evaluation and export",
                fix="build a handle without `data=`, or with a training split in it",
            )
        session = self._session
        with session.verb():
            refuse_restored_best(session)
            if self.epoch < session.setup.options.max_epochs and not session.has_ended:
                with session.as_trainer():
                    run_training(session, on_interrupt=on_interrupt)
            else:
                end_resumed(session)
        return self

    def request_stop(self) -> None:
        """Asks training to stop at the next boundary between calls, with a record.

        May be called from a monitor, a signal handler or another thread.
        """
        self._session.request_stop()

    def checkpoint(self) -> None:
        """Writes a record: at once, or at the next boundary between calls while training.

        Raises:
            ConfigError: The handle writes no records, keeps none without a score, has no
                training split, or ended with the weights of its best record.
            CheckpointError: Another process writes into the directory, or has trained on there.
        """
        session = self._session
        if session.records is None:
            raise ConfigError(
                "This handle writes no records: its `checkpointer` is None.",
                fix="build it with `checkpointer=nitro.TopK()`",
            )
        refuse_unranked_record(session.records.policy)
        if session.is_training:
            session.is_record_requested = True
        else:
            record_now(session)

    def on_phase(self, callback: Monitor) -> Callable[[], None]:
        """Has `callback` called with a `PhaseEvent` at each change of phase.

        A monitor that raises is warned about once, and disturbs nothing. One that evaluates,
        predicts or exports is not told of the phases which that goes through.

        Returns:
            A function that ends the subscription.
        """
        return subscribe(self._session.monitors.own, callback)

    def set_device(self, **values: Any) -> Self:
        """Sets Device fields, at once and without a compile.

        Args:
            values: New values by field; same tree, shapes and a dtype that converts.

        Raises:
            ConfigError: No such Device field, a scheduled one, or a value that does not fit.
        """
        set_device_fields(self._session, values)
        return self

    def device_value(self, name: str) -> Any:
        """The value of a Device field as NumPy, or as a tree of NumPy arrays.

        Raises:
            ConfigError: No such Device field.
        """
        return device_field(self._session, name)

    def validate(self) -> dict[str, Any]:
        """The finalised metrics of the split `val`."""
        return self.evaluate("val")

    def evaluate(
        self, split: str = "test", *, weights: Literal["current", "best"] = "current"
    ) -> dict[str, Any]:
        """The finalised metrics of a split.

        The split `train` is gone through once, every row in order, without a `transform` that
        draws random numbers, as far as its loader can do that.

        Args:
            split: The split.
            weights: Default "current": the weights as they are, after training the last ones.
                "best": those of this run's best record, as `nitro evaluate` takes them; the
                handle keeps its own.

        Raises:
            ConfigError: No such split; lists those that there are. Or the best weights of a run
                without a record that has a score.
        """
        check_weights(weights)
        if split not in self._session.setup.splits:
            raise ConfigError(
                f"There is no split `{split}`.",
                expected=did_you_mean(split, self._session.setup.splits),
            )
        with self._session.verb():
            if weights == "best":
                return evaluate_best(self._session, split)
            return self._session.evaluate(split, by_user=True)

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
        is_array_or_mapping = hasattr(batch, "shape") or hasattr(batch, "keys")
        if not is_array_or_mapping and hasattr(batch, "__iter__"):
            return (self.predict(one) for one in batch)
        with self._session.verb():
            return self._session.predict(batch)

    def memory_plan(self) -> MemoryPlan:
        """What the run will hold on its device, part by part; prints as a table.

        Compiles the programs of training and validation, which then serve `train`.
        """
        with self._session.verb():
            self._session.memory = plan_memory(self._session)
        return self._session.memory

    def close(self) -> None:
        """Waits for the last record and ends background threads; may be called again.

        Splits that `build_data` made, and that have a method `release()`, are released.
        """
        self._session.close()
        release_sources(self._session)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def summary(self) -> Report:
        """Where the run stands, then the binding report; text that a notebook shows as HTML."""
        return summary_report(self._session, repr(self))

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()  # pyright: ignore[reportPrivateUsage] - Jupyter's name for it

    def plot(self, path: str | Path | None = None) -> Any:
        """Draws the history, one panel for each curve, with the best epoch marked.

        Args:
            path: Where to save it; the suffix says the format. None saves nothing.

        Returns:
            A `matplotlib.figure.Figure`, which a notebook shows.

        Raises:
            MissingPackageError: matplotlib is not installed.
            ConfigError: No epoch has finished.
        """
        title = f"{self._session.setup.owner} ({self.run_dir})"
        return plot_history(self.history, title=title, path=path)

    def render(
        self,
        split: str = "val",
        *,
        batch: Any = None,
        predictions: bool = True,
        worst: int | None = None,
        batches: int | None = 1,
        limit: int | None = 32,
        out_dir: str | Path | None = None,
        tag: str | None = None,
    ) -> list[Path]:
        """Draws samples with the experiment's `visualize`, and saves the figures.

        Args:
            split: The split to draw from.
            batch: A batch to draw instead: a mapping of fields.
            predictions: Whether `visualize` gets the outputs for its sample; else None, and
                nothing compiles.
            worst: Draw only so many samples, those with the highest loss, worst first.
            batches: How many batches to look at; None for the whole split.
            limit: The most figures to draw; None for any number.
            out_dir: Where to save them; None means `viz` in the run's directory.
            tag: What the files' names start with; None means the split's name. The sample's
                index in what was looked at follows.

        Returns:
            The paths of the figures, in the order drawn.

        Raises:
            ExperimentError: There is no `visualize`, or nothing that saves what it returns.
            ConfigError: A number out of its range, or no such split.
            DataError: The data lacks a field that a hook wants.
        """
        request = RenderRequest(
            split=split,
            batch=batch,
            predictions=predictions,
            worst=worst,
            batches=batches,
            limit=limit,
            out_dir=self.run_dir / "viz"
            if out_dir is None
            else local_path(out_dir, name="out_dir"),
            tag=tag or ("batch" if batch is not None else split),
        )
        with self._session.verb():
            return render(self._session, request)

    def note(self, text: str) -> None:
        """Shows a few words beside the progress, until the next phase."""
        self._session.reporter.note(text)

    @property
    def run_id(self) -> str | None:
        """The id that this handle's records carry; None where it writes none."""
        records = self._session.records
        return None if records is None else records.run

    @property
    def logger(self) -> Logger:
        """The logger, bound to the run: monitors may log through it."""
        return self._session.setup.logger

    def __repr__(self) -> str:
        num_params = sum(p.size for p in self._session.state.params.values())
        return (
            f"Nitro({self._session.setup.owner}: {self.phase.value}, epoch {self.epoch}, step "
            f"{self.step}, {num_params:,} parameters, {self.run_dir})"
        )


def session_of(run: Nitro) -> Session:
    """What is behind a handle, for Nitro's own export."""
    return run._session  # pyright: ignore[reportPrivateUsage] - the accessor of the layer above
