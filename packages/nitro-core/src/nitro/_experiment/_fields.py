"""The three markers, and what a declared field may say."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import textwrap
from itertools import pairwise
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from nitro.errors import ExperimentError


class Residency(enum.Enum):
    """What XLA may know of a field."""

    GRAPH_CONST = "GraphConst"
    DEVICE = "Device"
    HOST = "Host"


T = TypeVar("T")

GraphConst = Annotated[T, Residency.GRAPH_CONST]
"""Marks a field as structural: baked into the program, part of the compile key."""

Device = Annotated[T, Residency.DEVICE]
"""Marks a field as a traced input: sweep it or schedule it without recompiling."""

Host = Annotated[T, Residency.HOST]
"""Marks a field as invisible to the tracer, as an unmarked one is."""


class _NoDefault:
    def __repr__(self) -> str:
        return "<required>"


NO_DEFAULT: Any = _NoDefault()
"""The default of a required field: `None` is itself a legal default."""

MARKER_EXAMPLES = (
    "`width: GraphConst[int] = 128` (baked, in the compile key), "
    "`smoothing: Device[float] = 0.1` (traced input) or "
    "`max_epochs: int = 30` (host-only)"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldInfo:
    """One declared field.

    Attributes:
        name: The attribute and keyword.
        type: The declared type, without its marker.
        default: The default value, or `NO_DEFAULT`.
        residency: What XLA may know of it.
        doc: The string under the field, or `""`.
    """

    name: str
    type: Any
    default: Any
    residency: Residency
    doc: str


def read_fields(cls: type) -> dict[str, FieldInfo]:
    """Reads the fields of a dataclass, in declaration order.

    Raises:
        ExperimentError: A marker without a type, or one inside another.
    """
    hints = _resolved_hints(cls)
    docs = _field_docs(cls)
    return {
        field.name: FieldInfo(
            name=field.name,
            type=_declared_type(hints[field.name]),
            default=_default_of(field),
            residency=_residency_of(cls, field.name, hints[field.name]),
            doc=docs.get(field.name, ""),
        )
        for field in dataclasses.fields(cls)
    }


def check_body(cls: type) -> None:
    """Refuses values in the class body that look like fields but are not annotated.

    Raises:
        ExperimentError: Names the attribute, its line and one example of each marker.
    """
    annotated = inspect.get_annotations(cls)
    for name, value in vars(cls).items():
        is_constant = name.startswith("_") or name.isupper()
        is_code = callable(value) or hasattr(type(value), "__get__")
        if name in annotated or is_constant or is_code:
            continue
        raise ExperimentError(
            f"`{cls.__name__}.{name} = {value!r}` ({locate(cls, name)}) has no type.",
            expected=MARKER_EXAMPLES,
            fix=f"annotate it as a field, or as `{name}: ClassVar[...]` where no run varies it",
        )


def locate(cls: type, name: str | None = None) -> str:
    """`file.py:12` of a class, or of one of its fields; the module's name at worst."""
    try:
        file = inspect.getsourcefile(cls) or cls.__module__
        lines, first = inspect.getsourcelines(cls)
    except (OSError, TypeError):
        return cls.__module__
    offset = 0
    if name is not None:
        starts = (f"{name}:", f"{name} :", f"{name} =", f"{name}=")
        matches = (i for i, line in enumerate(lines) if line.strip().startswith(starts))
        offset = next(matches, 0)
    return f"{file}:{first + offset}"


def _resolved_hints(cls: type) -> dict[str, Any]:
    # A class made inside a function may name that function's own types.
    frame = inspect.currentframe()
    names: dict[str, Any] = {}
    while frame is not None and frame.f_globals.get("__name__") != cls.__module__:
        frame = frame.f_back
    if frame is not None:
        names.update(frame.f_locals)
    try:
        return get_type_hints(cls, localns=names, include_extras=True)
    except NameError as error:
        raise ExperimentError(
            f"An annotation of `{cls.__name__}` ({locate(cls)}) names `{error.name}`, "
            "which is not defined.",
            fix="import it at the top of the module",
        ) from error


def _markers_of(hint: Any) -> list[Residency]:
    if get_origin(hint) is not Annotated:
        return []
    return [extra for extra in get_args(hint)[1:] if isinstance(extra, Residency)]


def _declared_type(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _residency_of(cls: type, name: str, hint: Any) -> Residency:
    markers = _markers_of(hint)
    where = f"`{cls.__name__}.{name}` ({locate(cls, name)})"
    inner = [arg for arg in get_args(_declared_type(hint)) if _markers_of(arg)]
    if len(markers) > 1 or inner:
        raise ExperimentError(
            f"{where} puts one marker inside another.",
            expected=f"one marker around the whole type: {MARKER_EXAMPLES}",
        )
    if isinstance(_declared_type(hint), TypeVar):
        marker = markers[0].value if markers else "A marker"
        raise ExperimentError(
            f"{where} uses `{marker}` without a type.",
            expected=f"`{marker}[int]`, `{marker}[float]` or another type in brackets",
        )
    return markers[0] if markers else Residency.HOST


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return NO_DEFAULT


def _field_docs(cls: type) -> dict[str, str]:
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base) or base is cls:
            docs.update(_own_field_docs(base))
    return docs


def _own_field_docs(cls: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return {}  # a class typed at a prompt has no source to read
    docs: dict[str, str] = {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    for statement, following in pairwise(body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        match following:
            case ast.Expr(value=ast.Constant(value=str(text))):
                docs[statement.target.id] = inspect.cleandoc(text)
            case _:
                pass
    return docs
