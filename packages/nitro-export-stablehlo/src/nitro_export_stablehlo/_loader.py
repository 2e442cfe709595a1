"""Loads a bundle and predicts with it; needs no model source and no training code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from nitro.errors import BundleError, did_you_mean

from ._dtypes import find_dtype, has_nan
from ._files import FileReader
from ._flatbuffers import require_flatbuffers
from ._index import FILE as INDEX_FILE
from ._index import MAX_BYTES as MAX_INDEX_BYTES
from ._index import Index, read_index
from ._io_spec import IOSpec
from ._manifest import FILE as MANIFEST_FILE
from ._manifest import Manifest, read_manifest
from ._plan import Planner
from ._programs import Device, Programs, choose_device, weight_types
from ._requests import Array, RequestReader, take_rows
from ._vet import refuse_unsafe_programs
from ._weights import FILE as WEIGHTS_FILE
from ._weights import TensorFile, make_contiguous
from ._x64 import x64_for
from ._yaml import MAX_BYTES as MAX_MANIFEST_BYTES


def load_bundle(
    path: str | Path,
    *,
    verify_digests: bool = True,
    untrusted: bool = False,
    device: Device | str | None = None,
) -> Bundle:
    """Loads a bundle that `nitro.export_model` wrote.

    The weights are memory-mapped and put on the device once; each program is compiled on
    its first use. Nothing in a bundle is executed or unpickled while it is loaded.

    Args:
        path: The bundle's directory.
        verify_digests: Hashes every file first, and looks for NaNs in the weights. Turn
            it off only for a store that you trust to have kept the bytes.
        untrusted: Reads and compiles every program in a child process first. Digests
            show damage, but who makes a bundle makes its digests too, and the libraries
            that read programs can hang or crash on a forged one. Takes some seconds.
        device: Where to run: a device, a platform such as `"cpu"`, or JAX's default.

    Returns:
        A callable: `bundle(img=array)["logits"]`.

    Raises:
        BundleError: A damaged bundle, or one for another platform; names file and key.
        MissingPackageError: `flatbuffers` is not installed.
    """
    require_flatbuffers()
    files = FileReader(Path(path))
    index = read_index(files.read(INDEX_FILE, limit_bytes=MAX_INDEX_BYTES))
    if verify_digests:
        files.check_all(index.files)
    manifest = read_manifest(
        files.read(MANIFEST_FILE, limit_bytes=MAX_MANIFEST_BYTES),
        has_model_jl="model.jl" in index.files,
    )
    check_agreement(manifest, index)
    stored = TensorFile(files.path(WEIGHTS_FILE), file=WEIGHTS_FILE, reverse_axes=True)
    order = stored.argument_order()
    chosen = choose_device(device, index)
    if untrusted:
        refuse_unsafe_programs(files.root, index.batch_sizes)
    weights = {name: _put(stored, name, chosen, check=verify_digests) for name in order}
    programs = Programs(
        files, index, weight_types(stored), device=chosen, verify_digests=verify_digests
    )
    return Bundle(index, manifest, programs, weights, chosen)


class Bundle:
    """A loaded bundle: call it with named arrays, get a dict of named arrays.

    Safe to call from several threads. Made by `load_bundle`.

    Example:
        >>> bundle = load_bundle("export_out/digits_v1")  # doctest: +SKIP
        >>> bundle(img=pixels)["logits"].shape  # doctest: +SKIP
        (360, 10)
    """

    def __init__(
        self,
        index: Index,
        manifest: Manifest,
        programs: Programs,
        weights: Mapping[str, jax.Array],
        device: Device,
    ) -> None:
        self._index = index
        self._manifest = manifest
        self._programs = programs
        self._weights = dict(weights)
        self._weight_args = tuple(self._weights.values())
        self._device = device
        self._planner = Planner(index.costs)
        self._reader = RequestReader(index.inputs)
        self._sizes = frozenset(index.batch_sizes)
        self._names = tuple(spec.name for spec in index.outputs)
        dtypes = {spec.numpy_dtype for spec in (*index.inputs, *index.outputs)}
        dtypes.update(np.dtype(weight.dtype) for weight in weights.values())
        self._is_wide = any(dtype.itemsize == 8 for dtype in dtypes)
        self._dtypes = dtypes

    def __call__(self, /, **inputs: Array) -> dict[str, np.ndarray]:
        """Predicts for any number of rows.

        A request runs as it is where its size is compiled. Otherwise it is cut into
        compiled sizes, and the last one filled up by repeating the last row. Arrays that
        are on the device and need no filling up are not copied.

        Args:
            inputs: One array for each of `inputs`, of exactly its dtype; the batch axis
                may have any size, the same in all of them.

        Returns:
            An array for each of `outputs`, with as many rows; it may be read-only.

        Raises:
            BundleError: Inputs that do not fit; names the input.
        """
        arrays, rows = self._reader.read(inputs)
        if self._is_wide:
            with x64_for(self._dtypes):
                return self._predict(arrays, rows)
        return self._predict(arrays, rows)

    @property
    def name(self) -> str:
        """The model's name."""
        return self._index.name

    @property
    def inputs(self) -> tuple[IOSpec, ...]:
        """The inputs, in wire order; shapes row-major, axes counted from 0."""
        return self._index.inputs

    @property
    def outputs(self) -> tuple[IOSpec, ...]:
        """The outputs, in result order."""
        return self._index.outputs

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The sizes that have a program, ascending."""
        return self._index.batch_sizes

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Where the bundle comes from, by its manifest."""
        return self._manifest.provenance

    @property
    def weights(self) -> Mapping[str, jax.Array]:
        """The weights on the device, by dotted name, in argument order."""
        return dict(self._weights)

    def warmup(self) -> Bundle:
        """Compiles the program of every size now, and returns the bundle."""
        for size in self.batch_sizes:
            self._programs.get(size)
        return self

    def with_weights(self, weights: Mapping[str, Array]) -> Bundle:
        """Returns a bundle with other weights, which shares the compiled programs.

        Args:
            weights: An array for every weight, of the same shape and dtype.

        Raises:
            BundleError: A missing or unknown name, or another shape or dtype.
        """
        for name in weights:
            if name not in self._weights:
                raise BundleError(
                    f"The bundle has no weight `{name}`.",
                    expected=did_you_mean(name, self._weights),
                )
        placed = dict[str, jax.Array]()
        for name, old in self._weights.items():
            if name not in weights:
                raise BundleError(
                    f"The weight `{name}` is missing.",
                    expected=f"all {len(self._weights)} weights; take the others from `.weights`",
                )
            new = weights[name]
            if tuple(new.shape) != tuple(old.shape) or new.dtype != old.dtype:
                raise BundleError(
                    f"The weight `{name}` is {new.dtype} of shape {tuple(new.shape)}.",
                    expected=f"{old.dtype} of shape {tuple(old.shape)}",
                )
            with x64_for([np.dtype(new.dtype)]):
                placed[name] = jax.device_put(new, self._device)
        return Bundle(self._index, self._manifest, self._programs, placed, self._device)

    def _predict(self, arrays: list[Array], rows: int) -> dict[str, np.ndarray]:
        if rows in self._sizes:
            results = self._run(rows, arrays)
            return dict(zip(self._names, map(np.asarray, results), strict=True))
        return self._predict_in_parts(arrays, rows)

    def _run(self, size: int, arrays: Sequence[Array]) -> Sequence[jax.Array]:
        placed = [
            jax.device_put(array, self._device)
            if isinstance(array, jax.Array) and array.devices() != {self._device}
            else array
            for array in arrays
        ]
        return self._programs.get(size)(*placed, *self._weight_args)

    def _predict_in_parts(self, arrays: list[Array], rows: int) -> dict[str, np.ndarray]:
        outputs = self._index.outputs
        whole = [spec for spec in (*self.inputs, *outputs) if spec.batch_axis0 is None]
        if whole:
            raise BundleError(
                f"A request of {rows} rows must be cut or filled up, and `{whole[0].name}` has "
                "no batch axis.",
                expected=f"a compiled size: {', '.join(map(str, self.batch_sizes))} rows",
            )
        filled = {spec.name: np.empty(spec.sizes(rows), dtype=spec.numpy_dtype) for spec in outputs}
        begin = 0
        pending: tuple[int, Sequence[jax.Array]] | None = None
        for size in self._planner.plan(rows):
            part = [
                take_rows(array, spec.batch_axis0 or 0, begin, size)
                for array, spec in zip(arrays, self.inputs, strict=True)
            ]
            running = (begin, self._run(size, part))
            # Fetching waits for the device, so the next call is on its way before that.
            if pending is not None:
                self._fetch(*pending, filled)
            pending = running
            begin += size
        if pending is not None:
            self._fetch(*pending, filled)
        return filled

    def _fetch(
        self, begin: int, results: Sequence[jax.Array], filled: Mapping[str, np.ndarray]
    ) -> None:
        for spec, result in zip(self._index.outputs, results, strict=True):
            at = (slice(None),) * (spec.batch_axis0 or 0)
            target = filled[spec.name][(*at, slice(begin, None))]
            host = np.asarray(result)
            rows = min(host.shape[len(at)], target.shape[len(at)])
            target[(*at, slice(rows))] = host[(*at, slice(rows))]


