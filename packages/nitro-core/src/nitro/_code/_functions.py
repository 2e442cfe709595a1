"""What there is to say of a function's code: a digest, the names in it, its source lines."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from types import CodeType
from typing import Final, NamedTuple

from ._values import IdentityMemo, describe, digest_of, encode_atom, is_atom


class CodeWords(NamedTuple):
    """What is remembered of a code object.

    Attributes:
        digest: Hash of what is executed, its constants and names; no line, no file.
        names: The names in it, of globals and attributes alike, and texts that may be names.
        source: The lines that it was written in, where they can be found.
    """

    digest: bytes
    names: tuple[str, ...]
    source: tuple[str, ...]


_known: Final = IdentityMemo[CodeWords]()


def code_words(code: CodeType) -> CodeWords:
    """What there is to say of a code object; read once for each."""
    return _known.get(code) or _known.put(
        code,
        CodeWords(code_digest(code), tuple(dict.fromkeys(_names(code))), tuple(_source(code))),
    )


def code_digest(code: CodeType) -> bytes:
    """Hashes what a code object executes, and the code nested in it."""
    constants = [_constant(value) for value in code.co_consts]
    names = (*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    table = getattr(code, "co_exceptiontable", b"")
    return digest_of(
        code.co_code, repr(counts).encode(), *map(str.encode, names), table, *constants
    )


def moved_constant(old: CodeType, new: CodeType) -> tuple[str, str] | None:
    """The one constant in which two code objects differ, if that is all."""
    if old.co_code != new.co_code or old.co_names != new.co_names:
        return None
    pairs = zip(old.co_consts, new.co_consts, strict=True)
    moved = [(a, b) for a, b in pairs if _constant(a) != _constant(b)]
    if len(old.co_consts) != len(new.co_consts) or len(moved) != 1:
        return None
    before, after = moved[0]
    if isinstance(before, CodeType) and isinstance(after, CodeType):
        return moved_constant(before, after)
    return describe(before), describe(after)


def _constant(value: object) -> bytes:
    if isinstance(value, CodeType):
        return code_digest(value)
    if isinstance(value, tuple):
        return digest_of(b"tuple", *map(_constant, value))
    if isinstance(value, frozenset):
        return digest_of(b"frozenset", *sorted(map(_constant, value)))
    return encode_atom(value) if is_atom(value) else repr(value).encode()


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _names(value)
        elif isinstance(value, str) and value.isidentifier():
            yield value


def _source(code: CodeType) -> list[str]:
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename)
    return [line.strip() for line in lines[code.co_firstlineno - 1 : _last_line(code)]]


def _last_line(code: CodeType) -> int:
    own = [line for _, _, line in code.co_lines() if line is not None]
    nested = [_last_line(value) for value in code.co_consts if isinstance(value, CodeType)]
    return max([code.co_firstlineno, *own, *nested])
