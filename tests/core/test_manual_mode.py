"""Manual mode: `train_step` in plain NNX, compiled once, with optimizers by name."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nitro
from nitro.errors import ConfigError, ExperimentError, HookError

SAMPLES, BATCH, RATE = 48, 8, 1e-2


class Pair(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.gen = nnx.Linear(3, 2, rngs=rngs)
        self.disc = nnx.Sequential(
            nnx.Linear(2, 8, rngs=rngs), nnx.tanh, nnx.Linear(8, 1, rngs=rngs)
        )


def losses_of(model, x, z, target):
    def disc_loss(disc):
        fake = jax.lax.stop_gradient(model.gen(z))
        return ((disc(x) - target) ** 2).mean() + (disc(fake) ** 2).mean()

    def gen_loss(gen):
        return ((model.disc(gen(z)) - target) ** 2).mean()

    return disc_loss, gen_loss


class Gan(nitro.Experiment):
    """A least-squares GAN with an optimizer for each network."""

    target: nitro.Device[float] = 1.0
    max_epochs: int = 2

    def build_data(self):
        rng = np.random.default_rng(0)
        x = rng.normal(2.0, 0.3, (SAMPLES, 2)).astype(np.float32)
        z = rng.normal(size=(SAMPLES, 3)).astype(np.float32)
        return {"train": nitro.ArrayLoader({"x": x, "z": z}, BATCH, shuffle=True)}

    def build_model(self, rngs):
        return Pair(rngs)

    def build_optimizers(self, model):
        adam = optax.inject_hyperparams(optax.adam)
        return {
            "gen": nnx.Optimizer(model.gen, adam(learning_rate=RATE), wrt=nnx.Param),
            "disc": nnx.Optimizer(model.disc, optax.sgd(RATE), wrt=nnx.Param),
        }

    def forward(self, model, *, z):
        return {"point": model.gen(z)}

    def train_step(self, model, optimizers, *, x, z):
        disc_loss, gen_loss = losses_of(model, x, z, self.target)
        d_loss, grads = nnx.value_and_grad(disc_loss)(model.disc)
        optimizers["disc"].update(model.disc, grads)
        g_loss, grads = nnx.value_and_grad(gen_loss)(model.gen)
        optimizers["gen"].update(model.gen, grads)
        return d_loss + g_loss, {"d_loss": d_loss, "g_loss": g_loss}


def by_hand(experiment: Gan, rate_at: Any, num_steps: int) -> tuple[Pair, list[float]]:
    """The same training, written in plain NNX without Nitro."""
    model = experiment.build_model(nnx.Rngs(0))
    adam = optax.inject_hyperparams(optax.adam)
    gen_opt = nnx.Optimizer(model.gen, adam(learning_rate=RATE), wrt=nnx.Param)
    disc_opt = nnx.Optimizer(model.disc, optax.sgd(RATE), wrt=nnx.Param)
    loader = experiment.build_data()["train"].bound(seed=0, drop_last=True)
    batches = [b for epoch in range(experiment.max_epochs) for b in loader.batches(epoch)]

    @nnx.jit
    def step(model, gen_opt, disc_opt, x, z, rate):
        gen_opt.opt_state.hyperparams["learning_rate"][...] = rate
        disc_loss, gen_loss = losses_of(model, x, z, 1.0)
        d_loss, grads = nnx.value_and_grad(disc_loss)(model.disc)
        disc_opt.update(model.disc, grads)
        g_loss, grads = nnx.value_and_grad(gen_loss)(model.gen)
        gen_opt.update(model.gen, grads)
        return d_loss + g_loss

    losses = []
    for index, batch in enumerate(batches[:num_steps]):
        rate = jnp.float32(rate_at(index))
        losses.append(float(step(model, gen_opt, disc_opt, batch["x"], batch["z"], rate)))
    return model, losses


def train(experiment, tmp_path, **options):
    return nitro.Nitro(experiment, run_dir=tmp_path, checkpointer=None, **options).train()


def logged(tmp_path, name="loss"):
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if line.get("context") == "train"]


def test_a_manual_step_equals_the_same_loop_by_hand(tmp_path):
    run = train(Gan(), tmp_path)

    model, losses = by_hand(Gan(), lambda step: RATE, 12)

    np.testing.assert_allclose(logged(tmp_path), losses, rtol=1e-5)
    z = np.ones((4, 3), np.float32)
    np.testing.assert_allclose(run.predict({"z": z})["point"], model.gen(z), rtol=1e-5)


def test_each_optimizer_follows_a_curve_of_its_own(tmp_path):
    curve = optax.linear_schedule(2 * RATE, 0.0, 12)
    train(Gan(), tmp_path, schedules={"opt.gen.learning_rate": lambda total: curve})

    _, losses = by_hand(Gan(), curve, 12)

    np.testing.assert_allclose(logged(tmp_path), losses, rtol=1e-5)


def test_scalars_are_logged_at_each_step(tmp_path):
    train(Gan(), tmp_path)

    total = np.add(logged(tmp_path, "d_loss"), logged(tmp_path, "g_loss"))
    np.testing.assert_allclose(logged(tmp_path), total, rtol=1e-6)


def test_a_device_field_and_a_curve_compile_nothing(tmp_path):
    nitro.cache_clear()
    train(Gan(), tmp_path / "a")
    before = nitro.cache_stats()["by_role"]["train step"]["misses"]

    train(Gan(target=0.9), tmp_path / "b")
    train(Gan(), tmp_path / "c", schedules={"opt.gen.learning_rate": 1e-3})

    assert nitro.cache_stats()["by_role"]["train step"]["misses"] == before == 1


def test_a_manual_run_resumes_to_the_same_bits(tmp_path):
    straight = train(Gan(max_epochs=3), tmp_path / "straight")
    first = nitro.Nitro(Gan(max_epochs=3), run_dir=tmp_path / "cut", checkpoint_every_steps=4)
    first.on_phase(lambda event: event.step >= 8 and first.request_stop())
    first.train()

    resumed = nitro.Nitro(Gan(max_epochs=3), run_dir=tmp_path / "cut", resume="auto").train()

    assert first.stop_reason == "stopped"
    for a, b in zip(
        jax.tree.leaves(nnx.state(straight.model)),
        jax.tree.leaves(nnx.state(resumed.model)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    assert logged(tmp_path / "straight") == logged(tmp_path / "cut")


class Critic(Gan):
    """WGAN-GP: several critic steps for each step of the generator."""

    critic_steps: nitro.GraphConst[int] = 3
    penalty: nitro.Device[float] = 10.0
    max_epochs: int = 40

    def train_step(self, model, optimizers, *, x, z):
        for index in range(self.critic_steps):
            mix = (index + 1) / (self.critic_steps + 1)
            fake = jax.lax.stop_gradient(model.gen(z))
            between = mix * x + (1 - mix) * fake

            def critic_loss(disc, fake=fake, between=between):
                slope = jax.grad(lambda point: disc(point).sum())(between)
                penalty = ((jnp.linalg.norm(slope, axis=-1) - 1) ** 2).mean()
                return disc(fake).mean() - disc(x).mean() + self.penalty * penalty

            d_loss, grads = nnx.value_and_grad(critic_loss)(model.disc)
            optimizers["disc"].update(model.disc, grads)
        g_loss, grads = nnx.value_and_grad(lambda gen: -model.disc(gen(z)).mean())(model.gen)
        optimizers["gen"].update(model.gen, grads)
        return d_loss, {"g_loss": g_loss}


def test_several_critic_steps_move_the_generator_to_the_target(tmp_path):
    run = train(Critic(), tmp_path)

    z = np.random.default_rng(5).normal(size=(512, 3)).astype(np.float32)
    centre = run.predict({"z": z})["point"].mean(axis=0)
    untrained = nitro.Nitro(Critic(), data={}, run_dir=tmp_path).predict({"z": z})["point"]
    # The target's mean is (2, 2); an untrained generator's is near the origin.
    assert np.abs(centre - 2.0).max() < 0.5 * np.abs(untrained.mean(axis=0) - 2.0).max()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"accum": 2}, r"`accum` is 2, and `Gan\.train_step` takes the steps"),
        ({"gradient_clip_norm": 1.0}, r"`gradient_clip_norm` is 1\.0"),
        ({"schedules": {"opt.gen.rate": 1.0}}, r"`opt\.gen\.rate` matches nothing.*\n.*gen\.learn"),
        ({"schedules": {"opt.disc.learning_rate": 1.0}}, "inject_hyperparams"),
    ],
)
def test_options_without_effect_are_refused(tmp_path, options, match):
    with pytest.raises(ConfigError, match=match):
        nitro.Nitro(Gan(), run_dir=tmp_path, **options)


def test_a_missing_hook_of_manual_mode_is_named(tmp_path):
    class NoOptimizers(nitro.Experiment):
        build_data, build_model = Gan.build_data, Gan.build_model
        forward, train_step = Gan.forward, Gan.train_step

    with pytest.raises(ExperimentError, match=r"lacks the hook `build_optimizers\(self, model\)`"):
        nitro.Nitro(NoOptimizers(), run_dir=tmp_path)


@pytest.mark.parametrize(
    ("returned", "match"),
    [
        (lambda loss: (loss, loss), "returned .* beside the loss"),
        (lambda loss: (loss, {"pair": jnp.ones(2)}), r"returned float32\(2,\) as `pair`"),
        (lambda loss: 1.0, "returned float as `loss`"),
    ],
)
def test_a_step_that_returns_something_else_is_refused(tmp_path, returned, match):
    class Wrong(Gan):
        def train_step(self, model, optimizers, *, x, z):
            return returned(super().train_step(model, optimizers, x=x, z=z)[0])

    with pytest.raises(HookError, match=match):
        train(Wrong(), tmp_path)


def test_a_step_that_makes_a_variable_is_refused_by_its_name(tmp_path):
    class Growing(Gan):
        def train_step(self, model, optimizers, *, x, z):
            model.seen = nnx.Variable(x.mean())
            return super().train_step(model, optimizers, x=x, z=z)

    with pytest.raises(HookError, match="`train_step` changed which variables the model has"):
        nitro.Nitro(Growing(), run_dir=tmp_path).train()


def test_optimizers_that_are_none_are_refused(tmp_path):
    class Wrong(Gan):
        def build_optimizers(self, model):
            return {"gen": optax.adam(1e-3)}

    with pytest.raises(HookError, match=r"returned 'gen': GradientTransformation"):
        nitro.Nitro(Wrong(), run_dir=tmp_path)
