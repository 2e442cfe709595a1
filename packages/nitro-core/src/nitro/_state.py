"""The one tree that training carries, and how it becomes an NNX module inside a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from flax import linen, nnx

from nitro._devices import brought_home
from nitro._linen import drive_linen, shell_of
from nitro._modes import kept_in_evaluation, parts_in_evaluation, switch_to_training
from nitro._trees import Flat, variable_name
from nitro.errors import HookError, warn


class TrainState(NamedTuple):
    """Everything that one optimizer step reads and replaces.

    Attributes:
        params: Trainable weights by dotted name.
        model_state: All other variables of the model by dotted name: running
            statistics, RNG keys and counters.
        opt_state: The optimizer's state; an empty tuple on an evaluation handle.
    """

    params: Flat
    model_state: Flat
    opt_state: Any


@dataclass(frozen=True, kw_only=True)
class ModelLayout:
    """The static part of a model: how flat arrays become a module again.

    Attributes:
        train: The graph definition in training mode.
        eval: The same in evaluation mode.
        params: The structure of the trainable weights.
        model_state: The structure of the other variables.
        train_modules: The modules in training mode by dotted path: class and settings.
        eval_modules: The same in evaluation mode.
        rng_names: The names in the model state that hold RNG keys and counters.
        parts_in_evaluation: The parts that stay in evaluation mode while the rest trains.
    """

    train: Any
    eval: Any
    params: _Structure
    model_state: _Structure
    train_modules: Mapping[str, Any]
    eval_modules: Mapping[str, Any]
    rng_names: tuple[str, ...]
    parts_in_evaluation: tuple[str, ...] = ()

    def merge(self, graph: Any, params: Mapping[str, Any], model_state: Mapping[str, Any]) -> Any:
        """The module with these arrays, safe to mutate inside a trace."""
        states = (self.params.unflatten(params), self.model_state.unflatten(model_state))
        return nnx.merge(graph, *states, copy=True)

    def split(self, model: Any) -> tuple[Flat, Flat]:
        """The weights and the other variables of a module that `train_step` has updated.

        Raises:
            HookError: It changed which variables there are.
        """
        hook = "train_step"
        _drop_sown(model, hook)
        _, params, rest = nnx.split(model, nnx.Param, ...)
        return self.params.flatten(params, hook), self.model_state.flatten(rest, hook)

    def model_state_of(self, model: Any) -> Flat:
        """The non-trainable variables of a module that `forward` has run.

        Raises:
            HookError: It changed which variables there are.
        """
        _drop_sown(model, "forward")
        _, _, rest = nnx.split(model, nnx.Param, ...)
        return self.model_state.flatten(rest, "forward")


@dataclass(frozen=True)
class _Structure:
    """Dotted names and the tree that they come from, in one order."""

    names: tuple[str, ...]
    treedef: Any

    def unflatten(self, flat: Mapping[str, Any]) -> Any:
        return jax.tree.unflatten(self.treedef, [flat[name] for name in self.names])

    def flatten(self, tree: Any, hook: str) -> Flat:
        leaves, treedef = jax.tree.flatten(tree)
        if treedef != self.treedef:
            raise HookError(
                f"`{hook}` changed which variables the model has.",
                expected="the variables that `build_model` created: "
                + ", ".join(f"`{name}`" for name in self.names),
                fix="create every nnx.Variable in the module's `__init__`",
            )
        return dict(zip(self.names, leaves, strict=True))


def _drop_sown(model: nnx.Module, hook: str) -> None:
    """Takes out what `sow` left in a module, which belongs to one call, and says so."""
    sown = jax.tree_util.tree_flatten_with_path(nnx.pop(model, nnx.Intermediate))[0]
    names = sorted({variable_name(path[:-1]) for path, _ in sown})
    if names:
        warn(
            f"`{hook}` sows {', '.join(f'`{name}`' for name in names)}, which is dropped: an "
            "intermediate is no state of the model.\n"
            "  fix: return from `forward` what is to be seen, and read it in `metrics`, `predict` "
            "or `visualize`"
        )


def split_model(
    model: Any, *, hook: str, sample: Callable[[], str] = lambda: "x"
) -> tuple[ModelLayout, Flat, Flat]:
    """Splits what `build_model` returned into layout, weights and model state.

    All of its arrays come to the device that Nitro works on. What is in evaluation mode
    against its own default stays so in training mode, too.

    Args:
        model: What the hook returned.
        hook: Its name, for messages.
        sample: Makes an expression for what `forward` takes, for messages.

    Raises:
        HookError: Not an `nnx.Module`, or two variables with one dotted name.
    """
    if not isinstance(model, nnx.Module):
        raise _no_module(model, hook, sample)
    drive_linen(model)
    kept = kept_in_evaluation(model)
    # A pre-trained part may come from another device, or spread over a mesh.
    nnx.update(model, brought_home(nnx.state(model)))
    # Of a call in `build_model`: it would be taken for state.
    nnx.pop(model, nnx.Intermediate)
    model.eval()
    eval_graph, _, _ = nnx.split(model, nnx.Param, ...)
    eval_modules = _described_modules(model)
    switch_to_training(model, kept=kept)
    train_graph, params, rest = nnx.split(model, nnx.Param, ...)
    params_structure, flat_params = _named(params, hook)
    rest_structure, flat_rest = _named(rest, hook)
    rngs = nnx.to_flat_state(nnx.filter_state(rest, nnx.RngState))
    layout = ModelLayout(
        train=train_graph,
        eval=eval_graph,
        params=params_structure,
        model_state=rest_structure,
        train_modules=_described_modules(model),
        eval_modules=eval_modules,
        rng_names=tuple(".".join(map(str, path)) for path, _ in rngs),
        parts_in_evaluation=parts_in_evaluation(model, kept),
    )
    return layout, flat_params, flat_rest


def _no_module(model: Any, hook: str, sample: Callable[[], str]) -> HookError:
    if isinstance(model, linen.Module):
        return HookError(
            f"`{hook}` returned {type(model).__name__}, a Linen module.",
            expected="an `nnx.Module`, which holds its variables",
            fix=f"write `return {shell_of(model, sample())}`",
        )
    return HookError(
        f"`{hook}` returned {type(model).__name__}.",
        expected="an `nnx.Module`",
        fix="return the module itself, such as `nnx.Linear(4, 1, rngs=rngs)`",
    )


def _described_modules(model: nnx.Module) -> dict[str, dict[str, Any]]:
    """Class and settings of each module, by dotted path: for keys that explain themselves."""
    return {
        ".".join(map(str, path)) or "model": {
            "class": type(module),
            **{name: value for name, value in vars(module).items() if _is_setting(name, value)},
        }
        for path, module in nnx.iter_modules(model)
    }


def _is_setting(name: str, value: Any) -> bool:
    holds_state = any(
        isinstance(leaf, nnx.Variable | nnx.Module | jax.Array)
        for leaf in jax.tree.leaves(value, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    )
    return not name.startswith("_") and not isinstance(value, nnx.Module) and not holds_state


def _named(state: Any, hook: str) -> tuple[_Structure, Flat]:
    leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
    names = tuple(variable_name(path) for path, _ in leaves)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise HookError(
            f"`{hook}` made two variables with the dotted name `{twice[0]}`.",
            expected="distinct names: they are the names of the exported weights",
            fix="rename the attribute or key that contains a dot",
        )
    values = (leaf for _, leaf in leaves)
    arrays = {n: _copied(n, leaf, hook) for n, leaf in zip(names, values, strict=True)}
    return _Structure(names, treedef), arrays


def _copied(name: str, leaf: Any, hook: str) -> jax.Array:
    """A copy: the step program overwrites its state, and the module stays the user's."""
    try:
        return jax.numpy.array(leaf, copy=True)
    except TypeError as error:
        raise HookError(
            f"`{hook}` made the variable `{name}` with {type(leaf).__name__}, not a value.",
            expected="an array or a number in each variable",
            fix="call the module itself: `nnx.eval_shape` and the like make shapes without values"
            if isinstance(leaf, jax.ShapeDtypeStruct)
            else "keep what is no array in a plain attribute of the module",
        ) from error
