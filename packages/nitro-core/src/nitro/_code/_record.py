"""Words about code as plain values, for records: what has moved since."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ._words import Words

_DIGEST_BYTES: Final = 10
# 3: code objects are hashed as they are, and identity is the trace's.
_FORM: Final = 3
_PLAIN: Final = frozenset({"int", "float", "str", "bool", "NoneType", "complex"})


def words_to_json(words: Words) -> dict[str, Any]:
    """The form, and each entry by label: kind, digest, display, location."""
    entries = {
        label: [word.kind, word.digest[:_DIGEST_BYTES].hex(), word.display, _place(word)]
        for label, word in words.entries.items()
    }
    return {"form": _FORM, "digest": words.digest.hex(), "entries": entries}


def describes_code(saved: Mapping[str, Any]) -> bool:
    """Whether a record describes functions in a way that can be compared today."""
    return saved.get("form", 1) == _FORM


def moved_since(saved: Mapping[str, Any], words: Words, *, reads_code: bool) -> list[str]:
    """What has moved since `words_to_json` returned `saved`, a line each.

    Args:
        saved: What `words_to_json` returned, in this process or another one, or what an
            older Nitro wrote: of that, only plain values are compared.
        words: The words now.
        reads_code: Whether code can be compared; it cannot between two versions of Python.
    """
    before: Mapping[str, list[str]] = saved["entries"]
    now = words_to_json(words)["entries"]
    compare = _moved if describes_code(saved) else _moved_plain
    both = [label for label in now if label in before]
    return [
        line
        for label in both
        for line in compare(label, before[label], now[label], reads_code=reads_code)
    ]


def arrived_since(saved: Mapping[str, Any], words: Words) -> list[str]:
    """What came or went since `words_to_json` returned `saved`, a line each."""
    before: Mapping[str, list[str]] = saved["entries"] if describes_code(saved) else {}
    now = words_to_json(words)["entries"]
    lines = [f"{label}: new, {now[label][2]}" for label in now if label not in before]
    gone = [f"{label}: gone" for label in before if label not in now]
    return lines + gone if before else []


def _place(word: Any) -> str:
    return f"{word.file}:{word.line}" if word.line else ""


def _moved(label: str, before: list[str], now: list[str], *, reads_code: bool) -> Iterator[str]:
    is_code = "function" in (before[0], now[0])
    if before[:2] == now[:2] or (is_code and not reads_code):
        return
    line = now[3].rpartition(":")[2]
    where = f"{label} line {line}" if line else label
    if before[2] == now[2]:
        yield f"{where}: {'code changed' if now[0] == 'function' else 'other content'}"
    else:
        yield f"{where}: {before[2]} in the record, {now[2]} now"


def _moved_plain(
    label: str, before: list[str], now: list[str], *, reads_code: bool
) -> Iterator[str]:
    del reads_code
    if before[0] in _PLAIN and now[0] in _PLAIN and before[2] != now[2]:
        yield f"{label}: {before[2]} in the record, {now[2]} now"
