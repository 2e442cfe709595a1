"""Models with state: BatchNorm, Dropout, and who owns the arrays."""

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
from nitro.errors import HookError

EPOCHS = 3


@pytest.fixture(scope="module")
def trained(images: Any, tmp_path_factory: pytest.TempPathFactory) -> nitro.Nitro:
    folder = tmp_path_factory.mktemp("images")
    return nitro.Nitro(images(), seed=3, max_epochs=EPOCHS, run_dir=folder).train()


@pytest.fixture(scope="module")
def by_hand(images: Any) -> tuple[Any, list[float]]:
    """The model and the losses of the same run, written in plain NNX."""
    experiment = images()
    model = experiment.build_model(nnx.Rngs(3))
    model.train()
    optimizer = nnx.Optimizer(model, optax.radam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, img: Any, label: Any) -> Any:
        def loss(model: Any) -> Any:
            logits = model(img)
            return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    arrays = experiment.build_data()["train"].arrays
    loader = nitro.ArrayLoader(arrays, 8, shuffle=True, seed=3)
    losses = [
        float(step(model, optimizer, batch["img"], batch["label"]))
        for _ in range(EPOCHS)
        for batch in loader
    ]
    model.eval()
    return model, losses


def test_dropout_masks_are_those_of_plain_nnx(trained: Any, by_hand: Any) -> None:
    lines = map(json.loads, (trained.run_dir / "metrics.jsonl").read_text().splitlines())

    losses = [line["loss"] for line in lines if line.get("context") == "train"]

    # Another mask would move the loss in its second digit.
    np.testing.assert_allclose(losses, by_hand[1], rtol=0, atol=2e-6)


def test_running_statistics_are_those_of_plain_nnx(trained: Any, by_hand: Any) -> None:
    model, expected = trained.model, by_hand[0]

    assert np.abs(expected.norm.mean[...]).max() > 0.01
    np.testing.assert_allclose(model.norm.mean[...], expected.norm.mean[...], atol=1e-6)
    np.testing.assert_allclose(model.norm.var[...], expected.norm.var[...], atol=1e-6)


def test_prediction_uses_the_running_statistics_and_no_dropout(
    trained: Any, by_hand: Any, images: Any
) -> None:
    img = images().build_data()["val"].arrays["img"]

    logits = trained.predict({"img": img})["logits"]

    np.testing.assert_allclose(logits, by_hand[0](img), atol=1e-5)
    np.testing.assert_array_equal(trained.predict({"img": img[:3]})["logits"], logits[:3])


def test_evaluation_leaves_the_state_alone(trained: Any) -> None:
    before = np.asarray(trained.model.norm.mean[...])

    first, second = trained.validate(), trained.validate()

    assert first == second
    np.testing.assert_array_equal(trained.model.norm.mean[...], before)


def test_model_taken_before_training_keeps_its_weights(plane: Any, make_run: Any) -> None:
    run = make_run(plane())
    before = run.model
    run.train()

    expected = plane().build_model(nnx.Rngs(0))

    np.testing.assert_array_equal(before.kernel[...], expected.kernel[...])
    assert not np.array_equal(run.model.kernel[...], expected.kernel[...])


def test_module_that_the_user_keeps_is_not_touched(plane: Any, make_run: Any) -> None:
    shared = nnx.Linear(4, 1, rngs=nnx.Rngs(7))
    kernel = np.asarray(shared.kernel[...])

    class Pretrained(plane):
        def build_model(self, rngs: Any) -> Any:
            return shared

    first, second = (make_run(Pretrained()).train() for _ in range(2))

    np.testing.assert_array_equal(shared.kernel[...], kernel)
    np.testing.assert_array_equal(first.model.kernel[...], second.model.kernel[...])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (jax.ShapeDtypeStruct((1,), jnp.float32), r"`bias` with ShapeDtypeStruct[\s\S]*eval_shape"),
        ("text", r"`bias` with str, not a value[\s\S]*plain attribute"),
        (np.ones(1, np.int32), r"made the parameter `bias` int32\(1,\)[\s\S]*`nnx\.Variable"),
    ],
)
def test_parameter_that_cannot_be_trained_is_refused_at_setup(
    plane: Any, make_run: Any, value: Any, words: str
) -> None:
    class Odd(plane):
        def build_model(self, rngs: Any) -> Any:
            model = super().build_model(rngs)
            model.bias = nnx.Param(value)
            return model

    with pytest.raises(HookError, match=words):
        make_run(Odd())


def test_variable_made_by_forward_is_refused(plane: Any, make_run: Any) -> None:
    class Growing(plane):
        def forward(self, model: Any, *, x: Any) -> Any:
            model.seen = nnx.Variable(jnp.zeros(3))
            return super().forward(model, x=x)

    with pytest.raises(
        HookError, match=r"changed which variables[\s\S]*in the module's `__init__`"
    ):
        make_run(Growing()).train()


def test_names_that_clash_when_dotted_are_refused(plane: Any, make_run: Any) -> None:
    class Clash(plane):
        def build_model(self, rngs: Any) -> Any:
            model = nnx.Linear(4, 1, rngs=rngs)
            model.inner = nnx.Linear(4, 1, rngs=rngs)
            setattr(model, "inner.bias", nnx.Param(jnp.zeros(1)))
            return model

    with pytest.raises(HookError, match=r"two variables with the dotted name `inner\.bias`"):
        make_run(Clash())


class Tabled(nnx.Module):
    """Holds plain arrays beside its variables."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.scale = nnx.data(jnp.float32(2.0))
        self.shift = nnx.data(jnp.float32(1.0))
        self.head = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(x) * self.scale + self.shift


def test_plain_arrays_of_a_module_are_carried_under_their_own_names(plane, tmp_path):
    class TabledPlane(plane):
        def build_model(self, rngs):
            return Tabled(rngs)

    run = nitro.Nitro(TabledPlane(), run_dir=tmp_path)
    x = np.ones((3, 4), np.float32)

    model = run.model

    np.testing.assert_allclose(run.predict({"x": x}), model(x)[:, 0], rtol=1e-6)
    assert {"scale", "shift"} <= run._session.state.model_state.keys()
