"""The fingerprint of a program as plain values, for records: what has moved since."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ._fingerprint import Closure, Entry

_DIGEST_BYTES: Final = 10
# 2: methods are loaded as other attributes are, and nothing else prepares a call.
_FORM: Final = 2
_LIBRARY: Final = "library"


@dataclass(frozen=True)
class CodeFingerprint:
    """What a program rests on.

    Attributes:
        closure: Everything that was read.
    """

    closure: Closure

    def to_json(self) -> dict[str, Any]:
        """The form, the digest, and each entry by label: kind, digest, display, location."""
        entries = {label: _values(entry) for label, entry in self._entries().items()}
        return {"form": _FORM, "digest": self.closure.digest, "entries": entries}

    def is_comparable(self, saved: Mapping[str, Any]) -> bool:
        """Whether `saved` describes the code of functions in today's normal form."""
        return saved.get("form", 1) == _FORM

    def differences(self, saved: Mapping[str, Any], *, reads_bytecode: bool) -> list[str]:
        """What has moved since `to_json` returned `saved`, a line each.

        Library code counts by name here, not by version.

        Args:
            saved: What `to_json` returned, in this process or another one.
            reads_bytecode: Whether the bytecode of functions can be compared; it cannot
                between two versions of Python, and never is where `is_comparable` says no.
        """
        reads_bytecode = reads_bytecode and self.is_comparable(saved)
        if saved["digest"] == self.closure.digest:
            return []
        before: dict[str, list[str]] = dict(_unversioned(saved["entries"]))
        now = dict(_unversioned(self.to_json()["entries"]))
        both = [label for label in now if label in before]
        lines = [
            _line(label, before[label], now[label])
            for label in both
            if _differs(before[label], now[label], reads_bytecode=reads_bytecode)
        ]
        if lines or not reads_bytecode:
            return lines
        # What came or went did so because something else moved, unless nothing else did.
        lines = [f"{label}: new, {now[label][2]}" for label in now if label not in before]
        return lines + [f"{label}: gone" for label in before if label not in now]

    def _entries(self) -> dict[str, Entry]:
        # What counts as itself has another digest in each process.
        unread = {name.rpartition(" (")[0] for name in self.closure.unfingerprinted}
        return {n: e for n, e in self.closure.entries.items() if n not in unread}


def _values(entry: Entry) -> list[str]:
    digest = entry.digest[:_DIGEST_BYTES].hex()
    return [entry.kind, digest, entry.display, entry.location]


def _unversioned(entries: Mapping[str, list[str]]) -> Iterator[tuple[str, list[str]]]:
    for label, (kind, digest, display, location) in entries.items():
        if kind != _LIBRARY:
            yield label, [kind, digest, display, location]
        elif label != display:
            name = display.rpartition(" ")[0]
            yield label, [kind, name, name, location]


def _differs(before: list[str], now: list[str], *, reads_bytecode: bool) -> bool:
    is_code = "function" in (before[0], now[0]) or before[0] == now[0] == "class"
    return before[:2] != now[:2] and (reads_bytecode or not is_code)


def _line(label: str, before: list[str], now: list[str]) -> str:
    line = now[3].rpartition(":")[2]
    where = f"{label} line {line}" if line else label
    if before[2] == now[2]:
        return f"{where}: {'code changed' if now[0] == 'function' else 'other content'}"
    return f"{where}: {before[2]} in the record, {now[2]} now"
