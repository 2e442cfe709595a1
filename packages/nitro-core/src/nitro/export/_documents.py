"""Reads the JSON documents of artifacts, and refuses what is wrong by file and key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from nitro.errors import BundleError

_MAX_SIZE = 2**63 - 1
_MAX_SHOWN = 80

_KINDS: Mapping[type[Any], str] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


class Document:
    """A JSON object whose values are asked for by key and kind.

    Example:
        >>> document = Document({"sizes": [1, "x"]}, file="index.json")
        >>> document.read_list("sizes", int)
        Traceback (most recent call last):
        nitro.errors.BundleError: In `index.json`, `sizes[1]` is 'x'.
          expected: an integer
          fix: copy the artifact again, whole; if it is whole, export the model again
    """

    def __init__(self, values: Any, *, file: str, path: str = "") -> None:
        """Takes a value of a document.

        Args:
            values: What the JSON reader gave.
            file: The document's name in messages.
            path: The key that `values` stands under, such as `"inputs[0]"`.

        Raises:
            BundleError: `values` is no object.
        """
        self.file = file
        self.path = path
        if not isinstance(values, dict):
            self.refuse("", repr(values), _KINDS[dict])
        self.values: dict[str, Any] = values

    def read(self, key: str, kind: type[Any], default: Any = ...) -> Any:
        """The value of a key, of one kind; `default` where the key is missing.

        Raises:
            BundleError: No such key and no default, or a value of another kind.
        """
        if key not in self.values:
            if default is not ...:
                return default
            self.refuse(key, "missing", _KINDS[kind])
        value = self.values[key]
        if not _is_kind(value, kind):
            self.refuse(key, repr(value), _KINDS[kind])
        return value

    def read_list(self, key: str, kind: type[Any], default: Any = ...) -> tuple[Any, ...]:
        """The list under a key, all elements of one kind.

        Raises:
            BundleError: No such list, or an element of another kind.
        """
        values = self.read(key, list, default)
        for i, value in enumerate(values):
            if not _is_kind(value, kind):
                self.refuse(f"{key}[{i}]", repr(value), _KINDS[kind])
        return tuple(values)

    def read_strings(self, key: str) -> dict[str, str]:
        """The object under a key, all of whose values are strings.

        Raises:
            BundleError: No such object, or a value of another kind.
        """
        child = self.child(key)
        return {name: child.read(name, str) for name in child.values}

    def child(self, key: str) -> Document:
        """The object under a key.

        Raises:
            BundleError: No such object.
        """
        return Document(self.read(key, dict), file=self.file, path=self._join(key))

    def children(self, key: str, default: Any = ...) -> list[Document]:
        """The list of objects under a key.

        Raises:
            BundleError: No such list, or an element that is no object.
        """
        path = self._join(key)
        return [
            Document(value, file=self.file, path=f"{path}[{i}]")
            for i, value in enumerate(self.read(key, list, default))
        ]

    def require_keys(self, *keys: str) -> None:
        """Refuses other keys than these, and a missing one.

        Raises:
            BundleError: The keys differ.
        """
        if set(self.values) != set(keys):
            self.refuse("", repr(self.values), f"{', '.join(keys[:-1])} and {keys[-1]}")

    def refuse(self, key: str, found: str, expected: str) -> NoReturn:
        """Raises for the value of a key; `""` for the object itself.

        Raises:
            BundleError: Always; names the file and the key with its path.
        """
        found = found if len(found) <= _MAX_SHOWN else found[: _MAX_SHOWN - 3] + "..."
        path = self._join(key)
        raise BundleError(
            f"In `{self.file}`, `{path}` is {found}." if path else f"`{self.file}` is {found}.",
            expected=expected,
            fix="copy the artifact again, whole; if it is whole, export the model again",
        )

    def _join(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path and key else self.path or key


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
        raise BundleError(
            f"`{file}` does not parse: {error}.",
            expected="JSON",
            fix="copy the artifact again, whole",
        ) from error


def is_size(value: object, *, least: int = 0) -> bool:
    """Whether a value is an integer from `least` to the largest 64-bit size."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MAX_SIZE


def _is_kind(value: Any, kind: type[Any]) -> bool:
    kinds = (int, float) if kind is float else kind
    return isinstance(value, kinds) and isinstance(value, bool) == (kind is bool)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
