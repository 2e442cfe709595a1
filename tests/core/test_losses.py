"""The loss of a step, an epoch and a split, against NumPy in float64."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nitro
from nitro.errors import DivergenceError, HookError, NitroWarning

_STEPS, _ROWS, _TOKENS, _RATE = 3, 8, 5, 0.1


def _sequences(rows: int, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Rows of tokens; row i counts i % 4 of its 5, so some count none at all."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, _TOKENS, 4)).astype(np.float32)
    lengths = np.arange(rows) % 4
    mask = (np.arange(_TOKENS) < lengths[:, None]).astype(np.float32)
    return {"x": x, "y": rng.normal(size=(rows, _TOKENS)).astype(np.float32), "mask": mask}


class Tokens(nitro.Experiment):
    """Fits each token that the mask has, by squares; the loss is a mean over tokens."""

    batch_size: int = _ROWS

    def build_data(self):
        return {"train": nitro.ArrayLoader(_sequences(_STEPS * _ROWS), self.batch_size)}

    def build_model(self, rngs):
        return nnx.Linear(4, 1, rngs=rngs)

    def forward(self, model, *, x):
        return model(x)[..., 0]

    def loss(self, out, *, y, mask):
        return (jnp.square(out - y) * mask).sum(), mask.sum()

    def optimizer(self, group):
        return optax.sgd

    def learning_rate(self, group=None):
        return _RATE


class Weighted(Tokens):
    """The same with a weight for each of two classes of tokens, divided by all weights."""

    def loss(self, out, *, y, mask):
        weights = mask * jnp.where(y > 0, 3.0, 0.25)
        return (jnp.square(out - y) * weights).sum(), weights.sum()


def _weights_of(kind: type[Tokens], arrays: Any) -> np.ndarray:
    classes = np.where(arrays["y"] > 0, 3.0, 0.25) if kind is Weighted else 1.0
    return arrays["mask"].astype(np.float64) * classes


def _by_hand(kind: type[Tokens], run: nitro.Nitro) -> tuple[np.ndarray, float]:
    """The kernel and the epoch's loss after whole batches of 8 by SGD, in float64."""
    arrays = _sequences(_STEPS * _ROWS)
    x, y = arrays["x"].astype(np.float64), arrays["y"].astype(np.float64)
    weights = _weights_of(kind, arrays)
    kernel, bias = (np.asarray(w[...], np.float64) for w in (run.model.kernel, run.model.bias))
    kernel, total = kernel[:, 0], 0.0
    for rows in np.split(np.arange(_STEPS * _ROWS), _STEPS):
        error = x[rows] @ kernel + bias - y[rows]
        total += (weights[rows] * error**2).sum()
        slope = 2 * weights[rows] * error / weights[rows].sum()
        kernel = kernel - _RATE * np.einsum("rt,rti->i", slope, x[rows])
        bias = bias - _RATE * slope.sum()
    return kernel, total / weights.sum()


