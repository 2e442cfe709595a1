"""Tells user code from library code, and gives library code its name.

Library code is what lies in a `site-packages` or `dist-packages` folder or in the
standard library, and Nitro with its export packages wherever they lie. Everything else is
the user's: scripts, notebook cells, the REPL, and packages installed in editable form.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import sysconfig
import types
from pathlib import Path
from typing import Final

_INSTALLED: Final = ("site-packages", "dist-packages")
# Jupyter and `%autoreload` compile each cell under a name of its own.
_CELL_MARKS: Final = ("ipykernel_", "ipython-input-")


def is_library_module(name: object) -> bool:
    """Tells whether a module is library code. An unknown module is the user's."""
    if not name or name == "__main__":
        return False
    if not isinstance(name, str):
        return True  # the `__module__` of a type that Cython made is a descriptor
    top = name.partition(".")[0]
    module = sys.modules.get(name) or sys.modules.get(top)
    if top == "nitro" or (top.startswith("nitro_export_") and hasattr(module, "__path__")):
        return True
    file = getattr(module, "__file__", None) or _file_on_disk(top)
    if file:
        return is_library_file(file)
    return top in sys.stdlib_module_names


@functools.lru_cache(maxsize=4096)
def is_library_file(file: str) -> bool:
    """Tells whether a file belongs to an installed package or the standard library."""
    if file.startswith("<frozen "):
        return True
    path = os.path.normcase(os.path.realpath(file))
    folders = Path(path).parts
    if any(folder in folders for folder in _INSTALLED):
        return True
    return any(path.startswith(root) for root in _standard_folders())


def is_library_function(function: types.FunctionType) -> bool:
    """Tells by the file where a function's code was written.

    Not by `__module__`, which `functools.wraps` copies from the wrapped function.
    """
    file = function.__code__.co_filename
    if file.startswith("<") and not file.startswith("<frozen "):
        return is_library_module(function.__globals__.get("__name__"))
    if _is_nitro(function.__globals__.get("__name__")):
        return True
    return is_library_file(file)


def definition_name(value: object) -> tuple[str, str] | None:
    """Returns the module and qualified name of a function, a class or a library's wrapper.

    An object of a user's class has none, so that its `__getattr__` does not run.
    """
    is_definition = isinstance(value, types.FunctionType | type)
    if not is_definition and not is_library_module(type(value).__module__):
        return None
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    return (module, name) if isinstance(module, str) and isinstance(name, str) else None


def find_definition(module: str, name: str) -> object:
    """Looks up what stands under a qualified name now; None if there is nothing."""
    found: object = sys.modules.get(module)
    for step in name.split("."):
        found = getattr(found, "__dict__", {}).get(step)
    return found


def library_name(value: object) -> str:
    """Returns the dotted name under which a library offers this very object, or ""."""
    named = definition_name(value)
    if named is None or not is_library_module(named[0]):
        return ""
    if isinstance(value, types.FunctionType) and not is_library_function(value):
        return ""
    return ".".join(named) if find_definition(*named) is value else ""


def file_label(file: str, module: str | None) -> str:
    """Names a file for a person: `features.py`, or the module if it is a cell or a REPL.

    A redefined cell keeps its name in this way, though its file name is another one.
    """
    if file.startswith("<") or any(mark in file for mark in _CELL_MARKS):
        return module or "an unnamed module"
    return Path(file).name


def _is_nitro(module: object) -> bool:
    return isinstance(module, str) and (module == "nitro" or module.startswith("nitro."))


@functools.cache
def _standard_folders() -> tuple[str, ...]:
    folders = [sysconfig.get_path(key) for key in ("stdlib", "platstdlib")]
    # Both spellings: a virtual environment links to the interpreter it was made from.
    spelled = [*folders, *(os.path.realpath(folder) for folder in folders)]
    return tuple(os.path.normcase(folder) + os.sep for folder in dict.fromkeys(spelled))


@functools.lru_cache(maxsize=4096)
def _file_on_disk(top: str) -> str | None:
    """Finds a package that is not imported, without importing it."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None:
        return None
    places = [spec.origin, *(spec.submodule_search_locations or ())]
    return next((p for p in places if p and p not in ("built-in", "frozen")), None)
