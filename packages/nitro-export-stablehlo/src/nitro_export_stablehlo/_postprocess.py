"""The post-processing module of a bundle: code, which runs only when it is asked for."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from nitro.errors import BundleError

from ._files import FileReader
from ._index import Index

FILE = "postprocess.py"
FUNCTION = "postprocess"

_MAX_BYTES = 4 * 1024 * 1024


def load_postprocess(files: FileReader, index: Index) -> Callable[..., Any]:
    """Executes the module of a bundle and returns its function.

    Raises:
        BundleError: There is none, it has changed since the export, or it fails.
    """
    if FILE not in index.files:
        raise BundleError(
            f"`{index.name}` has no `{FILE}`.",
            expected="a bundle of an experiment with an `export_postprocess` hook",
        )
    files.check(FILE, index.files[FILE])
    source = files.read(FILE, limit_bytes=_MAX_BYTES)
    module = types.ModuleType("postprocess")
    try:
        exec(compile(source, str(files.path(FILE)), "exec"), module.__dict__)
        function = module.__dict__[FUNCTION]
    # The module is somebody's code.
    except Exception as error:
        raise BundleError(
            f"`{FILE}` fails: {type(error).__name__}: {error}.",
            expected=f"a module that defines `{FUNCTION}(outputs)`",
        ) from error
    return function
