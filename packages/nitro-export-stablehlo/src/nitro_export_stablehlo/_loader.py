"""Loads a bundle and predicts with it; needs no model source and no training code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from nitro.errors import BundleError, did_you_mean
from nitro.export import constraint_symbols, run_in_parts, split_complex

from ._agreement import check_agreement
from ._files import FileReader
from ._flatbuffers import require_flatbuffers
from ._index import FILE as INDEX_FILE
from ._index import MAX_BYTES as MAX_INDEX_BYTES
from ._index import Index, read_index
from ._io_spec import IOSpec
from ._manifest import FILE as MANIFEST_FILE
from ._manifest import Manifest, read_manifest
from ._plan import Planner, plannable_costs
from ._postprocess import load_postprocess
from ._programs import Device, Programs, Values, choose_device, weight_types
from ._vet import refuse_unsafe_programs
from ._weights import FILE as WEIGHTS_FILE
from ._weights import TensorFile, check_values, make_contiguous
from ._x64 import x64_for
from ._yaml import MAX_BYTES as MAX_MANIFEST_BYTES

Array = np.ndarray | jax.Array


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
        refuse_unsafe_programs(files.root, index)
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
        self._planner = Planner(plannable_costs(index))
        self._reader = index.make_reader(array_types=(jax.Array,))
        self._sizes = frozenset(index.batch_sizes)
        self._names = tuple(spec.name for spec in index.outputs)
        dtypes = {spec.numpy_dtype for spec in (*index.inputs, *index.outputs)}
        dtypes.update(np.dtype(weight.dtype) for weight in weights.values())
        self._is_wide = any(dtype.itemsize == 8 for dtype in dtypes)
        self._dtypes = dtypes

    def __call__(self, /, *misplaced: Any, **inputs: Array) -> dict[str, np.ndarray]:
        """Predicts for any number of rows.

        A request runs as it is where its size is compiled. Otherwise it is cut into
        compiled sizes, and the last one filled up by repeating the last row; with a
        dynamic batch, powers of two count as compiled sizes, so that few programs serve
        all requests. Sizes that are symbolic besides the batch get a program each, on
        first use. Arrays that are on the device and need no filling up are not copied.

        Args:
            misplaced: Nothing: inputs are given by name.
            inputs: One array for each of `inputs`, of exactly its dtype; the batch axis
                may have any size, the same in all of them.

        Returns:
            An array for each of `outputs`, with as many rows; it may be read-only.

        Raises:
            BundleError: Inputs that do not fit; names the input.
        """
        if misplaced:
            self._refuse_positional(misplaced[0])
        arrays, rows, values = self._reader.read(inputs)
        if self._is_wide:
            with x64_for(self._dtypes):
                return self._predict(arrays, rows, values)
        return self._predict(arrays, rows, values)

    def count_rows(self, /, **inputs: Array) -> int:
        """Checks the inputs of a call, and returns their number of rows; runs nothing.

        Returns:
            The number of rows; -1 where no input has a batch axis.

        Raises:
            BundleError: Inputs that do not fit; names the input.
        """
        return self._reader.read(inputs)[1]

    def apply(
        self, weights: Mapping[str, Array] | None = None, /, **inputs: Array
    ) -> dict[str, jax.Array]:
        """The program as a JAX function, to be composed with others.

        It works under `jax.jit`, and under `jax.grad` where the bundle was exported with
        `vjp_order`; not under `jax.vmap`. Without any of them, calling the bundle itself
        is far quicker.

        Args:
            weights: Weights to use instead of the bundle's, by name; all or some, complex
                ones whole or in parts.
            inputs: An array for each of `inputs`, of a compiled number of rows, or of any
                with a dynamic batch.

        Raises:
            BundleError: Inputs or weights that do not fit; names them.
        """
        arrays, rows, values = self._reader.read(inputs)
        if rows not in self._sizes and not self._index.dynamic_batch:
            raise BundleError(
                f"The inputs have {rows} rows.",
                expected=f"a compiled size: {', '.join(map(str, self.batch_sizes))}",
                fix="export with this size in `batch_sizes`, or with `dynamic_batch=True`",
            )
        chosen = {**self._weights, **split_complex(weights or {}, self._weights)}
        self._check_weights(chosen)
        with x64_for(self._dtypes):
            exported = self._programs.exported(rows, values)
            try:
                results = exported.call(*arrays, *(chosen[name] for name in self._weights))
            # JAX has no rule for mapping over a program that is compiled already.
            except NotImplementedError as error:
                raise BundleError(
                    f"`{self.name}` was called under a transformation that JAX cannot apply to it: "
                    f"{error}",
                    expected="`jax.jit`, or `jax.grad` where it was exported with `vjp_order`; no "
                    "`jax.vmap`",
                    fix="pass all rows in one call, which the batch axis is for; or map one after "
                    "the other with `jax.lax.map`",
                ) from error
        return dict(zip(self._names, results, strict=True))

    def grad(self, loss: Callable[..., jax.Array]) -> Callable[..., dict[str, jax.Array]]:
        """The gradient of a loss by the weights, from the artifact alone.

        Args:
            loss: `loss(outputs, *targets)`, a scalar; `outputs` is a dict of arrays.

        Returns:
            `fn(weights, inputs, *targets)`, which gives the gradient for each entry of
            `weights`: all of the bundle's, or those to differentiate by. `inputs` is a
            dict. It works under `jax.jit`.

        Raises:
            BundleError: The bundle was exported without a derivative.

        Example:
            >>> grads = bundle.grad(mse)(bundle.weights, {"x": x}, y)  # doctest: +SKIP
        """
        if not self._index.vjp_order:
            raise BundleError(
                f"`{self.name}` was exported without a derivative.",
                expected="a bundle with `vjp_order` of at least 1",
                fix="export it with `export_model(..., vjp_order=1)`",
            )

        def total(
            weights: Mapping[str, Array], inputs: Mapping[str, Array], *targets: Any
        ) -> jax.Array:
            return loss(self.apply(weights, **inputs), *targets)

        return jax.grad(total)

    def run_symbolic(self, /, **inputs: Array) -> dict[str, np.ndarray]:
        """Predicts through the symbolic program, compiled for exactly these sizes.

        What `nitro-bundle verify` checks; calling the bundle prefers fixed programs.

        Raises:
            BundleError: Inputs that do not fit, or a bundle without such a program.
        """
        arrays, rows, values = self._reader.read(inputs)
        with x64_for(self._dtypes):
            results = self._programs.refine(rows, values)(*arrays, *self._weight_args)
        return dict(zip(self._names, map(np.asarray, results), strict=True))

    def load_postprocess(self) -> Callable[..., Any]:
        """Runs the bundle's post-processing module, and returns its `postprocess` function.

        This executes code of the bundle, with all rights of this process; nothing else
        here does. Ask for it only where you trust who made the bundle.

        Raises:
            BundleError: The bundle has none, or its code fails.
        """
        return load_postprocess(self._programs.files, self._index)

    def __repr__(self) -> str:
        inputs, outputs = (", ".join(map(str, specs)) for specs in (self.inputs, self.outputs))
        return f"<Bundle {self.name}, {inputs} → {outputs}>"

    @property
    def name(self) -> str:
        """The model's name."""
        return self._index.name

    @property
    def path(self) -> Path:
        """The bundle's directory."""
        return self._programs.files.root

    @property
    def inputs(self) -> tuple[IOSpec, ...]:
        """The inputs, in wire order; shapes row-major, axes counted from 0."""
        return self._index.inputs

    @property
    def outputs(self) -> tuple[IOSpec, ...]:
        """The outputs, in result order."""
        return self._index.outputs

    @property
    def client_inputs(self) -> tuple[IOSpec, ...]:
        """What a client sends, where that is not what the program takes."""
        return self._index.client_inputs or self._index.inputs

    @property
    def client_outputs(self) -> tuple[IOSpec, ...]:
        """What a client gets behind `load_postprocess()`, or else the outputs."""
        return self._index.client_outputs or self._index.outputs

    @property
    def verification(self) -> Mapping[str, Any] | None:
        """How far the bundle was from the model when it was exported; None if not tried."""
        return self._index.verification

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
        """Compiles every fixed program now, and returns the bundle."""
        for key in self._index.fixed_programs:
            assert key.size is not None
            self._programs.get(key.size, _values(self._index.values(key.variant)))
        return self

    def with_weights(self, weights: Mapping[str, Array]) -> Bundle:
        """Returns a bundle with other weights, which shares the compiled programs.

        Args:
            weights: An array for every weight, of the same shape and dtype. Of a model's
                complex weight `w` the bundle holds `w.real` and `w.imag`; `w` stands for both.

        Raises:
            BundleError: A missing or unknown name, or another shape or dtype.
        """
        weights = split_complex(weights, self._weights)
        self._check_weights(weights)
        for name in self._weights:
            if name not in weights:
                raise BundleError(
                    f"The weight `{name}` is missing.",
                    expected=f"all {len(self._weights)} weights; take the others from `.weights`",
                )
        placed = dict[str, jax.Array]()
        for name in self._weights:
            new = weights[name]
            with x64_for([np.dtype(new.dtype)]):
                # JAX may go on reading the memory of a NumPy array, which the caller changes.
                private = new.copy() if isinstance(new, np.ndarray) else new
                placed[name] = jax.device_put(private, self._device)
        return Bundle(self._index, self._manifest, self._programs, placed, self._device)

    def _check_weights(self, weights: Mapping[str, Array]) -> None:
        for name, new in weights.items():
            if name not in self._weights:
                raise BundleError(
                    f"The bundle has no weight `{name}`.",
                    expected=did_you_mean(name, self._weights),
                )
            old = self._weights[name]
            if tuple(new.shape) != tuple(old.shape) or new.dtype != old.dtype:
                raise BundleError(
                    f"The weight `{name}` is {new.dtype} of shape {tuple(new.shape)}.",
                    expected=f"{old.dtype} of shape {tuple(old.shape)}",
                )

    def _refuse_positional(self, value: Any) -> NoReturn:
        names = ", ".join(f"{spec.name}=..." for spec in self.inputs)
        raise BundleError(
            f"The bundle was called with a {type(value).__name__} that has no name.",
            expected=f"inputs by name: bundle({names})",
            fix="write `bundle(**inputs)` where you have a dict of them",
        )

    def _predict(self, arrays: list[Array], rows: int, values: Values) -> dict[str, np.ndarray]:
        if rows in self._sizes or self._is_exact:
            results = self._run(rows, values, arrays)
            return dict(zip(self._names, map(np.asarray, results), strict=True))
        return self._predict_in_parts(arrays, rows, values)

    @property
    def _is_exact(self) -> bool:
        """Whether each number of rows runs as it is: filling up could break a constraint."""
        names = (constraint_symbols(constraint) for constraint in self._index.constraints)
        return self._index.dynamic_batch and any(self._index.batch_symbol in n for n in names)

    def _run(self, size: int, values: Values, arrays: Sequence[Array]) -> Sequence[jax.Array]:
        program = self._programs.get(size, values)
        return program(*map(self._placed, arrays), *self._weight_args)

    def _placed(self, array: Array) -> Array:
        """The array itself, but for one that lies on another device."""
        is_away = type(array) is not np.ndarray and (
            isinstance(array, jax.Array) and array.devices() != {self._device}
        )
        return jax.device_put(array, self._device) if is_away else array

    def _predict_in_parts(
        self, arrays: list[Array], rows: int, values: Values
    ) -> dict[str, np.ndarray]:
        outputs = self._index.outputs
        whole = [spec for spec in (*self.inputs, *outputs) if spec.batch_axis0 is None]
        if whole:
            raise BundleError(
                f"A request of {rows} rows must be cut or filled up, and `{whole[0].name}` has "
                "no batch axis.",
                expected=f"a compiled size: {', '.join(map(str, self.batch_sizes))} rows",
            )
        return run_in_parts(
            lambda size, part: self._run(size, values, part),
            self._planner.plan(rows),
            inputs=self.inputs,
            outputs=outputs,
            arrays=arrays,
            rows=rows,
            values=dict(values),
        )


def _values(chosen: Mapping[str, int]) -> Values:
    return tuple(sorted(chosen.items()))


def _put(stored: TensorFile, name: str, device: Device, *, check: bool) -> jax.Array:
    if check:
        check_values(stored.flat(name), name, file=WEIGHTS_FILE)
    turned = make_contiguous(stored[name])
    with x64_for([turned.dtype]):
        # A view of the mapped file changes and ends with the file, under a running server.
        placed = jax.device_put(turned if turned.flags.owndata else turned.copy(), device)
    placed.block_until_ready()
    stored.forget_pages()
    return placed
