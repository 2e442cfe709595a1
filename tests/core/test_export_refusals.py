"""What an artifact cannot keep is found in the trace, and told with the user's line."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import Primitive
from jax.interpreters import mlir

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


def _ormqr(h):
    a = jnp.ones((4, 4)) * h.sum()
    return h + jax.lax.linalg.ormqr(a, a[0], a)[0, :2]


# A primitive of a user's own, which the host can run.
_own = Primitive("own")
_own.def_abstract_eval(lambda x: x)
mlir.register_lowering(_own, mlir.lower_fun(_ormqr, multiple_results=False))


def _own_call(h):
    return _own.bind(h)


def _many_calls(h):
    looped, _ = jax.lax.scan(lambda c, _: (_own_call(c), c.sum()), h, None, length=3)
    chosen = jax.lax.cond(h.sum() > 0, _ormqr, lambda h: h, looped)
    return jax.jit(jnp.tanh)(chosen)


_LINE = r" \(test_export_refusals\.py:\d+ in "


@pytest.mark.parametrize("batch_sizes", [(1,), (3, 8)])
@pytest.mark.parametrize(
    ("change", "where"),
    [
        (_ormqr, [r"_ormqr\)"]),
        (_own_call, [r"_own_call\)"]),
        (_many_calls, [r"_own_call\)", r"_ormqr\)"]),
    ],
)
def test_any_primitive_with_an_unstable_target_is_named(export, change, where, batch_sizes):
    calls = ", ".join(rf"`lapack_sormqr_ffi`{_LINE}{line}" for line in where)

    with pytest.raises(ExportError, match=rf"`Traced` calls {calls}, which JAX") as caught:
        export(change, batch_sizes=batch_sizes)

    assert "custom_calls=('lapack_sormqr_ffi',)`" in str(caught.value)


def test_a_target_is_let_through_by_name(export):
    with pytest.raises(AssertionError, match="before anything is written"):
        export(_many_calls, custom_calls=["lapack_sormqr_ffi"])


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h @ jnp.linalg.cholesky(jnp.eye(2) + jnp.outer(h[0], h[0])),
        lambda h: h @ jnp.linalg.qr(jnp.outer(h[0], h[0]))[0],
        lambda h: h @ jnp.linalg.svd(jnp.outer(h[0], h[0]))[0],
        lambda h: h @ jnp.linalg.eigh(jnp.outer(h[0], h[0]))[1],
        lambda h: jnp.linalg.solve(jnp.eye(2) + jnp.outer(h[0], h[0]), h.T).T,
        lambda h: jax.lax.approx_max_k(h, 2)[0],
        lambda h: jax.lax.top_k(h, 2)[0],
        lambda h: h + jax.random.normal(jax.random.key(0, impl="rbg"), (2,)),
    ],
)
def test_calls_that_jax_promises_to_keep_are_let_through(export, change):
    with pytest.raises(AssertionError, match="before anything is written"):
        export(change)


def test_another_side_effect_is_named_with_its_line(export):
    def count(h):
        shape = jax.ShapeDtypeStruct(h.shape, h.dtype)
        return jax.ffi.ffi_call("counter", shape, has_side_effect=True)(h)

    words = rf"has side effects: `ffi_call`{_LINE}count\) \(FFI\)"
    with pytest.raises(ExportError, match=words):
        export(jax.jit(count))


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
