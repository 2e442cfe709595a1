"""What may move without a compile: rates, decays, anchors, clip thresholds and schedules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import optax
import pytest

import nitro
from nitro import Device

COMPILED = "/jax/core/compile/backend_compile_duration"


@contextmanager
def counted_compiles() -> Iterator[list[str]]:
    """Collects what the whole process compiles."""
    events: list[str] = []

    def listen(event: str, _: float, **__: Any) -> None:
        if event == COMPILED:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="module")
def moving(plane: Any) -> type[nitro.Experiment]:
    """A plane whose hooks answer from its host fields, and which has a Device field."""

    class Moving(plane):
        rate: float = 1e-3
        decay: float = 0.0
        anchor: float | None = None
        spare_bias: bool = True
        scale: Device[float] = 1.0

        def loss(self, height, *, y):
            return self.scale * super().loss(height, y=y)

        def learning_rate(self, group=None):
            return self.rate

        def weight_decay(self, group):
            return self.decay

        def no_decay(self, path, leaf):
            return self.spare_bias and path == "bias"

        def decay_anchor(self, group):
            if self.anchor is None:
                return "zero"
            return {"kernel": np.full((4, 1), self.anchor), "bias": np.full(1, self.anchor)}

    return Moving


def step_misses() -> int:
    return nitro.cache_stats()["by_role"]["train step"]["misses"]


def cosine(total: int) -> optax.Schedule:
    return optax.cosine_decay_schedule(1e-2, total)


def scheduled(*keys: str) -> dict[str, Any]:
    return {"schedules": dict.fromkeys(keys, cosine)}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"rate": 0.1}),
        ({}, {"decay": 0.1}),
        ({"decay": 0.1}, {"decay": 0.1, "spare_bias": False}),
        ({"decay": 0.1, "anchor": 0.5}, {"decay": 0.1, "anchor": 0.25}),
        ({}, scheduled("learning_rate")),
        ({}, scheduled("scale")),
        ({}, {"max_epochs": 3}),
        ({"gradient_clip_norm": 1.0}, {"gradient_clip_norm": 0.1}),
        ({"gradient_clip_norm": 1.0}, {"gradient_clip_norm": 0.1, **scheduled("learning_rate")}),
    ],
    ids=lambda options: re.sub(r" at 0x\w+", "", str(options)),
)
def test_step_is_compiled_once(moving: Any, make_run: Any, before: Any, after: Any) -> None:
    _train(moving, make_run, before)
    misses = step_misses()

    _train(moving, make_run, after)

    assert step_misses() == misses


def test_scheduled_decay_is_the_same_program(plane: Any, make_run: Any) -> None:
    make_run(plane(), progress=False).train()
    misses = step_misses()

    make_run(plane(), progress=False, **scheduled("weight_decay")).train()

    assert step_misses() == misses


def test_clip_on_is_another_program(moving: Any, make_run: Any) -> None:
    nitro.cache_clear()
    _train(moving, make_run, {})

    _train(moving, make_run, {"gradient_clip_norm": 1.0})

    assert step_misses() == 2
    assert "clip" in str(nitro.explain_compiles()[-1])


def test_nothing_compiles_after_the_first_step(
    moving: Any, make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"max_epochs": 3, "steps_per_call": 2, "gradient_clip_norm": 0.5, "progress": False}
    run = make_run(moving(decay=0.1, anchor=0.5), **options, **scheduled("learning_rate", "scale"))
    compiles_by_step: dict[int, int] = {}
    with counted_compiles() as events:
        log = run._session.setup.logger.metrics

        def metrics(*values: Any, step: int, **rest: Any) -> None:
            compiles_by_step.setdefault(step, len(events))
            log(*values, step=step, **rest)

        monkeypatch.setattr(run._session.setup.logger, "metrics", metrics)
        run.train()

        assert len(events) == compiles_by_step[1]


def test_decay_of_zero_costs_no_bits(moving: Any, make_run: Any) -> None:
    without = _train(moving, make_run, {"rate": 0.1})
    zero = _train(moving, make_run, {"rate": 0.1, "anchor": 0.5})

    for a, b in zip(jax.tree.leaves(without), jax.tree.leaves(zero), strict=True):
        np.testing.assert_array_equal(a, b)


def _train(moving: Any, make_run: Any, settings: dict[str, Any]) -> Any:
    fields = {name: value for name, value in settings.items() if name in moving.fields()}
    options = {name: value for name, value in settings.items() if name not in fields}
    run = make_run(moving(**fields), checkpointer=None, logger=None, progress=False, **options)
    run.train()
    return run._session.state.params
