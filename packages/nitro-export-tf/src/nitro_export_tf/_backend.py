"""The SavedModel backend; this version only says that it cannot write yet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from nitro.errors import ExportError

from ._version import __version__

if TYPE_CHECKING:
    from nitro.export import ExportProgram
    from nitro.hooks import LoadedArtifact


class SavedModelBackend:
    """Refuses to write or load SavedModels; meets `nitro.hooks.ExportBackend`."""

    @property
    def name(self) -> str:
        """The name under which `export_model` finds the backend."""
        return "tf"

    def write(self, program: ExportProgram, path: Path, **options: Any) -> NoReturn:
        """Refuses: nothing is written to `path`.

        Raises:
            ExportError: Always.
        """
        del path, options
        raise _not_yet(f"`{program.name}` cannot be written as a SavedModel")

    def load(self, path: Path) -> LoadedArtifact:
        """Refuses.

        Raises:
            ExportError: Always.
        """
        raise _not_yet(f"The SavedModel at {path} cannot be loaded")


def _not_yet(problem: str) -> ExportError:
    return ExportError(
        f"{problem}: nitro-export-tf {__version__} is a placeholder that has no writer yet.",
        expected="a backend that can write, such as `stablehlo`",
        fix='`pip install "nitro-core[stablehlo]"` and `nitro.export_model(run, "stablehlo", ...)`',
    )
