from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import nitro
from nitro.errors import ConfigError, DataError, HookError, NitroWarning


def test_any_split_is_evaluated_without_training(plane: Any, make_run: Any, points: Any) -> None:
    splits = {name: [points(5, seed=s)] for s, name in enumerate(("val", "test", "hard"))}
    run = make_run(plane(), data=splits)

    results = [run.validate(), run.evaluate(), run.evaluate("hard")]

    assert len({result["val_loss"] for result in results}) == 3
    assert (run.epoch, run.step, run.phase.value) == (0, 0, "ready")


def test_unknown_split_is_refused_with_a_guess(plane: Any, make_run: Any) -> None:
    with pytest.raises(ConfigError, match=r"no split `vall`[\s\S]*did you mean `val`\?"):
        make_run(plane()).evaluate("vall")
    with pytest.raises(ConfigError, match=r"no split `test`[\s\S]*one of `train`, `val`"):
        make_run(plane()).evaluate()


@pytest.mark.parametrize("rows", [1, 4, 5, 6, 23])
def test_prediction_has_a_row_for_each_sample(
    trained_plane: nitro.Nitro, points: Any, rows: int
) -> None:
    x = points(rows, seed=9)["x"]

    height = trained_plane.predict({"x": x})

    model = trained_plane.model
    expected = x @ np.asarray(model.kernel[...]) + np.asarray(model.bias[...])
    assert type(height) is np.ndarray
    np.testing.assert_allclose(height, expected[:, 0], rtol=1e-5, atol=1e-6)


def test_prediction_has_the_structure_of_forward(plane: Any, make_run: Any, points: Any) -> None:
    class Nested(plane):
        def forward(self, model: Any, *, x: Any) -> Any:
            return {"a": model(x), "b": {"c": x[:, 0], "d": x > 0}}

        def loss(self, outputs: Any, *, y: Any) -> Any:
            return outputs["a"].mean()

    outputs = make_run(Nested()).predict({"x": points(7, seed=0)["x"]})

    assert outputs["a"].shape == (7, 1)
    assert outputs["b"]["c"].shape == (7,)
    assert outputs["b"]["d"].dtype == bool


def test_iterable_is_predicted_lazily_batch_by_batch(
    trained_plane: nitro.Nitro, points: Any
) -> None:
    drawn: list[int] = []

    def batches() -> Iterator[Any]:
        for rows in (2, 7, 1):
            drawn.append(rows)
            yield {"x": points(rows, seed=rows)["x"], "name": "unused"}

    results = trained_plane.predict(batches())
    first = next(results)

    assert (first.shape, drawn) == ((2,), [2])
    assert [result.shape for result in results] == [(7,), (1,)]


def test_evaluation_and_prediction_share_one_forward_program(plane: Any, make_run: Any) -> None:
    run = make_run(plane())
    run.validate()
    before = nitro.cache_stats()["misses"]

    run.predict({"x": np.zeros((3, 4), np.float32)})
    run.predict({"x": np.zeros((11, 4), np.float32), "y": np.zeros(11, np.float32)})
    run.validate()

    assert nitro.cache_stats()["misses"] == before


def test_handle_without_data_takes_its_width_from_the_first_request(
    plane: Any, make_run: Any, points: Any
) -> None:
    run, other = make_run(plane(), data={}), make_run(plane())
    x = points(9, seed=0)["x"]

    heights = [run.predict({"x": x[:4]}), run.predict({"x": x})]

    np.testing.assert_allclose(heights[1], other.predict({"x": x}), rtol=1e-6)
    np.testing.assert_array_equal(heights[0], heights[1][:4])


