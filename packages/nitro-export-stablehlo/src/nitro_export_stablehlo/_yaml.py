"""A YAML reader that is strict and bounded, and a writer that quotes every string.

PyYAML's own loaders recurse as deep as a document nests, expand aliases, take the last of
two equal keys, and read `no` as a boolean. This one builds plain values from PyYAML's
events instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from nitro.errors import BundleError

MAX_BYTES = 4 * 1024 * 1024
MAX_DEPTH = 64
# Twenty hold every 64-bit size; Python would take quadratic time over millions.
MAX_DIGITS = 20

_PARSER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_NULL = re.compile(r"|~|null|Null|NULL")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
_INT = re.compile(rf"[-+]?(0|[1-9][0-9]{{0,{MAX_DIGITS - 1}}})")
_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]{1,4})?")
_SPECIAL = {".nan": "nan", ".inf": "inf", "-.inf": "-inf", "+.inf": "inf"}
_NOT_A_STRING = re.compile(r"[-+]?[0-9][0-9_]*|0[xob][0-9a-fA-F_]+|\d{4}-\d\d?-\d\d?.*")


def dump(value: Any) -> str:
    """Writes plain values as one YAML document; every string and key is double-quoted."""
    return yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=float("inf")
    )


class _Dumper(yaml.SafeDumper):
    """Quotes every string and writes equal objects out again instead of as aliases."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - PyYAML names the argument
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - PyYAML's signature
        super().increase_indent(flow, False)  # noqa: FBT003 - PyYAML's signature


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')


_Dumper.add_representer(str, _quoted)


def load(data: bytes, *, file: str) -> Any:
    """Reads one document of null, booleans, numbers, strings, lists and string-keyed maps.

    Raises:
        BundleError: Malformed, too large, too deep, a duplicate or non-string key, or a
            tag, anchor or alias; names the file and the line.
    """
    if len(data) > MAX_BYTES:
        raise BundleError(
            f"`{file}` has {len(data)} bytes.", expected=f"at most {MAX_BYTES} bytes of YAML"
        )
    try:
        return _Builder(file).build(yaml.parse(data.decode("utf-8"), Loader=_PARSER))
    except UnicodeDecodeError as error:
        raise BundleError(f"`{file}` is not UTF-8: {error}.", expected="UTF-8 text") from error
    # PyYAML raises ValueError for some escapes that name no character.
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, BundleError):
            raise
        problem = " ".join(str(error).split())
        raise BundleError(
            f"`{file}` does not parse: {problem}.", expected="one YAML document"
        ) from error


class _Builder:
    """Builds one value from parser events, without recursion."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._stack: list[_Open] = []
        self._root: list[Any] = []

    def build(self, events: Iterator[Any]) -> Any:
        for event in events:
            self._take(event)
        if len(self._root) != 1:
            raise BundleError(
                f"`{self._file}` holds {len(self._root)} documents.", expected="one YAML document"
            )
        return self._root[0]

    def _take(self, event: Any) -> None:
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise self.refused(event, "an anchor or alias", "each value written out")
        if getattr(event, "tag", None) is not None:
            raise self.refused(event, f"the tag {event.tag!r}", "plain values without tags")
        if isinstance(event, yaml.ScalarEvent):
            self._add(event, _scalar(event, self))
        elif isinstance(event, yaml.CollectionStartEvent):
            if len(self._stack) >= MAX_DEPTH:
                raise self.refused(event, "too deep a nesting", f"at most {MAX_DEPTH} levels")
            value: Any = {} if isinstance(event, yaml.MappingStartEvent) else []
            self._add(event, value)
            self._stack.append(_Open(value))
        elif isinstance(event, yaml.CollectionEndEvent):
            self._stack.pop()

    def _add(self, event: Any, value: Any) -> None:
        if not self._stack:
            self._root.append(value)
            return
        top = self._stack[-1]
        if isinstance(top.value, list):
            top.value.append(value)
        elif top.has_key:
            top.value[top.key] = value
            top.has_key = False
        elif not isinstance(value, str):
            raise self.refused(event, "a key that is not a string", "every key in quotes")
        elif value in top.value:
            raise self.refused(event, f"the key {value!r} a second time", "each key once")
        else:
            top.key, top.has_key = value, True

    def refused(self, event: Any, found: str, expected: str) -> BundleError:
        line = event.start_mark.line + 1
        return BundleError(f"`{self._file}` has {found}, on line {line}.", expected=expected)


class _Open:
    """A collection that is still being filled, and the key that waits for its value."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.key = ""
        self.has_key = False


def _scalar(event: Any, builder: _Builder) -> Any:
    text: str = event.value
    if not event.implicit[0]:
        return text
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text) or _FALSE.fullmatch(text):
        return text[0] in "tT"
    if _INT.fullmatch(text):
        return int(text)
    if text.lower() in _SPECIAL or _FLOAT.fullmatch(text):
        return float(_SPECIAL.get(text.lower(), text))
    if _NOT_A_STRING.fullmatch(text):
        raise builder.refused(
            event, f"the unquoted value {text[:40]!r}", "numbers as JSON has them, or quotes"
        )
    return text
