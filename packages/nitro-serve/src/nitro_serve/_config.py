"""The `config.pbtxt` of a model in a Triton repository."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from nitro.errors import ConfigError
from nitro_export_stablehlo import Bundle, IOSpec

from ._kserve_types import kserve_name, wire_shape

DEFAULT_QUEUE_DELAY_US = 0
"""How long Triton holds a request back for others to join, in microseconds. With 0 it joins
what waits while a batch is computed, which costs a lone request nothing."""


@dataclass(frozen=True, kw_only=True)
class TensorConfig:
    """A tensor in a model's configuration.

    Attributes:
        name: The name on the wire.
        dtype: KServe's name of the dtype.
        dims: The sizes without the batch axis, where Triton counts rows; -1 for any size.
        label_filename: A file of names for the classes of an output, or None.
    """

    name: str
    dtype: str
    dims: tuple[int, ...]
    label_filename: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What Triton has to know of a model.

    Attributes:
        name: The model's name, which is its directory's.
        backend: Which of Triton's backends runs it: `"python"` or `"onnxruntime"`.
        max_batch_size: The most rows of one call; 0 where Triton must not join requests.
        inputs: What a client sends; empty where the backend reads it from the model.
        outputs: What a client gets.
        preferred_sizes: The sizes that Triton should join requests to.
        queue_delay_us: How long a request may wait for others, in microseconds.
        instances: How many copies of the model run at the same time.
        kind: `"cpu"` or `"gpu"`: where they run.
        serves_all_versions: Whether all versions are served, or only the newest.
        parameters: Text by name that the model's code can read.
    """

    name: str
    backend: Literal["python", "onnxruntime"]
    max_batch_size: int
    inputs: tuple[TensorConfig, ...] = ()
    outputs: tuple[TensorConfig, ...] = ()
    preferred_sizes: tuple[int, ...] = ()
    queue_delay_us: int = DEFAULT_QUEUE_DELAY_US
    instances: int = 1
    kind: Literal["cpu", "gpu"] = "cpu"
    serves_all_versions: bool = False
    parameters: Mapping[str, str] = field(default_factory=dict[str, str])

    def to_text(self) -> str:
        """The configuration in the text format of protocol buffers.

        Fields: https://github.com/triton-inference-server/common/blob/main/protobuf/model_config.proto.
        """
        policy = "all { }" if self.serves_all_versions else "latest { num_versions: 1 }"
        lines = [
            f"name: {_quoted(self.name)}",
            f"backend: {_quoted(self.backend)}",
            f"max_batch_size: {self.max_batch_size}",
            *(_tensor("input", tensor) for tensor in self.inputs),
            *(_tensor("output", tensor) for tensor in self.outputs),
            f"version_policy {{ {policy} }}",
            f"instance_group [ {{ count: {self.instances} kind: KIND_{self.kind.upper()} }} ]",
        ]
        if self.max_batch_size:
            sizes = [size for size in self.preferred_sizes if size <= self.max_batch_size]
            preferred = f"preferred_batch_size: {list(sizes)} " if sizes else ""
            lines.append(
                f"dynamic_batching {{ {preferred}"
                f"max_queue_delay_microseconds: {self.queue_delay_us} }}"
            )
        for key, value in sorted(self.parameters.items()):
            lines.append(
                f"parameters {{ key: {_quoted(key)} value: {{ string_value: {_quoted(value)} }} }}"
            )
        return "\n".join(lines) + "\n"


def _tensor(kind: str, tensor: TensorConfig) -> str:
    labels = f" label_filename: {_quoted(tensor.label_filename)}" if tensor.label_filename else ""
    return (
        f"{kind} [ {{ name: {_quoted(tensor.name)} data_type: TYPE_{tensor.dtype} "
        f"dims: {list(tensor.dims)}{labels} }} ]"
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def make_config(
    bundle: Bundle,
    *,
    name: str,
    max_batch_size: int | None = None,
    postprocess: bool = False,
    label_files: Mapping[str, str] | None = None,
    **settings: object,
) -> ModelConfig:
    """The configuration under which Triton serves a bundle.

    Triton joins requests along the first axis alone, and wants one axis besides it. A bundle
    that batches along another axis, or has a tensor of nothing but rows, is served request
    by request: `max_batch_size` is 0 then, and the batch axis one that takes any size.

    Args:
        bundle: The bundle.
        name: The model's name in the repository.
        max_batch_size: The most rows of one call. Default: the largest compiled size. More
            rows than that are cut by the bundle.
        postprocess: Whether the bundle's post-processing runs behind the program.
        label_files: A file of class names by output.
        settings: Other attributes of `ModelConfig`.

    Raises:
        ConfigError: A tensor without axes, which the protocol cannot carry; or labels for an
            output that there is not.
    """
    inputs, outputs = bundle.inputs, bundle.client_outputs if postprocess else bundle.outputs
    for spec in (*inputs, *outputs):
        if not spec.shape:
            raise ConfigError(
                f"`{spec.name}` of the model `{name}` is a scalar.",
                expected="at least one axis: Triton carries no tensor without",
                fix="give it an axis in `forward` or in `export_preprocess`",
            )
    labels = dict(label_files or {})
    unknown = sorted(labels.keys() - {spec.name for spec in outputs})
    if unknown:
        raise ConfigError(
            f"Labels are given for `{unknown[0]}`, which is not an output of `{name}`.",
            expected="one of " + ", ".join(f"`{spec.name}`" for spec in outputs),
        )
    joins = all(spec.batch_axis0 == 0 and len(spec.shape) > 1 for spec in (*inputs, *outputs))
    return ModelConfig(
        name=name,
        backend="python",
        max_batch_size=(max_batch_size or max(bundle.batch_sizes)) if joins else 0,
        inputs=tuple(_tensor_config(spec, joins=joins) for spec in inputs),
        outputs=tuple(
            _tensor_config(spec, joins=joins, label_filename=labels.get(spec.name))
            for spec in outputs
        ),
        preferred_sizes=_preferred(bundle.batch_sizes),
        parameters={"postprocess": "true"} if postprocess else {},
        **settings,  # pyright: ignore[reportArgumentType] - checked by the dataclass's callers
    )


def _preferred(sizes: Sequence[int]) -> tuple[int, ...]:
    """The compiled sizes; a preferred size of 1 would keep Triton from joining anything."""
    return tuple(size for size in sizes if size > 1)


def _tensor_config(spec: IOSpec, *, joins: bool, label_filename: str | None = None) -> TensorConfig:
    shape = wire_shape(spec)
    return TensorConfig(
        name=spec.name,
        dtype=kserve_name(spec),
        dims=tuple(shape[1:] if joins else shape),
        label_filename=label_filename,
    )
