"""Experiments: declaration, markers, what a trace sees, routing and run options."""

from ._declaration import Experiment, default_no_decay, field_names, has_hook, require_hooks
from ._fields import NO_DEFAULT, Device, FieldInfo, GraphConst, Host, Residency
from ._options import DRIVER_OPTIONS, UNSET, RunOptions, resolve_option, resolve_options
from ._routing import Route, listed, read_routes
from ._view import compile_view

__all__ = [
    "DRIVER_OPTIONS",
    "NO_DEFAULT",
    "UNSET",
    "Device",
    "Experiment",
    "FieldInfo",
    "GraphConst",
    "Host",
    "Residency",
    "Route",
    "RunOptions",
    "compile_view",
    "default_no_decay",
    "field_names",
    "has_hook",
    "listed",
    "read_routes",
    "require_hooks",
    "resolve_option",
    "resolve_options",
]
