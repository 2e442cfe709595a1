"""PyTorch's schedules in optax, against their published formulas in float64.

The table of `docs/how-to/schedules.md`, row by row. PyTorch and optax both count optimizer
steps from 0: the first update uses step 0.

References:
    https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.OneCycleLR.html
    Smith and Topin, "Super-convergence", 2018, https://arxiv.org/abs/1708.07120.
    Transformers, `get_cosine_schedule_with_warmup`:
    https://huggingface.co/docs/transformers/main_classes/optimizer_schedules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import nitro
from nitro._run import session_of
from nitro.errors import ConfigError

PEAK, TOTAL = 0.1, 100


def one_cycle(step: int, *, anneal: str = "cos", three_phase: bool = False) -> float:
    """`OneCycleLR(max_lr=0.1, total_steps=100, pct_start=0.3)`, as PyTorch defines it."""
    pct_start, div_factor, final_div_factor = 0.3, 25.0, 1e4
    initial = PEAK / div_factor
    lowest = initial / final_div_factor
    phases = [(pct_start * TOTAL - 1, initial, PEAK), (TOTAL - 1, PEAK, lowest)]
    if three_phase:
        down = 2 * pct_start * TOTAL - 2
        phases = [phases[0], (down, PEAK, initial), (TOTAL - 1, initial, lowest)]
    begin = 0.0
    for end, start_rate, end_rate in phases:
        if step <= end or end == TOTAL - 1:
            part = (step - begin) / (end - begin)
            if anneal == "linear":
                return (end_rate - start_rate) * part + start_rate
            return end_rate + (start_rate - end_rate) / 2 * (1 + math.cos(math.pi * part))
        begin = end
    raise AssertionError


def warm_cosine(step: int, *, warm_up: int = 10) -> float:
    """`get_cosine_schedule_with_warmup(optimizer, 10, 100)`, from a rate of 0.1."""
    if step < warm_up:
        return PEAK * step / warm_up
    return PEAK * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (TOTAL - warm_up)))


def cosine_annealing(step: int, *, lowest: float = 0.01) -> float:
    """`CosineAnnealingLR(T_max=100, eta_min=0.01)`, in closed form."""
    return lowest + (PEAK - lowest) * (1 + math.cos(math.pi * step / TOTAL)) / 2


def optax_one_cycle(
    total: int, *, interpolate: Any = "cosine", three_phase: bool = False
) -> optax.Schedule:
    pct_start, div_factor, final_div_factor = 0.3, 25.0, 1e4
    top = round(pct_start * total) - 1
    scales = {top: div_factor, total - 1: 1 / (div_factor * final_div_factor)}
    if three_phase:
        scales = {top: div_factor, 2 * top: 1 / div_factor, total - 1: 1 / final_div_factor}
    return optax.schedules.piecewise_interpolate_schedule(interpolate, PEAK / div_factor, scales)


ROWS: dict[str, tuple[Callable[[int], float], Callable[[int], optax.Schedule]]] = {
    "OneCycleLR": (one_cycle, optax_one_cycle),
    "OneCycleLR linear": (
        lambda step: one_cycle(step, anneal="linear"),
        lambda total: optax_one_cycle(total, interpolate="linear"),
    ),
    "OneCycleLR three_phase": (
        lambda step: one_cycle(step, three_phase=True),
        lambda total: optax_one_cycle(total, three_phase=True),
    ),
    "cosine with warm-up": (
        warm_cosine,
        lambda total: optax.warmup_cosine_decay_schedule(0.0, PEAK, 10, total),
    ),
    "CosineAnnealingLR": (
        cosine_annealing,
        lambda total: optax.cosine_decay_schedule(PEAK, total, alpha=0.01 / PEAK),
    ),
    "StepLR": (
        lambda step: PEAK * 0.5 ** (step // 30),
        lambda _: optax.exponential_decay(PEAK, 30, 0.5, staircase=True),
    ),
    "ExponentialLR": (
        lambda step: PEAK * 0.97**step,
        lambda _: optax.exponential_decay(PEAK, 1, 0.97),
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_every_step_is_that_of_the_formula(row: str) -> None:
    formula, factory = ROWS[row]

    got = jax.jit(jax.vmap(factory(TOTAL)))(np.arange(TOTAL, dtype=np.int32))

    expected = [formula(step) for step in range(TOTAL)]
    # The tolerance is float32's, near the peak; one step further is a hundred times as far.
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=PEAK * 1e-6)
    shifted = np.abs(np.array(expected[40:41]) - expected[41:42]).max()
    assert shifted > PEAK * 1e-4 or row == "StepLR"


def test_one_cycle_of_optax_itself_peaks_a_step_later() -> None:
    own = jax.jit(jax.vmap(optax.cosine_onecycle_schedule(TOTAL, PEAK)))(np.arange(TOTAL))

    assert np.argmax([one_cycle(step) for step in range(TOTAL)]) == 29
    assert np.argmax(own) == 30


def test_update_k_uses_the_rate_of_step_k(make_run: Any) -> None:
    class Falling(nitro.Experiment):
        """Its gradient is 1, so the weight is minus the sum of all rates so far."""

        def build_data(self):
            return {"train": nitro.ArrayLoader({"x": np.ones((12, 1), np.float32)}, 1)}

        def build_model(self, rngs):
            return nnx.Linear(1, 1, kernel_init=nnx.initializers.zeros, use_bias=False, rngs=rngs)

        def forward(self, model, *, x):
            return model(x)

        def loss(self, y):
            return y.mean()

        def optimizer(self, group):
            return optax.sgd

    schedules = {"learning_rate": ROWS["cosine with warm-up"][1]}
    run = make_run(Falling(), schedules=schedules, checkpointer=None, progress=False).train()

    rates = [float(ROWS["cosine with warm-up"][1](12)(step)) for step in range(12)]
    np.testing.assert_allclose(run.model.kernel[...], -sum(rates), rtol=1e-6)


def linear_to_zero(peak: float, total: int) -> Any:
    return optax.linear_schedule(peak, 0.0, total)


def warm_linear_to_zero(peak: float, total: int) -> Any:
    warm_up = max(1, total // 5)
    parts = [
        optax.linear_schedule(0.0, peak, warm_up),
        optax.linear_schedule(peak, 0.0, total - warm_up),
    ]
    return optax.join_schedules(parts, [warm_up])


@pytest.mark.parametrize("made", [linear_to_zero, warm_linear_to_zero])
@pytest.mark.parametrize("peak", [1e-3, 0.05])
@pytest.mark.parametrize("total", [3, 5, 7, 11, 13])
def test_decay_to_zero_stays_at_zero(
    plane: Any, make_run: Any, made: Any, peak: float, total: int
) -> None:
    schedules = {"learning_rate": lambda _: made(peak, total)}
    run = make_run(plane(), schedules=schedules, max_epochs=5, checkpointer=None, progress=False)

    optimizer: Any = session_of(run).setup.optimizer

    rates = optimizer.table[np.arange(20)][:, 0]
    assert rates.min() == 0
    assert (rates[total:] == 0).all()
    by_hand = [max(0.0, float(made(peak, total)(step))) for step in range(20)]
    # By a rounding of the peak at most: XLA fuses what eager optax rounds twice.
    np.testing.assert_allclose(rates, by_hand, rtol=1e-6, atol=peak * 1e-6)


def test_rate_below_zero_by_more_than_rounding_is_refused(plane: Any, make_run: Any) -> None:
    schedules = {"learning_rate": lambda _: lambda step: 1e-3 - 1e-3 * (1 + 1e-5) * (step > 2)}

    with pytest.raises(ConfigError, match=r"is -\d.*e-0[89] at step 3, counted from 0"):
        make_run(plane(), schedules=schedules)
