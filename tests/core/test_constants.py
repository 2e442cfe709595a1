"""Arrays that a trace captures: caught before they are compiled, and named."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nitro
from nitro._programs._constants import count_constant_bytes, find_constants
from nitro.errors import ConfigError, ProgramError

DATA = np.random.default_rng(0).normal(size=(300, 1000)).astype(np.float32)
ON_DEVICE = jnp.asarray(DATA[:, :900])
TABLE = np.arange(100, dtype=np.float32)
NUMBERS = DATA[:, :3].tolist()
MIB = 2**20


class Holder:
    def __init__(self, array: Any) -> None:
        self.array = array


HOLDER = Holder(DATA + 1)


def nearest(x: Any) -> Any:
    return x + jnp.abs(jnp.asarray(DATA).ravel()[:4] - x)


class Linear(nitro.Experiment):
    """Fits a line; what each test captures goes into `forward`."""

    def build_data(self) -> Any:
        rng = np.random.default_rng(0)
        x = rng.normal(size=(16, 4)).astype(np.float32)
        return {"train": nitro.ArrayLoader({"x": x, "y": x[:, :1]}, 4)}

    def build_model(self, rngs: nnx.Rngs) -> Any:
        return nnx.Linear(4, 1, rngs=rngs)

    def forward(self, model: Any, *, x: Any) -> Any:
        return model(x)

    def loss(self, outputs: Any, *, y: Any) -> Any:
        return ((outputs - y) ** 2).mean()

    def export_inputs(self) -> Any:
        return [nitro.ExportSpec("x", "float32", (1, 4))]

    def export_outputs(self) -> Any:
        return [nitro.ExportSpec("out")]


class ThroughGlobal(Linear):
    def forward(self, model: Any, *, x: Any) -> Any:
        return model(nearest(x))


class ThroughDefault(Linear):
    def forward(self, model: Any, *, x: Any, table: Any = DATA) -> Any:
        return model(x + jnp.take(table, 3))


class ThroughAttribute(Linear):
    def forward(self, model: Any, *, x: Any) -> Any:
        return model(x * HOLDER.array[:2].sum() + jnp.asarray(HOLDER.array).max())


class ThroughClass(Linear):
    TABLE: ClassVar[Any] = DATA * 2

    def forward(self, model: Any, *, x: Any) -> Any:
        return model(x + jnp.asarray(self.TABLE)[0, :4])


class ThroughField(Linear):
    table: nitro.GraphConst[Any] = None

    def forward(self, model: Any, *, x: Any) -> Any:
        return model(x + self.table[0, :4])


class ThroughJaxArray(Linear):
    def forward(self, model: Any, *, x: Any) -> Any:
        return model(x + ON_DEVICE[1, :4])


class ThroughLoss(Linear):
    def loss(self, outputs: Any, *, y: Any) -> Any:
        return ((outputs - y) ** 2).mean() + 0 * jnp.asarray(DATA).sum()


class ThroughList(Linear):
    def forward(self, model: Any, *, x: Any) -> Any:
        return model(x + jnp.asarray(np.array(NUMBERS)).sum())


class ThroughView(Linear):
    def forward(self, model: Any, *, x: Any) -> Any:
        return model(x + jnp.asarray(DATA.T[:500]).sum())


class ThroughNothing(Linear):
    def forward(self, model: Any, *, x: Any) -> Any:
        return model(x + jnp.asarray(np.sqrt(DATA * DATA)).sum())


class InALoop(Linear):
    def forward(self, model: Any, *, x: Any) -> Any:
        return model(jax.lax.fori_loop(0, 3, lambda i, c: c + jnp.asarray(DATA)[i, :4], x))


class InAnInnerJit(Linear):
    def forward(self, model: Any, *, x: Any) -> Any:
        return model(jax.jit(lambda x: x + jnp.asarray(DATA)[0, :4])(x))


class Lookup(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 1, rngs=rngs)
        self.holder = Holder(DATA - 1)

    def __call__(self, x: Any) -> Any:
        return self.linear(x + jnp.asarray(self.holder.array)[0, :4])


class ThroughModel(Linear):
    def build_model(self, rngs: nnx.Rngs) -> Any:
        return Lookup(rngs)


def through_closure() -> Linear:
    data = DATA + 2

    class ThroughClosure(Linear):
        def forward(self, model: Any, *, x: Any) -> Any:
            return model(x + jnp.asarray(data)[0, :4])

    return ThroughClosure()


CAPTURED = {
    "global": (ThroughGlobal, r"`ThroughGlobal.forward` \(\S+py:\d+ in nearest\): global .*DATA"),
    "closure": (through_closure, r"closure variable `data` of .*ThroughClosure.forward"),
    "default": (ThroughDefault, r"default `table` of ThroughDefault.forward"),
    "object": (ThroughAttribute, r"`ThroughAttribute.forward` .*: global .*HOLDER.array"),
    "class": (ThroughClass, r"ThroughClass.TABLE"),
    "field": (
        lambda: ThroughField(table=jnp.asarray(DATA)),
        r"GraphConst field ThroughField.table",
    ),
    "jax": (ThroughJaxArray, r"float32\(300, 900\), 1,080,000 bytes.*: global .*ON_DEVICE"),
    "loss": (ThroughLoss, r"in `ThroughLoss.loss` .*: global .*DATA"),
    "list": (ThroughList, r"equal to global .*NUMBERS"),
    "view": (ThroughView, r"float32\(500, 300\).*a view of .*global .*DATA"),
    "computed": (ThroughNothing, r"`ThroughNothing.forward` \(\S+py:\d+ .*\): computed while"),
    "loop": (InALoop, r"`InALoop.forward` \(\S+py:\d+ .*\): global .*DATA"),
    "jit": (InAnInnerJit, r"`InAnInnerJit.forward` \(\S+py:\d+ .*\): global .*DATA"),
    "model": (ThroughModel, r"float32\(300, 1000\).*: model.*holder.*array"),
}


@pytest.mark.parametrize("way", CAPTURED)
def test_captured_data_are_named_with_what_they_came_through(make_run, way):
    make, words = CAPTURED[way]

    with pytest.raises(ProgramError, match=words):
        make_run(make(), max_constant_bytes=2000).train()


def test_the_error_says_how_large_the_constants_are_and_what_to_do(make_run):
    with pytest.raises(ProgramError) as caught:
        make_run(ThroughGlobal()).train()

    assert "float32(300, 1000), 1,200,000 bytes" in caught.value.problem
    assert "at most 1.0 MiB in all" in caught.value.expected
    for way_out in ("`Device` field", "`nnx.Variable`", "`build_data`", "max_constant_bytes"):
        assert way_out in caught.value.fix


def test_a_small_table_is_no_matter(make_run):
    class WithTable(Linear):
        def forward(self, model: Any, *, x: Any) -> Any:
            return model(x + jnp.asarray(TABLE)[:4])

    assert make_run(WithTable()).train().epoch == 1


@pytest.mark.parametrize("limit", [None, DATA.nbytes])
def test_the_limit_can_be_raised(make_run, limit):
    assert make_run(ThroughGlobal(), max_constant_bytes=limit).train().epoch == 1


def test_a_shared_program_is_checked_against_the_limit_of_each_handle(make_run):
    make_run(ThroughGlobal(), max_constant_bytes=None).train()

    with pytest.raises(ProgramError, match=r"ThroughGlobal\.forward"):
        make_run(ThroughGlobal()).train()


def test_predict_is_checked_too(make_run):
    run = make_run(ThroughGlobal(), data={})

    with pytest.raises(ProgramError, match="The forward program of `ThroughGlobal`"):
        run.predict({"x": np.ones((2, 4), np.float32)})


def test_an_export_refuses_a_device_field_that_it_would_bake(make_run, tmp_path):
    class WithDevice(Linear):
        table: nitro.Device[Any] = None

        def forward(self, model: Any, *, x: Any) -> Any:
            return model(x + self.table[0, :4])

    run = make_run(WithDevice(table=DATA), data={})

    with pytest.raises(
        ProgramError, match=r"The exported program.*\n.*Device field WithDevice.tab"
    ):
        nitro.export_model(run, "stablehlo", dir=tmp_path, name="line")


def test_a_limit_must_be_a_size(make_run):
    with pytest.raises(ConfigError, match="max_constant_bytes"):
        make_run(Linear(), max_constant_bytes=-1)


PROGRAMS = {
    "twice": (lambda x: x + ON_DEVICE[0, 0] + ON_DEVICE[1, 0], [ON_DEVICE.nbytes]),
    "two": (
        lambda x: x + ON_DEVICE[0, 0] + jnp.asarray(DATA)[0, 0],
        [DATA.nbytes, ON_DEVICE.nbytes],
    ),
    "jit": (jax.jit(lambda x: x + ON_DEVICE[0, 0]), [ON_DEVICE.nbytes]),
    "gradient": (jax.grad(lambda x: (x * jnp.asarray(DATA)).sum()), [DATA.nbytes]),
    "remat": (jax.grad(jax.checkpoint(lambda x: jnp.sin(x * DATA).sum())), [DATA.nbytes]),
    "branch": (
        lambda x: jax.lax.cond(x > 0, lambda x: x + DATA[0], lambda x: x - DATA[1], x),
        [4000, 4000],
    ),
    "scan": (
        lambda x: jax.lax.scan(
            lambda c, _: (c + TABLE.sum() + DATA[0], None), x + 0 * DATA[1], length=2
        )[0],
        [4000, 4000],
    ),
    "zeros": (lambda x: x + jnp.zeros((1000, 1000)), []),
    "narrowed": (lambda x: x + jnp.asarray(DATA.astype(np.float64)), [DATA.nbytes]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_constant_counts_once(name):
    function, sizes = PROGRAMS[name]

    jaxpr = jax.make_jaxpr(function)(1.0)

    assert [constant.size_bytes for constant in find_constants(jaxpr)] == sizes
    assert count_constant_bytes(jaxpr) == sum(sizes)
