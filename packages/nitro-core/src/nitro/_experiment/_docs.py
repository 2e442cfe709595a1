"""The docstring of an experiment: the user's prose, and a table of the fields."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping

from ._fields import NO_DEFAULT, FieldInfo, Residency
from ._values import type_name

_WIDTH = 88
_LONGEST_DEFAULT = 32


def documented(prose: str | None, fields: Mapping[str, FieldInfo]) -> str | None:
    """The prose with the table of fields beneath it; None where there is neither."""
    text = inspect.cleandoc(prose or "")
    if not fields:
        return text or None
    return "\n\n".join([text, fields_table(fields)] if text else [fields_table(fields)])


def fields_table(fields: Mapping[str, FieldInfo]) -> str:
    """One row for each field: name, marked type, default; its doc below."""
    heads = [(field.name, _marked(field), _default(field)) for field in fields.values()]
    widths = [max(len(head[column]) for head in heads) for column in (0, 1)]
    lines = ["Fields:"]
    for (name, marked, default), field in zip(heads, fields.values(), strict=True):
        lines.append(f"    {name:<{widths[0]}}  {marked:<{widths[1]}}  {default}".rstrip())
        lines += textwrap.wrap(
            " ".join(field.doc.split()), _WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8
        )
    return "\n".join(lines)


def _marked(field: FieldInfo) -> str:
    declared = type_name(field.type)
    if field.residency is Residency.HOST:
        return declared
    return f"{field.residency.value}[{declared}]"


def _default(field: FieldInfo) -> str:
    if field.default is NO_DEFAULT:
        return "(required)"
    return "= " + textwrap.shorten(repr(field.default), _LONGEST_DEFAULT, placeholder="...")
