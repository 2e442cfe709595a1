from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from nitro import ExportSpec
from nitro.errors import ExportError


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("uint8", "uint8"),
        (np.float32, "float32"),
        (float, "float64"),
        (np.dtype("bool"), "bool"),
        ("bfloat16", "bfloat16"),
        (jnp.bfloat16, "bfloat16"),
        (np.dtype(ml_dtypes.float8_e5m2), "float8_e5m2"),
    ],
)
def test_dtype_is_known_by_one_name(dtype: Any, name: str) -> None:
    spec = ExportSpec("x", dtype, (1, 2))

    assert spec.dtype == name
    assert spec.numpy_dtype.name == name


def test_batch_size_goes_to_the_one_based_batch_axis() -> None:
    assert ExportSpec("x", "uint8", (1, 64)).sizes(32) == (32, 64)
    assert ExportSpec("x", "uint8", [6, np.int64(1), 4], batch_axis=2).sizes(8) == (6, 8, 4)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (("",), {}, r"the name ''[\s\S]*on the wire"),
        ((5,), {}, "the name 5"),
        (("x", "complex64"), {}, r"`x` has dtype 'complex64'[\s\S]*uint8, float32 or bfloat16"),
        (("x", "flaot32"), {}, "`x` has dtype 'flaot32'"),
        (("x", "uint8", 64), {}, r"`x` has the shape 64[\s\S]*\(1, 64\)"),
        (("x", "uint8", (0, 64)), {}, r"`x` has the size 0 in its shape[\s\S]*placeholder"),
        (("x", "uint8", (-1, 64)), {}, "the size -1"),
        (("x", "uint8", (1, None)), {}, "the size None"),
        (("x", "uint8", (True, 4)), {}, "the size True"),
        (("x",), {"batch_axis": 0}, r"`x` has batch_axis=0[\s\S]*1-based[\s\S]*batch_axis=1"),
        (("x",), {"batch_axis": "n"}, "batch_axis='n'"),
        (("x", "uint8", (4, 4)), {"batch_axis": 3}, r"batch_axis=3.*2 axes[\s\S]*from 1 to 2"),
        (("x", "uint8", ()), {}, r"has 0 axes[\s\S]*at least the batch axis"),
        (("x", "uint8", (1, "max")), {}, r"the size 'max'.*`max` is a function"),
        (("x", "uint8", (1, "mod(mod, 2)")), {}, "`mod` is a function"),
        (("x", "uint8", (1, 4)), {"axes": ("n",)}, r"names 1 axes[\s\S]*one name for each axis"),
        (("x",), {"axes": ("n", "n")}, "names an axis twice"),
    ],
)
def test_spec_that_cannot_be_promised_is_refused(arguments: Any, options: Any, words: str) -> None:
    with pytest.raises(ExportError, match=words):
        ExportSpec(*arguments, **options)
