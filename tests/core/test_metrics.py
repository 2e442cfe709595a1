from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nitro
from nitro._run import _evaluate as run_evaluate
from nitro.errors import ConfigError, HookError, NitroWarning


@pytest.fixture
def run_with(plane: Any, make_run: Any) -> Callable[..., nitro.Nitro]:
    """Makes an untrained plane (13 points to validate, 5 at a time) with these hooks."""

    def make(**hooks: Any) -> nitro.Nitro:
        return make_run(type("Measured", (plane,), hooks)(), checkpointer=None)

    return make


def _errors_of(run: nitro.Nitro) -> np.ndarray:
    """The errors of the plane on the 13 points, in float64."""
    arrays = run.experiment.build_data()["val"].arrays
    kernel, bias = (np.asarray(w[...], np.float64) for w in (run.model.kernel, run.model.bias))
    return (arrays["x"].astype(np.float64) @ kernel + bias)[:, 0] - arrays["y"]


def test_pair_is_the_exact_mean_over_a_ragged_split(run_with: Any) -> None:
    run = run_with(
        metrics=lambda self, height, *, y: {
            "mae": (np.abs(height - y).sum(), y.size),
            "mse": {"all": (((height - y) ** 2).sum(), y.size)},
        }
    )

    metrics = run.validate()

    errors = _errors_of(run)
    assert metrics["mae"] == pytest.approx(np.abs(errors).mean(), rel=1e-6)
    assert metrics["mse"]["all"] == pytest.approx((errors**2).mean(), rel=1e-6)


def test_value_without_a_count_is_summed(run_with: Any) -> None:
    run = run_with(metrics=lambda self, height, *, y: {"n": (y.size, None), "batches": (1, None)})

    assert run.validate() == {"n": 13.0, "batches": 3.0}


def test_buffer_that_the_hooks_fill_again_is_folded_as_it_was(run_with: Any) -> None:
    total, last = np.zeros(2), np.zeros(1)

    def metrics(self: Any, height: Any, *, y: Any) -> Any:
        total[:] = y.sum(), y.size
        return {"both": (total, None), "share": (total[0], total[1:])}

    def finalize_metrics(self: Any, reduced: Any, split: str) -> Any:
        last[:] += 1
        return {**reduced, "count": last}

    run = run_with(metrics=metrics, finalize_metrics=finalize_metrics)

    y = run.experiment.build_data()["val"].arrays["y"].astype(np.float64)
    result = run.train().validate()
    np.testing.assert_allclose(result["both"], [y.sum(), 13], rtol=1e-6)
    np.testing.assert_allclose(result["share"], [y.mean()], rtol=1e-6)
    np.testing.assert_array_equal(run.history["count"], [[1]])


def test_arrays_are_reduced_entry_by_entry(run_with: Any) -> None:
    run = run_with(
        metrics=lambda self, height, *, y: {
            "share": (np.array([(y > 0).sum(), (y <= 0).sum()]), np.array([y.size, y.size]))
        }
    )

    share = run.validate()["share"]

    up = (run.experiment.build_data()["val"].arrays["y"] > 0).mean()
    np.testing.assert_allclose(share, [up, 1 - up])


def test_hooks_never_see_padding(run_with: Any) -> None:
    seen: list[tuple[Any, ...]] = []

    def metrics(self: Any, height: Any, *, y: Any) -> Any:
        seen.append((type(height), height.shape, y.shape))
        return {"n": (height.size, None)}

    run_with(metrics=metrics).validate()

    assert seen == [(np.ndarray, (n,), (n,)) for n in (5, 5, 3)]


def test_without_the_hook_val_loss_is_the_mean_over_samples(plane: Any, make_run: Any) -> None:
    run = make_run(plane())

    assert run.validate() == {"val_loss": pytest.approx((_errors_of(run) ** 2).mean(), rel=1e-6)}


def test_name_with_a_slash_stays_as_it_is(run_with: Any) -> None:
    run = run_with(metrics=lambda self, height, *, y: {"top/1": (1, 2), "g": {"a/b": (3, 2)}})

    assert run.validate() == {"top/1": 1.5 / 3, "g": {"a/b": 1.5}}


def test_finalize_runs_once_on_reduced_values_with_the_split(run_with: Any) -> None:
    calls: list[Any] = []

    def finalize(self: Any, reduced: Any, split: str) -> Any:
        calls.append((split, dict(reduced)))
        return {"half": reduced["n"] / 2, "best": "none"}

    run = run_with(
        metrics=lambda self, height, *, y: {"n": (y.size, None)}, finalize_metrics=finalize
    )

    assert run.validate() == {"half": 6.5, "best": "none"}
    assert calls == [("val", {"n": 13.0})]


