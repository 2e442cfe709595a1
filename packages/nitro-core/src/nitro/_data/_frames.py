"""DataFrames as arrays, told by what they can do: no library of them is imported."""

from __future__ import annotations

from typing import Any

import numpy as np

from nitro.errors import DataError


def is_frame(value: Any) -> bool:
    """Whether a value is a DataFrame, of pandas or of one that behaves alike."""
    return hasattr(value, "columns") and hasattr(value, "to_numpy")


def columns_of(value: Any) -> Any:
    """The columns of a DataFrame by name; anything else as it is.

    Raises:
        DataError: A column that is not named by a string.
    """
    if not is_frame(value):
        return value
    odd = [name for name in value.columns if not isinstance(name, str)]
    if odd:
        raise DataError(
            f"A column of the DataFrame is named {odd[0]!r}.",
            expected="strings: they are the names of batch fields",
            fix='rename it: `df.columns = [...]`, or name the field: `{"x": df.to_numpy()}`',
        )
    return {name: value[name] for name in value.columns}


def plain_column(name: str, value: Any) -> Any:
    """What a field holds, unless it is a table or a column that is no plain array of numbers.

    Raises:
        DataError: A column of objects, of categories, or one that may hold missing values.
    """
    if is_frame(value):
        for column in value.columns:
            plain_column(str(column), value[column])
    elif hasattr(value, "to_numpy") and hasattr(value, "dtype"):
        _check_column(name, value.dtype)
    return value


def _check_column(name: str, dtype: Any) -> None:
    is_plain = isinstance(dtype, np.dtype) and dtype.kind in "biufc"
    # Polars has no NumPy dtypes; its own numbers say so.
    if is_plain or getattr(dtype, "is_numeric", bool)():
        return
    kind = str(dtype)
    if kind == "category":
        fix = f'take the codes: `df["{name}"].cat.codes`'
    elif kind in ("object", "str", "string") or kind.startswith("string"):
        fix = f'make numbers of it, such as `df["{name}"].astype("category").cat.codes`'
    elif kind.startswith("datetime"):
        fix = f'make numbers of it: `(df["{name}"] - df["{name}"].min()).dt.days`'
    else:
        fix = f'fill what is missing: `df["{name}"].fillna(0).to_numpy("float32")`'
    raise DataError(
        f"The column `{name}` has the dtype {kind}.",
        expected="numbers or booleans in plain NumPy dtypes",
        fix=fix,
    )
