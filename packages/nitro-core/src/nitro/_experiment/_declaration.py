"""The `Experiment` base class: turns a class body into a frozen, checked declaration."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
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


MANUAL_HOOKS = {
    **{name: REQUIRED_HOOKS[name] for name in ("build_data", "build_model", "forward")},
    "train_step": "train_step(self, model, optimizers, *, x)",
    "build_optimizers": "build_optimizers(self, model)",
}
"""What an experiment needs that takes its steps by itself."""


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
    - `optimizer`, `learning_rate`, `weight_decay`, `decay_anchor`, `no_decay`,
      `param_group` and `schedules` say how weights move; each has a default, below.
    - `train_step(self, model, optimizers, *, x)` with `build_optimizers(self, model)` takes
      the step by itself, in plain NNX: it updates the model through the `nnx.Optimizer`s
      that `build_optimizers` returned by name, and returns the loss, or the loss and a dict
      of scalars. `loss` is then optional.
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
        _keep_hooks_from_defaults(cls)
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

    # `*args, **kwargs` lets type checkers accept an override of either form.
    def optimizer(self, group: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Returns how the parameters of `group` are updated; by default `optax.radam`.

        The simple form, `optimizer(self, group)`, runs on the host at setup and returns an
        optax factory that takes `learning_rate`: `optax.adam`, or with other constants
        `functools.partial(optax.adam, b1=0.8)`. Nitro adds the decay of `weight_decay`.

        The full form, `optimizer(self, group, hyper)`, is traced: it returns a whole optax
        chain, built from what `hyper` holds and from GraphConst and Device fields. Nitro
        adds nothing to it. `hyper` has

        - `learning_rate`: the group's rate at this step, traced;
        - `weight_decay`: the group's decay already times that rate, traced;
        - `anchor`: what the weights decay toward, by parameter name; None for zero;
        - `no_decay`: whether each parameter is left out of decay, by name; static;
        - `decay()`: a transformation that applies the three, to end the chain with.
        """
        del group, args, kwargs
        import optax  # a second of import that an export or a listing need not pay

        return optax.radam

    def learning_rate(self, group: str | None = None) -> float:
        """Returns the base rate, for None, or the constant rate of one group; 1e-3.

        A schedule of the rate moves all groups: each keeps its ratio to the base rate.
        A field of this name does as well: `learning_rate: float = 1e-3`.
        """
        del group
        return 1e-3

    def weight_decay(self, group: str) -> float:
        """Returns the decoupled weight decay of a group; 0.

        Each step takes `rate * weight_decay * (weight - anchor)` off the updated weight. A
        field of this name does as well.
        """
        del group
        return 0.0

    def decay_anchor(self, group: str) -> Any:
        """Returns what the weights of a group decay toward; `"zero"`.

        `"init"` is the weights as `build_model` made them, before any record is read
        (L2-SP). A tree of arrays is matched to the parameters by dotted name.

        References:
            Li et al., "Explicit inductive bias for transfer learning with convolutional
            networks", 2018, https://arxiv.org/abs/1802.01483 (L2-SP).
        """
        del group
        return "zero"

    def no_decay(self, path: str, leaf: Any) -> bool:
        """Returns whether a parameter is left out of decay; `default_no_decay`.

        To extend it: `return nitro.default_no_decay(path, leaf) or "embed" in path`.
        """
        return default_no_decay(path, leaf)

    def param_group(self, path: str) -> str:
        """Returns the group of the parameter with this dotted name; `"default"`."""
        del path
        return "default"

    def schedules(self) -> Mapping[str, Any]:
        """Returns what changes with the step, by key; `{}`.

        A key is `learning_rate`, `weight_decay`, `opt.<group>.learning_rate` or a Device
        field. A value is a number, or a factory that gets the number of optimizer steps
        and returns a function of the step, counted from 0 as optax does:
        `{"learning_rate": lambda total: optax.cosine_decay_schedule(1e-3, total)}`. Each
        is evaluated once, at setup, for all steps.
        """
        return {}

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.fields())
        return f"{type(self).__name__}({shown})"

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked as at construction."""
        values = {name: getattr(self, name) for name in self.fields()}
        return type(self)(**{**values, **changes})


def default_no_decay(path: str, leaf: Any) -> bool:
    """Whether a parameter is left out of weight decay: biases and scales, that is 1-D leaves.

    Args:
        path: The parameter's dotted name.
        leaf: The parameter, or its shape and dtype.
    """
    del path
    return len(leaf.shape) <= 1


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
    required = MANUAL_HOOKS if has_hook(cls, "train_step") else REQUIRED_HOOKS
    missing = [signature for name, signature in required.items() if not has_hook(cls, name)]
    if missing:
        raise ExperimentError(
            f"`{cls.__name__}` ({locate(cls)}) lacks {_listed(missing)}.",
            expected="the required hooks: " + ", ".join(required),
            fix=f"add `def {missing[0]}: ...` to the class",
        )


def _keep_hooks_from_defaults(cls: type[Experiment]) -> None:
    # `learning_rate: float` alone is a required field; `dataclass` would find the hook of that
    # name in the base class and take it for the default.
    for name in inspect.get_annotations(cls):
        if name not in vars(cls) and callable(getattr(Experiment, name, None)):
            setattr(cls, name, dataclasses.field())


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
