"""Compiles a bundle's programs, each one once and on first use."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import numpy as np

from nitro.errors import BundleError
from nitro.export import evaluate_size, size_symbols

from ._files import FileReader
from ._index import Index
from ._io_spec import IOSpec
from ._keys import ProgramKey
from ._weights import FILE as WEIGHTS_FILE
from ._weights import TensorFile
from ._x64 import x64_for

Device = Any
"""A `jax.Device`, which is a variable to type checkers."""

ArrayType = tuple[tuple[int, ...], np.dtype[Any]]

Program = Callable[..., tuple[jax.Array, ...]]


Values = tuple[tuple[str, int], ...]
"""The sizes that a caller chose by name, sorted: what a program is kept under."""

_MAX_KEPT = 64


class Programs:
    """The programs of one bundle on one device, shared by all that use its weights.

    Attributes:
        files: The bundle's files.
    """

    def __init__(
        self,
        files: FileReader,
        index: Index,
        weights: Sequence[ArrayType],
        *,
        device: Device,
        verify_digests: bool,
    ) -> None:
        """Compiles nothing yet.

        Args:
            files: The bundle's files.
            index: Its `nitro.json`.
            weights: Shape and dtype of each weight, in argument order.
            device: Where the programs run.
            verify_digests: Checks each file again when it is read.
        """
        self.files = files
        self._index = index
        self._weights = tuple(weights)
        self._device = device
        self._verify_digests = verify_digests
        self._variants = {
            tuple(sorted(values.items())): i for i, values in enumerate(index.input_shapes)
        }
        self._compiled: OrderedDict[tuple[int, Values], Program] = OrderedDict()
        self._exported: dict[ProgramKey, jax.export.Exported] = {}
        self._locks: dict[Any, threading.Lock] = {}
        self._locks_lock = threading.Lock()

    def get(self, size: int, values: Values = ()) -> Program:
        """The compiled program for exactly these sizes: `fn(*inputs, *weights)`.

        Threads that ask for the same one wait for one compilation; others do not. Of
        those that are refined from a symbolic program, the last 64 are kept.

        Raises:
            BundleError: The file is damaged, or not what `nitro.json` says.
        """
        found = self._compiled.get((size, values))
        if found is not None:
            return found
        with self._lock((size, values)):
            # Others may have compiled so many since that this one is forgotten already.
            found = self._compiled.get((size, values))
            if found is None:
                found = self._compiled[size, values] = self._compile(size, values)
                self._forget_old()
            return found

    def exported(self, size: int, values: Values = ()) -> jax.export.Exported:
        """The export that serves these sizes, fixed or symbolic; read and checked once.

        Raises:
            BundleError: The file is damaged, or not what `nitro.json` says.
        """
        key = self._key(size, values)
        with self._lock(key):
            if key not in self._exported:
                self._exported[key] = self._read(key)
            return self._exported[key]

    def refine(self, size: int, values: Values) -> Program:
        """Compiles a symbolic program for these sizes; keeps nothing.

        Raises:
            BundleError: There is none for this number of rows, or it is damaged.
        """
        key = ProgramKey(None if self._index.dynamic_batch else size)
        if key not in self._index.symbolic_programs:
            raise BundleError(
                f"`{self._index.name}` has no symbolic program for {size} rows.",
                expected="a bundle with `dynamic_batch=True` or symbolic sizes",
            )
        return self._lower(self._read(key), size, values, key.exported_file)

    def try_out(self, key: ProgramKey) -> None:
        """Reads a program, and compiles it for its sizes or, where it has none, for some."""
        size = self._index.batch_sizes[0] if key.size is None else key.size
        variant = key.variant if key.variant is not None or not self._variants else 0
        values = tuple(sorted(self._index.values(variant).items()))
        self._lower(self._read(key), size, values, key.exported_file)

    def _key(self, size: int, values: Values) -> ProgramKey:
        """The file that serves these sizes: a fixed program where there is one."""
        fits = size in self._index.batch_sizes
        if fits and (not values or values in self._variants):
            return ProgramKey(size, self._variants.get(values))
        if self._index.dynamic_batch:
            return ProgramKey(None)
        return ProgramKey(size)

    def _lock(self, key: Any) -> threading.Lock:
        with self._locks_lock:
            return self._locks.setdefault(key, threading.Lock())

    def _forget_old(self) -> None:
        refined = [
            (size, values)
            for size, values in list(self._compiled)
            if self._key(size, values) in self._index.symbolic_programs
        ]
        for key in refined[:-_MAX_KEPT]:
            self._compiled.pop(key, None)
            self._locks.pop(key, None)

    def _compile(self, size: int, values: Values) -> Program:
        file = self._key(size, values).exported_file
        return self._lower(self.exported(size, values), size, values, file)

    def _lower(
        self, exported: jax.export.Exported, size: int, values: Values, file: str
    ) -> Program:
        sharding = jax.sharding.SingleDeviceSharding(self._device)
        arguments = self._fixed(self._index.inputs, size, values)
        with x64_for(self._dtypes):
            avals = [
                jax.ShapeDtypeStruct(*a, sharding=sharding) for a in (*arguments, *self._weights)
            ]
            try:
                return jax.jit(exported.call).lower(*avals).compile()
            # XLA and MLIR raise many types for a program that they cannot take.
            except Exception as error:
                raise BundleError(
                    f"The program in `{file}` does not compile: {_one_line(error)}.",
                    expected=f"a program for {self._device.platform}",
                    fix="run `nitro-bundle verify` on the bundle",
                ) from error

    def _read(self, key: ProgramKey) -> jax.export.Exported:
        file = key.exported_file
        if self._verify_digests:
            self.files.check(file, self._index.files[file])
        data = self.files.read(file)
        with x64_for(self._dtypes):
            exported = read_exported(data, file=file)
        self._check(exported, key)
        return exported

    @property
    def _dtypes(self) -> list[np.dtype[Any]]:
        specs = (*self._index.inputs, *self._index.outputs)
        return [*(spec.numpy_dtype for spec in specs), *(dtype for _, dtype in self._weights)]

    def _fixed(self, specs: Sequence[IOSpec], size: int, values: Values) -> list[ArrayType]:
        chosen = dict(values)
        return [(spec.sizes(size, chosen), spec.numpy_dtype) for spec in specs]

    def _check(self, exported: jax.export.Exported, key: ProgramKey) -> None:
        """Compares the program with what the other files promise."""
        file = key.exported_file
        for what, avals, specs, weights in (
            ("arguments", exported.in_avals, self._index.inputs, self._weights),
            ("results", exported.out_avals, self._index.outputs, ()),
        ):
            promised = [(self._promised_sizes(spec, key), spec.numpy_dtype) for spec in specs]
            wanted = [*promised, *weights]
            found = [(tuple(aval.shape), np.dtype(aval.dtype)) for aval in avals]
            if not _are_alike(found, wanted):
                raise BundleError(
                    f"The {what} of `{file}` are {_listed(found)}.",
                    expected=f"{_listed(wanted)}, by `nitro.json` and the weights",
                )
        if exported.nr_devices != 1 or exported.ordered_effects or exported.unordered_effects:
            raise BundleError(
                f"`{file}` is for {exported.nr_devices} devices, or has side effects.",
                expected="a pure program for one device",
            )
        if tuple(exported.platforms) != self._index.platforms:
            raise BundleError(
                f"`{file}` was lowered for {', '.join(exported.platforms)}.",
                expected=f"{', '.join(self._index.platforms)}, by `nitro.json`",
            )

    def _promised_sizes(self, spec: IOSpec, key: ProgramKey) -> tuple[int | str, ...]:
        if key.variant is not None:
            assert key.size is not None
            return spec.sizes(key.size, self._index.values(key.variant))
        batch = self._index.batch_symbol if key.size is None else key.size
        return tuple(
            batch if axis0 == spec.batch_axis0 or size is None else size
            for axis0, size in enumerate(spec.shape)
        )


def _are_alike(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Compares shapes and dtypes; symbolic sizes by what they are at some numbers."""
    return len(found) == len(wanted) and all(
        a[1] == b[1]
        and len(a[0]) == len(b[0])
        and all(_are_one_size(x, y) for x, y in zip(a[0], b[0], strict=True))
        for a, b in zip(found, wanted, strict=True)
    )


