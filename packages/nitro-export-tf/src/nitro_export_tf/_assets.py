"""What lies in a SavedModel's `assets.extra/`, which TensorFlow copies and never reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nitro.errors import BundleError
from nitro.export import ArtifactIndex, Document, read_json, write_golden

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
class Index(ArtifactIndex):
    """What our loader knows of a SavedModel: the contents of `nitro.json`.

    Attributes:
        versions: The packages that wrote it, and what its modules are written for.
        files: The SHA-256 of every other file, by path.
        verification: What the comparison with `predict` found, where it was made.
    """

    spec_type = IOSpec

    versions: Mapping[str, Any]
    files: Mapping[str, str]
    verification: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """The file's contents as JSON values."""
        found = {
            "format": _FORMAT,
            **super().to_json(),
            "versions": dict(self.versions),
            "files": dict(self.files),
        }
        return found if self.verification is None else {**found, "verification": self.verification}

    @classmethod
    def read(cls, values: Any) -> Index:
        """Reads what `to_json` gave.

        Raises:
            BundleError: A key that is missing or breaks a rule; names it.
        """
        document = Document(values, file=INDEX_FILE)
        if document.values.get("format") != _FORMAT:
            document.refuse("format", repr(document.values.get("format")), f"{_FORMAT}")
        return cls.from_json(
            values,
            file=INDEX_FILE,
            versions=document.read("versions", dict),
            files=document.read_strings("files"),
            verification=document.read("verification", dict, None),
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
        data = (root / INDEX_FILE).read_bytes()
    except OSError as error:
        raise BundleError(
            f"`{root}` has no `{INDEX_FILE}` that can be read: {error.strerror}.",
            expected='the folder that `export_model(run, "tf", ...)` returned',
            fix="load other SavedModels with `tf.saved_model.load`",
        ) from error
    index = Index.read(read_json(data, file=INDEX_FILE))
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
        **({"narrowed_inputs": list(program.narrowed)} if program.narrowed else {}),
        **versions,
        **program.provenance,
    }
    if patch is not None:
        facts["git_diff_file"] = PATCH_FILE
        (root / PATCH_FILE).write_bytes(patch)
    write_json(root / PROVENANCE_FILE, facts)
    write_golden(root / GOLDEN_FILE, program.golden)


def read_provenance(root: Path) -> Mapping[str, Any]:
    """Reads the facts that were kept with the model."""
    return json.loads((root / PROVENANCE_FILE).read_text(encoding="utf-8"))


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes JSON with sorted keys; what JSON does not have becomes text."""
    text = json.dumps(values, indent=2, sort_keys=True, default=str, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
