"""Writes an `ExportProgram` as a SavedModel."""

from __future__ import annotations

import importlib.metadata
import logging
import re
import uuid
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.export
import numpy as np

from nitro.errors import ConfigError, ExportError, did_you_mean, warn
from nitro.export import repeat_rows

from ._assets import Index, digest, write_assets, write_index
from ._calls import Call, make_call, make_differentiable
from ._dtypes import SUPPORTED, is_supported
from ._io_spec import IOSpec, check_input_names
from ._module import make_module, open_shape
from ._signatures import DEFAULT, fixed_signature
from ._tensorflow import Target
from ._warmup import write_warmup

if TYPE_CHECKING:
    from nitro.export import ExportProgram


Edge = tuple[tuple[IOSpec, ...], tuple[IOSpec, ...]]
"""Inputs and outputs."""


def check_program(program: ExportProgram) -> Edge:
    """Checks all that needs neither TensorFlow nor a trace; returns inputs and outputs.

    Raises:
        ExportError: Something that a SavedModel cannot promise.
    """
    inputs = tuple(IOSpec.from_export(spec) for spec in program.inputs)
    outputs = tuple(IOSpec.from_export(spec) for spec in program.outputs)
    check_input_names(inputs)
    for side, specs in (("in", program.client_inputs), ("out", program.client_outputs)):
        if specs:
            raise ExportError(
                f"`{program.name}` has client {side}puts ({', '.join(s.name for s in specs)}), "
                "and a SavedModel cannot ship the script between them and the program.",
                expected="no `export_client_inputs` and no `export_client_outputs`",
                fix='export with the backend "stablehlo", or compute it inside `forward`',
            )
    if program.vjp_order > 1:
        raise ExportError(
            f"`vjp_order` is {program.vjp_order}.",
            expected="0 or 1: the gradient in a SavedModel has no gradient of its own",
        )
    for name, weight in program.weights.items():
        if not is_supported(np.dtype(weight.dtype)):
            raise ExportError(
                f"The weight `{name}` has the dtype {weight.dtype}, which no variable can have.",
                expected="one of " + ", ".join(SUPPORTED),
                fix="store it in another dtype, and convert it inside `forward`",
            )
    return inputs, outputs


def trainable_weights(program: ExportProgram, wanted: bool | Collection[str]) -> frozenset[str]:  # noqa: FBT001 - the option as the caller gave it
    """The weights that become trainable variables: all floats, or the named ones.

    Raises:
        ConfigError: Not a weight, one without a gradient, or a program without any.
    """
    floats = {
        name
        for name in program.weight_names
        if jax.numpy.issubdtype(program.weights[name].dtype, jax.numpy.floating)
    }
    if isinstance(wanted, bool):
        names = floats - program.state_names if wanted else set[str]()
    else:
        names = {wanted} if isinstance(wanted, str) else set(wanted)
    for name in sorted(names - floats):
        raise ConfigError(
            f"`trainable` names `{name}`, which is no float weight of `{program.name}`.",
            expected=did_you_mean(name, floats),
        )
    if names and program.vjp_order == 0:
        raise ConfigError(
            "`trainable` asks for variables to train, and the program has no gradient.",
            expected="a program that can be differentiated",
            fix="pass `vjp_order=1` too",
        )
    return frozenset(names)


def write_saved_model(
    tf: Any,
    program: ExportProgram,
    root: Path,
    *,
    target: Target,
    trainable: Collection[str],
) -> None:
    """Writes every file of a SavedModel into the empty directory `root`.

    Args:
        tf: TensorFlow.
        program: What to write.
        root: Where to.
        target: The reader to write for.
        trainable: The weights that become trainable variables.

    Raises:
        ExportError: Something that a SavedModel cannot promise.
    """
    inputs, outputs = check_program(program)
    if program.postprocess is not None:
        warn(
            f"The post-process of `{program.name}` is left out: a SavedModel cannot ship a "
            'script. The backend "stablehlo" can.'
        )
    versions = _versions(tf, target)
    with tf.device("/CPU:0"):
        variables = _make_variables(tf, program, trainable)
    functions = {
        name: _make_function(tf, program, rows, target, variables, (inputs, outputs), name)
        for name, rows in _rows_by_signature(program).items()
    }
    module = tf.Module(name="nitro")
    module.weights = variables
    module.serve = _make_endpoint(tf, functions[DEFAULT], inputs)
    try:
        with _quiet():
            tf.saved_model.save(
                module,
                str(root),
                signatures=functions,
                options=tf.saved_model.SaveOptions(
                    experimental_custom_gradients=program.vjp_order > 0,
                    experimental_image_format=False,
                ),
            )
    # TensorFlow writes by itself, and has errors of its own for a full disk.
    except tf.errors.OpError as error:
        raise ExportError(
            f"TensorFlow cannot write the SavedModel: {error.message}",
            expected="a folder that can be written, with room for the weights",
            fix="free the disk, or choose another `dir`",
        ) from error
    _fix_fingerprint(root)
    write_assets(program, root, versions)
    write_warmup(tf, root, program.name, _warmup_requests(program))
    index = Index.from_program(program, versions=versions, files=_digests(root))
    write_index(root, index)


def _rows_by_signature(program: ExportProgram) -> dict[str, int | None]:
    default = None if program.dynamic_batch else program.batch_sizes[0]
    return {DEFAULT: default, **{fixed_signature(rows): rows for rows in program.batch_sizes}}


def _versions(tf: Any, target: Target) -> dict[str, Any]:
    return {
        "jax_version": jax.__version__,
        "jaxlib_version": importlib.metadata.version("jaxlib"),
        "tensorflow_version": tf.__version__,
        "stablehlo_version": target.stablehlo_version,
        "call_module_version": target.call_module_version,
    }


