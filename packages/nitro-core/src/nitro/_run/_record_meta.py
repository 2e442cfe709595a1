"""What a record says of its run, besides the arrays."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from nitro._checkpoint import flat_items
from nitro._code import words_to_json
from nitro._data import RowLoader, num_rows, routed_fields
from nitro._experiment import Residency
from nitro._logs import checked_state
from nitro._trees import Flat, named_leaves
from nitro._version import __version__
from nitro.errors import CheckpointError

from ._changes import steering_values
from ._derive import encode_derived
from ._journaling import experiment_name, source_file
from ._refusals import anchor_checksums, versions
from ._splits import train_names
from ._step_record import step_record

if TYPE_CHECKING:
    from ._session import Session
    from ._setup import Setup


def record_items(session: Session) -> dict[str, Flat]:
    """The arrays of a record: the state, the Device fields now, and what "init" means."""
    device = named_leaves(session.device)
    return {**flat_items(session.state), "device": device, "w0": session.setup.w0}


def record_meta(session: Session, metrics: Mapping[str, float] | None) -> dict[str, Any]:
    """Everything else, as JSON values that nothing changes afterwards."""
    get_stopper_state = getattr(session.setup.stopper, "get_state", None)
    return {
        **session.fixed_meta,
        "step": session.step,
        "epoch": session.epoch,
        "metrics": {n: value for n, value in (metrics or {}).items() if math.isfinite(value)},
        "steps_in_epoch": session.steps_in_epoch,
        "loader_state": encoded_state(session.loader_state),
        "epoch_loss": session.epoch_loss.get_state(),
        "epoch_metrics": {n: mean.get_state() for n, mean in session.epoch_metrics.items()},
        "history": session.history.scalar_rows(),
        "stopper": get_stopper_state() if get_stopper_state else None,
        "logger": _logger_state(session),
    }


def fixed_meta(session: Session) -> dict[str, Any]:
    """What stays the same for as long as a session trains."""
    setup = session.setup
    fields = setup.experiment.fields().values()
    return {
        "nitro_version": __version__,
        "versions": versions(),
        "experiment": experiment_name(type(setup.experiment)),
        "file": source_file(type(setup.experiment)),
        "config": session.config(),
        "params": session.declared_params(),
        "steering": steering_values(setup, session.declared_params()),
        "lineage": session.lineage,
        "graph_const": [f.name for f in fields if f.residency is Residency.GRAPH_CONST],
        "declared": declared_digests(setup),
        "seed": setup.options.seed,
        "preset": setup.preset,
        "derived": encode_derived(setup.derived),
        "pace": pace(setup),
        "weights": _fit(setup),
        "frozen": sorted(setup.frozen),
        "anchors": anchor_checksums(setup.optimizer),
        "code": _step_meta(session),
    }


def _step_meta(session: Session) -> dict[str, Any] | None:
    """What identifies the step program, and words about what it rests on."""
    setup = session.setup
    if setup.optimizer is None:
        return None
    step = step_record(
        setup.programs,
        setup.optimizer,
        state=session.state,
        device=session.device,
        splits=setup.splits,
        first=setup.first,
        options=setup.options,
    )
    return {
        **words_to_json(step.words),
        "program": step.program,
        "arguments": step.arguments,
    }


def _fit(setup: Setup) -> Any:
    """How the weights that the run started from fit, kept over each resume."""
    if setup.source.resumed is not None:
        return setup.source.resumed.meta.get("weights")
    return None if setup.fit is None else setup.fit.to_json()


def pace(setup: Setup) -> dict[str, int]:
    """What makes an epoch and its steps, as far as it can be told; and the horizon in steps."""
    if "train" not in setup.splits:
        return {"batches_per_epoch": 0, "accum": setup.options.accum, "num_steps": 0}
    source = setup.splits["train"]
    first = setup.first["train"]
    fields = routed_fields(first, train_names(setup.hooks, first), where="the first batch")
    return {
        "batches_per_epoch": len(source),
        "accum": setup.options.accum,
        "num_steps": setup.num_steps,
        "batch_size": num_rows(fields, where="the first batch"),
        **(_order(source) if isinstance(source, RowLoader) else {}),
    }


def _order(source: RowLoader) -> dict[str, int]:
    """What decides which samples come when."""
    return {
        "num_samples": source.num_samples,
        "shuffle": int(source.shuffle),
        "loader_seed": (source.seed or 0) if source.shuffle else 0,
    }


def declared_digests(setup: Setup) -> dict[str, str]:
    """A checksum of each Device field as the experiment declares it."""
    return {name: _digest(value) for name, value in setup.device.items()}


def _digest(tree: Any) -> str:
    total = hashlib.sha256()
    for name, leaf in named_leaves(jax.device_get(tree)).items():
        array = np.asarray(leaf)
        total.update(f"{name} {array.dtype}{array.shape}".encode() + array.tobytes())
    return total.hexdigest()[:16]


def _logger_state(session: Session) -> dict[str, Any]:
    logger = session.setup.logger
    # Until training begins, what the record before this one knew of the log still holds.
    waiting = session.reattach_to
    state = checked_state(logger) if waiting is None else waiting
    return {"type": type(logger).__name__, "state": state, "run_url": logger.run_url()}


def encoded_state(state: Any) -> Any:
    """A loader's state as JSON values; bytes by their base64.

    Raises:
        CheckpointError: It holds something else.
    """
    if state is None or isinstance(state, bool | int | float | str):
        return state
    if isinstance(state, bytes):
        return {"__bytes__": base64.b64encode(state).decode()}
    if isinstance(state, Mapping):
        return {str(key): encoded_state(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [encoded_state(value) for value in state]
    if isinstance(state, np.generic | np.ndarray):
        return encoded_state(state.tolist())
    raise CheckpointError(
        f"`get_state` of the training loader returned a {type(state).__name__}.",
        expected="numbers, strings, bytes, and lists and dicts of them",
        fix="return plain values from `get_state`, and take them in `set_state`",
    )


def decoded_state(state: Any) -> Any:
    """What `encoded_state` was given."""
    if isinstance(state, Mapping):
        if set(state) == {"__bytes__"}:
            return base64.b64decode(state["__bytes__"])
        return {key: decoded_state(value) for key, value in state.items()}
    if isinstance(state, list):
        return [decoded_state(value) for value in state]
    return state
