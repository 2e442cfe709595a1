"""Digests and descriptions of values, and that they are the same in every process."""

import dataclasses
import datetime as dt
import decimal
import enum
import functools
import os
import pathlib
import re
import subprocess
import sys
import threading
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

from nitro._code import describe, value_digest, why_not_by_content


class Mode(enum.Enum):
    """Two modes."""

    A = 1
    B = 2


@dataclasses.dataclass(frozen=True)
class Config:
    """A nested setting."""

    width: int = 3
    table: object = None


class Loop:
    """Holds what it is given."""

    def __init__(self, value):
        self.value = value


class Reluctant:
    """Refuses to be pickled and answers to every name."""

    def __init__(self, value):
        self.value = value

    def __getattr__(self, name):
        # pytest asks its parameters for this one.
        raise AttributeError if name == "__name__" else RuntimeError(name)

    def __getstate__(self):
        raise RuntimeError("no state")

    def __eq__(self, other):
        raise RuntimeError("no comparison")

    __hash__ = None

    def __repr__(self):
        raise RuntimeError("no text")


DIFFERENT = [
    *(0, 1, 2**200, True, False, 0.0, -0.0, 1.0, 1j, None, ..., "1", b"1", "", (), [], {}),
    *({1}, frozenset({1}), (1,), [1], ("1",), {1: 2}, {True: 2}, {1: 2, 3: 4}, {3: 4, 1: 2}),
    *([[], []], [[[]]], ("ab", "c"), ("a", "bc"), (("a",), "bc"), float("nan"), float("inf")),
    *(Mode.A, Mode.B, Mode, Config(), Config(4), Config(table=[1]), Config(table=(1,))),
    *(np.zeros(2), np.zeros(2, "f4"), np.zeros((2, 1)), np.zeros(0), np.zeros((0, 2))),
    *(np.zeros(2, ">f4"), np.array(0.0), np.array(-0.0), np.float64(0), np.float32(0)),
    *(np.zeros(2, ml_dtypes.bfloat16), np.zeros(2, "f2"), np.zeros(2, "V2")),
    *(np.array(["a"]), np.array(["a"], object), np.array(["b"], object)),
    *(np.array(["a"], np.dtypes.StringDType()), np.array(["b"], np.dtypes.StringDType())),
    *(np.zeros(1, [("a", "f4"), ("b", "i4")]), np.zeros(1, [("a", "i4"), ("b", "f4")])),
    *(np.ma.array([1, 2], mask=[0, 1]), np.ma.array([1, 2], mask=[0, 0])),
    *(np.datetime64("2020-01-01"), np.datetime64("2020-01-02")),
    *(np.dtype("f4"), np.dtype("f8"), np.dtype(ml_dtypes.bfloat16), np.float32, jnp.float32),
    *(jnp.zeros(2), jnp.zeros(2, jnp.bfloat16), jnp.ones(2), jnp.zeros((), bool)),
    *(jax.random.key(0), jax.random.key(1), jax.random.key_data(jax.random.key(0))),
    *(range(3), range(4), slice(1), slice(2), decimal.Decimal("0.1"), decimal.Decimal("0.10")),
    *(dt.date(2020, 1, 1), dt.date(2020, 1, 2), pathlib.PurePosixPath("a")),
    *(re.compile("a"), re.compile("a", re.I), types.SimpleNamespace(a=1)),
    *(len, sum, jnp.sin, jnp.cos, jax.nn.relu, np.sin, np, jnp, dict, list[int], list[str]),
    *(functools.partial(max, 1), functools.partial(max, 2), functools.partial(min, 1)),
    *(
        optax.adam(1e-3),
        optax.adam(1e-2),
        optax.sgd(1e-3, 0.9),
        optax.sgd(1e-3, 0.9, nesterov=True),
    ),
    *(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Linear(2, 3, rngs=nnx.Rngs(1))),
    *(nnx.Dropout(0.1), nnx.Dropout(0.2), nnx.Rngs(0), nnx.Rngs(1)),
    *(np.random.default_rng(0), np.random.default_rng(1)),
    *(jax.sharding.PartitionSpec("a"), jax.sharding.PartitionSpec("b")),
    *(Reluctant(1), Reluctant(2), Loop(1), Loop(2), "a".upper, "b".upper, str.upper),
    *(jax.jit(jnp.sin), jax.vmap(jnp.sin), np.vectorize(len), np.vectorize(sum)),
]


def test_different_values_have_different_digests():
    known = {}
    for value in DIFFERENT:
        twin = known.setdefault(value_digest(value), value)
        assert twin is value, f"{describe(twin)} and {describe(value)}"


def test_every_one_of_them_is_read_by_content():
    reasons = [why_not_by_content(value) for value in DIFFERENT]

    assert [reason for reason in reasons if reason] == []


