"""Training and evaluation mode: parts that the user froze, and Linen modules with a flag."""

from __future__ import annotations

import inspect
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nitro
from nitro._run import session_of
from nitro.errors import HookError

SEED = 5


class Part(nnx.Module):
    """BatchNorm, then Dropout."""

    def __init__(self, rngs: nnx.Rngs, **flags: bool) -> None:
        norm = {n: v for n, v in flags.items() if n == "use_running_average"}
        drop = {n: v for n, v in flags.items() if n == "deterministic"}
        self.norm = nnx.BatchNorm(4, rngs=rngs, **norm)
        self.drop = nnx.Dropout(0.5, rngs=rngs, **drop)

    def __call__(self, x):
        return self.drop(self.norm(x))


class Net(nnx.Module):
    """A body of two parts, and a head."""

    def __init__(self, rngs: nnx.Rngs, **flags: bool) -> None:
        self.body = Part(rngs, **flags)
        self.tail = Part(rngs)
        self.head = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(self.tail(self.body(x)))


def frozen_by_eval(rngs: nnx.Rngs) -> Any:
    model = Net(rngs)
    model.body.eval()
    return model


def frozen_by_constructor(rngs: nnx.Rngs) -> Any:
    return Net(rngs, use_running_average=True, deterministic=True)


@pytest.fixture(params=[frozen_by_eval, frozen_by_constructor])
def frozen(request: Any, plane: Any) -> Any:
    class Frozen(plane):
        def build_model(self, rngs):
            return request.param(rngs)

    return Frozen


def by_hand(model: Any, experiment: Any) -> Any:
    """One epoch of plain NNX, the mode of each part as it is."""
    optimizer = nnx.Optimizer(model, optax.radam(1e-3), wrt=nnx.Param)
    loader = nitro.ArrayLoader(
        experiment.build_data()["train"].arrays, 5, shuffle=True, seed=SEED, drop_last=True
    )

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        grads = nnx.grad(lambda m: ((m(x)[:, 0] - y) ** 2).mean())(model)
        optimizer.update(model, grads)

    for batch in loader:
        step(model, optimizer, batch["x"], batch["y"])
    return model


def test_part_in_evaluation_mode_trains_as_in_plain_nnx(frozen: Any, make_run: Any) -> None:
    expected = by_hand(frozen().build_model(nnx.Rngs(SEED)), frozen())

    run = make_run(frozen(), seed=SEED).train()

    model: Any = run.model
    np.testing.assert_array_equal(model.body.norm.mean[...], np.zeros(4))
    assert np.abs(expected.tail.norm.mean[...]).max() > 0.01
    # The masks of both Dropouts decide the first digits of these.
    np.testing.assert_allclose(model.tail.norm.mean[...], expected.tail.norm.mean[...], atol=1e-6)
    np.testing.assert_allclose(model.head.kernel[...], expected.head.kernel[...], atol=1e-6)


def test_report_says_which_parts_stay_in_evaluation_mode(
    frozen: Any, plane: Any, make_run: Any
) -> None:
    class Whole(plane):
        def build_model(self, rngs):
            model = Net(rngs)
            model.eval()
            return model

    words = "in evaluation mode while training, as `build_model` left them: "
    assert f"{words}`body`\n" in f"{make_run(frozen()).binding}\n"
    assert f"{words}`model`\n" in f"{make_run(Whole()).binding}\n"
    assert words not in str(make_run(plane()).binding)


class Noise(nnx.Module):
    """Adds noise; its own default is evaluation mode."""

    def __init__(self, rngs: nnx.Rngs, *, deterministic: bool = True) -> None:
        self.rngs = rngs.fork()
        self.deterministic = deterministic

    def __call__(self, x):
        return x if self.deterministic else x + self.rngs.default.normal(x.shape)


