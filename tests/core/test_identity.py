"""A program is what was traced: no value that a hook reads in any way leaves a stale one."""

from __future__ import annotations

import contextvars
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import io_callback

import nitro
from nitro import Device, GraphConst

FACTOR = 1.0
SETTING: contextvars.ContextVar[float] = contextvars.ContextVar("SETTING", default=1.0)
_COMPILES: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: (
        _COMPILES.append(event) if event == "/jax/core/compile/backend_compile_duration" else None
    )
)


class Line(nitro.Experiment):
    """The mean of `factor * y`, whatever the weights."""

    power: GraphConst[int] = 1
    shift: Device[float] = 0.0

    def build_data(self) -> Any:
        x = np.linspace(-1, 1, 16, dtype=np.float32)[:, None]
        fields = {"x": x, "y": x[:, 0] ** 2}
        return {"train": nitro.ArrayLoader(fields, 4), "val": nitro.ArrayLoader(fields, 4)}

    def build_model(self, rngs: nnx.Rngs) -> Any:
        return nnx.Linear(1, 1, rngs=rngs)

    def forward(self, model: Any, *, x: Any) -> Any:
        return model(x)[:, 0]

    def loss(self, height: Any, *, y: Any) -> Any:
        return self.factor() * y.mean() ** self.power + 0 * height.sum() + self.shift

    def factor(self) -> Any:
        return 1.0


def read_file() -> float:
    return float(Path(os.environ["LINE_FILE"]).read_text())


class Settings:
    def __getattr__(self, name: str) -> float:
        if name != "factor":
            raise AttributeError(name)
        return float(os.environ["LINE_FACTOR"])


SETTINGS = Settings()


@jax.jit
def jitted() -> Any:
    return jnp.float32(os.environ["LINE_FACTOR"])


@nnx.jit
def nnx_jitted(x: Any) -> Any:
    return x * float(os.environ["LINE_FACTOR"])


@jax.custom_vjp
def own_rule(x: Any) -> Any:
    return x * float(os.environ["LINE_FACTOR"])


own_rule.defvjp(lambda x: (own_rule(x), None), lambda _, g: (g,))


def body(carry: Any, x: Any) -> Any:
    return carry + x * float(os.environ["LINE_FACTOR"]), None


WAYS: dict[str, Callable[[], Any]] = {
    "environment": lambda: float(os.environ["LINE_FACTOR"]),
    "ContextVar": SETTING.get,
    "eval": lambda: eval("FACTOR"),
    "globals by name": lambda: globals()["FAC" + "TOR"],
    "__getattr__": lambda: SETTINGS.factor,
    "file": read_file,
    "patched library": lambda: optax.safe_increment(jnp.int32(0)) * 1.0,
    "inner jit": jitted,
    "inner nnx.jit": lambda: nnx_jitted(jnp.float32(1)),
    "custom_vjp": lambda: own_rule(jnp.float32(1)),
    "scan": lambda: jax.lax.scan(body, jnp.float32(0), jnp.ones(1))[0],
}


@pytest.fixture
def set_factor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[float], None]:
    """Sets the factor in every way that there is."""

    def set_all(factor: float) -> None:
        monkeypatch.setenv("LINE_FACTOR", str(factor))
        monkeypatch.setenv("LINE_FILE", str(tmp_path / "factor"))
        (tmp_path / "factor").write_text(str(factor))
        SETTING.set(factor)
        monkeypatch.setattr(sys.modules[__name__], "FACTOR", factor)
        monkeypatch.setattr(optax, "safe_increment", lambda count: count + int(factor))

    yield set_all
    SETTING.set(1.0)


def make(experiment: Any, folder: Path, **options: Any) -> nitro.Nitro:
    options = {"logger": None, "checkpointer": None, "progress": False, **options}
    return nitro.Nitro(experiment, run_dir=folder, **options)


