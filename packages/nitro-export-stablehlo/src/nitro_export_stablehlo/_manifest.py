"""`manifest.yaml`: what the server reads, written and checked by docs/reference/bundle-format.md."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from nitro.errors import BundleError, ExportError, did_you_mean
from nitro.export import evaluate_size, is_size

from . import _yaml
from ._dtypes import BY_TOKEN
from ._io_spec import BATCH_LETTERS, VARIABLE, IOSpec, Letters, variable_letters

FILE = "manifest.yaml"
FORMAT_VERSION = "2.0"

# The document itself is a level, too.
_MAX_DEPTH = _yaml.MAX_DEPTH - 1


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The manifest of a bundle of kind `model`.

    Attributes:
        name: The model's name; the directory must have it too.
        description: Free text.
        inputs: The program's inputs, in argument order.
        outputs: The program's results, in result order.
        batch_sizes: The sizes that have a program, as listed.
        input_shapes: For several input shapes: the size of each symbol; read from a
            manifest, of each variable letter.
        client_inputs: What a client sees in front of `model.jl`; empty if the same.
        client_outputs: What a client sees behind it; empty if the same.
        provenance: Where the bundle comes from.
    """

    name: str
    inputs: tuple[IOSpec, ...]
    outputs: tuple[IOSpec, ...]
    batch_sizes: tuple[int, ...]
    description: str = ""
    input_shapes: tuple[Mapping[str, int], ...] = ()
    client_inputs: tuple[IOSpec, ...] = ()
    client_outputs: tuple[IOSpec, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def to_yaml(self) -> bytes:
        """Writes the manifest.

        Raises:
            ExportError: The provenance holds what YAML cannot, or too much of it.
        """
        lists = {
            "executable_inputs": self.inputs,
            "executable_outputs": self.outputs,
            "client_inputs": self.client_inputs,
            "client_outputs": self.client_outputs,
        }
        letters = variable_letters(spec for specs in lists.values() for spec in specs)
        document: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "name": self.name,
            **({"description": self.description} if self.description else {}),
            **{
                key: [spec.to_manifest(letters) for spec in specs]
                for key, specs in lists.items()
                if specs or key.startswith("executable")
            },
            "batching": {"compiled_batch_sizes": list(self.batch_sizes)},
            **({"input_shapes": _by_letter(self, letters)} if self.input_shapes else {}),
            "provenance": self.provenance,
        }
        plain = {key: _plain(value, key) for key, value in document.items()}
        data = _yaml.dump(plain).encode("utf-8")
        if len(data) > _yaml.MAX_BYTES:
            raise ExportError(
                f"The manifest has {len(data)} bytes, most of them provenance.",
                expected=f"at most {_yaml.MAX_BYTES}",
                fix="leave large values out of `provenance`",
            )
        return data


def _by_letter(manifest: Manifest, letters: Letters) -> list[dict[str, int]]:
    """The sizes of the inputs' variable axes, a mapping for each variant."""
    keys = dict.fromkeys(key for spec in manifest.inputs for _, key in spec.variable_keys())
    return [
        {letters[key]: evaluate_size(key[0], values) for key in keys}
        for values in manifest.input_shapes
    ]


def read_manifest(data: bytes, *, has_model_jl: bool = False) -> Manifest:
    """Reads a manifest and checks every rule that needs no other file (bundle format §2 to §5, §7).

    Raises:
        BundleError: A rule is broken; the message names the key.
    """
    document = _yaml.load(data, file=FILE)
    if not isinstance(document, dict):
        _refuse("", document, "a mapping")
    if str(_required(document, "format_version", "")) not in {"2.0", "2"}:
        _refuse("format_version", document["format_version"], f'"{FORMAT_VERSION}"')
    if document.get("kind", "model") != "model":
        _refuse("kind", document["kind"], "`model`: other kinds need the server to run them")
    input_shapes = _input_shapes(document)
    inputs = _tensors(document, "executable_inputs")
    outputs = _tensors(document, "executable_outputs")
    _check_inputs(inputs, input_shapes)
    client_inputs, client_outputs = (
        _client_list(document, key, has_model_jl=has_model_jl)
        for key in ("client_inputs", "client_outputs")
    )
    if not has_model_jl:
        _check_wire(inputs, "executable_inputs")
        _check_wire(outputs, "executable_outputs")
    batch_sizes = _batch_sizes(document)
    input_specs = tuple(tensor.spec() for tensor in inputs)
    if len(batch_sizes) > 1 and not (input_specs and input_specs[0].batch_axis0 is not None):
        _refuse("batching.compiled_batch_sizes", batch_sizes, "one size: no input has a batch axis")
    provenance = document.get("provenance")
    return Manifest(
        name=_typed(document, "name", str, ""),
        description=str(document.get("description", "")),
        inputs=input_specs,
        outputs=tuple(tensor.spec() for tensor in outputs),
        batch_sizes=batch_sizes,
        input_shapes=input_shapes or (),
        client_inputs=client_inputs,
        client_outputs=client_outputs,
        provenance=provenance if isinstance(provenance, dict) else {},
    )


