"""The hooks that say how weights move: what they may return, and how a wrong answer is told."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nitro
from nitro import Device
from nitro._experiment import UNSET, compile_view
from nitro._optim import Optimizer, make_optimizer
from nitro._programs import run_pure
from nitro.errors import ConfigError, ExperimentError, HookError, HostFieldError

PARAMS = {"layers.0.kernel": jnp.ones((3, 2)), "layers.0.bias": jnp.zeros(2)}


def build(
    experiment: nitro.Experiment, *, params: Any = PARAMS, clip: float = 0.0, **device: Any
) -> tuple[Optimizer, Any]:
    return make_optimizer(
        experiment,
        params=params,
        initial=params,
        device=device,
        num_steps=10,
        clip=clip,
        schedules=UNSET,
        evaluate=run_pure,
    )


def with_hooks(**hooks: Any) -> nitro.Experiment:
    return type("Declared", (nitro.Experiment,), hooks)()


def with_optimizer(factory: Any) -> nitro.Experiment:
    return with_hooks(optimizer=lambda self, group: factory)


def test_nothing_declared_is_radam_in_one_group() -> None:
    optimizer, _ = build(with_hooks())

    (group,) = optimizer.groups
    assert (group.name, group.learning_rate, group.weight_decay) == ("default", 1e-3, 0.0)
    assert group.factory is optax.radam
    assert not optimizer.schedules


def test_fields_stand_for_the_hooks_of_their_names() -> None:
    class Declared(nitro.Experiment):
        learning_rate: float
        weight_decay: float = 0.5

    optimizer, _ = build(Declared(learning_rate=0.25))

    assert optimizer.groups[0].learning_rate == 0.25
    assert optimizer.groups[0].weight_decay == 0.5
    with pytest.raises(ExperimentError, match="required field `learning_rate`"):
        Declared()


def test_default_group_is_first_and_others_follow_the_parameters() -> None:
    params = {name: jnp.ones(2) for name in ("b.x", "a.x", "c.x", "b.y")}
    groups = {"b": "late", "a": "early", "c": "default"}

    optimizer, _ = build(with_hooks(param_group=lambda self, path: groups[path[0]]), params=params)

    assert [(g.name, g.leaves) for g in optimizer.groups] == [
        ("default", ("c.x",)),
        ("late", ("b.x", "b.y")),
        ("early", ("a.x",)),
    ]


@pytest.mark.parametrize(
    ("hooks", "kind", "message"),
    [
        ({"learning_rate": lambda self, group=None: "fast"}, HookError, "is 'fast' .str"),
        ({"learning_rate": lambda self, group=None: -1.0}, HookError, "finite number of at least"),
        ({"learning_rate": lambda self, group=None: np.nan}, HookError, "through `schedules`"),
        ({"learning_rate": lambda self, group=None: 0}, ConfigError, "freeze one group"),
        ({"learning_rate": lambda self: 1.0}, ExperimentError, r"learning_rate\(self, group=None"),
        ({"weight_decay": lambda self, group: True}, HookError, r'weight_decay\("default"\)'),
        ({"param_group": lambda self, path: 3}, HookError, r'param_group\("layers.0.kernel"\)'),
        ({"no_decay": lambda self, path, leaf: None}, HookError, "True to leave the parameter"),
        ({"decay_anchor": lambda self, group: 0.5}, ConfigError, '"zero", "init", or a tree'),
        ({"decay_anchor": lambda self, group: {"x": 1}}, ConfigError, "`x`, which is no param"),
        ({"decay_anchor": lambda self, group: {}}, ConfigError, "lacks the parameter `layers.0"),
        ({"optimizer": lambda self: optax.adam}, ExperimentError, "neither of its two forms"),
        ({"schedules": lambda self: [1]}, ConfigError, r"`schedules` is \[1\]"),
    ],
)
def test_wrong_answers_are_told(hooks: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        build(with_hooks(**hooks))


def test_anchor_of_another_shape_is_told() -> None:
    anchor = {name: np.zeros(5) for name in PARAMS}

    with pytest.raises(ConfigError, match=r"`layers.0.kernel` of shape \(5,\)"):
        build(with_hooks(decay_anchor=lambda self, group: anchor))


def test_anchor_may_be_the_state_of_a_module() -> None:
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    params = {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}

    optimizer, _ = build(
        with_hooks(decay_anchor=lambda self, group: nnx.state(model, nnx.Param)), params=params
    )

    np.testing.assert_array_equal(optimizer.anchors().toward["kernel"], model.kernel[...])


@pytest.mark.parametrize(
    ("factory", "kind", "message"),
    [
        (optax.adam(1e-3), HookError, "made already .* for the group `default`"),
        (optax.adam(1e-3), HookError, r"optax.adam(.|\n)*optimizer\(self, group, hyper\)"),
        (None, HookError, "returned None .NoneType. for the group `default`"),
        (optax.scale_by_adam, HookError, "has no parameter `learning_rate`"),
        (optax.adamw, ConfigError, r"decay twice(.|\n)*`optax.adam`(.|\n)*return 0.0001"),
        (optax.lion, ConfigError, r"functools.partial\(optax.lion, weight_decay=0.0\)"),
        (
            functools.partial(optax.adafactor, weight_decay_rate=0.1),
            ConfigError,
            "own `weight_decay_rate` is 0.1",
        ),
        (optax.lbfgs, HookError, r'optimizer\("default"\)` returned fails'),
        (lambda learning_rate: optax.adam(float(learning_rate)), HookError, "traced rate"),
        (
            lambda learning_rate: optax.MultiSteps(
                optax.adam(learning_rate), 2
            ).gradient_transformation(),
            ConfigError,
            "run option `accum`",
        ),
    ],
)
def test_unusable_factory_is_told(factory: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        build(with_optimizer(factory))


@pytest.mark.parametrize(
    "factory",
    [
        functools.partial(optax.adamw, weight_decay=0.0),
        optax.lars,
        optax.contrib.schedule_free_sgd,
        optax.contrib.prodigy,
        functools.partial(optax.sgd, momentum=0.9, nesterov=True),
        lambda **kwargs: optax.chain(optax.clip(1.0), optax.adam(**kwargs)),
        optax.inject_hyperparams(optax.adam),
    ],
)
def test_any_other_optax_factory_traces(factory: Any) -> None:
    _, state = build(with_optimizer(factory))

    assert all(
        isinstance(leaf, jax.Array) and not leaf.weak_type for leaf in jax.tree.leaves(state)
    )


def test_full_form_must_return_a_chain() -> None:
    with pytest.raises(HookError, match=r"hyper\)` returned `optax.adam`(.|\n)*whole optax"):
        build(with_hooks(optimizer=lambda self, group, hyper: optax.adam))


def test_full_form_sees_no_host_field() -> None:
    class Declared(nitro.Experiment):
        beta: float = 0.9

        def optimizer(self, group, hyper):
            return optax.adam(hyper.learning_rate, b1=self.beta)

    with pytest.raises(HostFieldError, match=r"`Declared.beta`"):
        build(Declared())


def test_full_form_reads_device_fields_as_tracers() -> None:
    class Declared(nitro.Experiment):
        momentum: Device[float] = 0.9

        def optimizer(self, group, hyper):
            return optax.sgd(hyper.learning_rate, momentum=self.momentum)

    device = {"momentum": jnp.float32(0.9)}
    optimizer, _ = build(Declared(), **device)

    view = compile_view(Declared(), device)
    assert optimizer.unused(optimizer.groups[0], view) == {"weight_decay"}


def test_state_that_starts_as_the_weights_is_copied() -> None:
    keep = optax.GradientTransformation(lambda params: params, lambda u, s, p=None: (u, s))

    _, state = build(with_hooks(optimizer=lambda self, group, hyper: optax.chain(keep, keep)))

    leaves = [*jax.tree.leaves(state), *PARAMS.values()]
    pointers = [leaf.unsafe_buffer_pointer() for leaf in leaves]
    assert len(set(pointers)) == len(leaves) == 6


def test_state_that_holds_no_array_is_told() -> None:
    odd = optax.GradientTransformation(lambda params: {"name": "x"}, lambda u, s, p=None: (u, s))

    with pytest.raises(ConfigError, match=r"`default.name` of the optimizer's state is 'x'"):
        build(with_hooks(optimizer=lambda self, group, hyper: odd))


def test_update_that_widens_the_weights_is_told() -> None:
    class Wide(nitro.Experiment):
        def optimizer(self, group, hyper):
            state = lambda params: jnp.zeros(3)  # noqa: E731 - short
            return optax.GradientTransformation(state, lambda u, s, p=None: (u, s[:2]))

    with pytest.raises(ConfigError, match=r"float32\(3,\) into float32\(2,\)"):
        build(Wide())


@pytest.mark.parametrize("value", [-1.0, float("inf"), True, "1", jnp.float32(1)])
def test_clip_must_be_a_number_on_the_host(value: Any, plane: Any, make_run: Any) -> None:
    with pytest.raises(ConfigError, match=r"`gradient_clip_norm` is .*"):
        make_run(plane(), gradient_clip_norm=value)


def test_report_lists_groups_and_schedules_with_their_sources(plane: Any, make_run: Any) -> None:
    class Declared(plane):
        def param_group(self, path):
            return "bias" if path == "bias" else "default"

        def learning_rate(self, group=None):
            return 2e-3 if group == "bias" else 1e-3

        def weight_decay(self, group):
            return 0.1

        def decay_anchor(self, group):
            return "init"

    report = make_run(Declared(), gradient_clip_norm=1.0, schedules={"learning_rate": 0.01}).binding

    assert "group `bias`: optax.radam, rate 0.002 (2 of the base), decay 0.1 toward init" in report
    assert "(1 of 1 arrays left out), 1 parameters" in report
    assert "schedule `learning_rate` → opt.learning_rate, constant (keyword)" in report
    assert "gradient_clip_norm = 1.0 (keyword)" in report


def test_evaluation_handle_has_no_optimizer_state(plane: Any, make_run: Any) -> None:
    assert "group `default`" not in make_run(plane(), data={}).binding
