"""The export backend `triton`: a bundle, in the form of a model of a Triton repository."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nitro.errors import BundleError
from nitro_export_stablehlo import Bundle, StableHLOBackend, load_bundle

from ._config import make_config
from ._repository import CONFIG_FILE, newest_version, write_model_code

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nitro.export import ExportProgram


class TritonBackend:
    """Writes models of a Triton repository: `dir` is the repository, `name` the model.

    The model has one version, `1`. `nitro-serve repository` adds bundles as further ones.
    """

    name = "triton"

    def write(self, program: ExportProgram, path: Path, **options: Any) -> None:
        """Writes the model into `path`, an empty directory.

        Args:
            program: What to write.
            path: Where to.
            options: Those of the backend `stablehlo`.

        Raises:
            ConfigError: An unknown option, or a tensor that Triton cannot carry.
            ExportError: Something that a bundle cannot promise.
        """
        bundle = path / "1" / program.name
        bundle.mkdir(parents=True)
        StableHLOBackend().write(program, bundle, **options)
        config = make_config(load_bundle(bundle, verify_digests=False), name=program.name)
        write_model_code(bundle.parent)
        (path / CONFIG_FILE).write_text(config.to_text(), encoding="utf-8")

    def record_verification(self, path: Path, verification: Mapping[str, Any]) -> None:
        """Stores in the bundle how far it was from the model."""
        StableHLOBackend().record_verification(_bundle_of(path), verification)

    def load(self, path: Path) -> Bundle:
        """Loads the bundle of the newest version; runs it here, not in Triton.

        Raises:
            BundleError: No version, or a damaged bundle.
        """
        return load_bundle(_bundle_of(path))


def _bundle_of(model: Path) -> Path:
    version = newest_version(model)
    if version is None:
        raise BundleError(
            f"`{model}` has no version.",
            expected="a model of a Triton repository: a folder named by a number, such as `1`",
        )
    # A staged model has another name than it will have, and one bundle.
    found = [p for p in (model / str(version)).iterdir() if (p / "manifest.yaml").is_file()]
    if len(found) != 1:
        raise BundleError(
            f"`{model / str(version)}` holds {len(found)} bundles.", expected="exactly one"
        )
    return found[0]
