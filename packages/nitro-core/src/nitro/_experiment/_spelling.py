"""Refuses names that look as if Nitro read them: misspelt ones, and those of other frameworks."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Collection, Iterator, Mapping
from types import FunctionType

from nitro.errors import ExperimentError

from ._source import locate

_BATCHES = "`build_data`, which returns all splits"
_STEP = "`forward` and `loss`, or `train_step` to take the step by itself"
_WATCHING = "`run.on_phase(callback)`, on the handle"
_EPOCHS = ("max_epochs",)
_ALL_RATES = ("learning_rate", "optimizer", "schedules", "build_optimizers")

FOREIGN_HOOKS: Mapping[str, str] = {
    # Lightning
    "configure_callbacks": "the options `early_stop` and `checkpointer`",
    "configure_model": "`build_model`",
    "configure_optimizers": "`optimizer`, `learning_rate` and `schedules`",
    "lr_scheduler_step": "`schedules`",
    "optimizer_step": "`train_step`",
    "predict_dataloader": _BATCHES,
    "predict_step": "`forward`",
    "prepare_data": "`build_data`",
    "test_dataloader": _BATCHES,
    "test_step": "`metrics`",
    "train_dataloader": _BATCHES,
    "training_step": _STEP,
    "val_dataloader": _BATCHES,
    "validation_step": "`metrics`",
    # Keras
    "call": "`forward`",
    "compute_loss": "`loss`",
    "compute_metrics": "`metrics`",
    # Hugging Face
    "create_optimizer": "`optimizer`",
    "create_optimizer_and_scheduler": "`optimizer` and `schedules`",
    "create_scheduler": "`schedules`",
    "get_eval_dataloader": _BATCHES,
    "get_test_dataloader": _BATCHES,
    "get_train_dataloader": _BATCHES,
    "model_init": "`build_model`",
    "prediction_step": "`forward` and `metrics`",
}
"""Hooks of Lightning, Keras and Hugging Face, with what does their work here."""

_EVENTS = (
    "on_after_",
    "on_batch_",
    "on_before_",
    "on_epoch_",
    "on_evaluate",
    "on_fit_",
    "on_log",
    "on_predict_",
    "on_save",
    "on_step_",
    "on_test_",
    "on_train_",
    "on_validation_",
)
"""How the events of the three begin."""

FOREIGN_OPTIONS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    # Lightning
    "accumulate_grad_batches": ("`accum`", ("accum",)),
    "check_val_every_n_epoch": ("nothing: each epoch is validated", ()),
    "default_root_dir": ("`run_dir`", ("run_dir",)),
    "enable_checkpointing": ("`checkpointer`; None writes no records", ("checkpointer",)),
    "enable_progress_bar": ("`progress`", ("progress",)),
    "gradient_clip_val": ("`gradient_clip_norm`", ("gradient_clip_norm",)),
    "max_steps": ("`max_epochs`", _EPOCHS),
    "num_sanity_val_steps": ("`sanity_check=` of `Nitro`", ()),
    # Hugging Face
    "early_stopping_patience": ("`early_stop`: `nitro.EarlyStop(patience=...)`", ("early_stop",)),
    "gradient_accumulation_steps": ("`accum`", ("accum",)),
    "load_best_model_at_end": ("`restore_best=` of `Nitro`", ()),
    "logging_dir": ("`run_dir`", ("run_dir",)),
    "max_grad_norm": ("`gradient_clip_norm`", ("gradient_clip_norm",)),
    "metric_for_best_model": ("`checkpointer`: `nitro.TopK(metric=...)`", ("checkpointer",)),
    "num_train_epochs": ("`max_epochs`", _EPOCHS),
    "per_device_eval_batch_size": ("the batch size of the loaders in `build_data`", ()),
    "per_device_train_batch_size": ("the batch size of the loaders in `build_data`", ()),
    "resume_from_checkpoint": ("`resume=` of `Nitro`", ()),
    "save_total_limit": ("`checkpointer`: `nitro.TopK(k=...)`", ("checkpointer",)),
}
"""Options of theirs: what does their work here, and what an experiment may define for it."""

_ANYBODYS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "epochs": ("`max_epochs`", _EPOCHS),
    "n_epochs": ("`max_epochs`", _EPOCHS),
    "num_epochs": ("`max_epochs`", _EPOCHS),
    "lr": ("`learning_rate`", _ALL_RATES),
}
"""Words of everybody's, which an experiment may also read by itself."""


