"""Serves a Nitro bundle in Triton's Python backend.

`nitro-serve repository` copies this file, as it is, into each version of a model. It needs
nitro-export-stablehlo in the interpreter of Triton's stub, or below `NITRO_SERVE_SITE`.
"""

import os
import site
from pathlib import Path
from typing import Any

# The stub ignores PYTHONPATH, so it has to be told where packages are.
for _folder in filter(None, os.environ.get("NITRO_SERVE_SITE", "").split(os.pathsep)):
    site.addsitedir(_folder)

import json  # noqa: E402 - what comes from here on may be in that folder

import jax  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
import triton_python_backend_utils as pb  # noqa: E402 # pyright: ignore[reportMissingImports] - Triton's own

_BF16 = np.dtype(ml_dtypes.bfloat16)


class TritonPythonModel:
    """One version of a model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads and compiles the bundle: Triton calls the model ready when this returns."""
        from nitro_export_stablehlo import load_bundle

        version = Path(args["model_repository"]) / args["model_version"]
        parameters = json.loads(args["model_config"]).get("parameters", {})
        self.bundle = load_bundle(version / args["model_name"]).warmup()
        self.inputs = {spec.name: spec.numpy_dtype for spec in self.bundle.inputs}
        self.axes = {spec.name: spec.batch_axis0 for spec in self.bundle.inputs}
        self.postprocess = None
        if parameters.get("postprocess", {}).get("string_value") == "true":
            self.postprocess = self.bundle.load_postprocess()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answers requests, joined into one call where there are several."""
        responses: list[Any] = [None] * len(requests)
        groups: dict[int, dict[str, np.ndarray]] = {}
        for index, request in enumerate(requests):
            try:
                groups[index] = self._read(request)
            except Exception as error:  # noqa: BLE001 - it is this client's, and not the others'
                responses[index] = _failure(error)
        try:
            outputs = self._predict_joined(list(groups.values()))
        except Exception:  # noqa: BLE001 - each is tried by itself, so that one harms no other
            outputs = [None] * len(groups)
        for (index, inputs), joined in zip(groups.items(), outputs, strict=True):
            try:
                answer = self._predict(inputs) if joined is None else joined
                responses[index] = _answer(requests[index], answer)
            except Exception as error:  # noqa: BLE001 - see above
                responses[index] = _failure(error)
        return responses

    def _read(self, request: Any) -> dict[str, np.ndarray]:
        # By DLPack: the stub was built against NumPy 1, whose `as_numpy` misreads the arrays
        # of NumPy 2 (Triton 24.10).
        return {
            name: _from_triton(pb.get_input_tensor_by_name(request, name), dtype)
            for name, dtype in self.inputs.items()
        }

    def _predict(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = self.bundle(**inputs)
        return outputs if self.postprocess is None else self.postprocess(outputs)

    def _predict_joined(self, groups: list[dict[str, np.ndarray]]) -> list[Any]:
        """The answers to several requests, which Triton joins only along their first axis."""
        if len(groups) < 2 or any(axis != 0 for axis in self.axes.values()):
            return [None] * len(groups)
        joined = {name: np.concatenate([group[name] for group in groups]) for name in self.inputs}
        outputs = self._predict(joined)
        first = next(iter(self.inputs))
        ends = np.cumsum([len(group[first]) for group in groups])
        return [
            {name: array[end - len(group[first]) : end] for name, array in outputs.items()}
            for group, end in zip(groups, ends, strict=True)
        ]


def _from_triton(tensor: Any, dtype: np.dtype) -> np.ndarray:
    if dtype == _BF16:
        return np.asarray(jax.dlpack.from_dlpack(tensor))
    array = np.from_dlpack(tensor)
    # Triton has no DLPack type for truth values, and exports them as bytes.
    return array.view(dtype) if array.dtype.itemsize == dtype.itemsize else array


def _to_triton(name: str, array: np.ndarray) -> Any:
    # Through JAX: NumPy has no bfloat16 to export, and complains at each array about what the
    # stub of Triton 24.10 does with its capsule.
    return pb.Tensor.from_dlpack(name, jax.numpy.asarray(array))


def _answer(request: Any, outputs: dict[str, np.ndarray]) -> Any:
    asked = set(request.requested_output_names())
    tensors = [_to_triton(name, array) for name, array in outputs.items() if name in asked]
    return pb.InferenceResponse(output_tensors=tensors)


def _failure(error: Exception) -> Any:
    return pb.InferenceResponse(error=pb.TritonError(str(error)))