def test_short_batch_is_padded_with_its_last_sample(plane: Any, make_run: Any) -> None:
    class Peak(plane):
        def forward(self, model: Any, *, x: Any) -> Any:
            return jnp.broadcast_to(x.max(0), x.shape)

    x = -np.arange(1, 13, dtype=np.float32).reshape(3, 4)

    # Zeros behind the three rows would be the highest of all.
    np.testing.assert_array_equal(make_run(Peak()).predict({"x": x}), [x[0]] * 3)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (np.zeros((3, 4)), r"got ndarray[\s\S]*`run\.predict\(\{\"x\": \.\.\.\}\)`"),
        (None, "got NoneType"),
        ({"y": np.zeros(3)}, r"wants the batch field `x`, but the batch has `y`"),
        ({"x": 3.0}, "holds float, not an array"),
        ({"x": [[1.0] * 4]}, r"`x` .* is a list, not an array[\s\S]*`np\.asarray\(x, \.\.\.\)`"),
        ({"x": np.zeros((0, 4))}, "There are no rows in the batch given to `predict`"),
        ({"x": np.float32(3)}, r"disagree on the batch extent: `x` \(\)"),
    ],
)
def test_request_that_is_no_batch_is_refused(
    trained_plane: nitro.Nitro, request_: Any, words: str
) -> None:
    with pytest.raises(DataError, match=words):
        trained_plane.predict(request_)


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (lambda out: out.mean(), r"of shape \(\) for a batch of 5"),
        (lambda out: {"a": out, "t": out.T}, r"`t` of shape \(1, 5\)[\s\S]*\(5, \.\.\.\)"),
    ],
)
def test_output_without_the_batch_axis_is_refused(
    plane: Any, make_run: Any, outputs: Any, words: str
) -> None:
    class Wrong(plane):
        def forward(self, model: Any, *, x: Any) -> Any:
            return outputs(model(x))

    with pytest.raises(HookError, match=words):
        make_run(Wrong()).validate()


def test_failure_restores_the_phase(plane: Any, make_run: Any) -> None:
    class Failing(plane):
        def metrics(self, height: Any, *, y: Any) -> Any:
            raise KeyError("mine")

    run = make_run(Failing())

    with pytest.raises(KeyError, match="mine"):
        run.validate()
    assert run.phase.value == "ready"


def test_evaluation_handle_holds_no_optimizer_state(plane: Any, make_run: Any, points: Any) -> None:
    evaluating = make_run(plane(), data={"val": [points(5, seed=0)]})
    serving = make_run(plane(), data={})

    assert "optimizer" not in evaluating.binding
    for run in (evaluating, serving):
        assert nitro._run.session_of(run).state.opt_state == ()


def test_handle_is_a_context_manager(plane: Any, tmp_path: Any) -> None:
    with nitro.Nitro(plane(), run_dir=tmp_path) as run:
        run.train()

    assert run.validate()["val_loss"] > 0


def test_best_weights_are_evaluated_and_the_last_ones_kept(
    plane: Any, make_run: Any, points: Any
) -> None:
    """The first epoch is the best one, as a rate that is far too high follows it."""

    class Rising(plane):
        def schedules(self) -> Any:
            return {"learning_rate": lambda total: lambda step: jnp.where(step < 4, 0.01, 1.0)}

    run = make_run(Rising(), max_epochs=3).train()
    last, kernel = run.validate(), np.asarray(run.model.kernel[...])
    best = nitro.Nitro(Rising(), checkpoint=f"{run.run_dir}@best", progress=False)

    assert run.evaluate("val", weights="best") == best.validate()
    assert run.evaluate("val", weights="best")["val_loss"] == pytest.approx(
        run.history.best["val_loss"], rel=1e-6
    )
    assert run.validate() == last != best.validate()
    np.testing.assert_array_equal(run.model.kernel[...], kernel)


def test_best_weights_of_a_run_without_a_score_are_refused(
    trained_plane: nitro.Nitro, plane: Any, make_run: Any
) -> None:
    with pytest.raises(ConfigError, match=r'no record with a score[\s\S]*`weights="current"`'):
        make_run(plane(), checkpointer=None).evaluate("val", weights="best")
    with pytest.raises(ConfigError, match=r'`weights` is \'final\'[\s\S]*"current" or "best"'):
        trained_plane.evaluate("val", weights="final")  # pyright: ignore[reportArgumentType]


def test_third_new_shape_in_a_row_is_told_with_the_programs_that_it_took(
    plane: Any, make_run: Any
) -> None:
    class Sums(plane):
        def forward(self, model: Any, *, x: Any) -> Any:
            return x.sum(1) + model(x[:, :4])[:, 0] * 0

    run = make_run(Sums(), data={})
    for width in (4, 5, 4, 6):
        assert run.predict({"x": np.ones((2, width))}).tolist() == [width, width]

    def predict_more() -> None:
        for width in (7, 8, 9, 10):
            run.predict({"x": np.ones((2, width))})

    with pytest.warns(NitroWarning, match=r"3 new shapes in a row; 5 .* for \(8,\)") as told:
        predict_more()

    assert len(told) == 1
