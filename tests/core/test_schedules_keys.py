"""What schedules bind to, and the table that they become."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nitro
from nitro import Device, GraphConst
from nitro._optim import Optimizer, make_optimizer
from nitro._programs import run_pure
from nitro.errors import ConfigError

PARAMS = {"body.kernel": jnp.ones((3, 2)), "head.kernel": jnp.ones((2, 2))}
TOTAL = 10


class Two(nitro.Experiment):
    """Two groups, and a field of each kind."""

    width: GraphConst[int] = 3
    depth: int = 2
    smoothing: Device[float] = 0.5
    weights: Device[Any] = (0.0, 0.0)
    count: Device[int] = 7
    flag: Device[bool] = False

    def param_group(self, path):
        return "head" if path.startswith("head") else "default"

    def learning_rate(self, group=None):
        return 1e-4 if group == "head" else 1e-3


DEVICE = {
    "smoothing": jnp.float32(0.5),
    "weights": jnp.zeros(2, jnp.float32),
    "count": jnp.int32(7),
    "flag": jnp.bool_(False),
}


def build(schedules: Any, experiment: Any = None, device: Any = None) -> Optimizer:
    return make_optimizer(
        experiment or Two(),
        params=PARAMS,
        initial=PARAMS,
        device=DEVICE if device is None else device,
        num_steps=TOTAL,
        clip=0.0,
        schedules=schedules,
        evaluate=run_pure,
    )[0]


def column(optimizer: Optimizer, name: str) -> np.ndarray:
    start, stop = optimizer.layout.columns[name]
    return optimizer.table[range(TOTAL)][:, start:stop].squeeze(1)


def test_rate_moves_all_groups_by_their_ratios() -> None:
    optimizer = build({"learning_rate": lambda total: lambda step: 0.5 + step / total})

    steps = np.arange(TOTAL, dtype=np.float32)
    curve = np.float32(0.5) + steps / np.float32(TOTAL)
    np.testing.assert_allclose(column(optimizer, "opt.default.learning_rate"), curve, rtol=1e-6)
    np.testing.assert_array_equal(
        column(optimizer, "opt.head.learning_rate"),
        column(optimizer, "opt.default.learning_rate") * 0.1,
    )


def test_path_is_one_groups_curve_still_scaled_and_others_fall_back() -> None:
    optimizer = build({"opt.head.learning_rate": 5.0, "opt.learning_rate": 2.0})

    assert set(column(optimizer, "opt.head.learning_rate")) == {np.float32(5.0 * 0.1)}
    assert set(column(optimizer, "opt.default.learning_rate")) == {np.float32(2.0)}


def test_decay_is_times_the_rate() -> None:
    optimizer = build({"weight_decay": lambda total: lambda step: step * 0.25})

    steps = np.arange(TOTAL, dtype=np.float32)
    np.testing.assert_array_equal(
        column(optimizer, "opt.default.weight_decay"), steps * 0.25 * 1e-3
    )


def test_no_schedule_holds_the_constants() -> None:
    optimizer = build({})

    assert set(column(optimizer, "opt.head.learning_rate")) == {np.float32(1e-4)}
    assert np.isnan(column(optimizer, "device.smoothing")).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda total: optax.cosine_decay_schedule(1e-3, total),
        lambda total: optax.warmup_cosine_decay_schedule(0.0, 1e-3, 3, total),
        lambda total: optax.exponential_decay(1e-3, 4, 0.5),
    ],
)
def test_table_has_the_bits_of_direct_evaluation(make: Any) -> None:
    got = column(build({"learning_rate": make}), "opt.default.learning_rate")

    direct = jax.jit(make(TOTAL))
    np.testing.assert_array_equal(got, [direct(np.int32(step)) for step in range(TOTAL)])


def test_device_fields_keep_dtype_and_shape() -> None:
    optimizer = build(
        {
            "weights": lambda total: lambda step: jnp.stack([step, -step]),
            "device.count": lambda total: lambda step: 3 * step,
            "flag": lambda total: lambda step: step > 4,
        }
    )
    row = optimizer.table[[5]][0]

    seen = jax.jit(optimizer.scheduled_fields)(DEVICE, row)
    after = optimizer.device_at(DEVICE, 6)

    for fields in (seen, after):
        assert {n: f.dtype for n, f in fields.items()} == {n: f.dtype for n, f in DEVICE.items()}
        np.testing.assert_array_equal(fields["weights"], [5, -5])
        assert (int(fields["count"]), bool(fields["flag"])) == (15, True)
        assert float(fields["smoothing"]) == 0.5


def test_python_schedule_is_called_step_by_step() -> None:
    def make(total):
        return lambda step: 1.0 if step < total // 2 else 0.5

    got = column(build({"learning_rate": make}), "opt.default.learning_rate")

    assert got.tolist() == [1.0] * 5 + [0.5] * 5


def test_schedule_that_raises_past_its_horizon_holds() -> None:
    values = [4.0, 3.0, 2.0]

    with pytest.warns(UserWarning, match="`learning_rate` raised IndexError .* at step 3 of 10"):
        optimizer = build({"learning_rate": lambda total: lambda step: values[step]})

    assert column(optimizer, "opt.default.learning_rate").tolist() == values + [2.0] * 7
    assert optimizer.table[[25]][0, 0] == 2.0


def test_slow_python_schedule_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nitro._optim._curves._SLOW_LOOP_S", 0.0)

    with pytest.warns(UserWarning, match="does not trace under JAX, so setup called it 10 times"):
        build({"learning_rate": lambda total: lambda step: 1.0 if step else 2.0})


def test_error_of_the_users_keeps_its_type_and_gets_a_note() -> None:
    def broken(step):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        build({"learning_rate": lambda total: broken})

    assert caught.value.__notes__ == ["raised by the schedule `learning_rate` at its first step, 0"]


@pytest.mark.parametrize(
    ("schedules", "message"),
    [
        ({"learning_rat": 1.0}, "did you mean `learning_rate`"),
        ({"lr": 1.0}, "write `learning_rate`"),
        ({"b1": 0.9}, "move only as Device fields"),
        ({"gradient_clip_norm": 1.0}, "one number for the whole run"),
        ({"width": 4}, r"`Two.width`, which is structural(.|\n)*width: Device"),
        ({"device.depth": 4}, "`Two.depth`, which is host-only"),
        ({"device.smooth": 4}, "did you mean `smoothing`"),
        ({"opt.beta": 4}, "one of `learning_rate`, `weight_decay`"),
        ({"opt.tail.learning_rate": 1.0}, r"group `tail`(.|\n)*`default`, `head`"),
        ({"opt.a.b.learning_rate": 1.0}, r"group `a.b`(.|\n)*one level"),
        ({"smoothing.x": 1.0}, "matches nothing"),
        ({"opt": 1.0}, r"`opt` is reserved(.|\n)*write `device.opt`"),
        ({"device": {"bogus": 1.0}}, "`device.bogus` matches nothing"),
        ({"learning_rate": 1.0, "opt.learning_rate": 1.0}, "are both `opt.learning_rate`"),
        ({"learning_rate": optax.cosine_decay_schedule(1.0, 5)}, "if you gave the schedule itself"),
        ({"learning_rate": "fast"}, "is 'fast' .str"),
        ({"learning_rate": lambda t: optax.linear_schedule(0.0, 1.0, 0)}, "nothing would be"),
        ({"learning_rate": -1.0}, "0 or more, and finite"),
        ({"learning_rate": lambda t: lambda s: 3.0 - s}, "is -1.0 at step 4, counted from 0"),
        ({"learning_rate": lambda t: lambda s: jnp.ones(2)}, "one real number for each step"),
        ({"weights": lambda t: lambda s: jnp.ones(3)}, r"float32\(3,\)(.|\n)*field, \(2,\)"),
        ({"smoothing": lambda t: lambda s: (s, s)}, "another tree"),
        ({"smoothing": lambda t: lambda s: jnp.nan * s}, "is nan at step 0"),
        ({"count": lambda t: lambda s: s / 2}, r"is 0.5 at step 1(.|\n)*whole numbers"),
        ({"count": 2**24 + 1}, "up to 2"),
        (7, "`schedules` is 7"),
    ],
)
def test_refusals(schedules: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(schedules)


def test_name_in_both_namespaces_must_be_qualified() -> None:
    class Both(nitro.Experiment):
        learning_rate: Device[float] = 0.1

    device = {"learning_rate": jnp.float32(0.1)}
    with pytest.raises(ConfigError, match=r"`opt.learning_rate` (.|\n)*`device.learning_rate`"):
        build({"learning_rate": 1.0}, Both(), device)

    both = build({"opt.learning_rate": 1.0, "device.learning_rate": 2.0}, Both(), device)
    assert column(both, "device.learning_rate")[0] == 2.0


def test_scheduled_decay_conflicts_with_the_hook() -> None:
    class Decays(Two):
        def weight_decay(self, group):
            return 0.1 if group == "head" else 0.0

    with pytest.raises(ConfigError, match=r"`Decays.weight_decay` both set the decay\."):
        build({"weight_decay": 1.0}, Decays())
    with pytest.raises(ConfigError, match="both set the decay of the group `head`"):
        build({"opt.head.weight_decay": 1.0}, Decays())
    build({"opt.default.weight_decay": 1.0}, Decays())


def test_keyword_replaces_the_experiments_table(plane: Any, make_run: Any) -> None:
    class Declared(plane):
        def schedules(self):
            return {"weight_decay": 0.5}

    assert (
        "`weight_decay` → opt.weight_decay, constant (experiment)" in make_run(Declared()).binding
    )
    run = make_run(Declared(), schedules={"learning_rate": lambda total: lambda step: 1.0})
    assert "weight_decay`" not in run.binding
    assert "`learning_rate` → opt.learning_rate, over 4 steps (keyword)" in run.binding


def test_validation_sees_the_field_of_the_last_step(plane: Any, make_run: Any) -> None:
    class Shifted(plane):
        shift: Device[float] = 0.0

        def forward(self, model, *, x):
            return 0 * super().forward(model, x=x) + self.shift

        def metrics(self, height, *, y):
            return {"shift": (height.sum(), height.size)}

    schedules = {"shift": lambda total: lambda step: 1.0 * step}
    run = make_run(
        Shifted(), schedules=schedules, max_epochs=2, checkpointer=None, progress=False
    ).train()

    assert run.history["shift"] == [3.0, 7.0]
    assert run.device_value("shift") == 7.0
