"""The declared type of a Device field decides its dtype, wherever the value comes from."""

from __future__ import annotations

from typing import Any

import numpy as np
import optax
import pytest

import nitro
from nitro import Device


@pytest.fixture
def scaled(plane: Any) -> Any:
    class Scaled(plane):
        scale: Device[float] = 1.0
        steps: Device[int] = 2

        @classmethod
        def presets(cls):
            return {"doubled": {"scale": 2}}

        def optimizer(self, group):
            return optax.sgd

        def learning_rate(self, group=None):
            return 0.01

        def loss(self, height, *, y):
            return self.scale * ((height - y) ** 2).mean() + 0 * self.steps

    return Scaled


_QUIET: dict[str, Any] = {"progress": False, "logger": None, "checkpointer": None}


@pytest.mark.parametrize("source", ["constructor", "preset", "replace", "derive"])
def test_integer_for_a_float_is_the_same_program_and_the_same_numbers(
    scaled: Any, make_run: Any, source: str
) -> None:
    class Derived(scaled):
        def derive(self, data):
            return {"scale": 2}

    expected = make_run(scaled(scale=2.0), **_QUIET).train().history.loss
    made = {
        "constructor": lambda: scaled(scale=2),
        "preset": lambda: scaled.from_preset("doubled"),
        "replace": lambda: scaled().replace(scale=np.int64(2)),
        "derive": Derived,
    }
    before = nitro.cache_stats()["misses"]
    run = make_run(made[source](), **_QUIET).train()

    assert run.device_value("scale").dtype == np.float32
    assert run.history.loss == expected
    # A class of its own has hooks of its own, and so do its programs.
    assert source == "derive" or nitro.cache_stats()["misses"] == before


def test_set_device_converts_to_the_declared_type(scaled: Any, make_run: Any) -> None:
    run = make_run(scaled(), **_QUIET)

    run.set_device(scale=3, steps=4.0)

    assert (run.device_value("scale"), run.device_value("steps")) == (3.0, 4)
    assert run.device_value("steps").dtype == np.int32
    with pytest.raises(nitro.errors.ConfigError, match=r"set_device.*steps"):
        run.set_device(steps=2.5)


def test_float_field_declared_with_an_integer_can_be_scheduled(scaled: Any, make_run: Any) -> None:
    schedules = {"scale": lambda total: lambda step: 0.5 + 0.1 * step}

    run = make_run(scaled(scale=1), schedules=schedules, **_QUIET).train()

    # Four steps: the last one had 0.5 + 0.1 * 3.
    np.testing.assert_allclose(run.device_value("scale"), 0.8, rtol=1e-6)
