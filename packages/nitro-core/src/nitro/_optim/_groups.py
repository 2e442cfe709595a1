"""Parameter groups: which parameters move together, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from nitro._experiment import Experiment
from nitro._trees import Flat
from nitro.errors import ConfigError, HookError

from ._decay import DecayInputs, read_anchor
from ._factories import Factory, builds_chains, name_of, read_factory
from ._hook_calls import base_rate, call_hook, group_rate, hook_number

DEFAULT_GROUP = "default"

FROZEN: Final = None
"""What `learning_rate` returns for a group that does not train: None, by a name that says so."""


@dataclass(frozen=True, kw_only=True)
class ParamGroup:
    """Some parameters, and what the experiment's hooks say of them.

    Attributes:
        name: The group's name.
        leaves: The dotted names of its parameters, in the model's order.
        num_params: How many numbers they hold.
        learning_rate: Its constant rate.
        ratio: That rate over the base rate; its part in a schedule.
        weight_decay: Its constant decay, before it is multiplied by the rate.
        anchor: What it decays toward: "zero", "init" or "arrays".
        no_decay: The parameters that are left out of decay.
        factory: Makes its transformation; None where the full form of the `optimizer` hook
            does, inside the trace.
        optimizer: What updates it, for the report.
    """

    name: str
    leaves: tuple[str, ...]
    num_params: int
    learning_rate: float
    ratio: float
    weight_decay: float
    anchor: str
    no_decay: frozenset[str]
    factory: Factory | None
    optimizer: str


@dataclass(frozen=True, kw_only=True)
class FrozenGroup:
    """Parameters that training leaves alone: no gradient, no state, no decay.

    Attributes:
        name: The group's name.
        leaves: The dotted names of its parameters, in the model's order.
        num_params: How many numbers they hold.
    """

    name: str
    leaves: tuple[str, ...]
    num_params: int


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The groups of a model's parameters.

    Attributes:
        trained: Those that train, the default one first and the others in order of appearance.
        frozen: Those that do not.
        decay_inputs: What the decay of the trained ones reads.
    """

    trained: tuple[ParamGroup, ...]
    frozen: tuple[FrozenGroup, ...]
    decay_inputs: DecayInputs


def read_groups(experiment: Experiment, *, params: Flat, initial: Flat) -> Groups:
    """Asks the hooks about each parameter, then about each group.

    Of a frozen group no hook but `learning_rate` is asked.

    Args:
        experiment: The real experiment, not the compile view.
        params: The parameters that training starts from.
        initial: The parameters as `build_model` made them.

    Raises:
        HookError: A hook returned something else than it should.
        ExperimentError: A hook does not take the arguments that it gets.
        ConfigError: A base rate of 0, a second weight decay, anchors that do not fit, or
            nothing but frozen groups.
    """
    assigned = _assigned(experiment, params)
    rates = {name: group_rate(experiment, name) for name in assigned}
    frozen = tuple(
        FrozenGroup(name=name, leaves=leaves, num_params=_count(params, leaves))
        for name, leaves in assigned.items()
        if rates[name] is FROZEN
    )
    if frozen and len(frozen) == len(assigned):
        raise _nothing_trains(experiment, frozen)
    still = {leaf for group in frozen for leaf in group.leaves}
    trained = {name: array for name, array in params.items() if name not in still}
    left_out = frozenset(n for n, leaf in trained.items() if _is_left_out(experiment, n, leaf))
    toward: Flat = {}
    groups: list[ParamGroup] = []
    for name, rate in rates.items():
        if rate is None:  # frozen
            continue
        leaves = assigned[name]
        called = f'{type(experiment).__name__}.decay_anchor("{name}")'
        anchor, arrays = read_anchor(
            called,
            call_hook(experiment, "decay_anchor", name),
            leaves=leaves,
            params=params,
            initial=initial,
        )
        toward |= arrays
        factory = None if builds_chains(experiment) else read_factory(experiment, name)
        groups.append(
            ParamGroup(
                name=name,
                leaves=leaves,
                num_params=_count(params, leaves),
                learning_rate=rate,
                ratio=rate / base_rate(experiment),
                weight_decay=hook_number(experiment, "weight_decay", name),
                anchor=anchor,
                no_decay=left_out.intersection(leaves),
                factory=factory,
                optimizer="the chain of `optimizer`" if factory is None else name_of(factory),
            )
        )
    applies = jnp.asarray([float(name not in left_out) for name in trained], jnp.float32)
    return Groups(trained=tuple(groups), frozen=frozen, decay_inputs=DecayInputs(applies, toward))


def _count(params: Flat, leaves: tuple[str, ...]) -> int:
    return sum(params[leaf].size for leaf in leaves)


def _nothing_trains(experiment: Experiment, frozen: tuple[FrozenGroup, ...]) -> ConfigError:
    owner = type(experiment).__name__
    names = ", ".join(f"`{group.name}`" for group in frozen)
    return ConfigError(
        f"`{owner}.learning_rate` is None (`nitro.FROZEN`) for every group ({names}): nothing "
        "would be trained.",
        expected="a rate above 0 for at least one group of `param_group`",
        fix="sort what should train into a group with a rate, or build the handle with "
        "`data={}` to evaluate and export only",
    )


def _assigned(experiment: Experiment, params: Flat) -> dict[str, tuple[str, ...]]:
    leaves: dict[str, list[str]] = {}
    for path in params:
        group: Any = call_hook(experiment, "param_group", path)
        if not isinstance(group, str) or not group:
            raise HookError(
                f'`{type(experiment).__name__}.param_group("{path}")` returned {group!r} '
                f"({type(group).__name__}).",
                expected="the name of a group, a string",
            )
        leaves.setdefault(group, []).append(path)
    order = sorted(leaves, key=lambda name: name != DEFAULT_GROUP)
    return {name: tuple(leaves[name]) for name in order}


def _is_left_out(experiment: Experiment, path: str, leaf: Any) -> bool:
    answer: Any = call_hook(experiment, "no_decay", path, leaf)
    if not isinstance(answer, bool | np.bool_):
        raise HookError(
            f'`{type(experiment).__name__}.no_decay("{path}", ...)` returned {answer!r} '
            f"({type(answer).__name__}).",
            expected="True to leave the parameter out of decay, or False",
        )
    return bool(answer)