def test_what_is_no_number_is_returned_but_not_logged(run_with: Any) -> None:
    run = run_with(
        metrics=lambda self, height, *, y: {"n": (y.size, None)},
        finalize_metrics=lambda self, reduced, split: {
            **reduced,
            "best": "none",
            "none": None,
            "per_class": np.ones(3),
        },
    ).train()

    assert run.history.columns == ["epoch", "step", "loss", "n"]


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ([1, 2], r"returned list[\s\S]*hits\.size"),
        ({"acc": 0.5}, r"returned 0\.5 for the metric `acc`[\s\S]*the denominator is yours"),
        ({"acc": {"top": [1, 2]}}, r"returned \[1, 2\] for the metric `acc/top`"),
        ({"acc": ("median", 1.0)}, r"\('median', 1\.0\) for .*`acc`[\s\S]*\(\"concat\", value\)"),
        ({"acc": ("max", "high")}, r"returned 'high' for the metric `acc`"),
        (
            {"g": ("max", {"acc": ("min", 1.0)})},
            r'\("min", value\) for .*`g/acc`.*\("max", value\)',
        ),
        (
            {"all": ("concat", np.zeros(4))},
            r"shape \(4,\) for .*`all`.*batch of 5[\s\S]*\(5, \.\.\.\)",
        ),
        ({"all": ("concat", 1.0)}, r"shape \(\) for the metric `all`"),
        ({"g": {"acc": (1, 2, 3)}}, r"\(1, 2, 3\) for the metric `g/acc`[\s\S]*\(sum, count\)"),
        ({"acc": (None, 2)}, r"\(None, .* for the metric `acc`"),
        ({"acc": ("a", 2)}, r"\('a', 2\) for the metric `acc`"),
        ({"acc": (1, "b")}, r"\(1, 'b'\) for the metric `acc`"),
        ({"acc": (1, 0)}, r"counts of the metric `acc` add up to 0"),
    ],
)
def test_metrics_that_are_no_pairs_are_refused(run_with: Any, metrics: Any, words: str) -> None:
    run = run_with(metrics=lambda self, height, *, y: metrics)

    with pytest.raises(HookError, match=rf"`Measured\.metrics` on the split `val`.*{words}"):
        run.validate()


@pytest.mark.parametrize(
    ("first", "later", "words"),
    [
        ({"a": (1, 2)}, {"b": (1, 2)}, "returned `b`, and `a` for the batch before"),
        ({}, {"b": (1, 2)}, "returned `b`, and no metrics for the batch before"),
        ({"a": (1, 2)}, {"a": (1, None)}, r"`a` between \(sum, count\) and \(value, None\)"),
        (
            {"a": ("max", 1)},
            {"a": ("min", 1)},
            r'`a` between \("max", value\) and \("min", value\)',
        ),
        ({"a": (np.ones(2), 2)}, {"a": (np.ones(3), 2)}, r"`a` with the shape \(3,\), and \(2,\)"),
        (
            {"a": ("concat", np.ones((5, 2)))},
            {"a": ("concat", np.ones((5, 3)))},
            r"`a` with the shape \(3,\), and \(2,\) for the batches before \(the batch axis",
        ),
    ],
)
def test_metrics_that_change_between_batches_are_refused(
    run_with: Any, first: Any, later: Any, words: str
) -> None:
    answers = iter([first, later])
    run = run_with(metrics=lambda self, height, *, y: next(answers))

    with pytest.raises(HookError, match=words):
        run.validate()


@pytest.mark.parametrize("name", ["epoch", "step", "loss"])
def test_metric_that_would_overwrite_the_history_is_refused(run_with: Any, name: str) -> None:
    run = run_with(metrics=lambda self, height, *, y: {name: (1, 2)})

    with pytest.raises(HookError, match=rf"metric named `{name}`[\s\S]*`val_{name}`"):
        run.validate()


def test_finalize_that_returns_no_dict_is_refused(run_with: Any) -> None:
    run = run_with(finalize_metrics=lambda self, reduced, split: 0.5)

    with pytest.raises(HookError, match=r"finalize_metrics` returned float[\s\S]*dict of metrics"):
        run.validate()


