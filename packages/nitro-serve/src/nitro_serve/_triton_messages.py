"""The messages of Triton's extensions of the protocol, which kserve lacks or numbers otherwise.

Names and numbers: https://github.com/triton-inference-server/common/tree/main/protobuf. They
are kept in a descriptor pool of their own, because kserve registers messages of the same names.
"""

from __future__ import annotations

import functools
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "inference"
_KINDS = {"string": 9, "bool": 8, "uint64": 4, "int64": 3, "int32": 5, "enum": 5}

# Each field: its name, number and kind; a kind that is no scalar is a message of this table,
# and one in brackets is repeated. An enumeration travels as the integer that it is.
_MESSAGES: dict[str, list[tuple[str, int, str]]] = {
    "RepositoryIndexRequest": [("repository_name", 1, "string"), ("ready", 2, "bool")],
    "ModelIndex": [
        ("name", 1, "string"),
        ("version", 2, "string"),
        ("state", 3, "string"),
        ("reason", 4, "string"),
    ],
    "RepositoryIndexResponse": [("models", 1, "[ModelIndex]")],
    "Parameter": [],
    "ParameterEntry": [("key", 1, "string"), ("value", 2, "Parameter")],
    "RepositoryModelLoadRequest": [
        ("repository_name", 1, "string"),
        ("model_name", 2, "string"),
        ("parameters", 3, "[ParameterEntry]"),
    ],
    "RepositoryModelLoadResponse": [],
    "RepositoryModelUnloadRequest": [
        ("repository_name", 1, "string"),
        ("model_name", 2, "string"),
        ("parameters", 3, "[ParameterEntry]"),
    ],
    "RepositoryModelUnloadResponse": [],
    "ModelConfigRequest": [("name", 1, "string"), ("version", 2, "string")],
    "Input": [("name", 1, "string"), ("data_type", 2, "enum"), ("dims", 4, "[int64]")],
    "Output": [("name", 1, "string"), ("data_type", 2, "enum"), ("dims", 3, "[int64]")],
    "DynamicBatching": [
        ("preferred_batch_size", 1, "[int32]"),
        ("max_queue_delay_microseconds", 2, "uint64"),
    ],
    "ModelConfig": [
        ("name", 1, "string"),
        ("platform", 2, "string"),
        ("backend", 17, "string"),
        ("max_batch_size", 4, "int32"),
        ("input", 5, "[Input]"),
        ("output", 6, "[Output]"),
        ("dynamic_batching", 11, "DynamicBatching"),
    ],
    "ModelConfigResponse": [("config", 1, "ModelConfig")],
    "ModelStatisticsRequest": [("name", 1, "string"), ("version", 2, "string")],
    "StatisticDuration": [("count", 1, "uint64"), ("ns", 2, "uint64")],
    "InferStatistics": [
        ("success", 1, "StatisticDuration"),
        ("fail", 2, "StatisticDuration"),
        ("queue", 3, "StatisticDuration"),
        ("compute_infer", 5, "StatisticDuration"),
    ],
    "InferBatchStatistics": [
        ("batch_size", 1, "uint64"),
        ("compute_infer", 3, "StatisticDuration"),
    ],
    "ModelStatistics": [
        ("name", 1, "string"),
        ("version", 2, "string"),
        ("last_inference", 3, "uint64"),
        ("inference_count", 4, "uint64"),
        ("execution_count", 5, "uint64"),
        ("inference_stats", 6, "InferStatistics"),
        ("batch_stats", 7, "[InferBatchStatistics]"),
    ],
    "ModelStatisticsResponse": [("model_stats", 1, "[ModelStatistics]")],
}

DATA_TYPES = {
    f"TYPE_{name}": number
    for number, name in enumerate(
        [
            "BOOL",
            "UINT8",
            "UINT16",
            "UINT32",
            "UINT64",
            "INT8",
            "INT16",
            "INT32",
            "INT64",
            "FP16",
            "FP32",
            "FP64",
            "STRING",
            "BF16",
        ],
        start=1,
    )
}
"""The numbers of Triton's enumeration of dtypes."""


@functools.cache
def message_class(name: str) -> Any:
    """The class of a message of the table."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{_PACKAGE}.{name}"))


@functools.cache
def _pool() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="nitro_serve_triton.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, number, kind in fields:
            inner = kind.strip("[]")
            field: Any = message.field.add(name=field_name, number=number)
            field.label = 3 if kind != inner else 1
            field.type = _KINDS.get(inner, 11)
            if field.type == 11:
                field.type_name = f".{_PACKAGE}.{inner}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool
