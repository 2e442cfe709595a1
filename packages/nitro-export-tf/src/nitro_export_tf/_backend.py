"""The export backend that Nitro finds under the name `tf`."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nitro.errors import ConfigError, did_you_mean

from ._assets import read_index, write_index
from ._loader import SavedModel, load_saved_model
from ._tensorflow import choose_target, import_tensorflow

if TYPE_CHECKING:
    from nitro.export import ExportProgram

_OPTIONS = ("stablehlo_version", "call_module_version", "trainable")


class SavedModelBackend:
    """Writes SavedModels, and loads them again; meets `nitro.hooks.ExportBackend`.

    Attributes:
        dynamic_batch: Clients of a SavedModel expect one signature for any number of rows.
    """

    dynamic_batch = True

    @property
    def name(self) -> str:
        """The name under which `export_model` finds the backend."""
        return "tf"

    def write(
        self,
        program: ExportProgram,
        path: Path,
        *,
        stablehlo_version: str | None = None,
        call_module_version: int | None = None,
        trainable: bool | Collection[str] = False,
        **unknown: Any,
    ) -> None:
        """Writes a SavedModel into `path`, an empty directory.

        Args:
            program: What to write.
            path: Where to.
            stablehlo_version: The StableHLO version of the TensorFlow that will read it;
                None asks the installed one.
            call_module_version: The calling convention that it reads; None is 9, or what
                the installed TensorFlow knows.
            trainable: The weights that become trainable variables: True for all float
                weights, or their names; needs `vjp_order=1`. Name them where the model
                has state, such as BatchNorm's statistics, which no gradient should move.
            unknown: Always refused.

        Raises:
            ConfigError: An unknown option, or a version that cannot be written.
            MissingPackageError: TensorFlow is not installed.
            ExportError: Something that a SavedModel cannot promise.
        """
        for option in unknown:
            raise ConfigError(
                f"The backend `tf` has no option `{option}`.",
                expected=did_you_mean(option, _OPTIONS),
            )
        from ._writer import check_program, trainable_weights, write_saved_model

        check_program(program)
        variables = trainable_weights(program, trainable)
        tf = import_tensorflow("writing a SavedModel")
        write_saved_model(
            tf,
            program,
            Path(path),
            target=choose_target(stablehlo_version, call_module_version),
            trainable=variables,
        )

    def load(self, path: Path) -> SavedModel:
        """Loads a SavedModel, as `load_saved_model` does."""
        return load_saved_model(path)

    def record_verification(self, path: Path, verification: Mapping[str, Any]) -> None:
        """Keeps what the comparison with `predict` found, in `assets.extra/nitro.json`."""
        index = dataclasses.replace(read_index(path), verification=dict(verification))
        write_index(path, index)