def _by_mode(values: Any, module: Any) -> dict[str, Any]:
    """One metric of each mode, and a group."""
    return {
        "mean": (abs(values).sum(), values.size),
        "sum": (values.sum(), None),
        "total": ("sum", values.sum()),
        "worst": ("max", abs(values).max()),
        "extremes": ("min", module.stack([values.min(), -values.max()])),
        "group": ("max", {"high": values.max(), "deep": {"low": -values.min()}}),
        "shares": ({"up": (values > 0).sum()}, values.size),
        "all": ("concat", values),
    }


@pytest.mark.parametrize("residency", ["host", "device"])
def test_modes_fold_a_ragged_split_without_its_padding(run_with: Any, residency: str) -> None:
    module = jnp if residency == "device" else np
    kept: dict[str, Any] = {}

    def finalize(self: Any, reduced: Any, split: str) -> Any:
        kept["all"] = reduced.pop("all")
        return reduced

    run = run_with(
        metrics=lambda self, height, *, y: _by_mode(height - y, module),
        metrics_residency=lambda self, hook: "device" if hook == "train_metrics" else residency,
        finalize_metrics=finalize,
    )
    metrics = run.validate()

    errors = _errors_of(run)
    np.testing.assert_allclose(kept["all"], errors, rtol=1e-5, atol=1e-6)
    assert list(metrics) == ["mean", "sum", "total", "worst", "extremes", "group", "shares"]
    assert metrics["mean"] == pytest.approx(abs(errors).mean(), rel=1e-5)
    assert metrics["sum"] == metrics["total"] == pytest.approx(errors.sum(), abs=1e-5)
    assert metrics["worst"] == pytest.approx(abs(errors).max(), rel=1e-5)
    np.testing.assert_allclose(metrics["extremes"], [errors.min(), -errors.max()], rtol=1e-5)
    assert metrics["group"]["deep"]["low"] == pytest.approx(-errors.min(), rel=1e-5)
    assert metrics["shares"]["up"] == pytest.approx((errors > 0).mean())


