"""Writes one archive per export, and predicts from it."""

import json

import jax.export
import numpy as np

from nitro.errors import BundleError, ConfigError, ExportError

FILE = "model.npz"


class NpzBackend:
    """An archive of one program per batch size, the weights, and a JSON description."""

    name = "npz"

    def write(self, program, path, **options):
        """Writes the archive into `path`, an empty directory."""
        if options:
            raise ConfigError(f"`npz` has no option {sorted(options)}.", expected="none")
        for what in ("dynamic_batch", "symbols", "vjp_order", "postprocess"):
            if getattr(program, what):
                raise ExportError(f"An `npz` archive cannot keep `{what}`.")
        description = {
            "inputs": [_described(spec) for spec in program.inputs],
            "outputs": [_described(spec) for spec in program.outputs],
            "provenance": dict(program.provenance),
        }
        arrays = {f"weight_{n}": np.asarray(program.weights[n]) for n in program.weight_names}
        for size in program.batch_sizes:
            arrays[f"program_{size}"] = _as_array(program.exported(size).serialize())
        text = _as_array(json.dumps(description).encode())
        np.savez(path / FILE, description=text, **arrays)

    def load(self, path):
        """Loads the archive; needs nothing of the model's source."""
        try:
            with np.load(path / FILE, allow_pickle=False) as archive:
                return NpzModel(dict(archive))
        # A damaged archive fails in as many ways as it has parts.
        except Exception as error:
            raise BundleError(f"`{path / FILE}` does not load: {error}.") from error


class NpzModel:
    """Named arrays in, named arrays out."""

    def __init__(self, arrays):
        description = json.loads(arrays.pop("description").tobytes())
        self.inputs, self.outputs = description["inputs"], description["outputs"]
        self.provenance = description["provenance"]
        self.weights = [a for name, a in arrays.items() if name.startswith("weight_")]
        self.programs = {
            int(name.removeprefix("program_")): jax.export.deserialize(bytearray(a)).call
            for name, a in arrays.items()
            if name.startswith("program_")
        }

    def __call__(self, **inputs):
        """Cuts a request into pieces of one compiled size, and fills the last one up."""
        rows = self._checked_rows(inputs)
        size = min((s for s in self.programs if s >= rows), default=max(self.programs))
        pieces = []
        for begin in range(0, rows, size):
            index = np.minimum(np.arange(begin, begin + size), rows - 1)
            piece = [np.take(inputs[s["name"]], index, axis=s["axis0"]) for s in self.inputs]
            pieces.append(self.programs[size](*piece, *self.weights))
        return {
            spec["name"]: np.concatenate(results, spec["axis0"]).take(range(rows), spec["axis0"])
            for spec, results in zip(self.outputs, zip(*pieces, strict=True), strict=True)
        }

    def _checked_rows(self, inputs):
        if set(inputs) != {spec["name"] for spec in self.inputs}:
            raise BundleError(f"The inputs are {sorted(inputs)}.", expected=f"{self.inputs}")
        rows = {np.shape(inputs[s["name"]])[s["axis0"]] for s in self.inputs}
        for spec in self.inputs:
            array = inputs[spec["name"]]
            shape = [*array.shape[: spec["axis0"]], 1, *array.shape[spec["axis0"] + 1 :]]
            if len(rows) > 1 or array.dtype.name != spec["dtype"] or shape != spec["shape"]:
                found = f"{array.dtype}{array.shape}"
                raise BundleError(f"`{spec['name']}` is {found}.", expected=f"{spec}")
        return rows.pop()


def _described(spec):
    axis0 = spec.batch_axis - 1  # Nitro counts axes from 1.
    return {"name": spec.name, "dtype": spec.dtype, "shape": spec.sizes(1), "axis0": axis0}


def _as_array(data):
    return np.frombuffer(data, np.uint8)
