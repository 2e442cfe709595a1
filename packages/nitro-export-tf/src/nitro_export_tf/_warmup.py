"""The requests that TensorFlow Serving replays when it loads a model.

The first request compiles a signature, which takes long; these do it before the first
client. The file is a TFRecord of `tensorflow.serving.PredictionLog`. The few fields that
are needed are encoded here, so that exporting needs no `tensorflow-serving-api`:
https://github.com/tensorflow/serving/blob/master/tensorflow_serving/apis/prediction_log.proto
https://github.com/tensorflow/serving/blob/master/tensorflow_serving/apis/predict.proto
https://github.com/tensorflow/serving/blob/master/tensorflow_serving/apis/model.proto
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ._assets import FOLDER

FILE = f"{FOLDER}/tf_serving_warmup_requests"


def write_warmup(
    tf: Any, root: Path, name: str, requests: Mapping[str, Mapping[str, np.ndarray]]
) -> None:
    """Writes one predict request for each signature.

    Args:
        tf: TensorFlow.
        root: The SavedModel's folder.
        name: The model's name, which a server ignores here.
        requests: The inputs, by signature.
    """
    with tf.io.TFRecordWriter(str(root / FILE)) as writer:
        for signature, inputs in requests.items():
            tensors = {
                key: tf.make_tensor_proto(array).SerializeToString(deterministic=True)
                for key, array in inputs.items()
            }
            writer.write(_prediction_log(name, signature, tensors))


def _prediction_log(name: str, signature: str, tensors: Mapping[str, bytes]) -> bytes:
    model_spec = _field(1, name.encode()) + _field(3, signature.encode())
    request = _field(1, model_spec) + b"".join(
        _field(2, _field(1, key.encode()) + _field(2, tensor)) for key, tensor in tensors.items()
    )
    return _field(6, _field(1, request))


def _field(number: int, data: bytes) -> bytes:
    """A field of bytes, as protocol buffers frame it."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])
