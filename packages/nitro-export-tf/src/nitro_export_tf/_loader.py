"""Loads a SavedModel that this package wrote; imports TensorFlow and no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nitro.errors import BundleError, did_you_mean
from nitro.export import cut_rows, run_in_parts

from ._assets import Index, read_index, read_provenance
from ._signatures import DEFAULT, fixed_signature
from ._tensorflow import import_tensorflow
from ._verify import verify_signatures

Arrays = dict[str, np.ndarray]


class SavedModel:
    """A SavedModel as a function of named NumPy arrays, on the CPU.

    Attributes:
        name: The name that it was exported under.
        inputs: The inputs in wire order, in TensorFlow's 0-based axes.
        outputs: The outputs.
        batch_sizes: The fixed sizes that have a signature of their own.
        dynamic_batch: Whether `serving_default` takes any number of rows.
        provenance: Where it comes from, as `assets.extra/provenance.json` has it.
    """

    def __init__(self, tf: Any, root: Path, index: Index, loaded: Any) -> None:
        """Takes what `load_saved_model` read."""
        self.name = index.name
        self.inputs = index.inputs
        self.outputs = index.outputs
        self.batch_sizes = index.batch_sizes
        self.dynamic_batch = index.dynamic_batch
        self.provenance = read_provenance(root)
        self._tf = tf
        self._root = root
        self._index = index
        self._reader = index.make_reader()
        # The functions of a SavedModel hold its variables by weak references.
        self._loaded = loaded

    @property
    def signatures(self) -> tuple[str, ...]:
        """The names of the signatures, `serving_default` first."""
        return (DEFAULT, *map(fixed_signature, self.batch_sizes))

    def __call__(self, **inputs: Any) -> Arrays:
        """Runs any number of rows: through the signature of that size where there is one.

        Else through `serving_default` if it takes any number; else the rows are cut into
        the fixed sizes, the last piece filled up with copies of the last row.

        Raises:
            BundleError: Another name, dtype or shape than the inputs have, a broken
                constraint, or an integer that the program cannot hold.
        """
        arrays, rows, values = self._reader.read(inputs)
        if rows in self.batch_sizes:
            return self.run(fixed_signature(rows), dict(inputs))
        if self.dynamic_batch and rows:
            return self.run(DEFAULT, dict(inputs))
        return run_in_parts(
            self._run_part,
            cut_rows(rows, self.batch_sizes),
            inputs=self.inputs,
            outputs=self.outputs,
            arrays=arrays,
            rows=rows,
            values=dict(values),
        )

    def run(self, signature: str, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Runs one signature.

        Raises:
            BundleError: No such signature, or inputs that it refuses.
        """
        if signature not in self.signatures:
            raise BundleError(
                f"`{self.name}` has no signature `{signature}`.",
                expected=did_you_mean(signature, self.signatures),
            )
        tf = self._tf
        try:
            with tf.device("/CPU:0"):
                tensors = {name: tf.constant(array) for name, array in inputs.items()}
                outputs = self._loaded.signatures[signature](**tensors)
        except tf.errors.InvalidArgumentError as error:
            raise BundleError(
                f"The signature `{signature}` refuses the inputs: {_told(error)}",
                expected="; ".join(map(str, self.inputs)),
            ) from error
        return {spec.name: outputs[spec.name].numpy() for spec in self.outputs}

    def verify(self) -> None:
        """Runs every signature on the golden inputs, at 1, 3 and 32 rows where it takes any.

        Raises:
            BundleError: An output differs from what `predict` gave before the export.
        """
        verify_signatures(self.run, self._root, self._index)

    def _run_part(self, size: int, arrays: list[np.ndarray]) -> list[np.ndarray]:
        named = dict(zip((spec.name for spec in self.inputs), arrays, strict=True))
        found = self.run(fixed_signature(size), named)
        return [found[spec.name] for spec in self.outputs]


def load_saved_model(path: str | Path) -> SavedModel:
    """Loads a SavedModel that `export_model(run, "tf", ...)` wrote, without JAX.

    Any other SavedModel, and this one for TensorFlow's own use, loads with
    `tf.saved_model.load`. A SavedModel is a program: load only what you trust.

    Raises:
        BundleError: It is damaged, or another package wrote it.
        MissingPackageError: TensorFlow is not installed.
    """
    root = Path(path)
    index = read_index(root)
    tf = import_tensorflow("loading a SavedModel")
    try:
        with tf.device("/CPU:0"):
            loaded = tf.saved_model.load(str(root))
    # TensorFlow raises many types for what it cannot read.
    except Exception as error:
        raise BundleError(
            f"TensorFlow {tf.__version__} cannot load `{root}`: {_told(error)}",
            expected=f"a SavedModel of TensorFlow {index.versions.get('tensorflow_version')}",
            fix="load it with that TensorFlow, or export with an older `stablehlo_version`",
        ) from error
    return SavedModel(tf, root, index, loaded)


def _told(error: Exception) -> str:
    """What an error of TensorFlow says, without where in which graph."""
    noise = ("Graph execution error", "Detected at node", "<stack traces")
    lines = [line.strip() for line in str(error).splitlines()]
    told = " ".join(line for line in lines if line and not line.startswith(noise))
    return f"{type(error).__name__}: {told[:400]}"