def _client_list(
    document: Mapping[str, Any], key: str, *, has_model_jl: bool
) -> tuple[IOSpec, ...]:
    if key not in document:
        return ()
    if not has_model_jl:
        _refuse(key, document[key], "no client lists in a bundle that has no model.jl")
    tensors = _tensors(document, key)
    _check_wire(tensors, key)
    return tuple(tensor.spec() for tensor in tensors)


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    """One entry of a tensor list, in the manifest's own terms."""

    key: str
    name: str
    token: str
    letters: str
    dims: Mapping[str, int]

    @property
    def variables(self) -> set[str]:
        return {letter for letter, size in self.dims.items() if size == VARIABLE}

    def spec(self) -> IOSpec:
        row_major = self.letters[::-1]
        batch = [axis0 for axis0, letter in enumerate(row_major) if letter in BATCH_LETTERS]
        return IOSpec(
            name=self.name,
            dtype=BY_TOKEN[self.token].numpy.name,
            shape=tuple(self.dims.get(letter, VARIABLE) for letter in row_major),
            batch_axis0=batch[0] if batch else None,
        )


def _tensors(document: Mapping[str, Any], list_key: str) -> list[_Tensor]:
    entries = _required(document, list_key, "")
    if not isinstance(entries, list):
        _refuse(list_key, entries, "a list of tensors")
    tensors = [_tensor(entry, f"{list_key}[{i}]") for i, entry in enumerate(entries)]
    names = [tensor.name for tensor in tensors]
    for tensor in tensors:
        if names.count(tensor.name) > 1:
            _refuse(
                f"{tensor.key}.name", tensor.name, "a name that no other tensor of the list has"
            )
    return tensors


def _tensor(entry: Any, key: str) -> _Tensor:
    if not isinstance(entry, dict):
        _refuse(key, entry, "a mapping with name, dtype and shape")
    for needed in ("name", "dtype", "shape"):
        if not isinstance(_required(entry, needed, key), str):
            _refuse(f"{key}.{needed}", entry[needed], "a string in quotes")
    token, letters = entry["dtype"], entry["shape"]
    if token not in BY_TOKEN:
        _refuse(f"{key}.dtype", token, did_you_mean(token, BY_TOKEN))
    if not re.fullmatch(r"[A-Za-z]*", letters) or len(set(letters)) != len(letters):
        _refuse(f"{key}.shape", letters, "distinct ASCII letters, one for each axis")
    if set(BATCH_LETTERS) <= set(letters):
        _refuse(f"{key}.shape", letters, "one batch letter, n or b")
    dims = entry.get("dims", {})
    if not isinstance(dims, dict):
        _refuse(f"{key}.dims", dims, "a mapping from letters to sizes")
    wanted = {letter for letter in letters if letter not in BATCH_LETTERS}
    if set(dims) != wanted:
        _refuse(f"{key}.dims", dims, f"sizes for exactly the letters {sorted(wanted)}")
    for letter, size in dims.items():
        if not is_size(size, least=VARIABLE) or size == 0:
            _refuse(f"{key}.dims.{letter}", size, "an integer above 0, or -1")
    return _Tensor(key=key, name=entry["name"], token=token, letters=letters, dims=dims)


def _check_inputs(
    inputs: Sequence[_Tensor], input_shapes: tuple[Mapping[str, int], ...] | None
) -> None:
    batched = [bool(set(tensor.letters) & set(BATCH_LETTERS)) for tensor in inputs]
    if any(batched) and not all(batched):
        without = inputs[batched.index(False)]
        _refuse(f"{without.key}.shape", without.letters, "a batch axis, as another input has one")
    variables = set[str]().union(*(tensor.variables for tensor in inputs))
    if variables and input_shapes is None:
        _refuse("input_shapes", None, f"the sizes of the variable axes {sorted(variables)}")
    if input_shapes is None:
        return
    if not variables:
        _refuse("input_shapes", input_shapes, "no such key, as no input axis is variable")
    if not input_shapes:
        _refuse("input_shapes", [], "at least one entry")
    for i, entry in enumerate(input_shapes):
        if set(entry) != variables:
            _refuse(f"input_shapes[{i}]", entry, f"sizes for exactly {sorted(variables)}")
        if input_shapes.index(entry) != i:
            _refuse(f"input_shapes[{i}]", entry, "an entry that no other equals")


