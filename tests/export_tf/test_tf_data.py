"""A `tf.data.Dataset` as a source of training batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nitro
from nitro.errors import DataError

pytestmark = pytest.mark.tf


@pytest.fixture(scope="module")
def tf() -> Any:
    return pytest.importorskip("tensorflow")


class Line(nitro.Experiment):
    def build_data(self) -> Any:
        return {}

    def build_model(self, rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Linear(4, 1, rngs=rngs)

    def forward(self, model: Any, *, x: Any) -> Any:
        return model(x)[:, 0]

    def loss(self, outputs: Any, *, y: Any) -> Any:
        return jnp.square(outputs - y).mean()


def _batches(tf: Any) -> Any:
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices({"x": x, "y": x.sum(1)}).batch(4)


def _run(data: Any, folder: Path) -> nitro.Nitro:
    options: dict[str, Any] = {"progress": False, "logger": None, "checkpointer": None}
    return nitro.Nitro(Line(), data={"train": data}, run_dir=folder / "run", **options)


@pytest.mark.parametrize("kind", ["infinite", "unknown"])
def test_a_dataset_without_a_length_is_refused_with_what_gives_it_one(
    kind: str, tf: Any, tmp_path: Path
) -> None:
    batches = _batches(tf)
    endless = batches.repeat() if kind == "infinite" else batches.filter(lambda _: True)

    with pytest.raises(DataError, match=rf"`train`[\s\S]*{kind}[\s\S]*assert_cardinality"):
        _run(endless, tmp_path)


def test_a_dataset_that_says_how_many_batches_it_has_is_trained_on(tf: Any, tmp_path: Path) -> None:
    filtered = _batches(tf).filter(lambda _: True)
    counted = filtered.apply(tf.data.experimental.assert_cardinality(4))

    assert _run(counted, tmp_path).train().step == 4
