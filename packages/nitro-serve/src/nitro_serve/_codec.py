"""Requests and responses of the REST protocol: JSON, with arrays in it or behind it.

https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol/binary-tensor-data-extension
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from ._kserve_types import KSERVE_BY_NUMPY, NUMPY_BY_KSERVE
from ._refusals import Kind, RefusedError

HEADER = "inference-header-content-length"
"""The header that says how many bytes of a body are JSON; arrays follow behind them."""

_MICROSECOND = 1e-6


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a request asks for.

    Attributes:
        inputs: The arrays, by name.
        outputs: The outputs that are wanted, and whether each is sent behind the JSON; None
            for all of them.
        is_binary: Whether outputs are sent behind the JSON where `outputs` does not say.
        id: What the client calls the request.
        timeout_s: How long it may take, in seconds; None for the server's limit.
    """

    inputs: dict[str, np.ndarray]
    outputs: dict[str, bool] | None = None
    is_binary: bool = False
    id: str = ""
    timeout_s: float | None = None


def read_call(body: bytes, header: str | None) -> Call:
    """Reads the body of an inference request.

    Args:
        body: The body.
        header: The value of `HEADER`; None where the whole body is JSON.

    Raises:
        RefusedError: What is not a request of the protocol; names the key.
    """
    json_bytes, binary = _cut(body, header)
    try:
        document = orjson.loads(json_bytes)
    except orjson.JSONDecodeError as error:
        raise invalid(f"The request's JSON cannot be read: {error}.") from None
    if not isinstance(document, dict) or not isinstance(document.get("inputs"), list):
        raise invalid(
            "The request has no list `inputs`.",
            expected='{"inputs": [{"name": ..., "datatype": ..., "shape": [...], "data": [...]}]}',
        )
    parameters = _mapping(document, "parameters")
    inputs: dict[str, np.ndarray] = {}
    at = 0
    for number, entry in enumerate(document["inputs"]):
        name, array, at = _read_input(entry, f"inputs[{number}]", binary, at)
        if name in inputs:
            raise invalid(f"The input `{name}` is given twice.")
        inputs[name] = array
    if at != len(binary):
        raise invalid(
            f"{len(binary)} bytes follow the JSON.",
            expected=f"{at}, by the `binary_data_size` of the inputs",
        )
    is_binary = bool(parameters.get("binary_data_output", False))
    return Call(
        inputs=inputs,
        outputs=_read_outputs(document, is_binary=is_binary),
        is_binary=is_binary,
        id=str(document.get("id", "")),
        timeout_s=read_timeout(parameters.get("timeout")),
    )


def read_timeout(microseconds: object) -> float | None:
    """The protocol's `timeout` parameter as seconds; None where there is none."""
    if microseconds is None:
        return None
    if isinstance(microseconds, bool) or not isinstance(microseconds, int) or microseconds <= 0:
        raise invalid(
            f"`parameters.timeout` is {microseconds!r}.", expected="a number of microseconds"
        )
    return microseconds * _MICROSECOND


def write_answer(
    call: Call, outputs: Mapping[str, np.ndarray], *, model: str, version: str
) -> tuple[bytes, int | None]:
    """The body of a response, and how many bytes of it are JSON; None where all are."""
    entries: list[dict[str, Any]] = []
    binary: list[bytes] = []
    for name in chosen_outputs(call.outputs, outputs):
        array = outputs[name]
        entry: dict[str, Any] = {
            "name": name,
            "datatype": KSERVE_BY_NUMPY[array.dtype],
            "shape": list(array.shape),
        }
        if call.is_binary if call.outputs is None else call.outputs[name]:
            data = array.tobytes()
            entry["parameters"] = {"binary_data_size": len(data)}
            binary.append(data)
        else:
            entry["data"] = _for_json(array)
        entries.append(entry)
    document: dict[str, Any] = {
        "model_name": model,
        "model_version": version,
        "outputs": entries,
    }
    if call.id:
        document["id"] = call.id
    text = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return (b"".join((text, *binary)), len(text)) if binary else (text, None)


def chosen_outputs(asked: Mapping[str, Any] | None, outputs: Mapping[str, Any]) -> Sequence[str]:
    """The outputs that a request wants, in the model's order.

    Raises:
        RefusedError: An output that the model has not.
    """
    if asked is None:
        return list(outputs)
    unknown = next((name for name in asked if name not in outputs), None)
    if unknown is not None:
        raise invalid(
            f"The model has no output `{unknown}`.",
            expected="one of " + ", ".join(f"`{name}`" for name in outputs),
        )
    return [name for name in outputs if name in asked]


