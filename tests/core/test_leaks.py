"""Growth from epoch to epoch: warned of once where it is steady, never in a clean run."""

from __future__ import annotations

import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nitro
from nitro._run import _leaks
from nitro._run._leaks import LeakWatch, live_arrays, resident_bytes
from nitro.errors import NitroWarning

MIB = 2**20


class Line(nitro.Experiment):
    """10 steps an epoch, and metrics that may keep what they see."""

    keep: Any = None

    def build_data(self) -> Any:
        x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
        arrays = {"x": x, "y": x[:, :1]}
        train = nitro.ArrayLoader(arrays, 4, shuffle=True)
        return {"train": train, "val": nitro.ArrayLoader(arrays, 40)}

    def build_model(self, rngs: nnx.Rngs) -> Any:
        return nnx.Linear(3, 1, rngs=rngs)

    def forward(self, model: Any, *, x: Any) -> Any:
        return model(x)

    def loss(self, outputs: Any, *, y: Any) -> Any:
        return ((outputs - y) ** 2).mean()

    def metrics(self, outputs: Any, *, y: Any) -> Any:
        if self.keep is not None:
            self.keep(outputs)
        return {"error": (float(abs(outputs - y).sum()), len(y))}


def train(experiment: Line, tmp_path: Any, *, max_epochs: int) -> nitro.Nitro:
    options = {"checkpointer": None, "logger": None, "progress": False}
    return nitro.Nitro(experiment, run_dir=tmp_path, max_epochs=max_epochs, **options).train()


def test_a_hook_that_keeps_device_arrays_is_caught(tmp_path):
    kept: list[Any] = []

    with pytest.warns(NitroWarning, match=r"up to epoch 4: float32\(40, 1\) arrays \d+ → \d+"):
        train(Line(keep=lambda out: kept.append(jnp.asarray(out) + 0)), tmp_path, max_epochs=4)


def test_a_hook_that_keeps_numpy_arrays_is_caught(tmp_path):
    kept: list[Any] = []

    with pytest.warns(NitroWarning, match=r"resident memory by \d+.* MiB to .* in \d epochs"):
        train(Line(keep=lambda _: kept.append(np.ones(32 * MIB, np.uint8))), tmp_path, max_epochs=5)


def test_three_epochs_are_too_few_to_tell(tmp_path):
    kept: list[Any] = []

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(Line(keep=lambda out: kept.append(jnp.asarray(out) + 0)), tmp_path, max_epochs=3)


def test_it_warns_once(tmp_path):
    kept: list[Any] = []

    with pytest.warns(NitroWarning) as caught:
        train(Line(keep=lambda out: kept.append(jnp.asarray(out) + 0)), tmp_path, max_epochs=9)

    assert len(caught) == 1


def test_a_clean_run_of_20_000_steps_does_not_grow(tmp_path, monkeypatch):
    resident: list[int] = []
    counts: list[int] = []

    def watched(watch: LeakWatch, epoch: int) -> None:
        take_stock(watch, epoch)
        resident.append(resident_bytes())
        counts.append(sum(live_arrays().values()))

    take_stock = LeakWatch.epoch_end
    monkeypatch.setattr(LeakWatch, "epoch_end", watched)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = train(Line(), tmp_path, max_epochs=2000)

    assert run.step == 20_000
    assert resident[-1] < 1.02 * resident[0]
    assert max(counts) <= counts[0]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Takes stock of made-up resident memory, in MiB, and tells whether it warned."""
    monkeypatch.setattr(_leaks.jax, "live_arrays", list)

    def feed(*resident_mib: float) -> list[str]:
        values = iter(resident_mib)
        monkeypatch.setattr(_leaks, "resident_bytes", lambda: int(next(values) * MIB))
        leaks = LeakWatch()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for epoch in range(1, len(resident_mib) + 1):
                leaks.epoch_end(epoch)
        return [str(warning.message) for warning in caught]

    return feed


def test_steady_growth_of_resident_memory_warns(watch):
    (message,) = watch(100, 120, 140, 160, 180)

    assert "resident memory by 60.0 MiB to 160.0 MiB in 3 epochs" in message


def test_slow_growth_warns_when_it_adds_up(watch):
    assert watch(*range(100, 130)) == []
    assert "by 32.0 MiB to 132.0 MiB in 32 epochs" in watch(*range(100, 140))[0]


@pytest.mark.parametrize(
    "resident_mib",
    [
        (100, 400, 400, 400, 400),
        (100, 150, 140, 190, 180, 230),
        (10_000, 10_050, 10_100, 10_150),
        tuple(100 + 0.2 * epoch for epoch in range(400)),
    ],
    ids=["warm-up", "to and fro", "small against the whole", "what allocators keep"],
)
def test_other_growth_does_not(watch, resident_mib):
    assert watch(*resident_mib) == []
