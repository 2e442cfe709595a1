"""What lies in a SavedModel's `assets.extra/`, which TensorFlow copies and never reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nitro.errors import BundleError

from ._io_spec import IOSpec
from ._version import __version__

if TYPE_CHECKING:
    from nitro.export import ExportProgram

FOLDER = "assets.extra"
INDEX_FILE = f"{FOLDER}/nitro.json"
PROVENANCE_FILE = f"{FOLDER}/provenance.json"
PATCH_FILE = f"{FOLDER}/working_tree.patch"
GOLDEN_FILE = f"{FOLDER}/golden.npz"

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Index:
    """What our loader knows of a SavedModel: the contents of `nitro.json`.

    Attributes:
        name: The artifact's name.
        inputs: The inputs of every signature, in wire order.
        outputs: The outputs of every signature.
        batch_sizes: The fixed sizes that have a signature, ascending.
        dynamic_batch: Whether `serving_default` takes any number of rows.
        rtol: How far outputs may be from the golden ones, relative to the largest.
        versions: The packages that wrote it, and what its modules are written for.
        files: The SHA-256 of every other file, by path.
        verification: What the comparison with `predict` found, where it was made.
    """

    name: str
    inputs: tuple[IOSpec, ...]
    outputs: tuple[IOSpec, ...]
    batch_sizes: tuple[int, ...]
    dynamic_batch: bool
    rtol: float
    versions: Mapping[str, Any]
    files: Mapping[str, str]
    verification: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """The file's contents as JSON values."""
        found = {
            "format": _FORMAT,
            "name": self.name,
            "inputs": [spec.to_json() for spec in self.inputs],
            "outputs": [spec.to_json() for spec in self.outputs],
            "batch_sizes": list(self.batch_sizes),
            "dynamic_batch": self.dynamic_batch,
            "rtol": self.rtol,
            "versions": dict(self.versions),
            "files": dict(self.files),
        }
        return found if self.verification is None else {**found, "verification": self.verification}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Index:
        """Reads what `to_json` gave.

        Raises:
            KeyError, TypeError, ValueError: It has another form.
        """
        if entry["format"] != _FORMAT:
            raise ValueError(f"its format is {entry['format']!r}, and {_FORMAT} is known")
        return cls(
            name=entry["name"],
            inputs=tuple(map(IOSpec.from_json, entry["inputs"])),
            outputs=tuple(map(IOSpec.from_json, entry["outputs"])),
            batch_sizes=tuple(entry["batch_sizes"]),
            dynamic_batch=entry["dynamic_batch"],
            rtol=entry["rtol"],
            versions=dict(entry["versions"]),
            files=dict(entry["files"]),
            verification=entry.get("verification"),
        )


def write_index(root: Path, index: Index) -> None:
    """Writes `nitro.json`."""
    write_json(root / INDEX_FILE, index.to_json())


def read_index(root: Path) -> Index:
    """Reads `nitro.json` and compares every file with its digest.

    Raises:
        BundleError: No SavedModel that this package wrote, or a changed or missing file.
    """
    try:
        index = Index.from_json(json.loads((root / INDEX_FILE).read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise BundleError(
            f"`{root}` has no `{INDEX_FILE}`.",
            expected='the folder that `export_model(run, "tf", ...)` returned',
            fix="load other SavedModels with `tf.saved_model.load`",
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise BundleError(
            f"`{root / INDEX_FILE}` does not parse: {type(error).__name__}: {error}.",
            expected=f"what nitro-export-tf {__version__} writes",
            fix="copy the SavedModel again, or update nitro-export-tf",
        ) from error
    for name, promised in index.files.items():
        path = root / name
        found = digest(path) if path.is_file() else None
        if found != promised:
            raise BundleError(
                f"`{name}` is missing." if found is None else f"`{name}` has changed.",
                expected=f"the sha256 {promised}, by `{INDEX_FILE}`",
                fix="copy the SavedModel again, whole; a model that was changed on purpose "
                "loads with `tf.saved_model.load`",
            )
    return index


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def write_assets(program: ExportProgram, root: Path, versions: Mapping[str, Any]) -> None:
    """Writes provenance, the patch and the golden arrays."""
    (root / FOLDER).mkdir()
    patch = program.working_tree_patch
    facts = {
        "source_framework": "jax",
        "converter": f"nitro-export-tf {__version__}",
        "batch_sizes": list(program.batch_sizes),
        "dynamic_batch": program.dynamic_batch,
        "platforms": list(program.platforms),
        **versions,
        **program.provenance,
    }
    if patch is not None:
        facts["git_diff_file"] = PATCH_FILE
        (root / PATCH_FILE).write_bytes(patch)
    write_json(root / PROVENANCE_FILE, facts)
    golden = {f"inputs.{name}": array for name, array in program.golden.inputs.items()}
    golden |= {f"outputs.{name}": array for name, array in program.golden.outputs.items()}
    # Numbers only. NumPy 2.0 would store a keyword `allow_pickle` as an array.
    np.savez(root / GOLDEN_FILE, **golden)  # pyright: ignore[reportArgumentType] - no name is a keyword of NumPy


def read_provenance(root: Path) -> Mapping[str, Any]:
    """Reads the facts that were kept with the model."""
    return json.loads((root / PROVENANCE_FILE).read_text(encoding="utf-8"))


def read_golden(
    root: Path, inputs: Sequence[IOSpec], outputs: Sequence[IOSpec]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Reads the golden inputs and outputs."""
    with np.load(root / GOLDEN_FILE, allow_pickle=False) as stored:
        # NumPy's format knows bfloat16 only as two bytes without a meaning.
        return (
            {s.name: stored[f"inputs.{s.name}"].view(s.numpy_dtype) for s in inputs},
            {s.name: stored[f"outputs.{s.name}"].view(s.numpy_dtype) for s in outputs},
        )


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes JSON with sorted keys; what JSON does not have becomes text."""
    text = json.dumps(values, indent=2, sort_keys=True, default=str, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
