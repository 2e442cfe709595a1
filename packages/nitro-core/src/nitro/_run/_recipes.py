"""Experiment classes by name, as a command line or a record has them."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from nitro._checkpoint import Record
from nitro._experiment import Experiment, checked_value
from nitro._logs import plain
from nitro.errors import CheckpointError, ConfigError, NitroError, did_you_mean

from ._restore import loggable

_ARRAY = re.compile(r"[a-z_]+[0-9]*\((\d+(, \d+)*,?)?\)")


def load_experiment(target: str) -> type[Experiment]:
    """The class that `file.py:Class` or `package.module:Class` names.

    The class may be left out where there is only one. The directory of a file, and the
    current one for a module, can be imported from.

    Raises:
        ConfigError: No such file, module or class, or one that cannot be imported.
    """
    place, colon, name = target.rpartition(":")
    if not colon or place.endswith((".py:", "\\")) or (len(place) == 1 and name[:1] in "\\/"):
        place, name = target, ""
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    found = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, Experiment)
        and value.__module__ == module.__name__
    }
    if not name and len(found) == 1:
        return next(iter(found.values()))
    return _find_class(module, place, name, found)


def _find_class(
    module: ModuleType, place: str, name: str, found: Mapping[str, type[Experiment]]
) -> type[Experiment]:
    """The class of that dotted name, which a module may also have from elsewhere."""
    expected = f"a subclass of `nitro.Experiment` in `{place}`"
    fix = "name the file that defines it"
    if found:
        expected, fix = did_you_mean(name, found), f"write `{place}:{next(iter(found))}`"
    if not name:
        number = f"{len(found)} experiments, and no class is named" if found else "no experiment"
        raise ConfigError(f"`{place}` has {number}.", expected=expected, fix=fix)
    candidate: Any = module
    for part in name.split("."):
        candidate = getattr(candidate, part, None)
    if candidate is None:
        raise ConfigError(f"`{place}` has no class `{name}`.", expected=expected, fix=fix)
    if not (isinstance(candidate, type) and issubclass(candidate, Experiment)):
        raise ConfigError(
            f"`{place}:{name}` is {candidate!r}.",
            expected="a subclass of `nitro.Experiment`",
            fix=fix,
        )
    return candidate


def class_of_record(record: Record) -> type[Experiment]:
    """The class of the experiment that wrote a record.

    Raises:
        CheckpointError: The record does not say where its class is, or the class is gone.
    """
    meta = record.meta
    file, (module, _, name) = meta.get("file"), meta["experiment"].partition(":")
    is_there = file is not None and Path(file).is_file()
    try:
        return load_experiment(f"{file if is_there else module}:{name}")
    except ConfigError as error:
        raise CheckpointError(
            f"The experiment `{meta['experiment']}` of the record `{record.path}` cannot be "
            f"loaded: {error.problem}"
            + ("" if file is None or is_there else f" Its file `{file}` is gone."),
            fix=f"say where it is now: `nitro evaluate FILE:{name} --checkpoint {record.path}`",
        ) from error


def build_from_record(
    cls: type[Experiment], record: Record, overrides: Mapping[str, Any] | None = None
) -> Experiment:
    """An experiment with the field values of a record; arrays stay at their defaults."""
    config: Mapping[str, Any] = record.meta["config"]
    overrides = overrides or {}
    values: dict[str, Any] = {}
    for name, field in cls.fields().items():
        saved = config.get(name)
        if name not in config or name in overrides or plain(loggable(field.default)) == saved:
            continue
        is_array = isinstance(saved, str) and _ARRAY.fullmatch(saved) and field.type is not str
        if is_array:
            continue
        try:
            values[name] = checked_value(cls.__name__, field, saved, strict=True)
        except NitroError:
            continue  # what JSON does not hold; structural ones are compared when it is opened
    return cls(**{**values, **overrides})


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        around = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, around, n=1)
        raise ConfigError(
            f"There is no file `{path}`.",
            expected=did_you_mean(path.name, around) if close else "a Python file, or a module",
        )
    path = path.resolve()
    name = path.stem
    known = sys.modules.get(name)
    if known is not None:
        if getattr(known, "__file__", None) == str(path):
            return known
        name = f"nitro_file_{name}"  # another module has the name
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except NitroError:
        del sys.modules[name]
        raise
    # Importing runs code that we do not know, `sys.exit` included.
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _unimportable(str(path), error) from error
    return module


def _load_module(name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except NitroError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name.partition(".")[0]:
            raise ConfigError(
                f"There is no module `{name}`.",
                expected="FILE.py:Class, or a module that can be imported from here",
            ) from error
        raise _unimportable(name, error) from error


def _unimportable(what: str, error: BaseException) -> ConfigError:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})"
    return ConfigError(
        f"`{what}` cannot be imported: {type(error).__name__}: {error}{where}",
        fix='a file that trains when it is run needs `if __name__ == "__main__":` around that',
    )
