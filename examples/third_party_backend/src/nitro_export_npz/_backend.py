"""Writes one archive per export, and predicts from it."""

import json

import jax.export
import numpy as np

from nitro.errors import BundleError, ConfigError, ExportError
from nitro.export import ArtifactIndex, cut_rows, run_in_parts

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
        index = ArtifactIndex.from_program(program).to_json()
        arrays = {f"weight_{n}": np.asarray(program.weights[n]) for n in program.weight_names}
        for size in program.batch_sizes:
            arrays[f"program_{size}"] = _as_array(program.exported(size).serialize())
        text = json.dumps({"index": index, "provenance": dict(program.provenance)})
        np.savez(path / FILE, description=_as_array(text.encode()), **arrays)

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
        self.index = ArtifactIndex.from_json(description["index"], file=FILE)
        self.provenance = description["provenance"]
        self.reader = self.index.make_reader()
        self.weights = [a for name, a in arrays.items() if name.startswith("weight_")]
        self.programs = {
            size: jax.export.deserialize(bytearray(arrays[f"program_{size}"])).call
            for size in self.index.batch_sizes
        }

    def __call__(self, **inputs):
        """Cuts a request into compiled sizes, and fills the last piece up."""
        arrays, rows, _ = self.reader.read(inputs)
        plan = cut_rows(rows, self.index.batch_sizes)
        edge = {"inputs": self.index.inputs, "outputs": self.index.outputs}
        return run_in_parts(self._run, plan, **edge, arrays=arrays, rows=rows)

    def _run(self, size, arrays):
        return self.programs[size](*arrays, *self.weights)


def _as_array(data):
    return np.frombuffer(data, np.uint8)
