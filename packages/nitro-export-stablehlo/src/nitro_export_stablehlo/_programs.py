"""Compiles a bundle's programs, each one once and on first use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import numpy as np

from nitro.errors import BundleError

from ._files import FileReader
from ._index import Index, exported_file
from ._weights import FILE as WEIGHTS_FILE
from ._weights import TensorFile
from ._x64 import x64_for

Device = Any
"""A `jax.Device`, which is a variable to type checkers."""

ArrayType = tuple[tuple[int, ...], np.dtype[Any]]

Program = Callable[..., tuple[jax.Array, ...]]


class Programs:
    """The programs of one bundle on one device, shared by all that use its weights."""

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
        self._files = files
        self._index = index
        self._weights = tuple(weights)
        self._device = device
        self._verify_digests = verify_digests
        self._compiled: dict[int, Program] = {}
        self._locks = {size: threading.Lock() for size in index.batch_sizes}

    def get(self, size: int) -> Program:
        """The compiled program for exactly `size` rows: `fn(*inputs, *weights)`.

        Threads that ask for the same size wait for one compilation; others do not.

        Raises:
            BundleError: The file is damaged, or not what `nitro.json` says.
        """
        found = self._compiled.get(size)
        if found is not None:
            return found
        with self._locks[size]:
            if size not in self._compiled:
                self._compiled[size] = self._compile(size)
            return self._compiled[size]

    def _compile(self, size: int) -> Program:
        file = exported_file(size)
        if self._verify_digests:
            self._files.check(file, self._index.files[file])
        data = self._files.read(file)
        sharding = jax.sharding.SingleDeviceSharding(self._device)
        arguments = self._arguments(size)
        with x64_for(dtype for _, dtype in arguments + self._results(size)):
            exported = read_exported(data, file=file)
            self._check(exported, size, file)
            avals = [jax.ShapeDtypeStruct(*a, sharding=sharding) for a in arguments]
            try:
                return jax.jit(exported.call).lower(*avals).compile()
            # XLA and MLIR raise many types for a program that they cannot take.
            except Exception as error:
                raise BundleError(
                    f"The program in `{file}` does not compile: {_one_line(error)}.",
                    expected=f"a program for {self._device.platform}",
                    fix="run `nitro-bundle verify` on the bundle",
                ) from error

    def _arguments(self, size: int) -> list[ArrayType]:
        inputs = [(spec.sizes(size), spec.numpy_dtype) for spec in self._index.inputs]
        return [*inputs, *self._weights]

    def _results(self, size: int) -> list[ArrayType]:
        return [(spec.sizes(size), spec.numpy_dtype) for spec in self._index.outputs]

    def _check(self, exported: jax.export.Exported, size: int, file: str) -> None:
        """Compares the program with what the other files promise."""
        for what, avals, wanted in (
            ("arguments", exported.in_avals, self._arguments(size)),
            ("results", exported.out_avals, self._results(size)),
        ):
            found = [(tuple(aval.shape), np.dtype(aval.dtype)) for aval in avals]
            if found != wanted:
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


def _listed(types: Sequence[ArrayType]) -> str:
    shown = [f"{dtype}{list(shape)}" for shape, dtype in types]
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
