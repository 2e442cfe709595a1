"""The hooks that an experiment has, and those that it must have."""

from __future__ import annotations

from collections.abc import Iterable

from nitro.errors import ExperimentError

from ._declaration import Experiment
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
            fix=f"add `def {next(iter(missing.values()))}: ...` to the class",
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"the hook `{name}`" for name in names)