def check_agreement(manifest: Manifest, index: Index) -> None:
    """Compares the two descriptions of one bundle.

    Raises:
        BundleError: They differ; names the key.
    """
    for key, ours, servers in (
        ("name", index.name, manifest.name),
        ("inputs", index.inputs, manifest.inputs),
        ("outputs", index.outputs, manifest.outputs),
        ("batch_sizes", index.batch_sizes, manifest.batch_sizes),
    ):
        if ours != servers:
            raise BundleError(
                f"`{INDEX_FILE}` and `{MANIFEST_FILE}` differ in `{key}`.",
                expected=f"{_shown(servers)} in both",
                fix="export the model again: one of them was changed",
            )


def _shown(value: Any) -> str:
    return "; ".join(map(str, value)) if isinstance(value, tuple) else repr(value)


def _put(stored: TensorFile, name: str, device: Device, *, check: bool) -> jax.Array:
    flat = stored.flat(name)
    dtype = find_dtype(flat.dtype)
    assert dtype is not None
    if check and has_nan(flat, dtype):
        raise BundleError(
            f"`{WEIGHTS_FILE}` holds a NaN in `{name}`.",
            expected="finite weights, or infinite ones: the export refuses NaNs",
        )
    if check and dtype.token == "bool" and (flat.view(np.uint8) > 1).any():
        raise BundleError(
            f"`{WEIGHTS_FILE}` holds a boolean other than 0 and 1 in `{name}`.",
            expected="bytes of 0 and 1",
        )
    with x64_for([dtype.numpy]):
        placed = jax.device_put(make_contiguous(stored[name]), device)
    placed.block_until_ready()
    stored.forget_pages()
    return placed
