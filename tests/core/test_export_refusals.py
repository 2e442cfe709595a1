"""What an artifact cannot keep is found in the trace, and told with the user's line."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nitro
from nitro import ExportSpec
from nitro.errors import ExportError, ProgramError


class Draws(nnx.Module):
    """Draws in every mode, from a stream of its own."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 2, rngs=rngs)
        self.rngs = rngs.fork()

    def __call__(self, x):
        h = self.linear(x)
        return h + jax.random.normal(self.rngs.params(), h.shape)


class Traced(nitro.Experiment):
    """Does with its output whatever a test wants."""

    change: nitro.GraphConst[Any] = None

    def build_data(self):
        return {}

    def build_model(self, rngs: nnx.Rngs):
        return Draws(rngs) if self.change is None else nnx.Linear(4, 2, rngs=rngs)

    def loss(self, y, *, label):
        return y.mean()

    def forward(self, model, *, x):
        return model(x) if self.change is None else self.change(model(x))

    def export_inputs(self):
        return [ExportSpec("x", "float32", (1, 4))]

    def export_outputs(self):
        return [ExportSpec("y")]


class Nothing:
    name = "nothing"

    def write(self, program, path, **options):
        raise AssertionError("it must be refused before anything is written")


@pytest.fixture
def export(tmp_path):
    def run(change: Any, **options: Any) -> None:
        handle = nitro.Nitro(Traced(change=change), data={}, run_dir=tmp_path / "run")
        nitro.export_model(handle, Nothing(), dir=tmp_path / "out", name="m", **options)

    return run


def _callback(h):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(h.shape, h.dtype), h)


def _inner_callback(h):
    return jax.lax.fori_loop(0, 3, lambda _, c: _callback(c), h)


def _print(h):
    jax.debug.print("h {}", h)
    return h


@pytest.mark.parametrize("dynamic_batch", [False, True])
@pytest.mark.parametrize(
    ("change", "where"),
    [
        (_callback, r"`pure_callback` \(test_export_refusals\.py:\d+ in _callback\)"),
        (_inner_callback, r"`pure_callback` \(test_export_refusals\.py:\d+ in _callback\)"),
        (_print, r"`debug_\w+` \(test_export_refusals\.py:\d+ in _print\)"),
    ],
)
def test_a_call_into_python_is_named_with_its_line(export, change, where, dynamic_batch):
    with pytest.raises(ExportError, match=rf"would call Python: {where}[\s\S]*pure JAX"):
        export(change, dynamic_batch=dynamic_batch)


def _foreign(h):
    return jax.ffi.ffi_call("my_kernel", jax.ShapeDtypeStruct(h.shape, h.dtype))(h)


def test_an_unstable_call_is_named_with_its_line(export):
    words = r"calls `my_kernel` \(test_export_refusals\.py:\d+ in _foreign\)[\s\S]*custom_calls="
    with pytest.raises(ExportError, match=words):
        export(_foreign)


def test_a_large_constant_is_named_with_what_it_came_through(export):
    table = np.zeros((400_000, 2), np.float32)
    words = r"exported program of `Traced` would hold 3.* of constants[\s\S]*float32\(400000, 2\)"
    with pytest.raises(ProgramError, match=words):
        export(lambda h: h + jnp.asarray(table)[:1])


def test_a_draw_in_evaluation_mode_is_named_with_its_line(export):
    words = (
        r"draws random numbers in evaluation mode: it reads `rngs\..*`.*"
        r"\(test_export_refusals\.py:\d+ in Draws\.__call__\)"
    )
    with pytest.raises(ExportError, match=words):
        export(None)


def test_drawing_from_a_fixed_key_is_no_draw(export):
    with pytest.raises(AssertionError, match="before anything is written"):
        export(lambda h: h + jax.random.normal(jax.random.key(0), h.shape[1:]))