def test_module_whose_default_is_evaluation_mode_is_switched(plane: Any, make_run: Any) -> None:
    class Noisy(plane):
        def build_model(self, rngs):
            return nnx.Sequential(Noise(rngs), nnx.Linear(4, 1, rngs=rngs))

    noisy, plain = make_run(Noisy(), seed=1).train(), make_run(plane(), seed=1)

    assert "evaluation mode" not in str(noisy.binding)
    counts = [int(a) for n, a in session_of(noisy).state.model_state.items() if n.endswith("count")]
    assert max(counts) >= 4  # a draw for each of the steps
    assert noisy.validate() == noisy.validate()
    assert plain.step == 0


# Linen ----------------------------------------------------------------------------------------


class Flagged(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(1)(nn.Dropout(0.5, deterministic=not train)(x))


class Deterministic(nn.Module):
    @nn.compact
    def __call__(self, x, *, deterministic: bool):
        return Flagged()(x, train=not deterministic)


class Attribute(nn.Module):
    train: bool = False

    @nn.compact
    def __call__(self, x):
        return Flagged()(x, train=self.train)


class Driven(nnx.Module):
    """The same by hand: a shell that passes its mode on."""

    def __init__(self, rngs: nnx.Rngs, linen: Any, flags: Any) -> None:
        self.linen = nnx.bridge.ToNNX(linen, rngs=rngs).lazy_init(jnp.zeros((1, 4)), **flags)
        self.is_by_argument = isinstance(linen, Flagged | Deterministic)
        self.name = "train" if isinstance(linen, Flagged) else "deterministic"
        self.deterministic = False

    def __call__(self, x):
        flags = {self.name: self.deterministic is (self.name == "deterministic")}
        mutable = False if self.deterministic else ["batch_stats"]
        return self.linen(x, mutable=mutable, **(flags if self.is_by_argument else {}))


@pytest.mark.parametrize(
    ("linen", "by_shell", "flags"),
    [
        (Flagged(), Flagged(), {}),
        (Deterministic(), Deterministic(), {"deterministic": True}),
        (Attribute(), Attribute(train=True), {}),
    ],
)
def test_linen_module_with_a_flag_trains_as_by_a_shell_written_by_hand(
    plane: Any, make_run: Any, linen: Any, by_shell: Any, flags: Any
) -> None:
    class Bridged(plane):
        def build_model(self, rngs):
            return nnx.bridge.ToNNX(linen, rngs=rngs).lazy_init(jnp.zeros((1, 4)), **flags)

    expected = by_hand(Driven(nnx.Rngs(SEED), by_shell, flags), plane())

    run = make_run(Bridged(), seed=SEED).train()

    got = {n.replace("Flagged_0.", ""): np.asarray(a) for n, a in _arrays(run.model).items()}
    want = {n.replace("Flagged_0.", ""): a for n, a in _arrays(expected.linen).items()}
    assert np.abs(want["BatchNorm_0.mean"]).max() > 0.01
    for name in ("BatchNorm_0.mean", "BatchNorm_0.var", "Dense_0.kernel"):
        np.testing.assert_allclose(got[name], want[name], atol=1e-6, err_msg=name)
    assert run.validate() == run.validate()


def _arrays(module: Any) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(module, nnx.Not(nnx.RngState)))
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in flat}


def test_linen_module_predicts_in_evaluation_mode(plane: Any, make_run: Any) -> None:
    class Bridged(plane):
        def build_model(self, rngs):
            return nnx.bridge.ToNNX(Flagged(), rngs=rngs).lazy_init(jnp.zeros((1, 4)))

    run = make_run(Bridged()).train()
    arrays = _arrays(run.model)
    stats = {n.split(".")[1]: a for n, a in arrays.items() if n.startswith("BatchNorm_0.")}
    x = np.random.default_rng(2).normal(size=(6, 4)).astype(np.float32)

    normed = (x - stats["mean"]) / np.sqrt(stats["var"] + 1e-5) * stats["scale"] + stats["bias"]
    expected = normed @ arrays["Dense_0.kernel"] + arrays["Dense_0.bias"]
    np.testing.assert_allclose(run.predict({"x": x}), expected[:, 0], atol=1e-5)


