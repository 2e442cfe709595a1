"""The `Experiment` base class: turns a class body into a frozen, checked declaration."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self, dataclass_transform

from nitro.errors import ExperimentError

from ._docs import documented
from ._fields import FieldInfo, Group, check_body, leaves_of, read_entries
from ._overrides import constructor_values
from ._presets import preset_values
from ._source import keep_source, locate
from ._spelling import check_spelling


def _field_or_hook(hook: Callable[..., Any]) -> Any:
    """Lets type checkers accept a field in place of a hook; the hook itself is unchanged."""
    return hook


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
      axis first. Keyword-only names are the batch fields that it wants: inputs only. The
      model comes in training mode in a step, in evaluation mode for all else.
    - `loss(self, outputs, *, y)` returns a scalar float, the mean over the batch, or
      `(sum, count)` with a denominator of its own: sums and counts are then added up over
      the micro-batches of a step, and over a split. `outputs` is what `forward` returned,
      and the keyword-only names are batch fields.

    Optional hooks:

    - `metrics(self, outputs, *, y)` returns name → `(sum, count)`, on NumPy arrays. The
      totals over a split are divided; the denominator is yours. Other modes are
      `(value, None)` or `("sum", value)`, `("max", value)`, `("min", value)`, and
      `("concat", value)` along the batch axis. Groups nest, and a mode around one covers
      what is in it. Padding is never seen.
    - `metrics_residency(self, hook)` says where it runs: on the host, or compiled.
    - `finalize_metrics(self, reduced, split)` returns what is logged for a split.
    - `figures(self, reduced, split)` returns matplotlib figures of a split by name.
    - `train_metrics(self, outputs, *, y)` returns name → scalar, traced with the loss and
      logged for each step; the history has the means over each epoch.
    - `derive(self, data)` returns field values that follow from the data.
    - `presets(cls)`, a class method, returns named partial field values.
    - `optimizer`, `learning_rate`, `weight_decay`, `decay_anchor`, `no_decay`,
      `param_group` and `schedules` say how weights move; each has a default, below.
    - `train_step(self, model, optimizers, *, x)` with `build_optimizers(self, model)` takes
      the step by itself, in plain NNX: it updates the model through the `nnx.Optimizer`s
      that `build_optimizers` returned by name, and returns the loss, or the loss and a dict
      of scalars. `loss` is then optional.
    - `visualize(self, outputs, *, x)` returns a figure of one sample, for `render`;
      `save_figure(self, figure, stem)` saves it where it is none of matplotlib.
    - `export_inputs(self)`, `export_outputs(self)` return lists of `ExportSpec`.
      `export_preprocess(self, *wire)` gets the inputs in that order and returns the batch
      fields of `forward`; it is traced into the exported program.
    - `export_postprocess(self)` returns the text of a module that ships beside the program;
      `export_client_inputs(self)` and `export_client_outputs(self)` say what a client sees
      around the two. `export_provenance(self)` returns more facts to keep.

    A field may hold a frozen dataclass: a group, whose fields are marked one by one, or
    all by a marker around it. `Digits(**{"model.width": 256})` sets one of them.

    What is named almost like a hook or an option, or like one of Lightning, Keras or Hugging
    Face, is refused where the class is declared: Nitro would not read it. A helper of such a
    name begins with an underscore.

    Raises:
        ExperimentError: At declaration, a malformed field, or a name that is taken for a
            hook or an option; at construction, an unknown or missing field.
        ConfigError: At construction, a structural value of another type.
    """

    __nitro_prose__: ClassVar[str | None] = None
    __nitro_entries__: ClassVar[dict[str, FieldInfo | Group]] = {}
    __nitro_fields__: ClassVar[Mapping[str, FieldInfo]] = MappingProxyType({})

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "_nitro_is_view" in cls.__dict__:
            return
        keep_source(cls)
        # Read before `dataclass` writes a signature there; inherited as docstrings are.
        cls.__nitro_prose__ = vars(cls).get("__doc__") or cls.__nitro_prose__
        check_body(cls)
        _check_reserved(cls)
        _keep_hooks_from_defaults(cls)
        try:
            dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)(cls)
        except (TypeError, ValueError) as error:
            raise ExperimentError(
                f"`{cls.__name__}` ({locate(cls)}) cannot be declared: {error}.",
                fix="give a mutable default through `dataclasses.field(default_factory=...)`",
            ) from error
        cls.__nitro_entries__ = read_entries(cls)
        cls.__nitro_fields__ = MappingProxyType(
            {f.name: f for f in leaves_of(cls.__nitro_entries__)}
        )
        check_spelling(cls, root=Experiment, fields=cls.__nitro_entries__, hooks=hook_names())
        cls.__doc__ = documented(cls.__nitro_prose__, cls.__nitro_fields__)
        for name in cls.__nitro_entries__:
            setattr(cls, name, _ReadOnClass(name))
        cls.__init__ = _checked_init(cls)

    @classmethod
    def fields(cls) -> Mapping[str, FieldInfo]:
        """The declared fields by name, in declaration order.

        A field that holds a frozen dataclass is a group: its fields are listed one by one,
        by dotted name, such as `model.width`.
        """
        return cls.__nitro_fields__

    @classmethod
    def presets(cls) -> Mapping[str, Mapping[str, Any]]:
        """Returns named partial field values, for `from_preset`; `{}`.

        To add to those of a base class: `return {**super().presets(), "large": {...}}`.
        """
        return {}

    @classmethod
    def from_preset(cls, preset: str, /, **overrides: Any) -> Self:
        """Makes an experiment of a preset's values, with `overrides` on top.

        `Nitro.from_preset` does this too, and records the preset's name with the run.

        Args:
            preset: One of the names in `presets`.
            overrides: Field values that beat the preset's, which beat the defaults.

        Raises:
            ConfigError: No such preset; lists those that there are.
            ExperimentError: A name that is no field.
        """
        return cls(**preset_values(cls, preset, overrides))

    def derive(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns field values that follow from the data; `{}`.

        Runs on the host at setup, once the data is built and before anything is on the
        device, so that a class weight or a mean may become a Device field. A record keeps
        the values: a handle that takes its weights takes them as well.

        Args:
            data: The splits by name.

        Returns:
            New values by field; `model.width` for one inside a group.
        """
        del data
        return {}

    def metrics_residency(self, hook: str) -> Literal["host", "device"]:
        """Returns where a hook runs; "host" for `metrics`, "device" for `train_metrics`.

        On the host, `metrics` gets NumPy arrays, may use any library, and is in no program.
        On the device it is compiled, and the outputs stay there. `train_metrics` is traced
        with the loss, so the device is its only place.

        Args:
            hook: "metrics" or "train_metrics".
        """
        return "device" if hook == "train_metrics" else "host"

    def finalize_metrics(self, reduced: dict[str, Any], split: str) -> dict[str, Any]:
        """Returns what is logged for `split`; runs on the host, once per split."""
        del split
        return reduced

    def figures(self, reduced: dict[str, Any], split: str) -> dict[str, Any]:
        """Returns matplotlib figures by name; drawn after each validation of a training run.

        A logger that shows images gets them; without one they are files in the folder `figures`
        of the run's directory. They are closed afterwards.

        Args:
            reduced: What `finalize_metrics` gets: the reduced metrics, concatenated ones too.
            split: The split, "val".
        """
        del reduced, split
        return {}

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

    @_field_or_hook
    def learning_rate(self, group: str | None = None) -> float | None:
        """Returns the base rate, for None, or the constant rate of one group; 1e-3.

        A schedule of the rate moves all groups: each keeps its ratio to the base rate.
        `nitro.FROZEN`, which is None, for one group freezes it: its weights stay as they are,
        and have no gradient, no optimizer state, no decay, and no part in the norm that
        `gradient_clip_norm` clips. A field of this name does as well: `learning_rate: float = 1e-3`.
        """
        del group
        return 1e-3

    @_field_or_hook
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
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__nitro_entries__)
        return f"{type(self).__name__}({shown})"

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked as at construction.

        `replace(**{"model.width": 256})` changes one field of a group.
        """
        values = {name: getattr(self, name) for name in self.__nitro_entries__}
        return type(self)(**{**values, **changes})


def default_no_decay(path: str, leaf: Any) -> bool:
    """Whether a parameter is left out of weight decay: biases and scales, that is 1-D leaves.

    Args:
        path: The parameter's dotted name.
        leaf: The parameter, or its shape and dtype.
    """
    del path
    return len(leaf.shape) <= 1


_HOOKS_THAT_MAY_BE_FIELDS = ("learning_rate", "weight_decay")
OTHER_HOOKS = (
    "build_data",
    "build_model",
    "build_optimizers",
    "export_client_inputs",
    "export_client_outputs",
    "export_inputs",
    "export_outputs",
    "export_postprocess",
    "export_preprocess",
    "export_provenance",
    "forward",
    "loss",
    "metrics",
    "metrics_residency",
    "train_metrics",
    "train_step",
    "visualize",
)


def hook_names() -> set[str]:
    """The names of all hooks, with and without a default."""
    own = {name for name, value in vars(Experiment).items() if callable(value)}
    hooks = {name for name in own if not name.startswith("_")} - {"replace"}
    return {*hooks, *OTHER_HOOKS, "presets"}


def _check_reserved(cls: type[Experiment]) -> None:
    """Refuses fields named like what Nitro calls on an experiment."""
    own = {name for name, value in vars(Experiment).items() if callable(value)}
    own |= {"fields", "presets", "from_preset"}
    for name in inspect.get_annotations(cls):
        if name in _HOOKS_THAT_MAY_BE_FIELDS or name not in {*own, *OTHER_HOOKS}:
            continue
        is_hook = name not in ("fields", "replace", "presets", "from_preset")
        raise ExperimentError(
            f"`{cls.__name__}.{name}` ({locate(cls, name)}) is a field, and `{name}` is the name of "
            + ("a hook." if is_hook else "a method of every experiment."),
            expected="a name that Nitro does not call",
            fix=f"rename the field, for example to `{name}_`"
            + (f", or write `def {name}(self, ...): ...`" if is_hook else ""),
        )
    if "__init__" in vars(cls):
        raise ExperimentError(
            f"`{cls.__name__}` ({locate(cls, '__init__')}) defines `__init__`.",
            expected="fields: they make the constructor",
            fix="check values in `__post_init__(self)`, and compute others in properties",
        )


def _keep_hooks_from_defaults(cls: type[Experiment]) -> None:
    # `learning_rate: float` alone is a required field; `dataclass` would find the hook of that
    # name in the base class and take it for the default.
    for name in inspect.get_annotations(cls):
        if name not in vars(cls) and callable(getattr(Experiment, name, None)):
            setattr(cls, name, dataclasses.field())


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

    @functools.wraps(generated)
    def __init__(self: Experiment, **values: Any) -> None:  # noqa: N807 - it becomes the class's own
        generated(self, **constructor_values(cls.__name__, cls.__nitro_entries__, values))

    return __init__
