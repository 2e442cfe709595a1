"""Names as a tracking store takes them: never two for one, and told where they change."""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Iterable, Sequence

from nitro.errors import warn

_MOST_BYTES = 250
_KEPT_BYTES = 200
_ODD = re.compile(r"[^/\w.\- ]")


class StoredNames:
    """Turns names into those that MLflow takes.

    A name that it takes stays. Any other one gets `_` for what is not allowed, and a checksum of
    the whole name behind it: the same in every run, and another one for another name.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], list[str]] = {}
        self._told: set[str] = set()

    def of(self, names: Iterable[str]) -> list[str]:
        """The stored names, in order; told once, where they are others."""
        key = tuple(names)
        if key not in self._known:
            self._known[key] = stored_names(key)
            self._tell(key, self._known[key])
        return self._known[key]

    def _tell(self, names: Sequence[str], stored: Sequence[str]) -> None:
        changed = {
            name: other
            for name, other in zip(names, stored, strict=True)
            if name != other and name not in self._told
        }
        self._told.update(changed)
        if changed:
            pairs = ", ".join(f"`{_short(name)}` as `{other}`" for name, other in changed.items())
            warn(
                f"MLflow does not take every name: it gets {pairs}.\n"
                "  fix: use letters, digits, `_`, `-`, `.`, spaces and single `/`, at most "
                f"{_MOST_BYTES} bytes, and no name that another one goes on from with `/`"
            )


def stored_names(names: Sequence[str]) -> list[str]:
    """The names that MLflow takes for these, which are logged together."""
    # A folder store has a file for each metric: `a` cannot be one beside `a/b`.
    folders = {str(parent) for name in names for parent in _parents(name)}
    return [name if _is_taken(name) and name not in folders else _changed(name) for name in names]


def _parents(name: str) -> Iterable[str]:
    parts = name.split("/")
    return ("/".join(parts[:count]) for count in range(1, len(parts)))


def _is_taken(name: str) -> bool:
    is_path = name == posixpath.normpath(name) and not name.startswith(("..", "/"))
    fits = len(name.encode(errors="replace")) <= _MOST_BYTES
    return is_path and name != "." and fits and not _ODD.search(name)


def _changed(name: str) -> str:
    parts = (_ODD.sub("_", part) for part in name.split("/"))
    cleaned = "/".join("_" if part.strip(".") == "" else part for part in parts)
    kept = cleaned.encode(errors="replace")[:_KEPT_BYTES].decode(errors="ignore").rstrip("/")
    mark = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{kept}-{mark}"


def _short(name: str) -> str:
    return name if len(name) <= 60 else f"{name[:60]}..."
