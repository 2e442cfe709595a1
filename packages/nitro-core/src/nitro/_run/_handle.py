"""The handle: one experiment, set up, with its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx

from nitro._experiment import UNSET, Experiment
from nitro._programs import MemoryPlan
from nitro.errors import ConfigError, did_you_mean

from ._binding import binding_report
from ._device_fields import device_field, set_device_fields
from ._history import History
from ._loop import plan_memory, run_training
from ._phases import Monitor, Phase, subscribe
from ._resume import resume_session
from ._session import Session, make_session
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
        progress: Whether to draw a progress bar; default None: on terminals.
        compile_options: XLA flags for every program of the handle, not for exports.
        max_constant_bytes: How many bytes of captured arrays a program may hold, exports
            too; default 1 MiB; None for any.
        slow_compile_s: A compile that takes longer, in seconds, warns and says what is
            large; default 30.
        memory_limit_bytes: The memory that the plan is checked against; default None:
            what the device says, the host's RAM on the CPU.
        data: The splits to use instead of `build_data`'s; `{}` for serving and export.
        resume: A record to go on from exactly, as `checkpoint` names one; "auto" takes the
            newest in `run_dir`, and starts anew where there is none.
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
        gradient_clip_norm: float = UNSET,
        schedules: Mapping[str, Any] = UNSET,
        logger: Any = UNSET,
        checkpointer: Any = UNSET,
        checkpoint_every_steps: int | None = UNSET,
        early_stop: Any = UNSET,
        check_divergence: bool = UNSET,
        steps_per_call: int | None = UNSET,
        progress: bool | None = UNSET,
        compile_options: Mapping[str, Any] | None = None,
        max_constant_bytes: int | None = UNSET,
        slow_compile_s: float = UNSET,
        memory_limit_bytes: int | None = UNSET,
        data: Mapping[str, Any] | None = None,
        resume: str | Path | bool = False,
        checkpoint: str | Path | None = None,
    ) -> None:
        given = {
            name: value for name, value in locals().items() if name not in ("self", "experiment")
        }
        self._session = make_session(set_up(experiment, given))
        self._session.handle = self
        source = self._session.setup.source
        if source.record is not None and source.is_resume:
            resume_session(self._session, source.record)

    @property
    def experiment(self) -> Experiment:
        """The declaration that the handle was built with."""
        return self._session.setup.experiment

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
        """Why training ended: "completed", "early_stop", "requested", "error"; else None."""
        return self._session.stop_reason

    @property
    def history(self) -> History:
        """The finished epochs of this handle."""
        return self._session.history

    @property
    def model(self) -> nnx.Module:
        """A module with the current weights, in evaluation mode; a copy."""
        layout, state = self._session.setup.hooks.layout, self._session.state
        # Copies: the next step overwrites the run's own arrays.
        params, model_state = jax.tree.map(jnp.copy, (state.params, state.model_state))
        return layout.merge(layout.eval, params, model_state)

    @property
    def binding(self) -> str:
        """The binding report: options with their sources, splits, hooks, the memory plan."""
        return binding_report(self._session.setup, self._session.memory)

    def train(self) -> Self:
        """Trains to `max_epochs`, then returns the handle; nothing where it is there already.

        Raises:
            ConfigError: There is no training split.
            DivergenceError: The loss, or the metric that ranks records, is not finite.
        """
        if "train" not in self._session.setup.splits:
            raise ConfigError(
                f"`{self._session.setup.owner}` has no split `train` here, so setup built no optimizer.",
                expected="data with a split `train`: this handle is for evaluation and export",
                fix="build a handle without `data=`, or with a training split in it",
            )
        session = self._session
        with session.verb():
            if self.epoch < session.setup.options.max_epochs:
                run_training(session)
        return self

    def request_stop(self) -> None:
        """Asks training to stop at the next boundary between calls, with a record.

        May be called from a monitor, a signal handler or another thread.
        """
        self._session.stop_requested = True

    def checkpoint(self) -> None:
        """Writes a record: at once, or at the next boundary between calls while training.

        Raises:
            ConfigError: The handle writes no records.
        """
        session = self._session
        if session.records is None:
            raise ConfigError(
                "This handle writes no records: its `checkpointer` is None.",
                fix="build it with `checkpointer=nitro.TopK()`",
            )
        if session.phase is Phase.TRAINING:
            session.record_requested = True
        else:
            session.save_record(None, session.stop_reason)
            session.records.wait()

    def on_phase(self, callback: Monitor) -> Callable[[], None]:
        """Has `callback` called with a `PhaseEvent` at each change of phase.

        A monitor that raises is warned about once, and disturbs nothing.

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

    def evaluate(self, split: str = "test") -> dict[str, Any]:
        """The finalised metrics of a split.

        Raises:
            ConfigError: No such split; lists those that there are.
        """
        if split not in self._session.setup.splits:
            raise ConfigError(
                f"There is no split `{split}`.",
                expected=did_you_mean(split, self._session.setup.splits),
            )
        with self._session.verb():
            return self._session.evaluate(split)

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
        """Waits for the last record and ends background threads; may be called again."""
        self._session.close()

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
        num_params = sum(p.size for p in self._session.state.params.values())
        return (
            f"Nitro({self._session.setup.owner}: {self.phase.value}, epoch {self.epoch}, step "
            f"{self.step}, {num_params:,} parameters, {self.run_dir})"
        )


def session_of(run: Nitro) -> Session:
    """What is behind a handle, for Nitro's own export."""
    return run._session  # pyright: ignore[reportPrivateUsage] - the accessor of the layer above
