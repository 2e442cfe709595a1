"""The three markers, and what a declared field may say."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import operator
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin, get_type_hints

from nitro.errors import ExperimentError

from ._source import defining_frame, locate, source_of


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
        name: The attribute and keyword; `model.width` inside a group.
        type: The declared type, without its marker.
        default: The default value, or `NO_DEFAULT`.
        residency: What XLA may know of it.
        doc: The string under the field, or `""`.
        location: Where it is declared, as `file.py:12`.
    """

    name: str
    type: Any
    default: Any
    residency: Residency
    doc: str
    location: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """A field that holds a frozen dataclass, whose fields count one by one.

    Attributes:
        name: The attribute and keyword; dotted inside another group.
        type: The dataclass.
        default: The default value, or `NO_DEFAULT`.
        entries: Its fields by their own, undotted names.
    """

    name: str
    type: type
    default: Any
    entries: Mapping[str, FieldInfo | Group]

    def leaves(self) -> Iterator[FieldInfo]:
        """The fields in it, however deep, in declaration order."""
        return leaves_of(self.entries)

    @property
    def is_host_only(self) -> bool:
        """Whether no trace sees anything of it."""
        return all(field.residency is Residency.HOST for field in self.leaves())


Entries = Mapping[str, FieldInfo | Group]
"""What a class declares, by attribute."""


def leaves_of(entries: Entries) -> Iterator[FieldInfo]:
    """All fields, those of groups by dotted name, in declaration order."""
    for entry in entries.values():
        if isinstance(entry, Group):
            yield from entry.leaves()
        else:
            yield entry


def groups_of(entries: Entries) -> Iterator[Group]:
    """All groups, outer ones first."""
    for entry in entries.values():
        if isinstance(entry, Group):
            yield entry
            yield from groups_of(entry.entries)


def read_entries(cls: type) -> dict[str, FieldInfo | Group]:
    """Reads the fields of an experiment that `dataclass` was applied to, in order.

    Raises:
        ExperimentError: A field that is declared wrongly; names it and its line.
    """
    return _Reader(cls).entries(cls)


class _Reader:
    """Reads the fields of an experiment and of the groups in it."""

    def __init__(self, experiment: type) -> None:
        # A class made inside a function may name that function's own types.
        frame = defining_frame(experiment)
        self._names = {} if frame is None else dict(frame.f_locals)

    def entries(
        self,
        cls: type,
        *,
        prefix: str = "",
        outer: Residency | None = None,
        value: Any = NO_DEFAULT,
    ) -> dict[str, FieldInfo | Group]:
        """The fields of a dataclass.

        Args:
            cls: The experiment, or the dataclass of a group.
            prefix: What stands before the names, `model.` for a group.
            outer: The marker around the group, which all its fields get.
            value: The group's default, whose values are the fields' defaults.
        """
        hints = self._hints(cls)
        if not prefix:
            _refuse_init_vars(cls, hints)
        return {
            field.name: self._entry(
                cls,
                field,
                hints[field.name],
                prefix=prefix,
                outer=outer,
                default=_default_of(field) if not prefix else _part_of(value, field.name),
            )
            for field in dataclasses.fields(cls)
        }

    def _entry(
        self,
        cls: type,
        field: dataclasses.Field[Any],
        hint: Any,
        *,
        prefix: str,
        outer: Residency | None,
        default: Any,
    ) -> FieldInfo | Group:
        owner = _declaring_class(cls, field.name)
        where = f"`{cls.__name__}.{field.name}` ({locate(owner, field.name)})"
        declared = _declared_type(hint)
        marker = _marker_of(where, hint)
        if marker is not None and outer is not None:
            raise ExperimentError(
                f"{where} is marked, and so is the group `{prefix.rstrip('.')}` that it is in.",
                expected="one marker: around the whole group, or on its fields one by one",
            )
        residency = marker or outer
        name = f"{prefix}{field.name}"
        if _is_group(where, declared, residency):
            _check_group_default(where, field.name, declared, default)
            return Group(
                name=name,
                type=declared,
                default=default,
                entries=self.entries(declared, prefix=f"{name}.", outer=residency, value=default),
            )
        return FieldInfo(
            name=name,
            type=declared,
            default=default,
            residency=residency or Residency.HOST,
            doc=source_of(owner).docs.get(field.name, ""),
            location=locate(owner, field.name),
        )

    def _hints(self, cls: type) -> dict[str, Any]:
        try:
            return get_type_hints(cls, localns=self._names, include_extras=True)
        except NameError as error:
            raise ExperimentError(
                f"An annotation of `{cls.__name__}` ({locate(cls)}) names `{error.name}`, "
                "which is not defined.",
                fix="import it at the top of the module",
            ) from error


