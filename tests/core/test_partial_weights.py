"""Weights that fit in part, and models that are not built where their weights come along."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nitro
from nitro import Weights
from nitro.errors import CheckpointError, ConfigError


class Net(nnx.Module):
    """A body, and a head of some width."""

    def __init__(self, rngs: nnx.Rngs, *, head: int = 1, deep: bool = False) -> None:
        self.body = nnx.Linear(4, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.head = nnx.Linear(6, head, rngs=rngs)
        if deep:
            self.adapter = nnx.Linear(6, 6, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(self.body(x)))


@pytest.fixture
def base(plane: Any, tmp_path: Path) -> nitro.Nitro:
    class Base(plane):
        def build_model(self, rngs):
            return Net(rngs)

    return nitro.Nitro(Base(), run_dir=tmp_path / "base", seed=1).train()


@pytest.fixture
def tuned(plane: Any) -> Any:
    class Tuned(plane):
        """A head of another size, and an adapter that the base lacks."""

        def build_model(self, rngs):
            return Net(rngs, head=3, deep=True)

        def loss(self, height, *, y):
            return super().loss(height.mean(-1), y=y)

        def forward(self, model, *, x):
            return model(x)

    return Tuned


@pytest.mark.parametrize("form", ["run", "path", "state"])
def test_body_is_taken_and_the_rest_is_as_built(
    base: nitro.Nitro, tuned: Any, make_run: Any, form: str
) -> None:
    source = {"run": base, "path": f"{base.run_dir}@latest", "state": nnx.state(base.model)}[form]

    run = make_run(tuned(), weights=Weights(source, skip=("head.*",), missing="init"), seed=7)

    built = dict(make_run(tuned(), seed=7).params)
    np.testing.assert_array_equal(run.params["body.kernel"], base.params["body.kernel"])
    for name in ("head.kernel", "head.bias", "adapter.kernel"):
        np.testing.assert_array_equal(run.params[name], built[name], err_msg=name)
    np.testing.assert_array_equal(run.model.norm.mean[...], base.model.norm.mean[...])
    assert np.abs(run.model.norm.mean[...]).max() > 0


def test_report_and_checkpoints_say_what_became_of_the_weights(
    base: nitro.Nitro, tuned: Any, make_run: Any
) -> None:
    run = make_run(tuned(), weights=Weights(base, skip=("head.*",), missing="init")).train()

    report = str(run.binding)
    assert "taken: 6 arrays" in report
    assert "skipped: 2, `head.bias`, `head.kernel`" in report
    assert "as `build_model` made them: 4, " in report
    told = nitro.checkpoint_info(run.run_dir)["weights"]
    assert sorted(told["taken"]) == sorted(
        ["body.kernel", "body.bias", "norm.scale", "norm.bias", "norm.mean", "norm.var"]
    )
    assert sorted(told["initialised"]) == [
        "adapter.bias", "adapter.kernel", "head.bias", "head.kernel",
    ]  # fmt: skip
    again = make_run(tuned(), resume="auto", max_epochs=2).train()
    assert nitro.checkpoint_info(f"{again.run_dir}@latest")["weights"] == told


def test_names_are_renamed_by_their_longest_beginning(plane: Any, make_run: Any) -> None:
    class Deep(plane):
        def build_model(self, rngs):
            return nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs))

    weights = {
        "model.fc1": {"weight": np.full((4, 4), 1.0), "bias": np.full(4, 2.0)},
        "model.fc2": {"weight": np.full((4, 1), 3.0), "bias": np.full(1, 4.0)},
    }
    rename = {
        "model.fc1": "layers.0",
        "model.fc1.weight": "layers.0.kernel",
        "model.fc2.weight": "layers.1.kernel",
        "model.fc2.bias": "layers.1.bias",
    }

    run = make_run(Deep(), weights=Weights(weights, rename=rename))

    values = {name: float(array.flat[0]) for name, array in run.params.items()}
    assert values == {
        "layers.0.kernel": 1, "layers.0.bias": 2, "layers.1.kernel": 3, "layers.1.bias": 4,
    }  # fmt: skip
    assert "renamed: 4, `model.fc1.bias → layers.0.bias`, " in str(run.binding)


@pytest.mark.parametrize(("key", "prefix"), [("", ""), ("net", "net.")])
def test_beginning_may_be_added_or_taken_away(
    plane: Any, make_run: Any, key: str, prefix: str
) -> None:
    class Inner(plane):
        def build_model(self, rngs):
            linear = nnx.Linear(4, 1, rngs=rngs)
            return linear if key else nnx.Dict(inner=linear)

        def forward(self, model, *, x):
            return (model if key else model["inner"])(x)[:, 0]

    weights = {f"{prefix}kernel": np.ones((4, 1)), f"{prefix}bias": np.ones(1)}

    run = make_run(Inner(), weights=Weights(weights, rename={key: "" if key else "inner"}))

    assert all((array == 1).all() for array in run.params.values())


KERNEL = {"kernel": np.zeros((4, 1), np.float32)}
BOTH = {**KERNEL, "bias": np.zeros(1, np.float32)}


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (lambda: Weights(KERNEL), r"`bias`: not given[\s\S]*missing=\"init\""),
        (lambda: Weights({**BOTH, "more": 1.0}, missing="init"), r"`more`: .*not in the model"),
        (
            lambda: Weights({"kernel": np.zeros((5, 1), np.float32)}, missing="init"),
            r"`kernel`: float32\(5, 1\) given, float32\(4, 1\) in the model[\s\S]*skip=",
        ),
        (lambda: Weights(BOTH, skip=("baise",)), r'"baise", which matches nothing[\s\S]*`bias`'),
        (lambda: Weights(BOTH, rename={"kernal": "x"}), r'key "kernal"[\s\S]*`kernel`'),
        (lambda: Weights(BOTH, rename={"bias": "kernel"}), r"`bias` and `kernel` both `kernel`"),
        (lambda: Weights(BOTH, skip="bias"), r"`skip` .* is 'bias'[\s\S]*skip=\('bias',\)"),
        (lambda: Weights(BOTH, missing="ignore"), r"`missing` .* is 'ignore'[\s\S]*\"init\""),
        (lambda: 3, r"`weights` is 3 \(int\)[\s\S]*a bundle"),
    ],
)
def test_policy_that_does_not_hold_is_refused(
    plane: Any, make_run: Any, weights: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_run(plane(), weights=weights())


@pytest.mark.parametrize("form", ["object", "path"])
def test_bundle_gives_its_weights(plane: Any, make_run: Any, tmp_path: Path, form: str) -> None:
    stablehlo = pytest.importorskip("nitro_export_stablehlo")
    trained = nitro.Nitro(plane(), run_dir=tmp_path / "trained").train()
    path = nitro.export_model(trained, "stablehlo", dir=tmp_path, name="plane", verify=False)

    run = make_run(plane(), weights=stablehlo.load_bundle(path) if form == "object" else path)

    assert run.params.keys() == trained.params.keys()
    for name, array in trained.params.items():
        np.testing.assert_array_equal(run.params[name], array, err_msg=name)
    assert "taken from" in str(run.binding)
    assert run.train().epoch == 1


def test_complex_weights_of_a_bundle_are_put_together(
    plane: Any, make_run: Any, tmp_path: Path
) -> None:
    class Turned(plane):
        def build_model(self, rngs):
            model = nnx.Linear(4, 1, rngs=rngs)
            model.turn = nnx.Param(jnp.array([1 + 2j], jnp.complex64))
            return model

        def forward(self, model, *, x):
            return model(x)[:, 0] * model.turn[...].real

    trained = nitro.Nitro(Turned(), run_dir=tmp_path / "trained")
    arrays = dict(trained.params)
    turn = arrays.pop("turn")

    class Halves:
        weights = {**arrays, "turn.real": turn.real + 1, "turn.imag": turn.imag + 1}  # noqa: RUF012

    run = make_run(Turned(), weights=Halves())

    np.testing.assert_array_equal(run.params["turn"], turn + (1 + 1j))


# The base is gone -----------------------------------------------------------------------------


@pytest.fixture
def loads_base(plane: Any, tmp_path: Path) -> Any:
    nitro.Nitro(plane(), run_dir=tmp_path / "base").train()

    class LoadsBase(plane):
        def build_model(self, rngs):
            return nitro.Nitro(plane(), checkpoint=str(tmp_path / "base"), data={}).model

    return LoadsBase


def test_run_is_served_and_resumed_where_the_base_that_its_model_loads_is_gone(
    loads_base: Any, tmp_path: Path
) -> None:
    first = nitro.Nitro(loads_base(), run_dir=tmp_path / "tuned").train()
    x = np.ones((3, 4), np.float32)
    expected = first.predict({"x": x})
    shutil.move(tmp_path / "base", tmp_path / "elsewhere")

    served = nitro.Nitro(loads_base(), checkpoint=tmp_path / "tuned", data={})
    resumed = nitro.Nitro(loads_base(), run_dir=tmp_path / "tuned", resume="auto", max_epochs=2)

    np.testing.assert_array_equal(served.predict({"x": x}), expected)
    assert resumed.train().epoch == 2
    with pytest.raises(CheckpointError, match="base"):
        nitro.Nitro(loads_base(), run_dir=tmp_path / "other")


def test_weights_that_are_replaced_are_not_made(plane: Any, tmp_path: Path) -> None:
    made: list[bool] = []

    def kernel_init(key: Any, shape: Any, dtype: Any = jnp.float32) -> Any:
        made.append(not isinstance(key, jax.core.Tracer))
        return jnp.ones(shape, dtype)

    class Watched(plane):
        def build_model(self, rngs):
            return nnx.Linear(4, 1, kernel_init=kernel_init, rngs=rngs)

    nitro.Nitro(Watched(), run_dir=tmp_path / "a").train()
    assert made == [True]

    nitro.Nitro(Watched(), checkpoint=tmp_path / "a", data={})
    nitro.Nitro(
        Watched(),
        run_dir=tmp_path / "b",
        weights={"kernel": np.ones((4, 1)), "bias": 0 * np.ones(1)},
    )

    assert made == [True, False, False]


def test_model_that_needs_values_to_be_built_is_built(plane: Any, tmp_path: Path) -> None:
    class Scaled(plane):
        def build_model(self, rngs):
            model = nnx.Linear(4, 1, rngs=rngs)
            model.kernel[...] = model.kernel[...] / float(jnp.abs(model.kernel[...]).max())
            return model

    first = nitro.Nitro(Scaled(), run_dir=tmp_path / "a").train()

    served = nitro.Nitro(Scaled(), checkpoint=f"{tmp_path / 'a'}@latest", data={})

    np.testing.assert_array_equal(served.params["kernel"], first.params["kernel"])


def test_handle_on_a_checkpoint_uses_the_programs_of_the_run(images: Any, tmp_path: Path) -> None:
    run = nitro.Nitro(images(), run_dir=tmp_path / "a").train()
    img = images().build_data()["val"].arrays["img"]
    expected = run.predict({"img": img})["logits"]
    before = nitro.cache_stats()["misses"]

    served = nitro.Nitro(images(), checkpoint=f"{tmp_path / 'a'}@latest")

    np.testing.assert_array_equal(served.predict({"img": img})["logits"], expected)
    assert nitro.cache_stats()["misses"] == before


def test_decay_toward_init_still_has_the_weights_of_build_model(tmp_path: Path, plane: Any) -> None:
    class Pulled(plane):
        def loss(self, height, *, y):
            return (height * 0).mean()

        def weight_decay(self, group):
            return 100.0

        def decay_anchor(self, group):
            return "init"

        def no_decay(self, path, leaf):
            return False

    weights = {"kernel": np.full((4, 1), 9.0), "bias": np.full(1, 9.0)}
    built = nitro.Nitro(Pulled(), run_dir=tmp_path / "a").params

    run = nitro.Nitro(Pulled(), run_dir=tmp_path / "b", weights=weights).train()

    # Each of 4 steps takes a tenth of the distance off: rate 1e-3 times decay 100.
    for name, start in weights.items():
        expected = built[name] + (start - built[name]) * 0.9**4
        np.testing.assert_allclose(run.params[name], expected, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("which", ["checkpoint", "resume"])
def test_checkpoint_that_does_not_fit_is_refused_with_the_call_that_takes_what_fits(
    base: nitro.Nitro, tuned: Any, make_run: Any, which: str
) -> None:
    with pytest.raises(CheckpointError, match="does not fit the model's parameters") as told:
        make_run(tuned(), **{which: f"{base.run_dir}@latest"})

    call = told.value.fix.split("`weights=")[1].rstrip("`")
    run = make_run(tuned(), weights=eval(call, {"nitro": nitro}))

    assert "'head.bias', 'head.kernel'" in call
    np.testing.assert_array_equal(run.params["body.kernel"], base.params["body.kernel"])
