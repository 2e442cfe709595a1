"""A served model in the terms of Triton's model configuration, which clients ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._kserve_types import kserve_name, wire_shape

if TYPE_CHECKING:
    from nitro_export_stablehlo import IOSpec

    from ._models import ServedModel


def model_config(model: ServedModel) -> dict[str, Any]:
    """The configuration of a model, as JSON.

    Fields: https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_model_configuration.md
    """
    joins = _has_rows_first(model)
    config: dict[str, Any] = {
        "name": model.name,
        "platform": "nitro_stablehlo",
        "backend": "nitro",
        "max_batch_size": model.max_batch_size if joins else 0,
        "input": [_tensor(spec, skip=int(joins)) for spec in model.inputs],
        "output": [_tensor(spec, skip=int(joins)) for spec in model.outputs],
    }
    if joins and model.max_batch_size:
        sizes = list(model.bundle.batch_sizes)
        config["dynamic_batching"] = {
            "preferred_batch_size": sizes,
            "max_queue_delay_microseconds": 0,
        }
    return config


def _has_rows_first(model: ServedModel) -> bool:
    """Whether Triton's way to write shapes, without a first axis of rows, holds for the model."""
    return all(spec.batch_axis0 == 0 for spec in (*model.inputs, *model.outputs))


def _tensor(spec: IOSpec, *, skip: int) -> dict[str, Any]:
    return {
        "name": spec.name,
        "data_type": f"TYPE_{kserve_name(spec)}",
        "dims": wire_shape(spec)[skip:],
    }