def _are_one_size(found: Any, wanted: int | str) -> bool:
    if isinstance(found, int) or isinstance(wanted, int):
        return found == wanted
    try:
        names = sorted(size_symbols(str(found)) | size_symbols(wanted))
        samples = [{n: scale * (i + 1) + i for i, n in enumerate(names)} for scale in (61, 1009)]
        return all(evaluate_size(str(found), v) == evaluate_size(wanted, v) for v in samples)
    except (ValueError, ArithmeticError):
        return False


def make_programs(files: FileReader, index: Index) -> Programs:
    """The programs of a bundle alone, for the platform they were lowered for.

    Raises:
        BundleError: The weights file is damaged, or there is no such platform.
    """
    stored = TensorFile(files.path(WEIGHTS_FILE), file=WEIGHTS_FILE, reverse_axes=True)
    device = choose_device(index.platforms[0] if index.platforms else None, index)
    return Programs(files, index, weight_types(stored), device=device, verify_digests=False)


def choose_device(device: Device | str | None, index: Index) -> Device:
    """The device that a caller asked for, or JAX's default, if the programs run there.

    Raises:
        BundleError: There is no such device, or it is of another platform.
    """
    try:
        chosen = jax.devices(device)[0] if device is None or isinstance(device, str) else device
    except RuntimeError as error:
        raise BundleError(
            f"There is no device {device!r}: {error}.",
            expected=" or ".join(f'device="{platform}"' for platform in index.platforms),
        ) from error
    # JAX calls a platform gpu, and lowers for cuda or rocm.
    names = {chosen.platform} | ({"cuda", "rocm"} if chosen.platform == "gpu" else set[str]())
    if not names & set(index.platforms):
        raise BundleError(
            f"The bundle's programs were lowered for {', '.join(index.platforms)}, and "
            f"{chosen} is a {chosen.platform}.",
            expected=f"a device of platform {' or '.join(index.platforms)}",
            fix=f'load_bundle(..., device="{index.platforms[0] if index.platforms else "cpu"}")',
        )
    return chosen


def weight_types(stored: TensorFile) -> list[ArrayType]:
    """Shape and dtype of each weight, in argument order; reads no data."""
    return [(stored.shape(name), stored.dtypes[name].numpy) for name in stored.argument_order()]


def read_exported(data: bytes, *, file: str) -> jax.export.Exported:
    """Deserializes a `jax.export.Exported`.

    Raises:
        BundleError: The bytes are damaged, or of a version that this JAX does not read.
    """
    try:
        return jax.export.deserialize(bytearray(data))
    # flatbuffers trusts its input: damage shows as any exception, from any depth.
    except Exception as error:
        raise BundleError(
            f"`{file}` does not parse: {_one_line(error)}.",
            expected=f"an export that jax {jax.__version__} can read",
            fix="use a JAX of within six months after the one that wrote it, by `nitro.json`",
        ) from error


def _listed(types: Sequence[tuple[tuple[int | str, ...], np.dtype[Any]]]) -> str:
    shown = [f"{dtype}[{', '.join(map(str, shape))}]" for shape, dtype in types]
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
