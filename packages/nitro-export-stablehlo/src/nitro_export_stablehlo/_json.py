"""A JSON reader that refuses what JSON leaves open."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from nitro.errors import BundleError

_MAX_SIZE = 2**63 - 1


def read_json(data: bytes, *, file: str) -> Any:
    """Reads JSON strictly: UTF-8, no duplicate keys, no NaN, bounded nesting.

    Raises:
        BundleError: The text breaks one of these rules; names the file.
    """
    try:
        return json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise BundleError(f"`{file}` does not parse: {error}.", expected="JSON") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def is_size(value: object, *, least: int = 0) -> bool:
    """Whether a value is an integer from `least` to the largest 64-bit size."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MAX_SIZE