@pytest.mark.parametrize("kind", [Tokens, Weighted])
@pytest.mark.parametrize("accum", [1, 4])
def test_sum_and_count_give_the_step_of_one_big_batch(make_run: Any, kind: Any, accum: int) -> None:
    # With 4 micro-batches of 2, some count one token, others five.
    run = make_run(kind(batch_size=_ROWS // accum), accum=accum, checkpointer=None)
    kernel, loss = _by_hand(kind, run)

    run.train()

    np.testing.assert_allclose(run.model.kernel[...][:, 0], kernel, rtol=2e-5)
    assert run.history.loss == [pytest.approx(loss, rel=1e-6)]


def test_micro_batch_that_counts_nothing_changes_nothing(make_run: Any, tmp_path: Path) -> None:
    arrays = _sequences(4)
    empty = {**arrays, "mask": np.zeros_like(arrays["mask"])}
    alone = make_run(Tokens(), data={"train": [arrays]}, checkpointer=None)
    two = {"data": {"train": [empty, arrays]}, "accum": 2, "run_dir": tmp_path / "two"}
    padded = make_run(Tokens(), checkpointer=None, **two)

    kernels = [run.train().model.kernel[...] for run in (alone, padded)]

    np.testing.assert_allclose(*kernels, rtol=1e-6)


@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("checks", [True, False])
def test_step_that_counts_nothing_is_told(make_run: Any, accum: int, checks: bool) -> None:
    arrays = _sequences(4)
    empty = {**arrays, "mask": np.zeros_like(arrays["mask"])}
    data = {"train": [arrays] * accum + [empty] * accum}
    run = make_run(Tokens(), data=data, accum=accum, check_divergence=checks)

    with pytest.raises(HookError, match=r"`Tokens\.loss` .* add up to 0 at step 2 of epoch 1"):
        run.train()
    assert np.isfinite(run.model.kernel[...]).all()


def test_sum_and_count_over_one_batch_are_the_bits_of_the_mean(
    make_run: Any, tmp_path: Path
) -> None:
    class Mean(Tokens):
        def loss(self, out: Any, *, y: Any, mask: Any) -> Any:
            return (jnp.square(out - y) * mask).sum() / mask.sum()

    runs = [make_run(kind(), run_dir=tmp_path / kind.__name__) for kind in (Tokens, Mean)]
    kernels = [run.train().model.kernel[...] for run in runs]

    np.testing.assert_array_equal(*kernels)


@pytest.mark.parametrize("batch_size", [1, 4, 10])
def test_val_loss_is_the_mean_over_samples_however_they_are_cut(
    plane: Any, make_run: Any, points: Any, batch_size: int
) -> None:
    arrays = points(10, seed=1)
    arrays["y"][8:] += 30
    run = make_run(plane(), data={"val": nitro.ArrayLoader(arrays, batch_size)})

    kernel, bias = (np.asarray(w[...], np.float64) for w in (run.model.kernel, run.model.bias))
    errors = (arrays["x"] @ kernel + bias)[:, 0] - arrays["y"]

    assert run.validate() == {"val_loss": pytest.approx((errors**2).mean(), rel=1e-6)}


@pytest.mark.parametrize("kind", [Tokens, Weighted])
@pytest.mark.parametrize("batch_size", [1, 4, 10])
def test_val_loss_divides_all_sums_by_all_counts(make_run: Any, kind: Any, batch_size: int) -> None:
    arrays = _sequences(10, seed=1)
    run = make_run(kind(), data={"val": nitro.ArrayLoader(arrays, batch_size)})

    kernel, bias = (np.asarray(w[...], np.float64) for w in (run.model.kernel, run.model.bias))
    errors = (arrays["x"] @ kernel + bias)[..., 0] - arrays["y"]
    weights = _weights_of(kind, arrays)

    expected = (weights * errors**2).sum() / weights.sum()
    assert run.validate()["val_loss"] == pytest.approx(expected, rel=1e-6)


def test_split_in_which_nothing_counts_is_told(make_run: Any) -> None:
    arrays = _sequences(4)
    empty = {**arrays, "mask": np.zeros_like(arrays["mask"])}
    run = make_run(Tokens(), data={"val": [empty]})

    with pytest.raises(HookError, match=r"`Tokens\.loss` on the split `val`: .* add up to 0"):
        run.validate()


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda out: 0.5, r"returned float\.[\s\S]*scalar float array, or \(sum, count\)"),
        (lambda out: out, r"returned float32\(8, 5\)\.[\s\S]*`\.mean\(\)`"),
        (lambda out: (out.sum(), 1, 2), "returned a tuple of 3"),
        (lambda out: (out.sum(), None), "returned NoneType as the count"),
        (
            lambda out: (out.sum(), out),
            r"returned float32\(8, 5\) as the count[\s\S]*`mask\.sum\(\)`",
        ),
        (lambda out: (out, 8), r"returned float32\(8, 5\) as the sum[\s\S]*`\.sum\(\)`"),
        (lambda out: ((out > 0).sum(), 8), r"returned int32\(\) as the sum"),
    ],
)
def test_loss_of_another_form_is_refused(make_run: Any, returned: Any, words: str) -> None:
    hooks = {"loss": lambda self, out, *, y, mask: returned(out)}

    with pytest.raises(HookError, match=rf"`Odd\.loss` {words}"):
        make_run(type("Odd", (Tokens,), hooks)()).train()


