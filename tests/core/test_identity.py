"""A program is what was traced: no value that a hook reads in any way leaves a stale one."""

from __future__ import annotations

import contextvars
import gc
import os
import re
import subprocess
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
from nitro.errors import CheckpointError, NitroWarning

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


LAZY = {
    "import in the hook": "import colorsys as c\n        return float(c.rgb_to_hsv(1, 1, 1)[2])",
    "expm": "import jax.scipy as s\n        return s.linalg.expm(jnp.zeros((2, 2)))[0, 0]",
    "convolve": "return jax.scipy.signal.convolve(jnp.ones(3), jnp.ones(1)).mean()",
    "map_coordinates": "return jax.scipy.ndimage.map_coordinates("
    "jnp.ones((2, 2)), [jnp.ones(1), jnp.ones(1)], 1)[0]",
    "sparse": "import jax.experimental as e\n        import jax.experimental.sparse\n"
    "        return e.sparse.BCOO.fromdense(jnp.ones((2, 2)), nse=4).todense().mean()",
    "hann": "return float(scipy.signal.windows.hann(3)[1])",
}
SCRIPT = """
import sys, warnings
import jax, jax.numpy as jnp, scipy, nitro
warnings.simplefilter("error")
sys.path.insert(0, {folder!r})
from test_identity import Line, make

class Lazy(Line):
    def factor(self):
        {body}

epochs = int(sys.argv[2])
options = {{"checkpointer": nitro.TopK(), "resume": "auto" if epochs > 1 else False}}
run = make(Lazy(), sys.argv[1], max_epochs=epochs, **options)
run.train()
run.validate()
before = nitro.cache_stats()["misses"]
make(Lazy(), sys.argv[1] + sys.argv[2], max_epochs=1).train()
print(run.step, nitro.cache_stats()["misses"] - before)
"""


@pytest.mark.parametrize("name", LAZY)
def test_what_a_library_loads_lazily_is_no_change(name: str, tmp_path: Path) -> None:
    script = tmp_path / "lazy.py"
    script.write_text(SCRIPT.format(folder=str(Path(__file__).parent), body=LAZY[name]))

    told = [
        subprocess.run(
            [sys.executable, str(script), str(tmp_path / "run"), epochs],
            capture_output=True,
            text=True,
            check=False,
        )
        for epochs in ("1", "2")
    ]

    assert [done.stdout.split() for done in told] == [["4", "0"], ["8", "0"]], told[-1].stderr


def recorded(experiment: Any, folder: Path) -> None:
    make(experiment, folder, checkpointer=nitro.TopK(), max_epochs=1).train()


def resumed(experiment: Any, folder: Path, **options: Any) -> nitro.Nitro:
    return make(
        experiment, folder, checkpointer=nitro.TopK(), max_epochs=2, resume="auto", **options
    )


def test_a_refactored_step_is_resumed(tmp_path: Path) -> None:
    recorded(Line(), tmp_path)

    assert resumed(renamed_line()(), tmp_path).train().epoch == 2


def test_a_step_that_computes_something_else_is_not_resumed(
    set_factor: Callable[[float], None], tmp_path: Path
) -> None:
    class Scaled(Line):
        def factor(self) -> Any:
            return float(os.environ["LINE_FACTOR"])

    set_factor(2.0)
    recorded(Scaled(), tmp_path)
    set_factor(3.0)

    with pytest.raises(CheckpointError, match=r"no code or value that can be seen: .*environment"):
        resumed(Scaled(), tmp_path)
    with pytest.warns(NitroWarning, match="has changed since the record"):
        assert resumed(Scaled(), tmp_path, allow_code_change=True).train().epoch == 2


def test_other_shapes_are_judged_by_words(tmp_path: Path) -> None:
    recorded(Line(), tmp_path)
    loader = Line().build_data()["train"]
    data = {split: nitro.ArrayLoader(loader.arrays, 8) for split in ("train", "val")}

    with pytest.warns(NitroWarning, match="batch_size: 4 in the record, 8 now"):
        run = resumed(Line(), tmp_path, data=data)

    assert run.epoch == 1


def test_an_edit_that_computes_the_same_is_not_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    run = make(Line(), tmp_path).train()

    def factor(self: Any) -> Any:
        half = 0.5
        return 2 * half

    monkeypatch.setattr(Line, "factor", factor)
    run.validate()

    assert not recwarn.list


def explained(role: str = "train step") -> str:
    return str([e for e in nitro.explain_compiles() if e.role == role][-1])


@pytest.fixture
def first(tmp_path: Path) -> None:
    nitro.cache_clear()
    make(Line(), tmp_path).train()


@pytest.mark.usefixtures("first")
def test_field_option_shape_and_dtype_are_named(tmp_path: Path) -> None:
    arrays = Line().build_data()["train"].arrays
    half = {name: array.astype(np.float16) for name, array in arrays.items()}
    say = []
    for experiment, options in (
        (Line(power=2), {}),
        (Line(), {"compile_options": {"xla_cpu_enable_fast_math": True}}),
        (Line(), {"data": {"train": nitro.ArrayLoader(arrays, 8)}}),
        (Line(), {"data": {"train": nitro.ArrayLoader(half, 4)}}),
        (Line(power=3), {"data": {"train": nitro.ArrayLoader(arrays, 2)}}),
    ):
        make(experiment, tmp_path, **options).train()
        say.append(explained().partition("): ")[2])

    assert say[0] == "Line.power: 1 → 2"
    assert say[1] == "compile option xla_cpu_enable_fast_math: None → True"
    assert "argument batch: int32(4,) → int32(8,)" in say[2]
    assert "argument inputs.data.x: float32(16, 1) → float16(16, 1)" in say[3]
    assert say[4].startswith("Line.power: ")
    assert "argument batch: int32(" in say[4]


@pytest.mark.usefixtures("first")
def test_a_function_is_named_with_its_lines_and_a_value_beside_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def factor(self) -> Any:
        return 3 * FACTOR

    factor.__code__ = factor.__code__.replace(co_qualname="Line.factor")
    monkeypatch.setattr(Line, "factor", factor)
    make(Line(), tmp_path).train()
    assert "`return 1.0` → `return 3 * FACTOR`" in explained()

    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 4.0)
    make(Line(power=2), tmp_path).train()

    assert f"Line.power: 1 → 2; global {__name__}.FACTOR: 1.0 → 4.0" in explained()


@pytest.mark.usefixtures("first")
def test_else_the_first_equation_is_named_with_its_line(
    set_factor: Callable[[float], None], tmp_path: Path
) -> None:
    class Scaled(Line):
        def loss(self, height: Any, *, y: Any) -> Any:
            return float(os.environ["LINE_FACTOR"]) * y.mean() + 0 * height.sum()

    for factor in (2.0, 3.0):
        set_factor(factor)
        make(Scaled(), tmp_path).train()

    assert re.search(
        r"test_identity.py:\d+ in Scaled.loss: `mul 2.0 .*` → `mul 3.0 .*`", explained()
    )
