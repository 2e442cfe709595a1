"""Variable lengths: declared shapes are programs compiled before the first step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nitro
from nitro.errors import ConfigError, DataError

LENGTHS = (3, 5, 5, 3, 8, 3, 8, 5)
_COMPILES: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: (
        _COMPILES.append(event) if event == "/jax/core/compile/backend_compile_duration" else None
    )
)

SHAPES = ({"x": (3, 4)}, {"x": (5, 4)}, {"x": (8, 4)})


def _batch(index: int, length: int, rows: int = 4) -> Any:
    rng = np.random.default_rng(index)
    x = rng.normal(size=(rows, length, 4)).astype(np.float32)
    return {"x": x, "y": x.sum((1, 2)) / length}


class Bucketed:
    """Batches of the given lengths; any of them can be had again."""

    def __init__(self, lengths: Any = LENGTHS, shapes: Any = SHAPES, rows: Any = None) -> None:
        self.lengths = lengths
        self.rows = rows or [4] * len(lengths)
        if shapes is not None:
            self.sample_shapes = list(shapes)

    def __len__(self) -> int:
        return len(self.lengths)

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        for index in range(start, len(self)):
            yield _batch(100 * epoch + index, self.lengths[index], self.rows[index])

    def __iter__(self) -> Iterator[Any]:
        return self.batches(0, 0)


class Mean(nitro.Experiment):
    """A plane through the mean of a sequence."""

    def build_data(self) -> Any:
        return {"train": Bucketed(), "val": Bucketed(rows=[4] * 7 + [2])}

    def build_model(self, rngs: nnx.Rngs) -> Any:
        return nnx.Linear(4, 1, rngs=rngs)

    def optimizer(self, group: str) -> Any:
        del group
        return optax.sgd

    def learning_rate(self, group: Any = None) -> float:
        del group
        return 0.1

    def forward(self, model: Any, *, x: Any) -> Any:
        return model(x.mean(1))[:, 0]

    def loss(self, height: Any, *, y: Any) -> Any:
        return ((height - y) ** 2).mean()


def test_steps_of_several_shapes_are_those_of_a_loop_by_hand(make_run: Any) -> None:
    run = make_run(Mean(), max_epochs=2)
    weights = {"kernel": run.model.kernel[...], "bias": run.model.bias[...]}

    def loss(weights: Any, batch: Any) -> Any:
        height = (batch["x"].mean(1) @ weights["kernel"] + weights["bias"])[:, 0]
        return ((height - batch["y"]) ** 2).mean()

    for epoch in range(2):
        for batch in Bucketed().batches(epoch, 0):
            grads = jax.grad(loss)(weights, batch)
            weights = jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)
    run.train()

    assert run.step == 16
    np.testing.assert_allclose(run.model.kernel[...], weights["kernel"], rtol=2e-5, atol=1e-6)


def test_every_declared_shape_is_compiled_before_the_first_step(make_run: Any) -> None:
    nitro.cache_clear()
    run = make_run(Mean(), data={"train": Bucketed(), "val": Bucketed()}, max_epochs=2)
    before_steps: list[int] = []

    def note(event: nitro.PhaseEvent) -> None:
        if event.before is nitro.Phase.COMPILING:
            before_steps.append(len(_COMPILES))

    run.on_phase(note)
    run.train()
    for length in (3, 5, 8):
        run.predict({"x": np.ones((4, length, 4), np.float32)})

    assert before_steps == [len(_COMPILES)]
    assert str(nitro.explain_compiles()).count("train step") >= 3
    assert "activations (largest of 3 shapes)" in str(run.memory_plan())


def test_validation_over_several_shapes_is_the_mean_over_samples(make_run: Any) -> None:
    run = make_run(Mean(), data={"train": Bucketed(), "val": Bucketed(rows=[4] * 7 + [2])})
    kernel, bias = np.asarray(run.model.kernel[...], np.float64), np.asarray(run.model.bias[...])
    batches = list(Bucketed(rows=[4] * 7 + [2]))
    errors = [((b["x"].mean(1) @ kernel + bias)[:, 0] - b["y"]) ** 2 for b in batches]

    expected = np.concatenate(errors).mean()

    assert run.validate()["val_loss"] == pytest.approx(expected, rel=1e-5)


def test_bits_do_not_depend_on_the_order_in_which_shapes_are_declared(
    make_run: Any, tmp_path: Any
) -> None:
    kernels: list[Any] = []
    for name, shapes in {"forth": SHAPES, "back": SHAPES[::-1]}.items():
        nitro.cache_clear()
        data = {"train": Bucketed(shapes=shapes), "val": Bucketed(shapes=shapes)}
        run = make_run(Mean(), data=data, max_epochs=2, run_dir=tmp_path / name).train()
        kernels.append(np.asarray(run.model.kernel[...]))

    np.testing.assert_array_equal(*kernels)


def test_run_of_several_shapes_goes_on_inside_an_epoch(make_run: Any, tmp_path: Any) -> None:
    whole = make_run(Mean(), max_epochs=2, run_dir=tmp_path / "whole").train()
    cut = make_run(Mean(), max_epochs=2, run_dir=tmp_path / "cut", checkpoint_every_steps=3)
    cut.on_phase(lambda e: e.phase is nitro.Phase.CHECKPOINTING and cut.request_stop())
    cut.train()

    resumed = make_run(Mean(), max_epochs=2, run_dir=tmp_path / "cut", resume="auto").train()

    assert 0 < cut.step < 16
    np.testing.assert_array_equal(resumed.model.kernel[...], whole.model.kernel[...])


@pytest.mark.parametrize(
    ("train", "options", "words"),
    [
        (Bucketed(shapes=None), {}, r"float32\(4, 5, 4\)[\s\S]*pad what is shorter"),
        (
            Bucketed(shapes=SHAPES[:2]),
            {},
            r"batch 5 of `train` .* `x` \(8, 4\)[\s\S]*`sample_shapes`",
        ),
        (Bucketed(shapes=SHAPES[1:]), {}, r"first batch of `train` .* `x` \(3, 4\)"),
        (Bucketed(shapes=[{"z": (3,)}]), {}, r"names `z`, which no program takes"),
        (Bucketed(shapes=[{"x": 3}]), {}, r"has 3 for `x`[\s\S]*leave the batch axis out"),
        (Bucketed(shapes=[]), {}, r"`sample_shapes` of the split `train` is \[\]"),
        (
            Bucketed(),
            {"accum": 2},
            r"batch 2 of `train` has another shape[\s\S]*2 batches of a shape",
        ),
        (Bucketed(), {"steps_per_call": 4}, r"`steps_per_call` is 4[\s\S]*leave"),
    ],
)
def test_shape_that_has_no_program_is_refused(
    make_run: Any, train: Any, options: Any, words: str
) -> None:
    def run() -> None:
        make_run(Mean(), data={"train": train}, checkpointer=None, **options).train()

    with pytest.raises((DataError, ConfigError), match=words):
        run()


def test_steps_of_micro_batches_of_one_shape_are_taken(make_run: Any) -> None:
    train = Bucketed(lengths=(3, 3, 8, 8, 5, 5))

    run = make_run(Mean(), data={"train": train}, checkpointer=None, accum=2).train()

    assert run.step == 3
    assert jnp.isfinite(run.model.kernel[...]).all()