class Cornered(Tokens):
    """The loss is finite and its gradient NaN at the one step whose mask is all 2."""

    max_epochs: int = 2
    bad_step: int = _STEPS

    def build_data(self):
        arrays = _sequences(_STEPS * _ROWS)
        arrays["mask"][(self.bad_step - 1) * _ROWS : self.bad_step * _ROWS] = 2
        return {"train": nitro.ArrayLoader(arrays, _ROWS)}

    def loss(self, out, *, y, mask):
        corner = jnp.sqrt(jnp.abs(out * jnp.where(mask.min() == 2, 0.0, 1.0)) + 0 * out)
        return jnp.square(out - y).mean() + 0 * corner.mean()


@pytest.mark.parametrize("bad_step", [1, 2, 3])
def test_gradient_that_is_nan_stops_the_run_at_its_own_step(make_run: Any, bad_step: int) -> None:
    run = make_run(Cornered(bad_step=bad_step, max_epochs=1))

    with pytest.raises(
        DivergenceError,
        match=rf"update at step {bad_step} of epoch 1 made weights .*: `bias`, `kernel`[\s\S]*"
        "start again with a lower learning rate: there is no record",
    ):
        run.train()
    assert nitro.checkpoints(run.run_dir) == []


def test_newest_record_is_never_of_weights_that_are_not_finite(make_run: Any) -> None:
    clean = {"train": nitro.ArrayLoader(_sequences(_STEPS * _ROWS), _ROWS)}
    healthy = make_run(Cornered(max_epochs=1), data=clean).train()
    run = make_run(Cornered(), resume="auto")

    with pytest.raises(DivergenceError, match="at step 6 of epoch 2") as raised:
        run.train()

    (newest,) = nitro.checkpoints(run.run_dir)
    path = re.search(r'resume="(.*)"', raised.value.fix)[1]
    again = make_run(Cornered(), resume=path)
    assert (newest.step, again.step) == (3, 3)
    np.testing.assert_array_equal(again.model.kernel[...], healthy.model.kernel[...])
    with pytest.raises(DivergenceError, match="No record of step 6: the weights `bias`"):
        run.checkpoint()


def test_divergence_that_is_not_checked_is_recorded(make_run: Any) -> None:
    run = make_run(Cornered(max_epochs=1), check_divergence=False).train()

    assert np.isnan(run.model.kernel[...]).all()
    assert [entry.step for entry in nitro.checkpoints(run.run_dir)] == [3]


class Balanced(Tokens):
    """Returns a balancing loss, a scalar, beside its predictions."""

    def forward(self, model, *, x):
        out = model(x)[..., 0]
        return {"out": out, "aux": jnp.square(out).mean()}

    def loss(self, outputs, *, y, mask):
        return jnp.square(outputs["out"] - y).mean() + outputs["aux"].mean()


@pytest.mark.parametrize("splits", [("train",), ("train", "val")])
def test_scalar_output_is_refused_with_or_without_validation(make_run: Any, splits: Any) -> None:
    data = {name: nitro.ArrayLoader(_sequences(8), 4) for name in splits}

    with pytest.raises(
        HookError,
        match=r"`aux` of shape \(\) for a batch of 4[\s\S]*broadcast_to\(aux, x\.shape\[:1\]\)`",
    ):
        make_run(Balanced(), data=data).train()


def test_scalar_output_that_is_spread_over_the_batch_trains_as_it_was_meant(make_run: Any) -> None:
    class Spread(Balanced):
        def forward(self, model: Any, *, x: Any) -> Any:
            outputs = super().forward(model, x=x)
            return {**outputs, "aux": jnp.broadcast_to(outputs["aux"], x.shape[:1])}

    arrays = _sequences(8)
    run = make_run(Spread(), data={"train": [arrays], "val": [arrays]}, checkpointer=None)
    kernel, bias = (np.asarray(w[...], np.float64) for w in (run.model.kernel, run.model.bias))
    out = (arrays["x"] @ kernel + bias)[..., 0]

    right = ((out - arrays["y"]) ** 2).mean() + (out**2).mean()
    assert run.validate()["val_loss"] == pytest.approx(right, rel=1e-6)
    assert run.train().history.loss == [pytest.approx(right, rel=1e-6)]