def check_body(cls: type) -> None:
    """Refuses what a class body declares wrongly, before it becomes a dataclass.

    Raises:
        ExperimentError: Names the attribute, its line, and what to write.
    """
    annotated = inspect.get_annotations(cls)
    _check_repeated(cls)
    for name, value in vars(cls).items():
        if isinstance(value, dataclasses.Field) and not value.init:
            raise ExperimentError(
                f"`{cls.__name__}.{name}` ({locate(cls, name)}) has `init=False`.",
                expected="fields that the constructor takes",
                fix="write a property for what follows from other fields, or `derive` for what "
                "follows from the data",
            )
        is_constant = name.startswith("_") or name.isupper()
        is_code = callable(value) or hasattr(type(value), "__get__")
        if name in annotated or is_constant or is_code:
            continue
        raise ExperimentError(
            f"`{cls.__name__}.{name} = {value!r}` ({locate(cls, name)}) has no type.",
            expected=MARKER_EXAMPLES,
            fix=f"annotate it as a field, or as `{name}: ClassVar[...]` where no run varies it",
        )


def _check_repeated(cls: type) -> None:
    for name, (first, second) in source_of(cls).repeated.items():
        raise ExperimentError(
            f"`{cls.__name__}.{name}` ({locate(cls, name)}) is declared twice, in the lines "
            f"{first} and {second}.",
            expected="one declaration for each field",
            fix=f"delete line {first}, which has no effect",
        )


def _refuse_init_vars(cls: type, hints: Mapping[str, Any]) -> None:
    for name, hint in hints.items():
        if isinstance(hint, dataclasses.InitVar) or hint is dataclasses.InitVar:
            raise ExperimentError(
                f"`{cls.__name__}.{name}` ({locate(cls, name)}) is an `InitVar`.",
                expected=f"a field, whose value is kept and recorded: {MARKER_EXAMPLES}",
            )


def _declaring_class(cls: type, name: str) -> type:
    return next((c for c in cls.__mro__ if name in inspect.get_annotations(c)), cls)


def _markers_of(hint: Any) -> list[Residency]:
    if get_origin(hint) is not Annotated:
        return []
    return [extra for extra in get_args(hint)[1:] if isinstance(extra, Residency)]


def _declared_type(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _marker_of(where: str, hint: Any) -> Residency | None:
    """The marker of an annotation, or None; refuses what markers cannot stand around."""
    markers = _markers_of(hint)
    declared = _declared_type(hint)
    if len(markers) > 1 or any(_markers_of(arg) for arg in get_args(declared)):
        raise ExperimentError(
            f"{where} puts one marker inside another.",
            expected=f"one marker around the whole type: {MARKER_EXAMPLES}",
        )
    if declared is T:
        marker = markers[0].value if markers else "A marker"
        raise ExperimentError(
            f"{where} uses `{marker}` without a type.",
            expected=f"`{marker}[int]`, `{marker}[float]` or another type in brackets",
        )
    if isinstance(declared, TypeVar):
        raise ExperimentError(
            f"{where} has the type variable `{declared}` for its type.",
            expected="a type: one experiment class is one configuration",
            fix="make a subclass for each type, which declares the field again",
        )
    if get_origin(declared) is Final or declared is Final:
        raise ExperimentError(
            f"{where} is `Final`.",
            expected=f"a plain type: fields are frozen as they are. {MARKER_EXAMPLES}",
        )
    return markers[0] if markers else None


def _is_group(where: str, declared: Any, residency: Residency | None) -> bool:
    """Whether a field holds a frozen dataclass whose fields count one by one."""
    if not isinstance(declared, type) or not dataclasses.is_dataclass(declared):
        return False
    params: Any = getattr(declared, "__dataclass_params__")  # noqa: B009 - not in its stub
    hints = inspect.get_annotations(declared, eval_str=False)
    if not params.frozen:
        if any(_names_marker(hint) for hint in hints.values()):
            raise ExperimentError(
                f"{where} is the dataclass `{declared.__name__}` ({locate(declared)}), which has "
                "markers inside and is not frozen.",
                expected="a frozen dataclass: a value that changes in place would be keyed wrongly",
                fix=f"write `@dataclass(frozen=True)` above `{declared.__name__}`",
            )
        return False
    # A pytree that is traced as a whole, such as a `flax.struct` record, stays one field.
    is_traced_whole = residency is Residency.DEVICE and _is_pytree(declared)
    return bool(dataclasses.fields(declared)) and not is_traced_whole


def _check_group_default(where: str, name: str, group: type, default: Any) -> None:
    if default is not NO_DEFAULT and not isinstance(default, group):
        raise ExperimentError(
            f"{where} has the default {default!r}, which is no `{group.__name__}`.",
            expected=f"an instance: `{name}: ... = {group.__name__}(...)`",
            fix=f"where it may be None, declare `{group.__name__} | None`: one field, taken as a "
            "whole",
        )


def _names_marker(hint: Any) -> bool:
    """Whether an annotation, evaluated or not, has a marker."""
    text = hint if isinstance(hint, str) else ""
    return bool(_markers_of(hint)) or any(f"{marker.value}[" in text for marker in Residency)


def _is_pytree(cls: type) -> bool:
    import jax

    blank = object.__new__(cls)
    try:
        leaves = jax.tree.leaves(blank)
    # A registered class reads attributes that a blank instance lacks; any error tells that.
    except Exception:  # noqa: BLE001
        return True
    return not (len(leaves) == 1 and leaves[0] is blank)


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return NO_DEFAULT


def _part_of(group: Any, name: str) -> Any:
    return NO_DEFAULT if group is NO_DEFAULT else operator.attrgetter(name)(group)