def test_flag_that_forward_passes_itself_wins(plane: Any, make_run: Any) -> None:
    class Told(plane):
        def build_model(self, rngs):
            return nnx.bridge.ToNNX(Flagged(), rngs=rngs).lazy_init(jnp.zeros((1, 4)))

        def forward(self, model, *, x):
            return model(x, train=False)[:, 0]

    run = make_run(Told()).train()

    np.testing.assert_array_equal(_arrays(run.model)["BatchNorm_0.mean"], np.zeros(4))


class AlwaysTrains(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.BatchNorm(use_running_average=False)(x))


class Wide(nn.Module):
    width: int
    name_of_it: str = "wide"

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(x)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda rngs: Wide(width=1),
            r"returned Wide, a Linen module[\s\S]*`return nnx\.bridge\.ToNNX\(Wide\(width=1\), "
            r"rngs=rngs\)\.lazy_init\(jnp\.zeros\(\(1, 4\), jnp\.float32\)\)`",
        ),
        (
            lambda rngs: nnx.bridge.ToNNX(Wide(width=1), rngs=rngs),
            r"`Wide` has no variables: it was not initialised[\s\S]*\.lazy_init\(",
        ),
        (
            lambda rngs: nnx.bridge.ToNNX(AlwaysTrains(), rngs=rngs).lazy_init(jnp.zeros((1, 4))),
            r"`AlwaysTrains` changes its variables in evaluation mode[\s\S]*an argument `train`",
        ),
        (lambda rngs: "model", r"returned str[\s\S]*nnx\.Linear"),
    ],
)
def test_linen_module_that_cannot_be_driven_is_told_by_us(
    plane: Any, make_run: Any, build: Any, words: str
) -> None:
    class Odd(plane):
        def build_model(self, rngs):
            return build(rngs)

    with pytest.raises(HookError, match=words):
        make_run(Odd()).train()


def test_line_of_the_message_for_a_linen_module_works(plane: Any, make_run: Any) -> None:
    class Literal(plane):
        def build_model(self, rngs):
            return Wide(width=1)

    with pytest.raises(HookError) as told:
        make_run(Literal())
    line = told.value.fix.removeprefix("write `return ").removesuffix("`")

    class Pasted(plane):
        def build_model(self, rngs):
            return eval(line, {"nnx": nnx, "jnp": jnp, "Wide": Wide, "rngs": rngs})

    assert make_run(Pasted()).train().step == 4


# Noise in evaluation mode ---------------------------------------------------------------------


class AlwaysNoise(nnx.Module):
    """Draws in every mode: it has no attribute that Nitro could switch."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.rngs = rngs.fork()

    def __call__(self, x):
        return x + self.rngs.default.normal(x.shape)


def test_layer_that_draws_in_evaluation_mode_is_told_at_setup_with_its_line(
    plane: Any, make_run: Any
) -> None:
    class Noisy(plane):
        def build_model(self, rngs):
            return nnx.Sequential(AlwaysNoise(rngs), nnx.Linear(4, 1, rngs=rngs))

    with pytest.warns(nitro.errors.NitroWarning) as told:
        run = make_run(Noisy())

    (message,) = [str(w.message) for w in told if "evaluation mode" in str(w.message)]
    line = inspect.getsourcelines(AlwaysNoise.__call__)[1] + 1
    assert "`Noisy.forward` draws random numbers in evaluation mode" in message
    assert f"test_modes.py:{line} in AlwaysNoise.__call__" in message
    assert "`deterministic = False`" in message
    x = np.ones((2, 4), np.float32)
    plain = nnx.merge(*nnx.split(run.model.layers[1]))
    assert np.abs(run.predict({"x": x}) - plain(x)[:, 0]).max() > 0.01


def test_layers_that_follow_the_mode_are_not_told(images: Any, make_run: Any) -> None:
    # A warning is an error in these tests. The model has Dropout, so it is traced.
    assert make_run(images()).step == 0
