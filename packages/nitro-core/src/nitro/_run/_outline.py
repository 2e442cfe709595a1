"""The model that a run starts from; only its shapes where its weights come from elsewhere."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from nitro._state import ModelLayout
from nitro._trees import Flat

_outlining = contextvars.ContextVar("outlining", default=False)

_Split = Callable[[Any], tuple[ModelLayout, Flat, Flat]]


def is_outlining() -> bool:
    """Whether a `build_model` is running whose weights will be replaced."""
    return _outlining.get()


@dataclass
class BuiltModel:
    """What `build_model` made, or the shapes of what it would make.

    Attributes:
        layout: What the model is besides its arrays.
        params: Its parameters: arrays, or shapes and dtypes.
        model_state: Its other variables, likewise.
        model: The module, or None.
    """

    layout: ModelLayout
    params: Flat
    model_state: Flat
    model: Any
    _build: Callable[[], BuiltModel] | None = None

    def filled(self, params: Flat, model_state: Flat) -> tuple[Flat, Flat]:
        """The same, with what is a shape only as `build_model` makes it."""
        shapes = [*params.values(), *model_state.values()]
        if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in shapes):
            return params, model_state
        whole = self._whole()
        return _filled(params, whole.params), _filled(model_state, whole.model_state)

    def own_params(self) -> Flat:
        """The parameters as `build_model` makes them, which runs when one is asked for."""
        if self._build is None:
            return self.params
        return _Later(lambda: self._whole().params)

    def _whole(self) -> BuiltModel:
        if self._build is None:
            return self
        whole = self._build()
        self._build, self.params, self.model_state = None, whole.params, whole.model_state
        return whole


def build_or_outline(
    build: Callable[[nnx.Rngs], Any], *, seed: int, split: _Split, is_replaced: bool
) -> BuiltModel:
    """Calls `build_model`; abstractly where its weights will be replaced, if it can run so.

    Args:
        build: The hook.
        seed: The seed of the streams that it gets.
        split: Takes the module apart.
        is_replaced: Whether its weights will be replaced, at least in part.
    """

    def concrete() -> BuiltModel:
        model = build(nnx.Rngs(seed))
        return BuiltModel(*split(model), model)

    if not is_replaced or is_outlining():
        return concrete()
    layouts: list[ModelLayout] = []

    def traced() -> tuple[Flat, Flat]:
        rngs = nnx.Rngs(seed)
        # On the host: of a traced counter, NNX asks with each key for its sharding, and JAX
        # answers by an error that takes as long as the trace so far.
        rngs["default"].count.set_raw_value(np.zeros((), np.uint32))  # pyright: ignore[reportArgumentType] - it takes what arithmetic takes
        layout, params, model_state = split(build(rngs))
        layouts.append(layout)
        return params, model_state

    shapes = None
    token = _outlining.set(True)
    # Whatever a hook does that a trace cannot: then it is called for real.
    with contextlib.suppress(Exception):
        shapes = jax.eval_shape(traced)
    _outlining.reset(token)
    if shapes is None:
        return concrete()
    params, model_state = shapes
    return BuiltModel(layouts[-1], params, model_state, None, concrete)


class _Later(dict[str, Any]):
    """Arrays by name that are made when the first of them is asked for."""

    def __init__(self, make: Callable[[], Flat]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> Any:
        self.update(self._make())
        return dict.__getitem__(self, name)


def _filled(flat: Flat, whole: Flat) -> Flat:
    return {
        name: whole[name] if isinstance(leaf, jax.ShapeDtypeStruct) else leaf
        for name, leaf in flat.items()
    }
