"""Experiments: declaration, markers, what a trace sees, routing and run options."""

from ._declaration import Experiment, default_no_decay
from ._fields import NO_DEFAULT, Device, GraphConst, Host, Residency
from ._hooks import has_hook, require_hooks
from ._options import (
    DRIVER_OPTIONS,
    UNSET,
    RunOptions,
    resolve_option,
    resolve_options,
    resolve_source,
)
from ._overrides import parse_override
from ._presets import preset_keywords
from ._read import field_names, field_value, field_values, group_code
from ._routing import Route, listed, read_route, read_routes
from ._source import locate
from ._spelling import foreign_keyword
from ._values import checked_value, traced_value
from ._view import compile_view

__all__ = [
    "DRIVER_OPTIONS",
    "NO_DEFAULT",
    "UNSET",
    "Device",
    "Experiment",
    "GraphConst",
    "Host",
    "Residency",
    "Route",
    "RunOptions",
    "checked_value",
    "compile_view",
    "default_no_decay",
    "field_names",
    "field_value",
    "field_values",
    "foreign_keyword",
    "group_code",
    "has_hook",
    "listed",
    "locate",
    "parse_override",
    "preset_keywords",
    "read_route",
    "read_routes",
    "require_hooks",
    "resolve_option",
    "resolve_options",
    "resolve_source",
    "traced_value",
]
