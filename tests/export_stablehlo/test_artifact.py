"""Portable artifacts: the target version, the entry, and what is left out."""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from nitro.errors import BundleError, ConfigError, ExportError
from nitro_export_stablehlo._artifact import check_version, make_artifact, read_signature, read_text


def _export(fn, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    return jax.export.export(jax.jit(fn, keep_unused=True), platforms=["cpu"])(*arguments)


def test_the_header_names_the_version_that_it_was_written_for():
    data, _ = make_artifact(_export(lambda x: (x + 1,), (2,)), "1.13.0")

    assert data.startswith(b"ML\xefR\rStableHLO_v1.13.0")


def test_unused_arguments_are_in_the_signature():
    data, signature = make_artifact(_export(lambda x, _: (x @ x,), (2, 2), (3,)), "1.13.0")

    assert signature.arguments == ("tensor<2x2xf32>", "tensor<3xf32>")
    assert signature.results == ("tensor<2x2xf32>",)
    assert read_signature(data, file="m") == signature


def test_no_source_path_is_in_the_bytes():
    # The default lowering writes paths; here even those are taken out.
    exported = _export(lambda x: (jnp.sin(x),), (2,))

    data, _ = make_artifact(exported, "1.13.0")

    assert __file__.encode() not in data
    assert b"loc(" not in read_text(data, file="m").encode()


@pytest.mark.parametrize(
    "fn",
    [
        jnp.linalg.cholesky,
        jnp.linalg.svd,
        jnp.linalg.eigh,
        lambda x: jnp.linalg.solve(x, x),
        lambda x: jax.lax.top_k(x, 2),
        lambda x: (jax.scipy.special.erf(x), jnp.sort(x), jnp.fft.rfft(x).real),
        lambda x: jax.lax.scan(lambda c, r: (c + r, c), x[0], x),
        lambda x: jax.random.normal(jax.random.key(0), x.shape) + x,
    ],
    ids=["cholesky", "svd", "eigh", "solve", "top_k", "erf", "scan", "threefry"],
)
def test_these_operations_fit_the_default_version(fn):
    data, written = make_artifact(_export(fn, (4, 4)), "1.13.0")

    assert written.arguments == ("tensor<4x4xf32>",)
    assert read_signature(data, file="m").arguments == written.arguments


def test_custom_calls_are_listed():
    _, signature = make_artifact(_export(jnp.linalg.cholesky, (3, 3)), "1.13.0")

    assert signature.custom_calls == ("lapack_spotrf_ffi",)


def test_an_operation_that_the_version_lacks_is_named():
    exported = _export(jnp.tan, (2,))

    with pytest.raises(ExportError, match=r"StableHLO 1\.0\.0: .*`tan`[\s\S]*newer"):
        make_artifact(exported, "1.0.0")


@pytest.mark.parametrize("version", ["99.0.0", "0.1.0", "1.13", "x", ""])
def test_a_version_that_cannot_be_written_is_refused(version):
    with pytest.raises(ConfigError, match=r"`stablehlo_version` is[\s\S]*which this JAX can write"):
        check_version(version)


@pytest.mark.parametrize("cut", [0, 3, 4, 5, 23, 30, 200, -1])
def test_what_is_cut_off_is_refused(cut):
    data, _ = make_artifact(_export(lambda x: (x + 1,), (2,)), "1.13.0")

    with pytest.raises(BundleError, match=r"`m\.mlir` (starts|is damaged)"):
        read_signature(data[:cut], file="m.mlir")


def test_text_is_no_artifact():
    with pytest.raises(BundleError, match=r"`m\.mlir` starts with the bytes b'modu'"):
        read_signature(b"module {}", file="m.mlir")
