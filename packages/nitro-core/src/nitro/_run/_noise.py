"""Tells of a model that draws random numbers in evaluation mode."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from nitro._programs import TracedHooks, find_draws
from nitro._trees import Flat
from nitro.errors import warn


def warn_of_noise(
    hooks: TracedHooks, *, params: Flat, model_state: Flat, device: Flat, first: Mapping[str, Any]
) -> None:
    """Traces `forward` in evaluation mode, and warns where its outputs depend on a random stream.

    Only a model that holds random streams is traced, on the first batch of the first split.
    """
    rng_names = hooks.layout.rng_names
    if not rng_names or not first:
        return
    batch = hooks.routes["forward"].pick(next(iter(first.values())))
    rngs = {name: model_state[name] for name in rng_names}
    rest = {name: array for name, array in model_state.items() if name not in rngs}

    def outputs(rngs: Flat, rest: Flat, params: Flat, device: Flat, batch: Flat) -> Any:
        return hooks.eval_outputs(hooks.view(device), params, {**rest, **rngs}, batch)

    drawn, line = [], ""
    # What `forward` raises is told by the first program that needs it, with its batch.
    with contextlib.suppress(Exception):
        drawn, line = find_draws(outputs, rngs, rest, params, device, batch)
    if drawn:
        warn(
            f"`{hooks.routes['forward'].hook}` draws random numbers in evaluation mode: its "
            f"outputs depend on {', '.join(f'`{name}`' for name in drawn)}{line}, so that "
            "validation and `predict` run with noise, and an export is refused.\n"
            "  fix: give the layer that draws an attribute `deterministic = False`, which Nitro "
            "sets to True in evaluation mode, and draw only where it is False; or take the noise "
            "as a batch field"
        )