class _Sowing(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 1, rngs=rngs)
        self(jnp.zeros((1, 1, 4)))

    def __call__(self, x):
        self.sow(nnx.Intermediate, "size", jnp.abs(x).mean())
        return self.linear(x)


@pytest.mark.filterwarnings("ignore:Using .Module.sow:DeprecationWarning")
def test_what_a_model_sows_is_dropped_and_said(make_run: Any, tmp_path: Path) -> None:
    class Sown(Tokens):
        def build_model(self, rngs: Any) -> Any:
            return _Sowing(rngs)

    run = make_run(Sown(), checkpointer=None)
    with pytest.warns(NitroWarning, match=r"`forward` sows `size`, which is dropped") as told:
        run.train()

    plain = make_run(Tokens(), checkpointer=None, run_dir=tmp_path / "plain").train()
    assert sum(issubclass(one.category, NitroWarning) for one in told) == 1, [str(t) for t in told]
    np.testing.assert_array_equal(run.model.linear.kernel[...], plain.model.kernel[...])


def test_divergence_on_finite_data_advises_a_lower_rate(make_run: Any) -> None:
    class Wild(Tokens):
        def learning_rate(self, group: Any = None) -> float:
            return 1e30

    with pytest.raises(DivergenceError, match=r"loss is (nan|inf) at step \d[\s\S]*lower learning"):
        make_run(Wild(), checkpointer=None).train()


@pytest.mark.parametrize("on_device", [True, False])
def test_nan_in_the_data_is_named_by_field_and_sample(make_run: Any, on_device: bool) -> None:
    arrays = _sequences(8)
    arrays["x"][5, 2, 1] = np.nan
    loader = nitro.ArrayLoader(arrays, 2, device=on_device)
    where = "samples, from 0: 5" if on_device else "rows, from 0: 1"

    with pytest.raises(
        DivergenceError,
        match=rf"loss is nan at step 2 .* in `train` `x` holds NaN in 1 of 4 {where}",
    ):
        make_run(Tokens(), data={"train": loader}, accum=2).train()


def test_nan_in_the_validation_alone_names_split_and_field(make_run: Any) -> None:
    arrays = _sequences(8)
    arrays["y"][5] = np.inf
    data = {name: nitro.ArrayLoader(_sequences(8), 4) for name in ("train", "test")}
    run = make_run(Tokens(), data={**data, "val": nitro.ArrayLoader(arrays, 4)})

    with (
        pytest.warns(NitroWarning, match="in batch 2 of `val` `y` holds infinity in 1 of 4 rows"),
        pytest.warns(NitroWarning, match="`val_loss` of `val` is nan"),
        pytest.raises(DivergenceError, match=r"`val_loss`, by which .* any of 1 epochs"),
    ):
        run.train()
    assert np.isfinite(run.evaluate("test")["val_loss"])


@pytest.mark.parametrize("split", ["train", "val"])
def test_nan_in_the_first_batch_of_a_split_is_told_at_setup(make_run: Any, split: str) -> None:
    data = {name: nitro.ArrayLoader(_sequences(8), 4) for name in ("train", "val")}
    data[split].arrays["x"][1, 0, 0] = np.nan

    with pytest.warns(
        NitroWarning, match=rf"in the first batch of `{split}`: `x` holds NaN in 1 of 4 rows"
    ):
        make_run(Tokens(), data=data)


def test_nan_that_derive_made_is_named(make_run: Any) -> None:
    class Scaled(Tokens):
        scale: nitro.Device[float] = 1.0

        def derive(self, data: Any) -> Any:
            return {"scale": float("nan")}

        def loss(self, out: Any, *, y: Any, mask: Any) -> Any:
            return jnp.square(out * self.scale - y).mean()

    with pytest.raises(DivergenceError, match=r"step 1 of .* not finite: `derive` made `scale` so"):
        make_run(Scaled(), checkpointer=None).train()