OPTION_NAMES = (
    "seed",
    "run_dir",
    "max_epochs",
    "accum",
    "gradient_clip_norm",
    "check_divergence",
    "steps_per_call",
    "checkpoint_every_steps",
    "progress",
    "max_constant_bytes",
    "slow_compile_s",
    "memory_limit_bytes",
    "n_devices",
    "logger",
    "checkpointer",
    "early_stop",
)
"""The run options that an experiment may define; all of them are in `_options`, too."""


def check_spelling(
    cls: type, *, root: type, fields: Collection[str], hooks: Collection[str]
) -> None:
    """Refuses what is named as if Nitro read it, where the class lacks what it does read.

    Args:
        cls: The experiment that was just declared.
        root: `Experiment`, whose own names are none of the user's.
        fields: The names of all its fields.
        hooks: The names of all hooks.

    Raises:
        ExperimentError: Names the attribute, its line, and what Nitro calls it.
    """
    bases = cls.__mro__[: cls.__mro__.index(root)]
    defined = {*fields, *(name for base in bases for name in vars(base))}
    read = {*hooks, *OPTION_NAMES}
    for name in _own_code(cls):
        meant = None if name in read else _meant_by_code(name, read - defined)
        if meant is not None:
            fix = f"rename it; a helper of your own begins with an underscore: `_{name}`"
            raise _refusal(cls, name, meant, fix)
    # A base of other experiments may leave to them what a name of everybody's means.
    is_complete = defined.issuperset(("build_data", "build_model", "forward"))
    for name in dict.fromkeys((*fields, *inspect.get_annotations(cls))):
        meant = _meant_by_field(name, defined, is_complete=is_complete)
        if meant is not None:
            fix = f"rename it; a field of your own needs another name than `{name}`"
            raise _refusal(cls, name, meant, fix)


def foreign_keyword(name: str) -> str | None:
    """What does the work here of a keyword that another framework's trainer takes."""
    known = {**FOREIGN_OPTIONS, **_ANYBODYS}.get(name)
    return None if known is None else known[0]


def _meant_by_code(name: str, missing: Collection[str]) -> str | None:
    if name in FOREIGN_HOOKS:
        return FOREIGN_HOOKS[name]
    if name.startswith(_EVENTS):
        return _WATCHING
    if name in FOREIGN_OPTIONS:
        return FOREIGN_OPTIONS[name][0]
    return _closest(name, missing, 0.85)


def _meant_by_field(name: str, defined: Collection[str], *, is_complete: bool) -> str | None:
    foreign = FOREIGN_OPTIONS.get(name) or (_ANYBODYS.get(name) if is_complete else None)
    if foreign is not None:
        meant, instead = foreign
        return None if set(instead) & set(defined) else meant
    # A field may well be called `metric`, and only its name speaks for it: it must be closer.
    return None if name in OPTION_NAMES else _closest(name, set(OPTION_NAMES) - set(defined), 0.92)


def _closest(name: str, missing: Collection[str], cutoff: float) -> str | None:
    close = difflib.get_close_matches(name, missing, n=1, cutoff=cutoff)
    return f"`{close[0]}`" if close else None


def _refusal(cls: type, name: str, meant: str, fix: str) -> ExperimentError:
    return ExperimentError(
        f"Nitro does not read `{cls.__name__}.{name}` ({locate(cls, name)}), and `{cls.__name__}` "
        "defines nothing in its place: a default would be used.",
        expected=meant,
        fix=fix,
    )


def _own_code(cls: type) -> Iterator[str]:
    """The public methods and properties that a class itself defines."""
    for name, member in vars(cls).items():
        if not name.startswith("_") and isinstance(member, _CODE):
            yield name


_CODE = (FunctionType, property, classmethod, staticmethod, functools.cached_property)