def _check_wire(tensors: Sequence[_Tensor], key: str) -> None:
    for tensor in tensors:
        if not BY_TOKEN[tensor.token].on_wire:
            _refuse(f"{tensor.key}.dtype", tensor.token, "a dtype that clients can send")
        if not tensor.letters and key.endswith("inputs"):
            _refuse(f"{tensor.key}.shape", tensor.letters, "at least one axis for a client's input")


def _input_shapes(document: Mapping[str, Any]) -> tuple[Mapping[str, int], ...] | None:
    if "input_shapes" not in document:
        return None
    entries = document["input_shapes"]
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        _refuse("input_shapes", entries, "a list of mappings from letters to sizes")
    for i, entry in enumerate(entries):
        for letter, size in entry.items():
            if not is_size(size, least=1):
                _refuse(f"input_shapes[{i}].{letter}", size, "an integer above 0")
    return tuple(entries)


def _batch_sizes(document: Mapping[str, Any]) -> tuple[int, ...]:
    batching = _typed(document, "batching", dict, {})
    sizes = batching.get("compiled_batch_sizes", [])
    key = "batching.compiled_batch_sizes"
    if not isinstance(sizes, list):
        _refuse(key, sizes, "a list of integers above 0")
    for i, size in enumerate(sizes):
        if not is_size(size, least=1):
            _refuse(f"{key}[{i}]", size, "an integer above 0")
    if sizes != sorted(set(sizes)):
        _refuse(key, sizes, "each size once, ascending")
    return tuple(sizes)


def _required(mapping: Mapping[str, Any], key: str, parent: str) -> Any:
    if key not in mapping:
        path = f"{parent}.{key}" if parent else key
        raise BundleError(f"`{FILE}` lacks the key `{path}`.", expected="the key, by format 2.0")
    return mapping[key]


def _typed(mapping: Mapping[str, Any], key: str, kind: type[Any], default: Any) -> Any:
    value = mapping.get(key, default)
    if not isinstance(value, kind):
        _refuse(key, value, {str: "a string", dict: "a mapping"}[kind])
    return value


def _refuse(key: str, value: object, expected: str) -> NoReturn:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    where = f"in `{FILE}`, `{key}`" if key else f"`{FILE}`"
    raise BundleError(f"{where[0].upper()}{where[1:]} is {shown}.", expected=expected)


def _plain(value: Any, key: str, depth: int = 1) -> Any:
    """Copies JSON-like values; refuses others by their key, and what could not be read back."""
    if value is None or isinstance(value, str | bool | int | float):
        return _plain_scalar(value, key)
    if depth > _MAX_DEPTH:
        raise ExportError(
            f"`{key[:80]}` lies {depth} levels deep.", expected=f"at most {_MAX_DEPTH} levels"
        )
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise ExportError(
                    f"`{key}` has the key {name!r}, a {type(name).__name__}.",
                    expected="string keys: any other makes the whole manifest unreadable",
                )
        return {
            _plain_scalar(name, f"a key of {key}"): _plain(item, f"{key}.{name}", depth + 1)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(item, f"{key}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise ExportError(
        f"`{key}` is {value!r}, a {type(value).__name__}.",
        expected="strings, numbers, booleans, None, and lists and dicts of them",
        fix="convert it to a string",
    )


def _plain_scalar(value: Any, key: str) -> Any:
    """A scalar of exactly a type of JSON: subclasses, such as NumPy's, become it."""
    if isinstance(value, str):
        if not _is_text(value):
            raise ExportError(
                f"`{ascii(key)[1:-1]}` is {value!r}, which is no text: UTF-8 cannot hold it.",
                expected="text; file names that are not UTF-8 come in as such strings",
                fix="leave it out, or write `ascii(...)` of it",
            )
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if abs(value) >= 10**_yaml.MAX_DIGITS:
            raise ExportError(
                f"`{key}` is a number of more than {_yaml.MAX_DIGITS} digits.",
                expected="numbers that every reader holds",
                fix="convert it to a string",
            )
        return int(value)
    return float(value) if isinstance(value, float) else value


def _is_text(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
