"""What a trace sees of an experiment: structural values and tracers, and no host field."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nitro.errors import HostFieldError

from ._fields import Entries, Group, Residency
from ._read import field_values

if TYPE_CHECKING:
    from ._declaration import Experiment

_STATE = "_nitro_view"
_classes: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


def compile_view(
    experiment: Experiment, device: Mapping[str, Any], reads: set[str] | None = None
) -> Any:
    """Makes the stand-in that traced hooks get as `self`.

    It is an instance of a subclass, so `isinstance`, `super()`, methods and properties
    work as ever; only the fields differ. So is what it has for a group of fields.

    Args:
        experiment: Gives the structural values.
        device: The tracer (or array) of each Device field, by dotted name.
        reads: Collects the name of each GraphConst field that a hook reads, which is
            what the compiled program depends on.
    """
    values = field_values(experiment, Residency.GRAPH_CONST)
    state = (values, device, set[str]() if reads is None else reads)
    return _instance(_view_class(type(experiment)), state)


def _instance(cls: type, state: Any) -> Any:
    view = object.__new__(cls)
    view.__dict__[_STATE] = state
    return view


def _view_class(cls: type[Experiment]) -> type:
    if cls not in _classes:
        _classes[cls] = _made_class(cls, cls.__name__, cls.__nitro_entries__)
    return _classes[cls]


def _made_class(cls: type, owner: str, entries: Entries) -> type:
    """A subclass whose fields are read from a view's state."""
    namespace: dict[str, Any] = {}
    for name, entry in entries.items():
        if isinstance(entry, Group):
            view = _made_class(entry.type, owner, entry.entries)
            namespace[name] = _GroupField(entry.name, owner, view)
        else:
            namespace[name] = _DESCRIPTORS[entry.residency](entry.name, owner)
    if not hasattr(cls, "__nitro_entries__"):
        # To those who ask, a group is of its own class, so that `==`, `hash` and
        # `dataclasses.replace` do with the fields' values what they always do.
        namespace["__class__"] = property(lambda _: cls)
    namespace |= {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__repr__": _view_repr,
        "_nitro_is_view": True,
        "_nitro_entries": entries,
    }
    return type(cls.__name__, (cls,), namespace)


def _view_repr(self: Any) -> str:
    values, device, _ = self.__dict__[_STATE]
    visible = {**values, **device}
    shown = ", ".join(
        f"{name}={getattr(self, name)!r}"
        if isinstance(entry, Group)
        else f"{name}={visible[entry.name]!r}"
        for name, entry in self._nitro_entries.items()
        if isinstance(entry, Group) or entry.name in visible
    )
    return f"{type(self).__name__}({shown})"


class _Field:
    """A data descriptor, so that it wins over anything in the instance's `__dict__`."""

    def __init__(self, name: str, owner: str) -> None:
        self.name = name
        self.owner = owner

    def seen_by(self, view: Any) -> Any:
        """What the view holds: structural values, device values, and the names read."""
        if view is None:
            raise AttributeError(
                f"`{self.owner}.{self.name}` is a field: read it as `self.{self.name}`"
            )
        return view.__dict__[_STATE]

    def __set__(self, view: Any, value: Any) -> None:
        raise AttributeError(f"`{self.owner}.{self.name}` cannot be set: experiments are frozen")


class _GraphConstField(_Field):
    def __get__(self, view: Any, owner: type | None = None) -> Any:
        values, _, reads = self.seen_by(view)
        reads.add(self.name)
        return values[self.name]


class _DeviceField(_Field):
    def __get__(self, view: Any, owner: type | None = None) -> Any:
        return self.seen_by(view)[1][self.name]


class _GroupField(_Field):
    def __init__(self, name: str, owner: str, view_class: type) -> None:
        super().__init__(name, owner)
        self.view_class = view_class

    def __get__(self, view: Any, owner: type | None = None) -> Any:
        return _instance(self.view_class, self.seen_by(view))


class _HostField(_Field):
    def __get__(self, view: Any, owner: type | None = None) -> Any:
        attribute = self.name.rpartition(".")[2]
        raise HostFieldError(
            f"A traced hook read the host-only field `{self.owner}.{self.name}`.",
            expected="traced code reads GraphConst and Device fields only",
            fix=(
                f"mark it `{attribute}: GraphConst[...]` (baked: recompiles for each value), or "
                f"`{attribute}: Device[...]` (traced input: no recompile), or read it in a hook "
                "that runs on the host, such as `build_data`, `build_model` or `finalize_metrics`"
            ),
        )


_DESCRIPTORS = {
    Residency.GRAPH_CONST: _GraphConstField,
    Residency.DEVICE: _DeviceField,
    Residency.HOST: _HostField,
}
