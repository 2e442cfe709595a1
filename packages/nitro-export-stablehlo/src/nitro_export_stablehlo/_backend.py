"""The export backend that Nitro finds under the name `stablehlo`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nitro.errors import ConfigError, did_you_mean

from ._artifact import DEFAULT_VERSION, check_version
from ._flatbuffers import require_flatbuffers
from ._loader import Bundle, load_bundle
from ._writer import write_bundle

if TYPE_CHECKING:
    from nitro.export import ExportProgram


class StableHLOBackend:
    """Writes bundles of StableHLO programs, and loads them again."""

    name = "stablehlo"

    def write(
        self,
        program: ExportProgram,
        path: Path,
        *,
        stablehlo_version: str = DEFAULT_VERSION,
        **unknown: Any,
    ) -> None:
        """Writes a bundle into `path`, an empty directory.

        Args:
            program: What to write.
            path: Where to; the manifest's name is the program's, so the directory must
                end up under that name.
            stablehlo_version: The oldest reader that must understand the artifacts.
            unknown: Always refused.

        Raises:
            ConfigError: An unknown option, or a version that cannot be written.
            MissingPackageError: `flatbuffers` is not installed.
            ExportError: Something that a bundle cannot promise.
        """
        for option in unknown:
            raise ConfigError(
                f"The backend `stablehlo` has no option `{option}`.",
                expected=did_you_mean(option, ["stablehlo_version"]),
            )
        require_flatbuffers()
        check_version(stablehlo_version)
        write_bundle(program, Path(path), stablehlo_version=stablehlo_version)

    def load(self, path: Path) -> Bundle:
        """Loads a bundle, as `load_bundle` does."""
        return load_bundle(path)