@pytest.mark.parametrize("way", WAYS)
def test_a_new_handle_computes_with_the_value_of_now(
    way: str, set_factor: Callable[[float], None], tmp_path: Path
) -> None:
    class Scaled(Line):
        def factor(self) -> Any:
            return WAYS[way]()

    mean = float(np.mean(np.linspace(-1, 1, 16, dtype=np.float32) ** 2))
    for factor in (2.0, 3.0, 2.0):
        set_factor(factor)
        run = make(Scaled(), tmp_path).train()

        assert run.history["loss"][-1] == pytest.approx(factor * mean, rel=1e-5)
        assert run.validate()["val_loss"] == pytest.approx(factor * mean, rel=1e-5)


def test_an_equal_handle_compiles_nothing_and_calls_each_hook_once(tmp_path: Path) -> None:
    calls: list[str] = []

    class Counted(Line):
        def forward(self, model: Any, *, x: Any) -> Any:
            calls.append("forward")
            return super().forward(model, x=x)

    for _ in range(2):
        calls.clear()
        before = len(_COMPILES)
        make(Counted(), tmp_path).train()

    assert len(_COMPILES) == before
    assert calls == ["forward", "forward"]  # the step, and validation


def test_a_sweep_of_a_device_field_compiles_nothing(tmp_path: Path) -> None:
    make(Line(), tmp_path).train()
    before = len(_COMPILES)

    losses = [make(Line(shift=0.1 * i), tmp_path).train().history["loss"][-1] for i in range(20)]

    assert len(_COMPILES) == before
    np.testing.assert_allclose(np.diff(losses), 0.1, rtol=1e-4)


def renamed_line() -> type[Line]:
    def helper_of_another_name(height: Any, y: Any, self: Any) -> Any:
        level = y.mean()
        return self.factor() * level**self.power + 0 * height.sum() + self.shift

    class Line2(Line):
        def loss(self, height: Any, *, y: Any) -> Any:
            """Computes the same."""
            return jax.named_call(helper_of_another_name, name="other")(height, y, self)

    Line2.__name__ = "Line"
    return Line2


def test_a_refactoring_compiles_nothing(tmp_path: Path) -> None:
    make(Line(), tmp_path).train()
    before = nitro.cache_stats()["misses"]

    make(renamed_line()(), tmp_path).train()

    assert nitro.cache_stats()["misses"] == before


def test_a_callback_of_one_handle_is_not_called_by_another(tmp_path: Path) -> None:
    class Told(Line):
        def loss(self, height: Any, *, y: Any) -> Any:
            io_callback(lambda value: told[-1].append(float(value)), None, y.mean())
            return super().loss(height, y=y)

    told: list[list[float]] = []
    for _ in range(2):
        told.append([])
        make(Told(), tmp_path).train()

    assert len(told[0]) == len(told[1]) > 0


def test_a_printing_hook_compiles_once(tmp_path: Path) -> None:
    class Printing(Line):
        def loss(self, height: Any, *, y: Any) -> Any:
            jax.debug.print("mean {}", y.mean())
            return super().loss(height, y=y)

    make(Printing(), tmp_path).train()
    before = len(_COMPILES)

    make(Printing(), tmp_path).train()

    assert len(_COMPILES) == before


def test_constants_count_by_content(tmp_path: Path) -> None:
    class Tabled(Line):
        def factor(self) -> Any:
            return jnp.asarray(TABLE)[3]

    values = []
    for value in (1.0, 5.0):
        TABLE[3] = value
        values.append(make(Tabled(), tmp_path).validate()["val_loss"])

    assert values[1] == pytest.approx(5 * values[0], rel=1e-5)


TABLE = np.zeros(1000, np.float32)


def test_many_handles_leave_no_traces_behind(tmp_path: Path) -> None:
    from jax._src.interpreters import partial_eval

    def remembered() -> int:
        make(Line(), tmp_path).train()
        gc.collect()
        return partial_eval.trace_to_jaxpr.cache_info().currsize

    first = [remembered() for _ in range(2)][-1]

    assert [remembered() for _ in range(3)] == [first] * 3
