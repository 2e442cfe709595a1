"""200 steps of each recipe against the same one written by hand in optax."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nitro
from nitro._experiment import UNSET, compile_view
from nitro._optim import make_optimizer
from nitro._programs import run_pure

NUM_STEPS = 200
BASE = 3e-3
SHAPES = {"body.kernel": (7, 5), "body.bias": (5,), "head.kernel": (5, 3), "head.bias": (3,)}

FACTORIES: dict[str, Callable[..., Any]] = {
    "sgd": functools.partial(optax.sgd, momentum=0.9),
    "adam": functools.partial(optax.adam, b1=0.8),
    "radam": optax.radam,
    "lion": functools.partial(optax.lion, weight_decay=0.0),
    "lamb": optax.lamb,
    "adafactor": functools.partial(optax.adafactor, min_dim_size_to_factor=4),
    "muon": optax.contrib.muon,
    "noisy_sgd": functools.partial(optax.noisy_sgd, key=jax.random.key(3)),  # a key in its state
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What varies; `head_ratio` 1 puts all parameters in one group."""

    scheduled: bool = False
    clip: float = 0.0
    decay: float = 0.0
    anchor: str = "zero"
    head_ratio: float = 1.0


RECIPES = {
    "plain": Recipe(),
    "schedule, two groups, decay": Recipe(scheduled=True, decay=0.1, head_ratio=0.3),
    "clip, decay to init": Recipe(clip=0.5, decay=0.1, anchor="init"),
    "schedule, clip, two groups, decay to arrays": Recipe(
        scheduled=True, clip=0.5, decay=0.1, anchor="arrays", head_ratio=3.0
    ),
}


def warm_up_and_down(total: int) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(0.0, 2 * BASE, total // 10, total)


def make_params(dtype: Any = jnp.float32) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=s), dtype) for name, s in SHAPES.items()}


def make_grads(params: dict[str, Any]) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    return [
        {n: jnp.asarray(rng.normal(0.1, 0.5, p.shape), p.dtype) for n, p in params.items()}
        for _ in range(NUM_STEPS)
    ]


def anchors_of(recipe: Recipe, params: dict[str, Any]) -> dict[str, Any]:
    if recipe.anchor == "zero":
        return {}
    if recipe.anchor == "init":
        return dict(params)
    return {name: np.full(p.shape, 0.25, np.float32) for name, p in params.items()}


def make_experiment(
    factory: Callable[..., Any], recipe: Recipe, params: dict[str, Any]
) -> nitro.Experiment:
    class Golden(nitro.Experiment):
        def optimizer(self, group):
            return factory

        def learning_rate(self, group=None):
            return BASE * recipe.head_ratio if group == "head" else BASE

        def weight_decay(self, group):
            return recipe.decay

        def decay_anchor(self, group):
            return anchors_of(recipe, params) if recipe.anchor == "arrays" else recipe.anchor

        def param_group(self, path):
            return "head" if recipe.head_ratio != 1 and path.startswith("head") else "default"

        def schedules(self):
            return {"learning_rate": warm_up_and_down} if recipe.scheduled else {}

    return Golden()


def train_with_nitro(factory: Any, recipe: Recipe, params: Any, grads: list[Any]) -> Any:
    return train(make_experiment(factory, recipe, params), params, grads, clip=recipe.clip)


def train(experiment: Any, params: Any, grads: list[Any], *, clip: float = 0.0) -> Any:
    optimizer, state = make_optimizer(
        experiment,
        params=params,
        initial=params,
        device={},
        num_steps=NUM_STEPS,
        clip=clip,
        schedules=UNSET,
        evaluate=run_pure,
    )
    view = compile_view(experiment, {})

    @jax.jit
    def step(params: Any, state: Any, grads: Any, anchors: Any, row: Any) -> Any:
        return optimizer.update(grads, state, params, anchors, row, view)

    rows = optimizer.table[range(len(grads))]
    for row, grad in zip(rows, grads, strict=True):
        params, state = step(params, state, grad, optimizer.anchors(), row)
    return params


def train_by_hand(
    factory: Any, recipe: Recipe, params: Any, grads: list[Any], *, rate_is_input: bool = True
) -> Any:
    """The recipe in plain optax; decay is taken off the updated weights.

    Rates and decays are inputs of the compiled step; or they are made inside it, from
    Python constants or by the schedule.
    """
    anchors = anchors_of(recipe, params)
    is_split = recipe.head_ratio != 1
    groups = {"body": 1.0, "head": recipe.head_ratio} if is_split else {"": 1.0}
    schedule = warm_up_and_down(NUM_STEPS) if recipe.scheduled else lambda _: BASE

    def members(tree: Any, prefix: str) -> Any:
        return {name: leaf for name, leaf in tree.items() if name.startswith(prefix)}

    def rates_at(rate: Any) -> Any:
        rates = {prefix: rate * ratio for prefix, ratio in groups.items()}
        return rates, {prefix: rate * recipe.decay for prefix, rate in rates.items()}

    @jax.jit
    def take(params: Any, states: Any, grads: Any, inputs: Any, step: Any) -> Any:
        rates, decays = inputs if rate_is_input else rates_at(schedule(step))
        if recipe.clip:
            clip = optax.clip_by_global_norm(recipe.clip)
            grads, _ = clip.update(grads, clip.init(params))
        new_params, new_states = {}, {}
        for prefix, rate in rates.items():
            old = members(params, prefix)
            updates, new_states[prefix] = factory(learning_rate=rate).update(
                members(grads, prefix), states[prefix], old
            )
            new_params |= optax.apply_updates(old, updates)
        for name, weight in params.items():
            if recipe.decay and weight.ndim > 1:
                distance = weight - anchors[name] if anchors else weight
                new_params[name] -= decays[name.partition(".")[0] if is_split else ""] * distance
        return new_params, new_states

    evaluate = jax.jit(schedule)
    states = {p: factory(learning_rate=BASE).init(members(params, p)) for p in groups}
    for step, grad in enumerate(grads):
        rate = np.float32(evaluate(np.int32(step))) if recipe.scheduled else BASE
        params, states = take(params, states, grad, rates_at(rate), np.int32(step))
    return params