EQUAL = {
    "list": lambda: [1, [2.0, "x"]],
    "dataclass": lambda: Config(table={"a": np.arange(3)}),
    "object": lambda: Loop([1]),
    "array": lambda: np.arange(6).reshape(2, 3),
    "array in other order": lambda: np.asfortranarray(np.arange(6).reshape(2, 3)),
    "strided array": lambda: np.arange(12).reshape(2, 6)[:, ::2] // 2,
    "jax array": lambda: jnp.arange(3),
    "set": lambda: {"a", "b", ("c", Mode.A)},
    "function": lambda: lambda x: x * 2,
    "partial": lambda: functools.partial(lambda x: x, 1),
    "jitted": lambda: jax.jit(lambda x: x),
    "optimizer": lambda: optax.chain(optax.clip(1.0), optax.adamw(1e-3)),
    "module": lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)),
    "generator of random numbers": lambda: np.random.default_rng(0),
    "class": lambda: type("C", (), {"k": 1}),
    "regular expression": lambda: re.compile("a+"),
    "string dtype": lambda: np.array(["a" * 100], np.dtypes.StringDType()),
}


@pytest.mark.parametrize("name", EQUAL)
def test_values_made_twice_have_one_digest(name):
    digest = value_digest(EQUAL[name]())
    # The order in strided and Fortran arrays is that of the plain one.
    if "order" in name:
        digest = value_digest(EQUAL["array"]())

    assert value_digest(EQUAL[name]()) == digest


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (threading.Lock(), "the value (lock): its content is out of reach: cannot pickle"),
        ({"a": [threading.Lock()]}, "the value['a'][0] (lock)"),
        (Config(table=iter(x for x in ())), "the value.table (generator)"),
    ],
)
def test_obstacle_is_named_with_its_place(value, reason):
    assert reason in (why_not_by_content(value) or "")
    assert value_digest(value) == value_digest(value)


def test_tracer_counts_as_itself():
    seen = []
    jax.make_jaxpr(lambda x: seen.append(why_not_by_content([x])) or x)(1.0)

    assert "a tracer has no value" in seen[0]


def test_deleted_array_counts_as_itself():
    array = jnp.arange(3)
    array.delete()

    assert "deleted" in (why_not_by_content(array) or "")


def test_value_that_changes_in_place_changes_its_digest():
    array = np.zeros(1000)
    before = value_digest(array)
    array[999] = 1
    after = value_digest(array)
    array[999] = 0

    assert after != before
    assert value_digest(array) == before


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.5"),
        ("a", "'a'"),
        (None, "None"),
        (2**10000, "int of 10001 bits"),
        (np.zeros((3, 4), "f4"), "float32[3,4]"),
        (jnp.zeros((3, 4), jnp.bfloat16), "bfloat16[3,4]"),
        (np.float32(2), "float32(2.0)"),
        ([1, (2,), {"a": {3}}], "[1, (2,), {'a': set of 1}]"),
        (list(range(100)), "[0, 1, 2, 3, 4, 5, … 94 more]"),
        (Mode.A, "Mode.A"),
        (Config(table=[1]), "Config(width=3, table=[1])"),
        (Loop(Loop(Loop(1))), "Loop(value=Loop(value=Loop(…)))"),
        (Reluctant(1), "Reluctant(value=1)"),
        (jnp.sin, "sin()"),
        (Config, "class Config"),
        (np, "module numpy"),
        ("x" * 1000, f"'{'x' * 59}…"[:59] + "…"),
        (np.dtype("f4"), "float32"),
    ],
)
def test_description_is_short_and_shows_the_value(value, text):
    described = describe(value)

    assert described == text or text.endswith("…")
    assert len(described) <= 60
    assert "0x" not in described


STABLE = '''
"""Docstring."""
import dataclasses, enum, functools, sys, types
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
{more}
class Mode(enum.Enum):
    A = 1
NAMES = {{"a", "b", "c", ("d", Mode.A)}}
TABLE = jnp.arange(3.0)
CONFIG = types.SimpleNamespace(f=lambda x: x in {{"p", "q", "r"}}, k=[1, 2])
TX = optax.adamw(1e-3)
@functools.lru_cache
def cached(n): return n
@jax.jit
def helper(x, *, f=cached):
    {docstring}
    return helper(x) + CONFIG.f(x) + TABLE[0]
class Net(nnx.Module):
    {docstring}
    def __init__(self, rngs):
        super().__init__()
        self.layer = nnx.Linear(2, 3, rngs=rngs)
class Digits:
    NAMES = NAMES
    def forward(self, model, *, img):
        {docstring}
        with jax.named_scope("x"):
            return self.NAMES, helper(img), TX.init(img), Net(img), Mode.A, np.pi

if __name__ == "__main__" or True:
    from nitro._code import read_words, value_digest
    words = read_words({{"Digits.forward": Digits.forward, "Net": Net}}, owner=Digits)
    net = Net(nnx.Rngs(0))
    functions = sorted(w.digest.hex() for w in words.entries.values() if w.kind == "function")
    print(functions, value_digest(net), value_digest([TX, NAMES]))
'''


def _run(folder, more, docstring, seed, *command):
    folder.mkdir()
    (folder / "train.py").write_text(STABLE.format(more=more, docstring=docstring))
    environment = {**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_digest_is_the_same_in_other_processes_and_folders(tmp_path):
    plain = _run(tmp_path / "a", "", "", "0", "train.py")
    moved = _run(tmp_path / "elsewhere", "# A comment.\n\nOTHER = 1", "", "1", "train.py")
    imported = _run(tmp_path / "b", "", "", "2", "-c", "import train")
    cell = "import sys; exec(compile(open('train.py').read(), '<ipython-input-1>', 'exec'))"
    in_a_cell = _run(tmp_path / "c", "", "", "3", "-c", cell)

    assert moved == imported == in_a_cell == plain
