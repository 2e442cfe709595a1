"""The export backend that Nitro finds under the name `stablehlo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.export

from nitro.errors import ConfigError, did_you_mean

from ._artifact import DEFAULT_VERSION, check_version
from ._flatbuffers import require_flatbuffers
from ._loader import Bundle, load_bundle
from ._writer import WriteOptions, write_bundle, write_verification

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
        calling_convention_version: int | None = None,
        input_shapes: Sequence[Mapping[str, int]] | None = None,
        model_jl: str | Path | None = None,
        description: str = "",
        **unknown: Any,
    ) -> None:
        """Writes a bundle into `path`, an empty directory.

        Args:
            program: What to write.
            path: Where to; the manifest's name is the program's, so the directory must
                end up under that name.
            stablehlo_version: The oldest reader that must understand the artifacts.
            calling_convention_version: Of `jax.export`, for an older JAX; None means
                the default of the installed one.
            input_shapes: Where sizes are symbolic, the ones to compile fixed programs
                for, such as `[{"time": 64}, {"time": 128}]`: other readers than JAX need
                those. None takes the sizes of the golden inputs.
            model_jl: Julia code that the server runs around the program, or its file.
            description: Free text for the manifest.
            unknown: Always refused.

        Raises:
            ConfigError: An unknown option, or a value that cannot be written.
            MissingPackageError: `flatbuffers` is not installed.
            ExportError: Something that a bundle cannot promise.
        """
        for option in unknown:
            raise ConfigError(
                f"The backend `stablehlo` has no option `{option}`.",
                expected=did_you_mean(option, [f.name for f in fields(WriteOptions)]),
            )
        require_flatbuffers()
        check_version(stablehlo_version)
        _check_calling_convention(calling_convention_version)
        options = WriteOptions(
            stablehlo_version=stablehlo_version,
            calling_convention_version=calling_convention_version,
            input_shapes=input_shapes,
            model_jl=_checked_model_jl(model_jl),
            description=_checked_description(description),
        )
        write_bundle(program, Path(path), options)

    def record_verification(self, path: Path, verification: Mapping[str, Any]) -> None:
        """Stores in `nitro.json` how far the bundle was from the model."""
        write_verification(path, verification)

    def load(self, path: Path) -> Bundle:
        """Loads a bundle, as `load_bundle` does."""
        return load_bundle(path)


def _check_calling_convention(version: int | None) -> None:
    oldest = jax.export.minimum_supported_calling_convention_version
    newest = jax.export.maximum_supported_calling_convention_version
    if version is not None and (
        isinstance(version, bool) or version not in range(oldest, newest + 1)
    ):
        raise ConfigError(
            f"`calling_convention_version` is {version!r}.",
            expected=f"a version from {oldest} to {newest}, which this JAX can write",
            fix=f"leave it out for {newest}",
        )


def _checked_model_jl(given: str | Path | None) -> str | None:
    if isinstance(given, Path) and not given.is_file():
        raise ConfigError(f"`model_jl` is `{given}`, which is no file.", expected="a Julia file")
    text = given.read_text(encoding="utf-8") if isinstance(given, Path) else given
    if text is not None and "register_model(" not in text:
        raise ConfigError(
            "`model_jl` never calls `register_model`.",
            expected="Julia code that calls it, or the `Path` of a file with such code",
            fix="write `register_model(name; preprocess, postprocess)` into it",
        )
    return text


def _checked_description(text: object) -> str:
    if not isinstance(text, str):
        raise ConfigError(f"`description` is {text!r}.", expected="text")
    return text