def assert_same_bits(got: Any, expected: Any) -> None:
    for name in expected:
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


# Every recipe with one optimizer, and every optimizer with nothing and with everything on.
EVERYTHING = "schedule, clip, two groups, decay to arrays"
CASES = [(name, EVERYTHING) for name in FACTORIES]
CASES += [("adam", recipe) for recipe in RECIPES if recipe != EVERYTHING]
CASES += [("lion", "plain"), ("lamb", "plain"), ("muon", "plain")]


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_200_steps_are_the_bits_of_optax_by_hand(name: str, recipe: str) -> None:
    params = make_params()
    grads = make_grads(params)

    got = train_with_nitro(FACTORIES[name], RECIPES[recipe], params, grads)
    expected = train_by_hand(FACTORIES[name], RECIPES[recipe], params, grads)

    assert_same_bits(got, expected)


@pytest.mark.parametrize("name", ["sgd", "radam", "adafactor"])
def test_rate_as_python_constant_is_the_same(name: str) -> None:
    params = make_params()
    grads = make_grads(params)

    got = train_with_nitro(FACTORIES[name], RECIPES["plain"], params, grads)
    expected = train_by_hand(FACTORIES[name], RECIPES["plain"], params, grads, rate_is_input=False)

    if name != "adafactor":
        assert_same_bits(got, expected)
    for leaf in expected:
        # Adafactor scales twice by constants, and XLA may multiply those beforehand.
        np.testing.assert_allclose(got[leaf], expected[leaf], rtol=0, atol=1e-6)


def test_schedule_inside_the_program_agrees_to_the_last_bits() -> None:
    params = make_params()
    grads = make_grads(params)
    recipe = RECIPES["schedule, two groups, decay"]

    got = train_with_nitro(optax.radam, recipe, params, grads)
    expected = train_by_hand(optax.radam, recipe, params, grads, rate_is_input=False)

    for leaf in expected:
        # Next to the update XLA fuses the schedule's multiply-adds in another way.
        np.testing.assert_allclose(got[leaf], expected[leaf], rtol=0, atol=1e-6)


def test_decay_at_the_end_of_a_chain_agrees_to_rounding() -> None:
    params = make_params()
    grads = make_grads(params)

    got = train_with_nitro(FACTORIES["adam"], Recipe(decay=0.1), params, grads)
    is_kernel = {name: p.ndim > 1 for name, p in params.items()}
    adam, decay = FACTORIES["adam"](BASE), optax.add_decayed_weights(-BASE * 0.1, is_kernel)
    expected = train_by_hand(lambda **_: optax.chain(adam, decay), Recipe(), params, grads)

    for leaf in expected:
        # (w + u) - d w against w + (u - d w): the same but for where it is rounded.
        np.testing.assert_allclose(got[leaf], expected[leaf], rtol=0, atol=2e-6)


def test_full_form_is_the_chain_by_hand() -> None:
    params = make_params()
    grads = make_grads(params)

    class FullForm(nitro.Experiment):
        def optimizer(self, group, hyper):
            mask = {name: not left_out for name, left_out in hyper.no_decay.items()}
            return optax.chain(
                optax.adam(hyper.learning_rate, b1=0.8),
                optax.add_decayed_weights(-hyper.weight_decay, mask),
            )

        def learning_rate(self, group=None):
            return BASE

        def weight_decay(self, group):
            return 0.1

    got = train(FullForm(), params, grads)
    is_kernel = {name: p.ndim > 1 for name, p in params.items()}
    chain = optax.chain(FACTORIES["adam"](BASE), optax.add_decayed_weights(-BASE * 0.1, is_kernel))
    expected = train_by_hand(lambda **_: chain, Recipe(), params, grads)

    assert_same_bits(got, expected)


@pytest.mark.parametrize("name", ["adam"])
def test_rate_does_not_promote_bfloat16(name: str) -> None:
    params = make_params(jnp.bfloat16) | {"head.bias": jnp.ones(3, jnp.float32)}
    grads = make_grads(params)[:20]

    got = train_with_nitro(FACTORIES[name], RECIPES["plain"], params, grads)
    expected = train_by_hand(FACTORIES[name], RECIPES["plain"], params, grads, rate_is_input=False)

    assert {n: p.dtype for n, p in got.items()} == {n: p.dtype for n, p in params.items()}
    assert_same_bits(got, expected)
