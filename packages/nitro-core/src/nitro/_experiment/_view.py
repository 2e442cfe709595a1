"""What a trace sees of an experiment: structural values and tracers, and no host field."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nitro.errors import HostFieldError

from ._fields import Residency

if TYPE_CHECKING:
    from ._declaration import Experiment

_classes: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


def compile_view(
    experiment: Experiment, device: Mapping[str, Any], reads: set[str] | None = None
) -> Any:
    """Makes the stand-in that traced hooks get as `self`.

    It is an instance of a subclass, so `isinstance`, `super()`, methods and properties
    work as ever; only the fields differ.

    Args:
        experiment: Gives the structural values.
        device: The tracer (or array) of each Device field.
        reads: Collects the name of each GraphConst field that a hook reads, which is
            what the compiled program depends on.
    """
    view = object.__new__(_view_class(type(experiment)))
    values = {
        name: getattr(experiment, name)
        for name, field in experiment.fields().items()
        if field.residency is Residency.GRAPH_CONST
    }
    view.__dict__["_nitro_view"] = (values, device, set[str]() if reads is None else reads)
    return view


def _view_class(cls: type[Experiment]) -> type:
    if cls not in _classes:
        namespace: dict[str, Any] = {
            name: _DESCRIPTORS[field.residency](name, cls.__name__)
            for name, field in cls.fields().items()
        }
        namespace |= {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__repr__": _view_repr,
            "_nitro_is_view": True,
        }
        _classes[cls] = type(cls.__name__, (cls,), namespace)
    return _classes[cls]


def _view_repr(self: Any) -> str:
    values, device, _ = self.__dict__["_nitro_view"]
    shown = ", ".join(f"{name}={value!r}" for name, value in {**values, **device}.items())
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
        return view.__dict__["_nitro_view"]

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


class _HostField(_Field):
    def __get__(self, view: Any, owner: type | None = None) -> Any:
        raise HostFieldError(
            f"A traced hook read the host-only field `{self.owner}.{self.name}`.",
            expected="traced code reads GraphConst and Device fields only",
            fix=(
                f"mark it `{self.name}: GraphConst[...]` (baked: recompiles for each value), or "
                f"`{self.name}: Device[...]` (traced input: no recompile), or read it in a hook "
                "that runs on the host, such as `build_data`, `build_model` or `finalize_metrics`"
            ),
        )


_DESCRIPTORS = {
    Residency.GRAPH_CONST: _GraphConstField,
    Residency.DEVICE: _DeviceField,
    Residency.HOST: _HostField,
}
