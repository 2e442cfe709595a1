"""Puts the values of a constructor together: defaults, groups, dotted names, checks."""

from __future__ import annotations

import ast
import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nitro.errors import ConfigError, ExperimentError, did_you_mean

from ._fields import NO_DEFAULT, Entries, FieldInfo, Group, groups_of, leaves_of
from ._values import checked_value, type_name


def constructor_values(owner: str, entries: Entries, given: Mapping[str, Any]) -> dict[str, Any]:
    """The value of every attribute of an experiment, from the keywords given.

    Args:
        owner: The experiment's class name.
        entries: What it declares.
        given: Values by name; `model.width` replaces one value inside a group.

    Raises:
        ExperimentError: An unknown name, or a required one that is missing.
        ConfigError: A value that its declared type cannot hold.
    """
    check_names(owner, entries, given)
    whole = {name: value for name, value in given.items() if "." not in name}
    inner: dict[str, dict[tuple[str, ...], Any]] = defaultdict(dict)
    for name, value in given.items():
        head, *rest = name.split(".")
        if rest:
            inner[head][tuple(rest)] = value
    values: dict[str, Any] = {}
    for name, entry in entries.items():
        value = whole.get(name, entry.default)
        if value is NO_DEFAULT:
            raise ExperimentError(
                f"`{owner}(...)` lacks the required field `{name}`.",
                fix=f"write `{owner}({name}=...)`, or give the field a default",
            )
        if name in inner:
            value = _overridden(owner, entry, value, inner[name])
        values[name] = _checked(owner, entry, value)
    return values


def check_names(owner: str, entries: Entries, names: Mapping[str, Any]) -> None:
    """Refuses names that the class does not declare.

    Raises:
        ExperimentError: Names the first, and lists the fields.
    """
    leaves = {field.name for field in leaves_of(entries)}
    known = leaves | {group.name for group in groups_of(entries)}
    for name in names:
        if name not in known:
            raise ExperimentError(
                f"`{owner}` has no field `{name}`.", expected=did_you_mean(name, leaves)
            )


def parse_override(experiment: Any, text: str) -> tuple[str, Any]:
    """Reads `name=value` as a command line has it: the field's declared type decides.

    The text is taken for the first of these that the type can hold exactly: a Python literal
    (`3`, `1e1`, `'a'`, `(3, 5)`; true, false and none in any case), the text itself, a path,
    a yes or no (`1`, `0`, `yes`, `no`, `on`, `off`), a number (`inf`, `nan`, `007`).

    Args:
        experiment: The experiment class.
        text: For example `model.width=256`, `mode=max` or `sizes=(3, 5)`.

    Returns:
        The name, and the value for the constructor.

    Raises:
        ConfigError: There is no `=`, or the value does not fit the type.
        ExperimentError: No such field.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"`{text}` sets nothing.", expected="name=value, such as width=256")
    fields: Mapping[str, FieldInfo] = experiment.fields()
    if name not in fields:
        raise ExperimentError(
            f"`{experiment.__name__}` has no field `{name}`.", expected=did_you_mean(name, fields)
        )
    field = fields[name]
    for candidate in _readings(value):
        try:
            return name, checked_value(experiment.__name__, field, candidate, strict=True)
        except ConfigError:
            continue
    raise ConfigError(
        f"`{name}={value}` does not fit the field `{experiment.__name__}.{name}`.",
        expected=f"a value of the declared type {type_name(field.type)}",
    )


def _readings(text: str) -> Iterator[Any]:
    """What a word may mean, the likeliest first; see `parse_override`."""
    word = text.strip().lower()
    if word in _LITERALS:
        yield _LITERALS[word]
    else:
        with suppress(ValueError, SyntaxError):
            yield ast.literal_eval(text.strip())
    yield text
    yield Path(text)
    if word in _YES_OR_NO:
        yield _YES_OR_NO[word]
    with suppress(ValueError):
        yield float(word)


_LITERALS = {"true": True, "false": False, "none": None}
_YES_OR_NO = {"1": True, "0": False, "yes": True, "no": False, "on": True, "off": False}


def _overridden(
    owner: str, entry: FieldInfo | Group, value: Any, changes: Mapping[tuple[str, ...], Any]
) -> Any:
    """A value with what is inside it replaced, all at once."""
    if () in changes:
        value = changes[()]
    by_name: dict[str, dict[tuple[str, ...], Any]] = defaultdict(dict)
    for path, new in changes.items():
        if path:
            by_name[path[0]][path[1:]] = new
    if not by_name:
        return value
    assert isinstance(entry, Group)  # by `check_names`
    _check_group(owner, entry, value)
    return _replaced(
        owner,
        entry,
        value,
        {
            name: _overridden(owner, entry.entries[name], getattr(value, name), inner)
            for name, inner in by_name.items()
        },
    )


def _checked(owner: str, entry: FieldInfo | Group, value: Any) -> Any:
    """A value as the experiment keeps it: structural ones converted to their type."""
    if isinstance(entry, FieldInfo):
        return checked_value(owner, entry, value)
    _check_group(owner, entry, value)
    converted = {
        name: new
        for name, inner in entry.entries.items()
        if (new := _checked(owner, inner, getattr(value, name))) is not getattr(value, name)
    }
    return _replaced(owner, entry, value, converted) if converted else value


def _check_group(owner: str, group: Group, value: Any) -> None:
    # A subclass may hold more, which no marker and no key would know of.
    fits = isinstance(value, group.type) if group.is_host_only else type(value) is group.type
    if not fits:
        raise ConfigError(
            f"`{owner}.{group.name}` is {value!r} ({type(value).__name__}).",
            expected=f"a `{group.type.__name__}` itself: its fields are declared one by one",
            fix=f"write `{group.name}={group.type.__name__}(...)`, or set one field of it: "
            f"`{owner}(**{{'{next(group.leaves()).name}': ...}})`",
        )


def _replaced(owner: str, group: Group, value: Any, changes: Mapping[str, Any]) -> Any:
    computed = [f.name for f in dataclasses.fields(group.type) if not f.init and f.name in changes]
    if computed:
        raise ConfigError(
            f"`{owner}.{group.name}.{computed[0]}` follows from other fields (`init=False`).",
            expected="a field that the dataclass's constructor takes",
        )
    return dataclasses.replace(value, **changes)
