"""Reads the fields of an experiment by their dotted names."""

from __future__ import annotations

from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any

from ._fields import Residency, groups_of

if TYPE_CHECKING:
    from ._declaration import Experiment


def field_names(
    experiment: Experiment | type[Experiment], residency: Residency | None = None
) -> list[str]:
    """The names of the fields of one residency, or of all, in declaration order."""
    return [
        name
        for name, field in experiment.fields().items()
        if residency is None or field.residency is residency
    ]


def field_value(experiment: Experiment, name: str) -> Any:
    """The value of a field; of one inside a group by its dotted name."""
    return attrgetter(name)(experiment)


def field_values(experiment: Experiment, residency: Residency | None = None) -> dict[str, Any]:
    """The values of the fields of one residency, or of all, by name."""
    return {name: field_value(experiment, name) for name in field_names(experiment, residency)}


def group_code(experiment: type[Experiment]) -> dict[str, Any]:
    """What users wrote into the dataclasses of groups, by name: a trace may call it."""
    return {
        f"{cls.__name__}.{name}": value.fget if isinstance(value, property) else value
        for group in groups_of(experiment.__nitro_entries__)
        for cls in group.type.__mro__[-2::-1]
        for name, value in vars(cls).items()
        if isinstance(value, property | FunctionType) and not _is_generated(name, value)
    }


def _is_generated(name: str, value: Any) -> bool:
    """Whether `dataclass` wrote a method, which follows from the fields."""
    is_special = name.startswith("__") and name.endswith("__")
    code = getattr(value, "__code__", None)
    return is_special and (code is None or code.co_filename == "<string>" or name == "__repr__")
