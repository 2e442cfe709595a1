"""Where a class was written: its file, the lines of its fields, and the strings under them."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import FrameType
from typing import Any

_ATTRIBUTE = "__nitro_source__"


@dataclass(frozen=True, kw_only=True)
class ClassSource:
    """What the text of a class body says that the class itself does not.

    Attributes:
        file: The file, or the module's name where there is none.
        line: The line of the class statement; 0 where it is not known.
        lines: The line of each annotated or assigned name.
        docs: The string under each annotated name that has one.
        repeated: Names that are annotated twice, with both lines.
    """

    file: str
    line: int = 0
    lines: Mapping[str, int] = field(default_factory=dict[str, int])
    docs: Mapping[str, str] = field(default_factory=dict[str, str])
    repeated: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])


def keep_source(cls: type) -> None:
    """Reads the source of a class that is being made; call it while its statement runs."""
    setattr(cls, _ATTRIBUTE, _of_statement(cls) or _of_class(cls))


def source_of(cls: type) -> ClassSource:
    """What the text of a class says."""
    return vars(cls).get(_ATTRIBUTE) or _of_class(cls)


def locate(cls: type, name: str | None = None) -> str:
    """`file.py:12` of a class, or of one of its fields; the module's name at worst."""
    source = source_of(cls)
    line = source.line if name is None else source.lines.get(name, source.line)
    return f"{source.file}:{line}" if line else source.file


def defining_frame(cls: type) -> FrameType | None:
    """The frame whose class statement is making `cls`, if one is."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != cls.__module__:
        frame = frame.f_back
    return frame


def _of_statement(cls: type) -> ClassSource | None:
    # By the running statement rather than `inspect.getsource`: it finds classes of notebooks,
    # and the right one of two that share a name.
    frame = defining_frame(cls)
    if frame is None:
        return None
    file, line = frame.f_code.co_filename, frame.f_lineno
    tree = _parsed("".join(linecache.getlines(file, frame.f_globals)))
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and node.name == cls.__name__
        and _first_line(node) <= line <= (node.end_lineno or node.lineno)
    ]
    if not found:
        return ClassSource(file=file, line=line)
    return _read(found[-1], file, first=1)


def _of_class(cls: type) -> ClassSource:
    try:
        file = inspect.getsourcefile(cls) or cls.__module__
        lines, first = inspect.getsourcelines(cls)
        node = _parsed(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, IndexError):
        return ClassSource(file=cls.__module__)
    if not isinstance(node, ast.ClassDef):
        return ClassSource(file=file, line=first)
    return _read(node, file, first=first)


def _read(node: ast.ClassDef, file: str, *, first: int) -> ClassSource:
    """Reads a class body; `first` is the line that the parsed text starts at."""
    lines: dict[str, int] = {}
    docs: dict[str, str] = {}
    repeated: dict[str, tuple[int, int]] = {}
    annotated: set[str] = set()
    for statement, following in pairwise([*node.body, ast.Pass()]):
        for name in _names(statement):
            line = statement.lineno + first - 1
            if name in annotated and isinstance(statement, ast.AnnAssign):
                repeated[name] = (lines[name], line)
            lines[name] = line
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        annotated.add(statement.target.id)
        match following:
            case ast.Expr(value=ast.Constant(value=str(text))):
                docs[statement.target.id] = inspect.cleandoc(text)
            case _:
                pass
    return ClassSource(
        file=file, line=node.lineno + first - 1, lines=lines, docs=docs, repeated=repeated
    )


def _names(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case ast.FunctionDef(name=name):
            return [name]
        case _:
            return []


def _first_line(node: ast.ClassDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


@functools.lru_cache(maxsize=4)
def _parsed(text: str) -> Any:
    try:
        return ast.parse(text)
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])  # a cell with magics, for example
