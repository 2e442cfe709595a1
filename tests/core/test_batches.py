from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import nitro
from nitro.errors import DataError, HookError


@pytest.fixture
def run_on(plane: Any, make_run: Any, points: Any) -> Any:
    """Makes a run of a plane on the given batches, with hooks replaced."""

    def make(train: Any = None, val: Any = None, data: Any = None, **hooks: Any) -> nitro.Nitro:
        experiment = type("Changed", (plane,), hooks)()
        if data is not None:
            return make_run(experiment, data=data)
        data = {"train": [points(5, seed=0)] * 2 if train is None else train}
        return make_run(experiment, data=data if val is None else {**data, "val": val})

    return make


def test_undeclared_fields_may_be_anything(run_on: Any, points: Any) -> None:
    batch = {**points(5, seed=0), "id": list("abcde"), "file": "a.csv", "n": 5}

    run = run_on([batch, batch], [batch]).train()

    assert run.step == 2


def test_catch_all_gets_the_whole_batch(run_on: Any, points: Any) -> None:
    def metrics(self: Any, height: Any, **batch: Any) -> Any:
        return {"fields": (len(batch), None)}

    batch = {**points(5, seed=0), "file": "a.csv"}

    assert run_on(None, [batch], metrics=metrics).validate() == {"fields": 3.0}


def test_keyword_with_a_default_is_an_optional_field(run_on: Any, points: Any) -> None:
    def loss(self: Any, height: Any, *, y: Any, weight: Any = 1.0) -> Any:
        return (weight * (height - y) ** 2).mean()

    batch = points(5, seed=0)
    plain = run_on(None, [batch], loss=loss).validate()["val_loss"]
    tripled = [{**batch, "weight": np.full(5, 3, np.float32)}]

    assert run_on(None, tripled, loss=loss).validate()["val_loss"] == pytest.approx(3 * plain)


@pytest.mark.parametrize("hook", ["forward", "loss", "metrics"])
def test_field_that_a_hook_wants_and_no_batch_has_is_refused_at_setup(
    run_on: Any, points: Any, hook: str
) -> None:
    hooks = {
        "forward": lambda self, model, *, z: model(z),
        "loss": lambda self, out, *, z: out.mean(),
        "metrics": lambda self, out, *, z: {},
    }

    with pytest.raises(
        DataError,
        match=rf"`Changed\.{hook}` wants the batch field `z`, but the first batch of `\w+` has `x`, `y`"
        r"[\s\S]*fix: add `z` to the batch, or give the keyword a default",
    ):
        run_on(val=[points(5, seed=0)], **{hook: hooks[hook]})


def test_split_without_labels_predicts_and_is_refused_once_it_is_evaluated(
    run_on: Any, points: Any
) -> None:
    labelled = points(5, seed=0)
    test = [{"x": labelled["x"]}]
    run = run_on(data={"train": [labelled], "val": [labelled], "test": test}).train()
    kernel, bias = np.asarray(run.model.kernel[...]), np.asarray(run.model.bias[...])
    plane = labelled["x"].astype(np.float64) @ kernel + bias

    np.testing.assert_allclose(run.predict({"x": labelled["x"]}), plane[:, 0], rtol=1e-5)
    with pytest.raises(
        DataError, match=r"loss` wants the batch field `y`, but the first .* `test`"
    ):
        run.evaluate("test")


def test_field_that_only_metrics_names_need_not_be_in_the_training_split(
    run_on: Any, points: Any
) -> None:
    def metrics(self: Any, height: Any, *, id: Any) -> Any:  # noqa: A002 - what users call it
        return {"val_loss": (len(id), None)}

    batch = points(5, seed=0)
    run = run_on([batch], [{**batch, "id": [f"img{i}" for i in range(5)]}], metrics=metrics)

    assert run.train().history.rows[-1]["val_loss"] == 5
    with pytest.raises(DataError, match="`id`, but the first batch of `train` has `x`, `y`"):
        run.evaluate("train")


@pytest.mark.parametrize("split", ["val", "test"])
def test_split_without_what_its_use_needs_is_refused_at_setup(
    run_on: Any, points: Any, split: str
) -> None:
    batch = points(5, seed=0)
    lacking = {"val": {"x": batch["x"]}, "test": {"y": batch["y"]}}

    with pytest.raises(DataError, match=f"but the first batch of `{split}` has"):
        run_on(data={"train": [batch], "val": [batch], split: [lacking[split]]})


def test_field_close_to_one_of_the_batch_is_told_which(run_on: Any) -> None:
    with pytest.raises(DataError, match="if `y` is meant, rename the keyword; else add `yy`"):
        run_on(loss=lambda self, out, *, yy: out.mean())


def test_flag_of_the_mode_is_told_that_nitro_sets_it(run_on: Any) -> None:
    with pytest.raises(DataError, match="leave `train` out: Nitro puts the model into training"):
        run_on(forward=lambda self, model, *, x, train: model(x))


@pytest.mark.parametrize("name", ["valid", "validation", "Dev"])
def test_split_that_is_meant_for_validation_warns(run_on: Any, points: Any, name: str) -> None:
    batches = [points(5, seed=0)]

    with pytest.warns(UserWarning, match=rf"beside `{name}`: no epoch[\s\S]*`{name}` to `val`"):
        run_on(data={"train": batches, name: batches})


def test_other_splits_without_validation_do_not_warn(run_on: Any, points: Any) -> None:
    batches = [points(5, seed=0)]

    run = run_on(data={"train": batches, "test": batches}).train()

    assert run.step == 1


