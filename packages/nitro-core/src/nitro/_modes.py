"""Training and evaluation mode: which parts of a model change between the two."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

from flax import nnx

MODE_FLAGS = ("deterministic", "use_running_average")
"""The attributes that NNX switches; each is True in evaluation mode."""


def kept_in_evaluation(model: nnx.Module) -> dict[tuple[Any, ...], tuple[str, ...]]:
    """The flags that somebody has put into evaluation mode, by the path of their module.

    A flag that is True where the module's own default is not was set on purpose, by its
    constructor or by `eval()`: training leaves it.
    """
    kept = {
        path: tuple(flag for flag in MODE_FLAGS if _is_kept(module, flag))
        for path, module in nnx.iter_modules(model)
    }
    return {path: flags for path, flags in kept.items() if flags}


def switch_to_training(model: nnx.Module, *, kept: dict[tuple[Any, ...], tuple[str, ...]]) -> None:
    """Puts a model into training mode, but for the flags to keep; changes it in place."""
    model.train()
    for path, module in nnx.iter_modules(model):
        for flag in kept.get(path, ()):
            setattr(module, flag, True)


def parts_in_evaluation(model: nnx.Module, kept: Collection[tuple[Any, ...]]) -> tuple[str, ...]:
    """The dotted paths of the largest parts of which every flag is kept; "model" for all of it."""
    switched = [
        path
        for path, module in nnx.iter_modules(model)
        if path not in kept and any(hasattr(module, flag) for flag in MODE_FLAGS)
    ]

    def largest(path: tuple[Any, ...]) -> tuple[Any, ...]:
        starts = (path[:length] for length in range(len(path)))
        is_pure = lambda start: all(other[: len(start)] != start for other in switched)  # noqa: E731
        return next((start for start in starts if is_pure(start)), path)

    parts = dict.fromkeys(largest(path) for path in kept)
    return tuple(".".join(map(str, path)) or "model" for path in parts)


def _is_kept(module: nnx.Module, flag: str) -> bool:
    return getattr(module, flag, None) is True and _default(type(module), flag) is not True


def _default(cls: type, flag: str) -> Any:
    try:
        # Of `__init__`: the call itself goes through NNX's metaclass.
        parameter = inspect.signature(cls.__init__).parameters.get(flag)
    except (TypeError, ValueError):
        return None
    return None if parameter is None else parameter.default
