"""Puts other weights into a bundle, without a new export."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from nitro.errors import BundleError, ConfigError
from nitro.export import export_time, split_complex, staged

from ._files import FileReader, FileWriter
from ._index import FILE as INDEX_FILE
from ._index import MAX_BYTES as MAX_INDEX_BYTES
from ._index import read_index
from ._loader import load_bundle
from ._manifest import FILE as MANIFEST_FILE
from ._manifest import read_manifest
from ._verify import golden_arrays
from ._weights import FILE as WEIGHTS_FILE
from ._weights import GOLDEN_FILE, TensorFile, check_values, make_contiguous, write_tensors


def swap_weights(source: Path, weights: Mapping[str, np.ndarray], target: Path) -> None:
    """Writes a copy of a bundle with other weights of the same names, shapes and dtypes.

    The golden outputs are computed again, the digests too; the provenance says so. The
    copy is complete before it appears under its name.

    Raises:
        BundleError: `source` is damaged, or the weights do not fit it.
        ConfigError: `target` exists.
    """
    if target.exists():
        raise ConfigError(
            f"`{target}` exists.",
            expected="a new directory",
            fix="choose another, or remove it first",
        )
    bundle = load_bundle(source)
    weights = split_complex(weights, bundle.weights)
    bundle = bundle.with_weights(weights)
    for name, array in weights.items():
        check_values(make_contiguous(np.asarray(array)).reshape(-1), name, file="the new weights")
    files = FileReader(source)
    index = read_index(files.read(INDEX_FILE, limit_bytes=MAX_INDEX_BYTES))
    inputs, _ = golden_arrays(files)
    golden = {f"inputs.{name}": array for name, array in inputs.items()}
    golden |= {f"outputs.{name}": array for name, array in bundle(**inputs).items()}
    manifest = read_manifest(files.read(MANIFEST_FILE), has_model_jl="model.jl" in index.files)
    provenance = {
        **manifest.provenance,
        "weights_swapped_at": export_time(),
        "weights_swapped_from_sha256": index.files[WEIGHTS_FILE].sha256,
    }
    with staged(target) as staging:
        staging.mkdir()
        writer = FileWriter(staging)
        order = {"argument_order": json.dumps(list(bundle.weights))}
        with writer.open(WEIGHTS_FILE) as sink:
            write_tensors(sink, bundle.weights, reverse_axes=True, metadata=order)
        with writer.open(GOLDEN_FILE) as sink:
            write_tensors(sink, golden, reverse_axes=False)
        renamed = replace(manifest, name=target.name, provenance=provenance)
        writer.write(MANIFEST_FILE, renamed.to_yaml())
        for name in sorted(set(index.files) - set(writer.digests)):
            writer.write(name, files.read(name))
        changed = replace(index, name=target.name, files=writer.digests, verification=None)
        writer.write(INDEX_FILE, changed.to_bytes())
        staging.rename(target)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Reads named arrays from an `.npz` or a `.safetensors` file.

    A safetensors file with an `argument_order` is a bundle's, so its axes are turned back;
    any other holds arrays as NumPy has them.

    Raises:
        BundleError: Another kind of file, or a damaged one.
    """
    if not path.is_file():
        raise BundleError(f"`{path}` is not a file.", expected="an .npz or .safetensors file")
    if path.suffix == ".npz":
        try:
            with np.load(path, allow_pickle=False) as archive:
                return dict(archive)
        # A damaged archive raises whatever the damaged part leads to.
        except Exception as error:
            raise BundleError(
                f"`{path}` does not load: {error}.", expected="an .npz of plain arrays"
            ) from error
    if path.suffix == ".safetensors":
        plain = TensorFile(path, file=path.name, reverse_axes=False)
        if "argument_order" in plain.metadata:
            return dict(TensorFile(path, file=path.name, reverse_axes=True))
        return dict(plain)
    raise BundleError(f"`{path}` ends in `{path.suffix}`.", expected=".npz or .safetensors")


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes named arrays to an `.npz` or a `.safetensors` file, whole or not at all.

    Raises:
        ConfigError: Another kind of file, or what `.npz` cannot hold.
    """
    if path.suffix not in {".npz", ".safetensors"}:
        raise ConfigError(
            f"`{path}` cannot be written.", expected="a name that ends in .safetensors or .npz"
        )
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(
            f"`{path}` cannot be written.", expected="a file's name, in a folder that is there"
        )
    for name, array in arrays.items() if path.suffix == ".npz" else ():
        # NumPy stores the extended types as bytes without a type, and takes names as keywords.
        if array.dtype.kind in "VO" or name in {"file", "allow_pickle"} or name.endswith(".npy"):
            raise ConfigError(
                f"`{path.name}` cannot hold `{name}`, a {array.dtype}.",
                expected="a NumPy dtype, and another name than those NumPy keeps to itself",
                fix="use .safetensors, which holds every dtype",
            )
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        written = Path(folder) / path.name
        with written.open("wb") as sink:
            if path.suffix == ".npz":
                # Numbers only. NumPy 2.0 would store a keyword `allow_pickle` as an array.
                np.savez(sink, **dict(arrays))  # pyright: ignore[reportArgumentType] - no name is a keyword of NumPy
            else:
                write_tensors(sink, arrays, reverse_axes=False)
        written.replace(path)
