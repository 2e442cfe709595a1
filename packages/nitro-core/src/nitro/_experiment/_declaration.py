"""The `Experiment` base class: turns a class body into a frozen, checked declaration."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Self, dataclass_transform

from nitro.errors import ExperimentError, did_you_mean

from ._fields import NO_DEFAULT, FieldInfo, Residency, check_body, locate, read_fields
from ._values import checked_value

REQUIRED_HOOKS = {
    "build_data": "build_data(self)",
    "build_model": "build_model(self, rngs)",
    "forward": "forward(self, model, *, x)",
    "loss": "loss(self, outputs, *, y)",
}


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Experiment:
    """Declares one experiment: typed fields plus a few hooks.

    A subclass becomes a frozen dataclass with keyword-only fields. Each field says what
    XLA may know of it: `GraphConst[T]` is baked into the program and part of the compile
    key; `Device[T]` is a traced input; an unmarked field is host-only.

    Required hooks:

    - `build_data(self)` returns a mapping of splits, such as `"train"` and `"val"`. A
      split is a sized iterable of batches: mappings of NumPy arrays, batch axis first.
    - `build_model(self, rngs)` returns an `nnx.Module`; `rngs` is an `nnx.Rngs`.
    - `forward(self, model, *, x)` returns an array or a (nested) dict of arrays, batch
      axis first. Keyword-only names are the batch fields that it wants: inputs only.
    - `loss(self, outputs, *, y)` returns a scalar float; `outputs` is what `forward`
      returned, and the keyword-only names are batch fields.

    Optional hooks:

    - `metrics(self, outputs, *, y)` returns name → `(sum, count)`, on NumPy arrays.
    - `finalize_metrics(self, reduced, split)` returns what is logged for a split.
    - `export_inputs(self)`, `export_outputs(self)` return lists of `ExportSpec`;
      `export_preprocess(self, *wire)` is traced into the exported program.

    Raises:
        ExperimentError: At declaration, a malformed field; at construction, an unknown
            or missing one.
        ConfigError: At construction, a structural value of another type.
    """

    __nitro_fields__: ClassVar[dict[str, FieldInfo]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "_nitro_is_view" in cls.__dict__:
            return
        check_body(cls)
        try:
            dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)(cls)
        except (TypeError, ValueError) as error:
            raise ExperimentError(
                f"`{cls.__name__}` ({locate(cls)}) cannot be declared: {error}.",
                fix="give a mutable default through `dataclasses.field(default_factory=...)`",
            ) from error
        cls.__nitro_fields__ = read_fields(cls)
        for name in cls.__nitro_fields__:
            setattr(cls, name, _ReadOnClass(name))
        cls.__init__ = _checked_init(cls)

    @classmethod
    def fields(cls) -> Mapping[str, FieldInfo]:
        """The declared fields by name, in declaration order."""
        return cls.__nitro_fields__

    def finalize_metrics(self, reduced: dict[str, Any], split: str) -> dict[str, Any]:
        """Returns what is logged for `split`; runs on the host, once per split."""
        del split
        return reduced

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.fields())
        return f"{type(self).__name__}({shown})"

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked as at construction."""
        values = {name: getattr(self, name) for name in self.fields()}
        return type(self)(**{**values, **changes})


def field_names(experiment: Experiment | type[Experiment], residency: Residency) -> list[str]:
    """The names of the fields of one residency, in declaration order."""
    return [name for name, f in experiment.fields().items() if f.residency is residency]


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
    missing = [signature for name, signature in REQUIRED_HOOKS.items() if not has_hook(cls, name)]
    if missing:
        raise ExperimentError(
            f"`{cls.__name__}` ({locate(cls)}) lacks {_listed(missing)}.",
            expected="the four required hooks: " + ", ".join(REQUIRED_HOOKS),
            fix=f"add `def {missing[0]}: ...` to the class",
        )


def _listed(names: list[str]) -> str:
    return ", ".join(f"the hook `{name}`" for name in names)


class _ReadOnClass:
    """Stands where a field's default was, so that no hook reads it off the class."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, experiment: Any, owner: type | None = None) -> Any:
        cls = owner.__name__ if owner is not None else "Experiment"
        raise AttributeError(
            f"`{cls}.{self.name}` is a field: read it as `self.{self.name}` on an instance"
        )


def _checked_init(cls: type[Experiment]) -> Any:
    generated = cls.__init__
    fields = cls.__nitro_fields__

    @functools.wraps(generated)
    def __init__(self: Experiment, **values: Any) -> None:  # noqa: N807 - it becomes the class's own
        _check_names(cls, fields, values)
        generated(self, **values)
        for name, field in fields.items():
            value = checked_value(cls.__name__, field, self.__dict__[name])
            object.__setattr__(self, name, value)

    return __init__


def _check_names(cls: type, fields: Mapping[str, FieldInfo], values: Mapping[str, Any]) -> None:
    for name in values:
        if name not in fields:
            raise ExperimentError(
                f"`{cls.__name__}` has no field `{name}`.",
                expected=did_you_mean(name, fields),
            )
    missing = [n for n, f in fields.items() if f.default is NO_DEFAULT and n not in values]
    if missing:
        raise ExperimentError(
            f"`{cls.__name__}(...)` lacks the required field `{missing[0]}`.",
            fix=f"write `{cls.__name__}({missing[0]}=...)`, or give the field a default",
        )
