"""What a failing open size is answered with: a promise that was tried, and that works."""

from __future__ import annotations

import re
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
from nitro.export import ExportProgram

ROWS = 32
"""How many positions the table has."""


class Keep:
    """A backend that keeps the program."""

    name = "keep"

    def write(self, program: ExportProgram, path: Path) -> None:
        self.program = program


class Table(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (ROWS, 4)))
        self.dense = nnx.Linear(16, 2, rngs=rngs)


class Open(nitro.Experiment):
    call: nitro.GraphConst[Callable[..., Any]]
    shape: nitro.GraphConst[tuple[Any, ...]] = (1, "t", 4)

    def build_data(self):
        return {}

    def build_model(self, rngs):
        return Table(rngs)

    def loss(self, out, *, y):
        return out.mean()

    def forward(self, model, *, x):
        return self.call(model, x)

    def export_inputs(self):
        return [ExportSpec("x", "float32", self.shape)]

    def export_outputs(self):
        return [ExportSpec("out")]


def _cut(model, x):
    return model.dense(x[:, :4].reshape(x.shape[0], 16))


def _slice(model, x):
    return x + model.table[: x.shape[1]]


def _look_up(model, x):
    return x + jnp.take(model.table[...], jnp.arange(x.shape[1]), axis=0)


def _top(model, x):
    return jax.lax.top_k(x[..., 0], 3)[0]


def _window(model, x):
    return jax.lax.top_k((x + model.table[: x.shape[1]])[..., 0], 3)[0]


def _pair_up(model, x):
    return x.reshape(x.shape[0], -1, 2, 4).sum(2)


def _export(folder: Path, call: Callable[..., Any], **options: Any) -> ExportProgram:
    shape = options.pop("shape", (1, "t", 4))
    run = nitro.Nitro(Open(call=call, shape=shape), data={}, run_dir=folder / "run")
    keep: Any = Keep()
    nitro.export_model(run, keep, dir=folder / "out", name="m", verify=False, **options)
    return keep.program


def _proposed(error: ExportError) -> tuple[str, ...]:
    found = re.search(r"constraints=\((.+?),?\)`", error.fix)
    assert found, error.fix
    return tuple(re.findall(r'"(.+?)"', found[1]))


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (_cut, ("t >= 4",)),
        (_slice, ("t <= 32",)),
        (_look_up, ("t <= 32",)),
        (_top, ("t >= 3",)),
        (_window, ("t >= 3", "t <= 32")),
    ],
)
def test_the_constraint_that_is_proposed_is_the_weakest_and_works(tmp_path, call, wanted):
    with pytest.raises(ExportError) as refusal:
        _export(tmp_path / "open", call)
    proposed = _proposed(refusal.value)
    program = _export(tmp_path / "kept", call, constraints=proposed)

    assert proposed == wanted
    model_table = np.asarray(program.weights["table"], np.float64)
    x = np.random.default_rng(0).normal(size=(1, 7, 4)).astype(np.float32)
    weights = [program.weights[name] for name in program.weight_names]
    (got,) = program.exported(1).call(x, *weights)
    if call in (_slice, _look_up):
        assert np.allclose(got, x + model_table[:7], atol=1e-6)


def test_a_table_that_ends_before_a_promised_size_is_refused_and_not_filled_with_nan(tmp_path):
    words = r"`out` is not finite where t = \d+[\s\S]*constraints=\(\"t <= 32\",\)"
    with pytest.raises(ExportError, match=words):
        _export(tmp_path, _look_up)


def test_every_promise_so_far_is_part_of_the_proposed_one(tmp_path):
    with pytest.raises(ExportError) as refusal:
        _export(tmp_path / "open", _window, constraints=("t >= 5",))

    assert _proposed(refusal.value) == ("t >= 5", "t <= 32")
    _export(tmp_path / "kept", _window, constraints=_proposed(refusal.value))


def test_an_expression_is_proposed_only_where_it_was_tried(tmp_path):
    with pytest.raises(ExportError, match=r'write "2\*k" instead of "t"'):
        _export(tmp_path / "open", _pair_up)

    _export(tmp_path / "kept", _pair_up, shape=(1, "2*k", 4))


def test_where_no_promise_helps_none_is_proposed(tmp_path):
    def count(model, x):
        total = jnp.zeros((x.shape[0], 4))
        for i in range(x.shape[1]):
            total = total + x[:, i]
        return total

    with pytest.raises(ExportError) as refusal:
        _export(tmp_path, count)

    assert "constraints=" not in refusal.value.fix
    assert "fix the size" in refusal.value.fix


def test_outputs_that_are_infinite_at_small_sizes_too_are_no_reason_to_refuse(tmp_path):
    def hide(model, x):
        return jnp.where(jnp.arange(4) == 0, -jnp.inf, x)

    assert _export(tmp_path, hide).outputs[0].shape == (1, "t", 4)


def test_rows_are_tried_in_large_numbers_where_a_table_is_read(tmp_path):
    def by_row(model, x):
        return x + jnp.take(model.table[...], jnp.arange(x.shape[0]), axis=0)[:, None]

    with pytest.raises(ExportError, match=r'constraints=\("b <= 32",\)'):
        _export(tmp_path, by_row, shape=(1, 3, 4), dynamic_batch=True)
