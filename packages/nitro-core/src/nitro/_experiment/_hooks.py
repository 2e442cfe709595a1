"""The hooks that an experiment has, and those that it must have."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from nitro.errors import ExperimentError

from ._declaration import OTHER_HOOKS, Experiment
from ._source import locate

REQUIRED_HOOKS = {
    "build_data": "build_data(self)",
    "build_model": "build_model(self, rngs)",
    "forward": "forward(self, model, *, x)",
    "loss": "loss(self, outputs, *, y)",
}

MANUAL_HOOKS = {
    **{name: REQUIRED_HOOKS[name] for name in ("build_data", "build_model", "forward")},
    "train_step": "train_step(self, model, optimizers, *, x)",
    "build_optimizers": "build_optimizers(self, model)",
}
"""What an experiment needs that takes its steps by itself."""


def has_hook(experiment: Experiment | type[Experiment], name: str) -> bool:
    """Whether the experiment's class defines a hook that has no default."""
    cls = experiment if isinstance(experiment, type) else type(experiment)
    return callable(getattr(cls, name, None))


def require_hooks(experiment: object) -> None:
    """Refuses what is no experiment, or lacks a required hook.

    Raises:
        ExperimentError: Names the class, its line, and each missing hook's signature.
    """
    if isinstance(experiment, type) and issubclass(experiment, Experiment):
        raise ExperimentError(
            f"Nitro got the class `{experiment.__name__}`.",
            expected="an instance of it",
            fix=f"write `Nitro({experiment.__name__}())`",
        )
    if not isinstance(experiment, Experiment):
        raise ExperimentError(
            f"Nitro got {experiment!r} ({type(experiment).__name__}).",
            expected="an instance of a subclass of `nitro.Experiment`",
        )
    cls = type(experiment)
    required = MANUAL_HOOKS if has_hook(cls, "train_step") else REQUIRED_HOOKS
    missing = {hook: text for hook, text in required.items() if not has_hook(cls, hook)}
    if missing:
        raise ExperimentError(
            f"`{cls.__name__}` ({locate(cls)}) lacks {_listed(missing.values())}.",
            expected="the required hooks: " + ", ".join(required),
            fix=_fix_of_lacking(cls, *next(iter(missing.items()))),
        )


def _fix_of_lacking(cls: type[Experiment], hook: str, signature: str) -> str:
    others = {name for name, _ in own_members(cls)} - {*REQUIRED_HOOKS}
    close = difflib.get_close_matches(hook, others, n=1, cutoff=0.8)
    if close:
        return f"rename `{close[0]}` to `{hook}`"
    return f"add `def {signature}: ...` to the class"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"the hook `{name}`" for name in names)


def own_members(cls: type[Experiment]) -> list[tuple[str, Any]]:
    """What a class and its bases, up to Experiment, hold under public names."""
    bases = [base for base in cls.__mro__ if base not in Experiment.__mro__]
    return [
        (name, member)
        for base in bases
        for name, member in vars(base).items()
        if not name.startswith("_")
    ]


def hook_names() -> set[str]:
    """The names of all hooks, with and without a default."""
    own = {name for name, value in vars(Experiment).items() if callable(value)}
    hooks = {name for name in own if not name.startswith("_")} - {"replace"}
    return {*hooks, *OTHER_HOOKS, "presets"}
