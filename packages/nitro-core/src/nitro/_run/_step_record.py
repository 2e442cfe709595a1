"""What a record says of the step program, before or after training begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nitro._experiment import RunOptions
from nitro._optim import ManualOptimizers, Optimizer
from nitro._programs import Chunk, RunPrograms, StepInputs, StepPlan, StepRecord
from nitro._state import TrainState

from ._feed import make_feed
from ._splits import train_names


def step_record(
    programs: RunPrograms,
    optimizer: Optimizer | ManualOptimizers,
    *,
    state: TrainState,
    device: Mapping[str, Any],
    splits: Mapping[str, Any],
    first: Mapping[str, Any],
    options: RunOptions,
) -> StepRecord:
    """Traces the step if that was not done; training then goes on from this trace.

    Args:
        programs: The handle's programs.
        optimizer: The handle's optimizer.
        state: The state that training starts from.
        device: The Device fields.
        splits: The data by split.
        first: The first batch of each split.
        options: The run options.
    """
    batch = first["train"]
    names = train_names(programs.hooks, batch)
    feed = make_feed(splits["train"], batch, names, memory_bytes=options.memory_limit_bytes)
    plan = StepPlan(steps_per_call=1, accum=options.accum, is_looped=False)
    rows = optimizer.table[np.arange(1)]
    inputs = StepInputs(dict(device), optimizer.anchors(), feed.data_shapes)
    return programs.step_record(state, inputs, Chunk(rows, feed.example(plan), np.int32(0)))
