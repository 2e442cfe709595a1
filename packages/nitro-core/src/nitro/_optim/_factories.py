"""The two forms of the `optimizer` hook, and what each must return."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any, TypeAlias

import jax
import optax

from nitro._experiment import Experiment
from nitro.errors import ConfigError, ExperimentError, HookError

from ._hook_calls import call_hook

Factory: TypeAlias = Callable[..., Any]
"""Makes a transformation from `learning_rate`."""

_OWN_DECAY = ("weight_decay", "weight_decay_rate")
_WITHOUT_DECAY = {"adamw": "adam", "nadamw": "nadam", "adamaxw": "adamax"}

_TWO_FORMS = (
    "return an optax factory, such as `optax.adam` or `functools.partial(optax.adam, b1=0.8)`; "
    "or define `optimizer(self, group, hyper)` and return a whole chain, such as "
    "`optax.chain(optax.adam(hyper.learning_rate), hyper.decay())`"
)


def builds_chains(experiment: Experiment) -> bool:
    """Whether the `optimizer` hook has the full form, which takes `hyper` and is traced.

    Raises:
        ExperimentError: It has neither form.
    """
    hook = getattr(type(experiment), "optimizer", None)
    if hook is Experiment.optimizer:
        return False
    parameters = inspect.signature(hook).parameters.values() if callable(hook) else []
    num_positional = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    if num_positional not in (2, 3):
        raise ExperimentError(
            f"`{type(experiment).__name__}.optimizer` has neither of its two forms.",
            expected="`optimizer(self, group)`, or `optimizer(self, group, hyper)`",
        )
    return num_positional == 3


def read_factory(experiment: Experiment, group: str) -> Factory:
    """The factory that the simple form returns for a group.

    Raises:
        HookError: Something else, such as a transformation that is made already.
        ConfigError: The factory adds weight decay of its own.
    """
    called = f'{type(experiment).__name__}.optimizer("{group}")'
    factory: Any = call_hook(experiment, "optimizer", group)
    if is_transformation(factory) or not callable(factory):
        raise HookError(
            f"`{called}` returned {_described(factory)} for the group `{group}`.",
            expected="a factory: Nitro makes the transformation, from a rate that is traced",
            fix=_TWO_FORMS,
        )
    parameters = _parameters(factory)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if "learning_rate" not in parameters and not takes_all:
        raise HookError(
            f"`{called}` returned `{name_of(factory)}`, which has no parameter `learning_rate`.",
            expected="a factory that Nitro can call with `learning_rate=`",
            fix=_TWO_FORMS,
        )
    _refuse_own_decay(called, factory, parameters)
    return factory


def checked_chain(called: str, chain: Any) -> optax.GradientTransformation:
    """What the full form returned, checked to be a transformation.

    Raises:
        HookError: Something else, such as a factory.
    """
    if is_transformation(chain):
        return chain
    raise HookError(
        f"`{called}` returned {_described(chain)}.",
        expected="a whole optax transformation, since the hook takes `hyper`",
        fix="return, for example, `optax.chain(optax.adam(hyper.learning_rate), hyper.decay())`",
    )


def refuse_accumulation(called: str, state: Any) -> None:
    """Refuses a transformation that accumulates gradients by itself.

    Raises:
        ConfigError: There is an `optax.MultiSteps` in it.
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, optax.MultiStepsState))
    if any(isinstance(node, optax.MultiStepsState) for node in nodes):
        raise ConfigError(
            f"`{called}` wraps its transformation in `optax.MultiSteps`: steps, schedules and "
            "records would count micro-batches.",
            expected="a transformation that updates the weights at every step",
            fix="leave `MultiSteps` out, and set the run option `accum`",
        )


def clips_norm(transformation: Any) -> bool:
    """Whether there is an `optax.clip_by_global_norm` in a transformation, however deep.

    optax composes closures, so that is where it is looked for.
    """
    seen: set[int] = set()

    def is_in(value: Any) -> bool:
        if id(value) in seen:
            return False
        seen.add(id(value))
        return _is_norm_clip(value) or any(is_in(part) for part in _parts(value))

    return is_in(transformation)


def _is_norm_clip(value: Any) -> bool:
    name = getattr(value, "__qualname__", "").partition(".")[0]
    return name == "clip_by_global_norm" and value.__module__.partition(".")[0] == "optax"


def _parts(value: Any) -> Iterator[Any]:
    """What a function, or a container of functions, is made of."""
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, tuple | list):
        yield from value
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            # A cell of a name that is bound later may be empty still.
            with contextlib.suppress(ValueError):
                yield cell.cell_contents


def is_transformation(value: Any) -> bool:
    """Whether a value is an optax transformation, and no class or factory of one."""
    return not isinstance(value, type) and hasattr(value, "init") and hasattr(value, "update")


def name_of(factory: Any) -> str:
    """`optax.adam(b1=0.8)`: a factory for messages and reports."""
    if isinstance(factory, functools.partial):
        arguments = [repr(a) for a in factory.args]
        arguments += [f"{name}={value!r}" for name, value in factory.keywords.items()]
        return f"{name_of(factory.func)}({', '.join(arguments)})"
    module = getattr(factory, "__module__", None) or ""
    name = getattr(factory, "__qualname__", type(factory).__name__).replace("<locals>.", "")
    if not module.startswith("optax"):
        return name
    return f"optax.contrib.{name}" if ".contrib" in module else f"optax.{name}"


def _refuse_own_decay(called: str, factory: Any, parameters: Any) -> None:
    for name in _OWN_DECAY:
        default = parameters[name].default if name in parameters else None
        if default is None or default is inspect.Parameter.empty or _is_zero(default):
            continue
        plain = factory.func if isinstance(factory, functools.partial) else factory
        simpler = _WITHOUT_DECAY.get(getattr(plain, "__name__", ""))
        without = f"functools.partial({name_of(plain)}, {name}=0.0)"
        raise ConfigError(
            f"`{called}` returned `{name_of(factory)}`, whose own `{name}` is {default!r}: the "
            "weights would decay twice.",
            expected="a factory that leaves the decay to the `weight_decay` hook",
            fix=f"return `{f'optax.{simpler}' if simpler else without}`, and let "
            f"`weight_decay(self, group)` return {default!r}",
        )


def _is_zero(value: Any) -> bool:
    return isinstance(value, int | float) and value == 0


def _parameters(factory: Any) -> Any:
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):
        # Compiled code shows no signature: then the call itself has to tell.
        return {"learning_rate": inspect.Parameter("_", inspect.Parameter.VAR_KEYWORD)}


def _described(value: Any) -> str:
    if is_transformation(value):
        return f"a transformation that is made already ({type(value).__name__})"
    if callable(value):
        return f"`{name_of(value)}`"
    return f"{value!r} ({type(value).__name__})"