def test_keyword_close_to_a_field_warns_where_the_run_is_made(run_on: Any) -> None:
    def loss(self: Any, height: Any, *, y: Any, xx: Any = None) -> Any:
        return ((height - y) ** 2).mean()

    with pytest.warns(UserWarning, match="keyword `xx`, which matches no .*did you mean `x`"):
        run_on(loss=loss)


def test_warning_points_to_the_line_that_made_the_handle(plane: Any, tmp_path: Any) -> None:
    class Typo(plane):
        def loss(self, height: Any, *, y: Any, xx: Any = None) -> Any:
            return ((height - y) ** 2).mean()

    source = compile("nitro.Nitro(Typo(), run_dir=folder)", "user.py", "exec")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(source, {"nitro": nitro, "Typo": Typo, "folder": tmp_path})

    assert [warning.filename for warning in caught] == ["user.py"]


@pytest.mark.parametrize(
    ("field", "words"),
    [
        (3.0, r"`x` in the first batch of `train` holds float, not an array[\s\S]*Device field"),
        (["a", "b"], "`x` in .* holds str, not an array"),
        (None, "`x` in .* holds NoneType, not an array"),
        (np.array(["a", "b"]), r"`x` in .* has dtype <U1[\s\S]*leave it undeclared"),
        (np.array([None, 1]), "`x` in .* has dtype object"),
        (np.array(["2020-01-01"], "M8[D]"), "`x` in .* has dtype datetime64"),
    ],
)
def test_declared_field_that_is_no_numeric_array_is_refused(
    run_on: Any, points: Any, field: Any, words: str
) -> None:
    with pytest.raises(DataError, match=words):
        run_on([{**points(5, seed=0), "x": field}])


def test_fields_of_different_lengths_are_listed_with_their_shapes(run_on: Any, points: Any) -> None:
    batch = {**points(5, seed=0), "y": np.zeros(4, np.float32)}

    with pytest.raises(DataError, match=r"disagree.*`x` \(5, 4\), `y` \(4,\)"):
        run_on([batch])


def test_hooks_that_name_no_field_are_refused(run_on: Any) -> None:
    with pytest.raises(DataError, match=r"No hook names a batch field.*\['x', 'y'\]"):
        run_on(forward=lambda self, model: 0.0, loss=lambda self, out: out)


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        (
            lambda p: [p(5, seed=0), p(4, seed=0)],
            r"batch 2 of `train` has 4[\s\S]*5, [\s\S]*drop_last",
        ),
        (lambda p: [p(5, seed=0), {"x": p(5, seed=0)["x"]}], r"batch 2 of `train`.*`y` is gone"),
        (lambda p: [p(5, seed=0), np.zeros(3)], r"batch 2 of `train` Nitro found ndarray"),
    ],
)
def test_training_batch_unlike_the_first_is_refused(
    run_on: Any, points: Any, batches: Any, words: str
) -> None:
    # The sizes of a list are read at setup, all else when a batch is drawn.
    with pytest.raises(DataError, match=words):
        run_on(batches(points)).train()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (([], []), r"returned tuple[\s\S]*mapping of splits"),
        ({1: []}, "split is named 1"),
        ({"train": iter([])}, r"`train` is list_iterator.*no length[\s\S]*__len__"),
        ({"train": 5}, "`train` is int"),
        ({"train": []}, "`train` has no batches"),
        ({"train": [5]}, r"the first batch of `train` Nitro found int[\s\S]*mapping"),
        ({"train": [(1, 2)]}, r"found tuple[\s\S]*fix: name its parts"),
        (
            {"train": {"x": np.zeros(3), "y": np.zeros(3)}},
            r"`train` is a mapping: `x`, `y`[\s\S]*nitro\.ArrayLoader\(arrays, batch_size=32\)",
        ),
    ],
)
def test_data_that_is_no_mapping_of_splits_is_refused(
    plane: Any, make_run: Any, data: Any, words: str
) -> None:
    class Wrong(plane):
        def build_data(self) -> Any:
            return data

    with pytest.raises(DataError, match=words):
        make_run(Wrong())


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda self, out, *, y: (out - y) ** 2, r"returned float32\(5,\)[\s\S]*\.mean\(\)"),
        (lambda self, out, *, y: y.astype(int).sum(), r"returned int32\(\)"),
        (lambda self, out, *, y: 1.0, r"returned float\.[\s\S]*scalar float array"),
    ],
)
def test_loss_that_is_no_scalar_float_is_refused(run_on: Any, loss: Any, words: str) -> None:
    with pytest.raises(HookError, match=rf"`Changed\.loss` {words}"):
        run_on(loss=loss).train()


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (lambda out: (out, out), r'tuple[\s\S]*"logits"'),
        (lambda out: {"a": {"b": [out]}}, "list"),
        (lambda out: {1: out}, r"key 1[\s\S]*string keys"),
        (lambda out: {}, r"no arrays"),
    ],
)
def test_forward_that_returns_no_named_arrays_is_refused(
    run_on: Any, points: Any, outputs: Any, words: str
) -> None:
    run = run_on(forward=lambda self, model, *, x: outputs(model(x)))

    with pytest.raises(HookError, match=rf"`Changed\.forward` returned .*{words}"):
        run.predict(points(3, seed=0))


def test_arrays_of_double_precision_share_the_program_of_single(run_on: Any, points: Any) -> None:
    batch = points(5, seed=0)
    run = run_on([{name: a.astype(np.float64) for name, a in batch.items()}], [batch]).train()
    before = nitro.cache_stats()["misses"]

    run.predict(batch)
    run.predict({"x": batch["x"].astype(np.float64)})

    assert nitro.cache_stats()["misses"] == before
