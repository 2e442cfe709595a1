"""Symbolic sizes: what works for every size is exported, what does not is explained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nitro
from nitro import ExportSpec
from nitro.errors import ExportError
from nitro.export import ExportProgram, evaluate_size, size_symbols, solve_sizes

Change = Callable[[Any], Any]


class Keep:
    """A backend that keeps the program."""

    name = "keep"

    def write(self, program: ExportProgram, path: Path) -> None:
        self.program = program


def _plain(h):
    return h


class Sequences(nitro.Experiment):
    """A dense layer along sequences, and then whatever a test wants."""

    change: nitro.GraphConst[Change] = _plain
    time: str = "time"

    def build_data(self):
        return {}

    def build_model(self, rngs: nnx.Rngs):
        return nnx.Linear(8, 4, rngs=rngs)

    def loss(self, outputs, *, y):
        return outputs["h"].mean()

    def forward(self, model, *, x):
        return {"h": self.change(model(x))}

    def export_inputs(self):
        return [ExportSpec("x", "float32", (1, self.time, 8))]

    def export_outputs(self):
        return [ExportSpec("h")]


def _export(tmp_path: Path, change: Change = _plain, time: str = "time", **options: Any):
    run = nitro.Nitro(Sequences(change=change, time=time), data={}, run_dir=tmp_path / "run")
    keep = Keep()
    options = {"dynamic_batch": True, "verify": False, **options}
    nitro.export_model(run, keep, dir=tmp_path / "out", name="m", **options)
    return run, keep.program


def _half(h):
    return h[:, : h.shape[1] // 2]


@pytest.mark.filterwarnings("ignore:`predict` got 3 new shapes")
@pytest.mark.parametrize("change", [_plain, _half, lambda h: jnp.repeat(h, 2, axis=1)])
def test_batch_and_time_symbolic_at_once_give_what_predict_gives(tmp_path, change):
    run, program = _export(tmp_path, change)
    exported = program.exported(None)
    weights = [program.weights[name] for name in program.weight_names]

    for rows, time in ((1, 1), (3, 5), (8, 17)):
        x = np.random.default_rng(rows).normal(size=(rows, time, 8)).astype(np.float32)
        (got,) = exported.call(x, *weights)
        np.testing.assert_allclose(got, run.predict({"x": x})["h"], rtol=1e-5, atol=1e-6)


def test_one_scope_holds_batch_time_and_constraints(tmp_path):
    _, program = _export(tmp_path, batch_sizes=(4,), constraints=("b >= 2", "time <= 40"))

    assert program.symbols == ("time",)
    assert str(program.exported(None).in_avals[0].shape) == "(b, time, 8)"
    assert program.exported(4, sizes={"time": 6}).in_avals[0].shape == (4, 6, 8)
    assert str(program.exported(4).in_avals[0].shape) == "(4, time, 8)"
    # One that a caller could not keep is none to try.
    assert program.golden.inputs["x"].shape[0] >= 2


def test_expressions_are_solved_and_evaluated(tmp_path):
    _, program = _export(tmp_path, lambda h: h.reshape(h.shape[0], -1, 2, 4), time="2*k")

    assert program.symbols == ("k",)
    assert program.outputs[0].shape == (1, "k", 2, 4)
    assert program.outputs[0].fixed_sizes(3, {"k": 5}) == (3, 5, 2, 4)


def test_sizes_may_have_names_of_any_language(tmp_path):
    # The second holds the batch's name; it must stay whole where the batch gets a number.
    for name in ("größe", "éb"):
        _, program = _export(tmp_path / name, time=name, batch_sizes=(2,))

        assert program.symbols == (name,)
        assert str(program.exported(2).in_avals[0].shape) == f"(2, {name}, 8)"


def test_the_batch_may_have_a_name_of_its_own(tmp_path):
    class Named(Sequences):
        def export_inputs(self):
            return [ExportSpec("x", "float32", ("rows", 3, 8))]

    keep = Keep()
    run = nitro.Nitro(Named(), data={}, run_dir=tmp_path / "run")
    options: dict[str, Any] = {
        "batch_sizes": 3,
        "dynamic_batch": True,
        "constraints": "rows >= 3",
        "verify": False,
    }
    nitro.export_model(run, keep, dir=tmp_path / "out", name="m", **options)

    assert str(keep.program.exported(None).in_avals[0].shape) == "(rows, 3, 8)"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda h: h.reshape(h.shape[0], -1, 2, 4),
            r"test_export_shapes\.py:\d+ in <lambda>\).*Cannot divide evenly"
            r'[\s\S]*write "2\*k" instead of "time"',
        ),
        (
            lambda h: h + 1 if h.shape[1] > 5 else h,
            r'time. > .5. is inconclusive[\s\S]*constraints=\("time >= 6",\)',
        ),
        (
            # Exports, and would fail when it is called with an odd size.
            lambda h: h.reshape(h.shape[0], h.shape[1] // 2, 2, 4),
            r"fails where time = 1, b = 1 \(test_export_shapes\.py:\d+ in <lambda>\)"
            r'[\s\S]*only multiples of 2[\s\S]*"2\*k"[\s\S]*mod\(time, 2\) == 0',
        ),
        (
            lambda h: h.reshape(h.shape[0] // 2, -1, 4).repeat(2, 0)[:, ::2],
            r'constraints=\("mod\(b, 2\) == 0",\)',
        ),
        (
            lambda h: h + 1 if h.shape[0] == 1 else h,
            r"symbolic program differs by 1[\s\S]*test no size with `==`",
        ),
    ],
)
def test_what_does_not_work_for_every_size_is_refused_with_its_line_and_a_fix(
    tmp_path, change, words
):
    with pytest.raises(ExportError, match=words):
        _export(tmp_path, change)


def test_the_fixes_that_it_suggests_work(tmp_path):
    pairs = lambda h: h.reshape(h.shape[0], h.shape[1] // 2, 2, 4)  # noqa: E731
    longer = lambda h: h + 1 if h.shape[1] > 5 else h  # noqa: E731

    _export(tmp_path / "a", pairs, time="2*k")
    _export(tmp_path / "b", pairs, constraints=("mod(time, 2) == 0",))
    _export(tmp_path / "c", longer, constraints=("time >= 6",))


def test_sizes_that_no_caller_can_keep_are_refused(tmp_path):
    with pytest.raises(ExportError, match=r"`t >= 2` speaks of `t`[\s\S]*`b`, `time`"):
        _export(tmp_path, constraints=("t >= 2",))
    with pytest.raises(ExportError, match="No sizes up to 4096 keep"):
        _export(tmp_path, constraints=("time <= 4", "time >= 6"))


def test_the_derivative_that_is_promised_is_tried(tmp_path):
    def loop(h):
        return jax.lax.while_loop(lambda c: c.sum() < 3, lambda c: c + 1, h)

    with pytest.raises(ExportError, match=r"cannot be differentiated[\s\S]*`lax\.scan`"):
        _export(tmp_path, loop, vjp_order=1)


@pytest.mark.parametrize(
    ("size", "values", "number"),
    [
        (7, {}, 7),
        ("t", {"t": 3}, 3),
        ("2*t + 1", {"t": 3}, 7),
        ("floordiv(t, 2)", {"t": 7}, 3),
        ("mod(t, 4)", {"t": 7}, 3),
        ("max(t, 9) - min(t, 2)", {"t": 7}, 7),
        ("t^2", {"t": 4}, 16),
        ("-t + 10", {"t": 4}, 6),
    ],
)
def test_a_size_is_worked_out_as_jax_does(size, values, number):
    assert evaluate_size(size, values) == number
    if values:
        (symbolic,) = jax.export.symbolic_shape(str(size))
        assert evaluate_size(str(symbolic), values) == number


@pytest.mark.parametrize(
    "text", ["", "t +", "__import__('os')", "t.real", "t[0]", "f(t, 1)", "t**t", "9**9**9", "1.5"]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="it"):
        size_symbols(text)
    if text:
        with pytest.raises(ExportError, match="a name or an expression"):
            ExportSpec("x", "int8", (1, text))


@pytest.mark.parametrize(
    ("sizes", "constraints", "values", "problem"),
    [
        ([("2*k", 8), ("k + 1", 5)], [], {"k": 4}, ""),
        ([("2*k", 7)], [], {}, '"2*k" cannot be 7'),
        ([("k - 3", 2), ("k", 4)], [], {"k": 5}, '"k" is 4, and 5 where k = 5'),
        ([("k + 1", 1)], [], {"k": 0}, "`k` would be 0"),
        ([("b", 1)], ["b >= 2"], {"b": 1}, "b = 1 breaks the constraint `b >= 2`"),
        ([("b", 4), ("t", 8)], ["t == 2*b"], {"b": 4, "t": 8}, ""),
    ],
)
def test_sizes_are_solved_from_shapes(sizes, constraints, values, problem):
    assert solve_sizes(sizes, constraints) == (values, problem)
