"""Which batch fields each hook wants, read once from its signature."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nitro.errors import DataError, ExperimentError

ROUTED_HOOKS = ("forward", "loss", "train_metrics", "metrics", "train_step")
# What models of Linen and PyTorch take to switch Dropout and BatchNorm.
_MODE_FLAGS = ("train", "training", "is_training", "deterministic", "use_running_average")
_POSITIONAL = {
    "forward": ("self", "model"),
    "loss": ("self", "outputs"),
    "metrics": ("self", "outputs"),
    "train_metrics": ("self", "outputs"),
    "visualize": ("self", "outputs"),
    "train_step": ("self", "model", "optimizers"),
}


@dataclass(frozen=True, kw_only=True)
class Route:
    """The batch fields that one hook declares.

    Attributes:
        hook: The hook, as `Class.hook`.
        required: Keyword-only names without a default.
        optional: Keyword-only names with one.
        takes_all: Whether the hook ends in `**batch`.
    """

    hook: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    takes_all: bool

    def names(self, batch_fields: Iterable[str], *, where: str = "the batch") -> tuple[str, ...]:
        """The fields of a batch that the hook gets, sorted; `where` it is, for messages.

        Raises:
            DataError: The batch lacks a required field; names hook, field and fixes.
        """
        available = set(batch_fields)
        missing = [name for name in self.required if name not in available]
        if missing:
            raise DataError(
                f"`{self.hook}` wants the batch field `{missing[0]}`, but {where} has "
                f"{listed(available)}.",
                fix=_fix_of_missing(missing[0], available),
            )
        if self.takes_all:
            return tuple(sorted(available))
        return tuple(sorted(available.intersection(self.required + self.optional)))

    def pick(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The hook's keywords out of a batch."""
        return {name: batch[name] for name in self.names(batch)}

    def near_misses(self, batch_fields: Iterable[str]) -> list[tuple[str, str]]:
        """Defaulted keywords that match no field but are close to one."""
        available = sorted(batch_fields)
        unmatched = [name for name in self.optional if name not in available]
        guesses = ((n, difflib.get_close_matches(n, available, n=1)) for n in unmatched)
        return [(name, close[0]) for name, close in guesses if close]


def read_routes(experiment: type) -> dict[str, Route]:
    """The routes of the hooks that the class defines.

    Raises:
        ExperimentError: A hook takes the wrong positional arguments, or a batch field
            that is not keyword-only.
    """
    hooks = ((name, getattr(experiment, name, None)) for name in ROUTED_HOOKS)
    return {
        name: read_route(experiment.__name__, name, hook) for name, hook in hooks if callable(hook)
    }


def read_route(owner: str, name: str, hook: Callable[..., Any]) -> Route:
    """The route of one hook, a plain function that takes `self` first.

    Raises:
        ExperimentError: It takes the wrong positional arguments, or `*args`.
    """
    parameters = list(inspect.signature(hook).parameters.values())
    positional = [p.name for p in parameters if p.kind in _POSITIONAL_KINDS]
    expected = _POSITIONAL[name]
    if len(positional) != len(expected) or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise ExperimentError(
            f"`{owner}.{name}({', '.join(map(str, parameters))})` has the positional arguments "
            f"({', '.join(positional)}).",
            expected=f"({', '.join(expected)}), then the batch fields as keyword-only names",
            fix=f"write `def {name}({', '.join(expected)}, *, ...)`",
        )
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    return Route(
        hook=f"{owner}.{name}",
        required=tuple(p.name for p in keywords if p.default is p.empty),
        optional=tuple(p.name for p in keywords if p.default is not p.empty),
        takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def _fix_of_missing(name: str, available: Iterable[str]) -> str:
    if name in _MODE_FLAGS:
        return (
            f"leave `{name}` out: Nitro puts the model into training mode for a step, and into "
            "evaluation mode for all else"
        )
    close = difflib.get_close_matches(name, sorted(available), n=1)
    guess = f"if `{close[0]}` is meant, rename the keyword; else " if close else ""
    return f"{guess}add `{name}` to the batch, or give the keyword a default"


def listed(names: Iterable[str]) -> str:
    """Names in backquotes, sorted."""
    return ", ".join(f"`{name}`" for name in sorted(names)) or "no fields"


_POSITIONAL_KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
