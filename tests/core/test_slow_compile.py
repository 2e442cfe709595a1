"""What is said of a program that took long to compile."""

from __future__ import annotations

import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import nitro
from nitro._programs._slow_compile import size_report, warn_if_slow
from nitro.errors import ConfigError, NitroWarning


def deep(x: Any) -> Any:
    for _ in range(20):
        x = jnp.sin(x)
    return x


def looped(x: Any) -> Any:
    def body(carry: Any, _: None) -> tuple[Any, None]:
        return jnp.cos(carry) * 2.0, None

    return jax.lax.scan(body, x, length=1000)[0]


def report(function: Any) -> list[str]:
    return size_report(jax.make_jaxpr(function)(1.0)).splitlines()


def line_of(function: Any, offset: int) -> str:
    code = function.__code__
    return f"test_slow_compile.py:{code.co_firstlineno + offset} in {function.__name__}"


def test_equations_are_counted_by_primitive_and_line():
    lines = report(lambda x: deep(x) + looped(x))

    # 20 sin; a scan with cos and mul in its body; one add.
    assert lines[0] == "  24 equations: sin 20, scan 1, add 1, cos 1, mul 1"
    assert lines[1].startswith(f"  by line: {line_of(deep, 2)} 20, ")


def test_a_loop_body_is_counted_once_at_its_line():
    assert f"  loop bodies, in equations: scan at {line_of(looped, 4)} 2" in report(looped)


def test_a_python_loop_is_named_with_the_way_out():
    (line,) = [line for line in report(deep) if "same" in line]

    assert line.startswith(f"  {line_of(deep, 2)} makes the same `sin` 20 times")
    assert "`jax.lax.scan`" in line


def test_a_short_python_loop_is_not_blamed():
    assert not [line for line in report(lambda x: x * 2 + x * 3) if "same" in line]


def test_an_inner_jit_counts_for_the_line_that_calls_it():
    def function(x: Any) -> Any:
        return jax.nn.silu(x)

    by_line = report(function)[1]

    assert line_of(function, 1).replace(" in function", "") in by_line


@pytest.mark.parametrize(("seconds", "warns"), [(30.0, False), (30.1, True)])
def test_the_limit_decides(seconds, warns):
    jaxpr = jax.make_jaxpr(deep)(1.0)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_slow("step program", jaxpr, seconds=seconds, limit_s=30.0)

    assert len(caught) == warns


class Stack(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        for _ in range(16):
            x = self.layer(x)
        return x


def test_a_slow_compile_of_a_run_is_reported(plane, make_run):
    class Deep(plane):
        def build_model(self, rngs: nnx.Rngs) -> Any:
            return Stack(rngs)

    nitro.cache_clear()
    with pytest.warns(NitroWarning, match="Compiling the") as caught:
        make_run(Deep(), slow_compile_s=0.0, checkpointer=None).train()

    messages = [str(warning.message) for warning in caught]
    (step,) = [text for text in messages if "train step program of `Deep`" in text]
    assert "over `slow_compile_s` = 0" in step
    assert f"{line_of(Stack.__call__, 2)}".replace("__call__", "Stack.__call__") in step
    assert re.search(r"Stack\.__call__ makes the same `\w+` \d+ times", step)
    # The loop over the steps of a chunk is ours: the report is about one step.
    assert "loop bodies" not in step
    assert "test_a_slow_compile" not in step


def test_a_limit_must_be_a_time(plane, make_run):
    with pytest.raises(ConfigError, match="slow_compile_s"):
        make_run(plane(), slow_compile_s="long")