def _make_variables(tf: Any, program: ExportProgram, trainable: Collection[str]) -> dict[str, Any]:
    """A variable for each weight, in argument order; the dictionary keeps the exact names."""
    return {
        name: tf.Variable(
            np.asarray(program.weights[name]),
            name=re.sub(r"[^\w.\\/-]", "_", name, flags=re.ASCII).lstrip("_\\/-") or "weight",
            trainable=name in trainable,
        )
        for name in program.weight_names
    }


def _make_function(
    tf: Any,
    program: ExportProgram,
    rows: int | None,
    target: Target,
    variables: Mapping[str, Any],
    edge: Edge,
    name: str,
) -> Any:
    """The program at one batch size, as a function of named tensors and the variables."""
    inputs, outputs = edge
    call = _make_program_call(tf, program, rows, target, edge)

    def run(**tensors: Any) -> dict[str, Any]:
        arguments = [tensors[spec.name] for spec in inputs]
        results = call([*arguments, *(variable.read_value() for variable in variables.values())])
        return {spec.name: result for spec, result in zip(outputs, results, strict=True)}

    run.__name__ = name
    return tf.function(run, autograph=False).get_concrete_function(
        **{
            spec.name: tf.TensorSpec(
                spec.signature_shape(rows), tf.as_dtype(spec.dtype), name=spec.name
            )
            for spec in inputs
        }
    )


def _make_program_call(
    tf: Any, program: ExportProgram, rows: int | None, target: Target, edge: Edge
) -> Call:
    where = "the program for any number of rows" if rows is None else f"the program for {rows} rows"
    exported = program.exported(rows)
    _check_signature(program, exported, rows, edge, where)

    def make(export: jax.export.Exported, where: str) -> Call:
        module = make_module(
            export,
            target.stablehlo_version,
            allowed_calls=program.custom_calls,
            where=where,
        )
        return make_call(tf, module, target.call_module_version)

    call = make(exported, where)
    if program.vjp_order == 0:
        return call
    with program.wide_types():
        vjp = exported.vjp()
    is_float = [jax.numpy.issubdtype(aval.dtype, jax.numpy.floating) for aval in exported.in_avals]
    return make_differentiable(tf, call, make(vjp, f"the gradient of {where}"), is_float)


def _check_signature(
    program: ExportProgram,
    exported: jax.export.Exported,
    rows: int | None,
    edge: Edge,
    where: str,
) -> None:
    """Compares what was lowered with what is promised; TensorFlow trusts the module."""
    inputs, outputs = (
        [(spec.name, spec.signature_shape(rows), spec.numpy_dtype) for spec in specs]
        for specs in edge
    )
    weights = [
        (name, tuple(weight.shape), np.dtype(weight.dtype))
        for name, weight in ((name, program.weights[name]) for name in program.weight_names)
    ]
    for kind, avals, promised in (
        ("arguments", exported.in_avals, [*inputs, *weights]),
        ("results", exported.out_avals, outputs),
    ):
        if len(avals) != len(promised):
            raise ExportError(
                f"{_capital(where)} has {len(avals)} {kind}.",
                expected=f"{len(promised)}: {', '.join(name for name, _, _ in promised)}",
                fix="a value that `forward` captures may have become an argument of its own: "
                "make it a field of the experiment or a variable of the model",
            )
        for aval, (name, shape, dtype) in zip(avals, promised, strict=True):
            if open_shape(aval) != shape or np.dtype(aval.dtype) != dtype:
                raise ExportError(
                    f"In {where}, `{name}` is {aval.dtype}{list(aval.shape)}.",
                    expected=f"{dtype}{list(shape)}, as promised",
                )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _make_endpoint(tf: Any, default: Any, inputs: Sequence[IOSpec]) -> Any:
    """What Keras calls: it takes the one input as it is, or a dictionary of all."""
    specs = {
        name: tf.TensorSpec(spec.shape, spec.dtype, name=name)
        for name, spec in default.structured_input_signature[1].items()
    }
    single = inputs[0].name if len(inputs) == 1 else None

    def serve(tensors: Any) -> Any:
        return default(**(tensors if single is None else {single: tensors}))

    signature = specs if single is None else specs[single]
    return tf.function(serve, input_signature=[signature], autograph=False)


def _warmup_requests(program: ExportProgram) -> dict[str, dict[str, np.ndarray]]:
    """Golden rows for each signature; what takes any number of rows gets one row."""
    return {
        name: {
            spec.name: repeat_rows(program.golden.inputs[spec.name], spec.batch_axis - 1, rows or 1)
            for spec in program.inputs
        }
        for name, rows in _rows_by_signature(program).items()
    }


def _fix_fingerprint(root: Path) -> None:
    """Makes the fingerprint's random id one that depends on the program only."""
    from tensorflow.core.protobuf import fingerprint_pb2

    path = root / "fingerprint.pb"
    fingerprint: Any = fingerprint_pb2.FingerprintDef.FromString(path.read_bytes())
    name = digest(root / "saved_model.pb")
    fingerprint.uuid = str(uuid.uuid5(uuid.NAMESPACE_OID, name).int % 2**63)
    path.write_bytes(fingerprint.SerializeToString(deterministic=True))


def _digests(root: Path) -> dict[str, str]:
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): digest(path) for path in files}


@contextmanager
def _quiet() -> Generator[None]:
    """Keeps TensorFlow from telling that it wrote no assets."""
    logger = logging.getLogger("tensorflow")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)
