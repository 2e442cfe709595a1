"""What passes between Nitro and its plugins: hook specs, backend records, protocols."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import pluggy

if TYPE_CHECKING:
    import numpy as np

    from nitro.export import ExportProgram

ENTRY_POINT_GROUP = "nitro"

hookspec = pluggy.HookspecMarker("nitro")
hookimpl = pluggy.HookimplMarker("nitro")


@dataclass(frozen=True, kw_only=True)
class BackendInfo:
    """A light record of one export backend; making it imports no heavy library.

    Attributes:
        name: What the user writes in `export_model(run, name, ...)`.
        summary: One line for `nitro backends`.
        load: Called on first use; imports what the backend needs and returns it.
        recognises: Whether a path holds one of the backend's artifacts, judged by the names of
            its files alone; None if the backend's artifacts hand out no weights.
    """

    name: str
    summary: str
    load: Callable[[], ExportBackend]
    recognises: Callable[[Path], bool] | None = None


class LoadedArtifact(Protocol):
    """An artifact loaded again: named NumPy arrays in, named NumPy arrays out."""

    def __call__(self, **inputs: np.ndarray) -> Mapping[str, np.ndarray]:
        """Runs the program.

        Inputs have the wire's names, dtypes and shapes, with any number of rows along
        the batch axis; outputs have as many rows. An artifact of fixed sizes cuts a
        request into those, and fills the last one up.

        It must raise `BundleError` for inputs that do not fit; names the input.
        """
        ...

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Where the artifact comes from: what `ExportProgram.provenance` was."""
        ...


@runtime_checkable
class ExportBackend(Protocol):
    """Writes an `ExportProgram` as an artifact, and loads it again."""

    @property
    def name(self) -> str:
        """The name under which `export_model` finds the backend."""
        ...

    def write(self, program: ExportProgram, path: Path, **options: Any) -> None:
        """Writes the artifact into `path`, an empty directory.

        Nitro calls it with a temporary sibling of the target and renames that when
        the call returns, so an exception or a kill leaves nothing behind.

        Args:
            program: What to write; read only. What of it the format cannot keep
                (`dynamic_batch`, `symbols`, `vjp_order`, several `platforms`,
                `client_outputs`) must raise `ExportError`, not be left out.
            path: An empty directory that exists.
            options: The backend's own options, as the caller gave them. An option
                that the backend does not know must raise `ConfigError`.
        """
        ...

    def load(self, path: Path) -> LoadedArtifact:
        """Loads an artifact that `write` made, without any model source.

        It must raise `BundleError` for a damaged artifact.
        """
        ...


@runtime_checkable
class VerificationRecorder(Protocol):
    """What a backend may do besides: keep what verification found."""

    def record_verification(self, path: Path, verification: Mapping[str, Any]) -> None:
        """Stores JSON values in the artifact: what was allowed, and the differences found.

        Nitro calls it after `write`, when the artifact gave what `predict` gives, and
        before the rename.
        """
        ...


@runtime_checkable
class SelfVerifying(Protocol):
    """What a loaded artifact may do besides: check all that calling it does not reach."""

    def verify(self) -> None:
        """Compares every program in it with the golden arrays that it holds.

        Nitro calls it in the process that verifies. It must raise `BundleError` for a
        difference.
        """
        ...


@runtime_checkable
class WeightHolder(Protocol):
    """What a loaded artifact may do besides: hand out its weights, for `Nitro(weights=...)`."""

    @property
    def weights(self) -> Mapping[str, Any]:
        """The weights by dotted name, as `ExportProgram.weights` had them."""
        ...


class NitroSpec:
    """The hooks that a plugin may implement."""

    @hookspec
    def nitro_export_backends(self) -> Iterable[BackendInfo]:  # pyright: ignore[reportReturnType] - a spec has no body
        """Returns a record for each export backend that the plugin brings."""