def test_device_metrics_are_compiled_with_the_outputs_on_the_device(
    run_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []

    def metrics(self: Any, height: Any, *, y: Any) -> Any:
        seen.append((isinstance(height, jax.core.Tracer), height.shape, y.shape))
        return {"mae": (abs(height - y).sum(), y.size)}

    run = run_with(metrics=metrics, metrics_residency=lambda self, hook: "device")
    first = run.validate()
    monkeypatch.setattr(run_evaluate, "host_number", lambda value: pytest.fail("on the host"))
    before = nitro.cache_stats()["misses"]

    assert run.validate() == first
    assert nitro.cache_stats()["misses"] == before
    assert set(seen) == {(True, (5,), (5,)), (True, (3,), (3,))}


def test_device_metrics_are_compiled_before_the_first_step(run_with: Any) -> None:
    run = run_with(
        metrics=lambda self, height, *, y: {"mae": (abs(height - y).sum(), y.size)},
        metrics_residency=lambda self, hook: "device",
    )
    phases: dict[str, int] = {}

    def note(event: Any) -> None:
        phases[event.phase.value] = nitro.cache_stats()["misses"]

    run.on_phase(note)
    run.train()

    assert phases["evaluating"] == phases["done"]


def test_device_metrics_without_a_batch_field_see_the_real_rows(run_with: Any) -> None:
    run = run_with(
        metrics=lambda self, height: {"n": (height.shape[0], None)},
        metrics_residency=lambda self, hook: "device",
    )

    assert run.validate() == {"n": 13.0}


def test_device_metrics_of_a_batch_wider_than_the_program(
    plane: Any, make_run: Any, points: Any
) -> None:
    class Measured(plane):
        def metrics(self, height: Any, *, y: Any) -> Any:
            return {"n": (y.size, None), "mae": (abs(height - y).sum(), y.size)}

        def metrics_residency(self, hook: str) -> Any:
            return "device"

    run = make_run(Measured(), data={"val": [points(4, seed=0)], "test": [points(11, seed=1)]})
    on_host = type("Measured", (Measured,), {"metrics_residency": lambda self, hook: "host"})
    same = make_run(on_host(), data={"val": [points(4, seed=0)], "test": [points(11, seed=1)]})

    assert run.evaluate("test") == pytest.approx(same.evaluate("test"), rel=1e-6)


def test_numpy_in_a_device_metric_is_explained(run_with: Any) -> None:
    run = run_with(
        metrics=lambda self, height, *, y: {"mae": (np.abs(np.asarray(height) - y).sum(), 1)},
        metrics_residency=lambda self, hook: "device",
    )

    with pytest.raises(
        HookError, match=r"`Measured\.metrics` is traced[\s\S]*jax\.numpy`, or return"
    ):
        run.validate()


@pytest.mark.parametrize("hook", ["metrics", "train_metrics"])
def test_unknown_residency_is_refused_at_setup(run_with: Any, hook: str) -> None:
    def residency(self: Any, asked: str) -> str:
        return "gpu" if asked == hook else "device"

    with pytest.raises(
        ConfigError,
        match=rf'metrics_residency\("{hook}"\)` is \'gpu\'[\s\S]*"host": NumPy[\s\S]*"device": compiled',
    ):
        run_with(metrics_residency=residency)


def test_train_metrics_on_the_host_are_refused_at_setup(run_with: Any) -> None:
    with pytest.raises(ConfigError, match=r'"host", and its outputs[\s\S]*compute in `metrics`'):
        run_with(
            train_metrics=lambda self, height, *, y: {"mae": abs(height - y).mean()},
            metrics_residency=lambda self, hook: "host",
        )


def test_metrics_on_the_host_get_numpy_whatever_the_loader_yields(
    plane: Any, make_run: Any, points: Any
) -> None:
    class Measured(plane):
        def metrics(self, height: Any, *, y: Any, name: Any) -> Any:
            assert (type(height), type(y), name) == (np.ndarray, np.ndarray, ["a", "b"])
            return {"n": (y.size, None)}

    batch = {**jax.tree.map(jnp.asarray, points(2, seed=0)), "name": ["a", "b"]}

    assert make_run(Measured(), data={"val": [batch]}).validate() == {"n": 2.0}


@pytest.mark.parametrize("residency", ["host", "device"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_floats_are_added_up_in_float32(
    plane: Any, make_run: Any, points: Any, residency: str, dtype: Any
) -> None:
    class Half(plane):
        def forward(self, model: Any, *, x: Any) -> Any:
            return model(x)[:, 0].astype(dtype)

        def metrics(self, height: Any, *, y: Any) -> Any:
            return {"mean": (abs(height).sum(), (height == height).astype(height.dtype).sum())}

        def metrics_residency(self, hook: str) -> Any:
            return residency if hook == "metrics" else "device"

    arrays = points(4097, seed=1)
    run = make_run(Half(), data={"val": [arrays]}, checkpointer=None)

    height = run.predict({"x": arrays["x"]})
    assert height.dtype == dtype
    right = np.abs(height.astype(np.float64)).mean()
    assert run.validate()["mean"] == pytest.approx(right, rel=1e-5)


def test_concatenated_metric_must_be_reduced(run_with: Any) -> None:
    run = run_with(metrics=lambda self, height, *, y: {"g": {"scores": ("concat", height)}})

    with pytest.raises(
        HookError,
        match=r"`g/scores` of the split `val`, 13 samples, as it is[\s\S]*pop\(\"scores\"\)",
    ):
        run.validate()


def test_finalised_value_on_the_device_is_refused(run_with: Any) -> None:
    run = run_with(finalize_metrics=lambda self, reduced, split: {"auc": jnp.float32(0.5)})

    with pytest.raises(HookError, match=r"JAX array as `auc` for the split `val`[\s\S]*float\("):
        run.validate()


def _logged(run: nitro.Nitro, context: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run.run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line.get("context") == context]


@pytest.mark.parametrize("accum", [1, 2])
def test_train_metrics_are_logged_per_step_as_the_mean_over_micro_batches(
    plane: Any, make_run: Any, accum: int
) -> None:
    class Measured(plane):
        factor: nitro.Device[float] = 2.0

        def train_metrics(self, height: Any, *, y: Any) -> Any:
            squares = ((height - y) ** 2).mean()
            return {"twice": self.factor * squares, "count": {"n": y.shape[0]}}

    run = make_run(Measured(), accum=accum, max_epochs=2).train()

    steps = _logged(run, "train")
    assert len(steps) == 8 // accum
    assert [step["twice"] for step in steps] == pytest.approx([2 * s["loss"] for s in steps])
    assert {step["count/n"] for step in steps} == {5.0}


def test_train_metrics_reach_the_history_as_means_of_the_epoch(plane: Any, make_run: Any) -> None:
    class Measured(plane):
        def train_metrics(self, height: Any, *, y: Any) -> Any:
            return {"mae": abs(height - y).mean(), "up": (y > 0).mean()}

        def metrics(self, height: Any, *, y: Any) -> Any:
            return {"mae": (abs(height - y).sum(), y.size)}

    run = make_run(Measured(), checkpointer=None, max_epochs=2).train()

    steps = _logged(run, "train")
    for column, name in (("train_mae", "mae"), ("up", "up")):
        epochs = [[s[name] for s in steps if s["epoch"] == epoch] for epoch in (1, 2)]
        assert run.history[column] == [pytest.approx(np.mean(epoch)) for epoch in epochs]
    assert run.history["mae"] == [s["mae"] for s in _logged(run, "val")]


def test_means_of_train_metrics_go_on_where_a_run_was_stopped(
    plane: Any, make_run: Any, tmp_path: Any
) -> None:
    class Measured(plane):
        def train_metrics(self, height: Any, *, y: Any) -> Any:
            return {"mae": abs(height - y).mean()}

    def stop(event: Any) -> None:
        if event.phase is nitro.Phase.CHECKPOINTING and event.step == 2:
            event.run.request_stop()

    whole = make_run(Measured(), run_dir=tmp_path / "whole").train()
    first = make_run(Measured(), checkpoint_every_steps=1)
    first.on_phase(stop)
    first.train()
    again = make_run(Measured(), resume="auto").train()

    assert 0 < first.step < 4
    assert again.history["mae"] == whole.history["mae"]


def test_train_metrics_change_no_bit_of_the_losses(
    plane: Any, make_run: Any, tmp_path: Any
) -> None:
    class Measured(plane):
        def train_metrics(self, height: Any, *, y: Any) -> Any:
            return {"mae": abs(height - y).mean()}

    plain = make_run(plane(), run_dir=tmp_path / "plain").train()
    measured = make_run(Measured(), run_dir=tmp_path / "measured").train()

    losses = [[step["loss"] for step in _logged(run, "train")] for run in (plain, measured)]
    assert losses[0] == losses[1]


def test_field_of_train_metrics_alone_goes_to_the_device(
    plane: Any, make_run: Any, points: Any
) -> None:
    class Measured(plane):
        def train_metrics(self, height: Any, *, group: Any) -> Any:
            return {"group": group.max()}

    batch = {**points(5, seed=0), "group": np.arange(5)}
    run = make_run(Measured(), data={"train": [batch]}).train()

    assert [step["group"] for step in _logged(run, "train")] == [4.0]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda h: 1.0, r"returned float[\s\S]*mapping of scalars"),
        (lambda h: {"a": h}, r"float32\(5,\) for the metric `a`[\s\S]*`\.mean\(\)`"),
        (lambda h: {"g": {"a": "x"}}, "returned str for the metric `g/a`"),
        (lambda h: {"a": (h.sum(), 5)}, "returned tuple for the metric `a`"),
        (lambda h: {"loss": h.sum()}, r"metric named `loss`[\s\S]*`train_loss`"),
        (lambda h: {"a": np.asarray(h).sum()}, r"is traced[\s\S]*compute it in `metrics`"),
    ],
)
def test_train_metrics_that_are_no_scalars_are_refused(
    plane: Any, make_run: Any, returned: Any, words: str
) -> None:
    hooks = {"train_metrics": lambda self, height: returned(height)}
    run = make_run(type("Measured", (plane,), hooks)())

    with pytest.raises(HookError, match=rf"`Measured\.train_metrics` {words}|{words}"):
        run.train()


def test_non_finite_metric_is_left_out_of_the_log_and_said_once(plane: Any, make_run: Any) -> None:
    class Measured(plane):
        def train_metrics(self, height: Any, *, y: Any) -> Any:
            return {"ratio": y.sum() / 0.0, "fine": y.sum()}

        def metrics(self, height: Any, *, y: Any) -> Any:
            return {"mae": (abs(height - y).sum(), y.size), "odd": (np.nan, 1)}

    run = make_run(Measured(), checkpointer=None, max_epochs=2)
    with pytest.warns(NitroWarning) as told:
        run.train()

    texts = [str(warning.message).splitlines()[0] for warning in told]
    assert len(texts) == 2
    assert "`ratio` of `train` is" in texts[0]
    assert "step 1" in texts[0]
    assert "`odd` of `val` is nan" in texts[1]
    assert all("ratio" not in step and "fine" in step for step in _logged(run, "train"))