def from_bytes(data: bytes, name: str, datatype: str, shape: tuple[int, ...]) -> np.ndarray:
    """An array of its little-endian bytes, read-only.

    Raises:
        RefusedError: An unknown dtype, or another number of bytes.
    """
    dtype = numpy_dtype(name, datatype)
    size = math.prod(shape) * dtype.itemsize
    if len(data) != size:
        raise invalid(
            f"The input `{name}` has {len(data)} bytes.",
            expected=f"{size}: {datatype} of shape {list(shape)}",
        )
    return np.frombuffer(data, dtype).reshape(shape)


def numpy_dtype(name: str, datatype: str) -> np.dtype[Any]:
    """The dtype of an input by the protocol's name for it."""
    dtype = NUMPY_BY_KSERVE.get(datatype)
    if dtype is None:
        raise invalid(
            f"The input `{name}` has the datatype {datatype!r}.",
            expected="one of " + ", ".join(NUMPY_BY_KSERVE),
        )
    return dtype


def invalid(problem: str, *, expected: str = "", fix: str = "") -> RefusedError:
    """A refusal of what a client sent."""
    return RefusedError(Kind.INVALID, problem, expected=expected, fix=fix)


def _cut(body: bytes, header: str | None) -> tuple[bytes, bytes]:
    if header is None:
        return body, b""
    if not (header.isascii() and header.isdecimal()) or int(header) > len(body):
        raise invalid(
            f"The header `{HEADER}` is {header!r}.",
            expected=f"how many of the body's {len(body)} bytes are JSON",
        )
    return body[: int(header)], body[int(header) :]


def _read_input(entry: Any, where: str, binary: bytes, at: int) -> tuple[str, np.ndarray, int]:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise invalid(f"`{where}` has no `name`.", expected="the name of an input")
    name, datatype = entry["name"], str(entry.get("datatype"))
    shape = entry.get("shape")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise invalid(f"`{where}.shape` is {shape!r}.", expected="a list of sizes")
    size = _mapping(entry, "parameters").get("binary_data_size")
    if size is None:
        return name, _from_json(entry.get("data"), name, datatype, tuple(shape)), at
    if type(size) is not int or not 0 <= size <= len(binary) - at:
        raise invalid(
            f"`{where}.parameters.binary_data_size` is {size!r}.",
            expected=f"at most the {len(binary) - at} bytes that are left behind the JSON",
            fix=f"send the header `{HEADER}` with the length of the JSON",
        )
    return name, from_bytes(binary[at : at + size], name, datatype, tuple(shape)), at + size


def _from_json(data: Any, name: str, datatype: str, shape: tuple[int, ...]) -> np.ndarray:
    """An array of a list, flat or nested; a number that the dtype cannot hold is refused."""
    dtype = numpy_dtype(name, datatype)
    if not isinstance(data, list):
        raise invalid(f"The input `{name}` has no list `data`.", expected="its values, in C order")
    is_float = datatype in {"FP16", "FP32", "FP64", "BF16"}
    try:
        given = np.asarray(data)
        if given.size and given.dtype.kind not in ("b" if datatype == "BOOL" else "iuf"):
            raise TypeError(f"it holds {given.dtype}")
        if given.size and given.dtype.kind == "f" and not is_float:
            raise TypeError("it holds numbers with a fraction")
        # From the list, not from `given`: NumPy checks the range of Python's integers only.
        array = np.asarray(given if is_float else data, dtype)
        return array.reshape(shape)
    except (TypeError, ValueError, OverflowError) as error:
        raise invalid(
            f"The `data` of the input `{name}` is not {datatype} of shape {list(shape)}: {error}.",
            expected=f"{math.prod(shape)} values, flat or nested",
        ) from None


def _for_json(array: np.ndarray) -> Any:
    """The values in C order, as JSON knows them; no number of JSON is NaN or infinite."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.astype(np.float32) if flat.dtype.itemsize == 2 and _is_float(flat) else flat


def _is_float(array: np.ndarray) -> bool:
    return KSERVE_BY_NUMPY[array.dtype] in {"FP16", "BF16"}


def _read_outputs(document: Mapping[str, Any], *, is_binary: bool) -> dict[str, bool] | None:
    wanted = document.get("outputs")
    if not wanted:
        return None
    outputs: dict[str, bool] = {}
    for number, entry in enumerate(wanted if isinstance(wanted, list) else [wanted]):
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise invalid(f"`outputs[{number}]` has no `name`.", expected="the name of an output")
        parameters = _mapping(entry, "parameters")
        if parameters.get("classification"):
            raise RefusedError(
                Kind.UNSUPPORTED,
                f"`outputs[{number}].parameters.classification` is asked for.",
                expected="the scores themselves: this server has no labels",
                fix="serve the bundle with Triton, `nitro-serve repository --labels`",
            )
        outputs[entry["name"]] = bool(parameters.get("binary_data", is_binary))
    return outputs


def _mapping(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = document.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid(f"`{key}` is {value!r}.", expected="an object")
    return value
