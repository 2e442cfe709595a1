"""The step program: chunks, data on the device, and what a person sees of them."""

from __future__ import annotations

import json
import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import nitro
from nitro._programs._store import store
from nitro.errors import ConfigError, DataError, DivergenceError


class Bars(nitro.Experiment):
    """A model with running statistics and dropout, so that all state must be carried."""

    max_epochs: int = 2
    on_device: bool | None = None
    poison: int = -1
    samples: int = 44

    def build_data(self):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(self.samples, 6)).astype(np.float32)
        if self.poison >= 0:
            x[self.poison] = np.nan
        arrays = {"x": x, "y": rng.integers(0, 3, self.samples)}
        shuffle = self.poison < 0
        return {"train": nitro.ArrayLoader(arrays, 4, shuffle=shuffle, device=self.on_device)}

    def build_model(self, rngs):
        return nnx.Sequential(
            nnx.Linear(6, 8, rngs=rngs),
            nnx.BatchNorm(8, rngs=rngs),
            nnx.Dropout(0.2, rngs=rngs),
            nnx.Linear(8, 3, rngs=rngs),
        )

    def forward(self, model, *, x):
        return model(x)

    def loss(self, logits, *, y):
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


class Convolved(Bars):
    def build_model(self, rngs):
        return nnx.Sequential(
            lambda x: x[..., None],
            nnx.Conv(1, 4, (3,), rngs=rngs),
            lambda x: x.mean(1),
            nnx.Linear(4, 3, rngs=rngs),
        )


def trained(experiment, tmp_path, **options):
    run = nitro.Nitro(experiment, run_dir=tmp_path, checkpointer=None, **options)
    return run.train()


def weights(run):
    states = nnx.state(run.model, nnx.Param), nnx.state(run.model, nnx.BatchStat)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(states)]


def assert_same_bits(a, b):
    for left, right in zip(a, b, strict=True):
        np.testing.assert_array_equal(left, right)


def losses(tmp_path):
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    return [(x["step"], x["epoch"], x["loss"]) for x in lines if x.get("context") == "train"]


@pytest.mark.parametrize("on_device", [True, False])
def test_one_program_gives_the_same_bits_however_its_steps_are_cut(tmp_path, on_device):
    def cut_every(steps: int | None) -> nitro.Nitro:
        folder = tmp_path / str(steps)
        options = {"steps_per_call": 8, "checkpoint_every_steps": steps}
        return trained(Bars(on_device=on_device), folder, **options)

    whole, single, uneven = cut_every(None), cut_every(1), cut_every(3)

    assert_same_bits(weights(whole), weights(single))
    assert_same_bits(weights(whole), weights(uneven))
    assert losses(tmp_path / "None") == losses(tmp_path / "1") == losses(tmp_path / "3")


@pytest.mark.parametrize("accum", [1, 2])
def test_data_on_the_device_gives_the_same_bits_as_data_from_the_host(tmp_path, accum):
    options = {"accum": accum, "steps_per_call": 4}
    on_device = trained(Bars(on_device=True, samples=40), tmp_path / "device", **options)
    from_host = trained(Bars(on_device=False, samples=40), tmp_path / "host", **options)

    assert_same_bits(weights(on_device), weights(from_host))
    assert losses(tmp_path / "device") == losses(tmp_path / "host")


def test_a_list_of_batches_gives_the_same_bits_as_a_loader(tmp_path):
    experiment = Bars(on_device=False, max_epochs=1)
    loader = experiment.build_data()["train"].bound(seed=0, drop_last=True)
    by_loader = trained(experiment, tmp_path / "a", data={"train": loader})

    by_list = trained(experiment, tmp_path / "b", data={"train": list(loader.batches(0))})

    assert_same_bits(weights(by_loader), weights(by_list))


class Backwards(nitro.ArrayLoader):
    def order(self, epoch):
        return super().order(epoch)[::-1].copy()


class Mirrored(nitro.ArrayLoader):
    def batches(self, epoch, start=0):
        for batch in super().batches(epoch, start):
            yield {**batch, "x": batch["x"][:, ::-1]}


class Doubled(nitro.ArrayLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield {**batch, "x": 2 * batch["x"]}


@pytest.mark.parametrize("kind", [Backwards, Mirrored, Doubled])
def test_a_subclass_of_the_loader_trains_on_its_own_batches(tmp_path, kind):
    experiment = Bars(on_device=None, max_epochs=1)
    arrays = experiment.build_data()["train"].arrays

    def loader(kind):
        return kind(arrays, 4, shuffle=True, seed=0, drop_last=True)

    batches = list(loader(kind))
    assert any(
        (a["x"] != b["x"]).any() for a, b in zip(batches, loader(nitro.ArrayLoader), strict=True)
    )

    by_loader = trained(experiment, tmp_path / "a", data={"train": loader(kind)})
    by_list = trained(experiment, tmp_path / "b", data={"train": batches})

    assert_same_bits(weights(by_loader), weights(by_list))


def test_batches_of_its_own_cannot_be_gathered_on_the_device(tmp_path):
    experiment = Bars(on_device=True)
    arrays = experiment.build_data()["train"].arrays
    with pytest.raises(DataError, match="Mirrored with `device=True`"):
        trained(experiment, tmp_path, data={"train": Mirrored(arrays, 4, device=True)})


def test_every_step_is_logged_once_and_in_order(tmp_path):
    trained(Bars(), tmp_path, steps_per_call=4)

    expected = [(step, 1 if step <= 11 else 2) for step in range(1, 23)]
    assert [(step, epoch) for step, epoch, _ in losses(tmp_path)] == expected


def test_losses_do_not_depend_on_the_steps_per_call(tmp_path):
    trained(Bars(), tmp_path / "one", steps_per_call=1)
    trained(Bars(), tmp_path / "many", steps_per_call=7)

    one, many = losses(tmp_path / "one"), losses(tmp_path / "many")
    # Two programs, which may differ in the last bits.
    np.testing.assert_allclose([x[2] for x in one], [x[2] for x in many], rtol=1e-5)


@pytest.mark.parametrize("on_device", [True, False])
def test_a_divergence_inside_a_chunk_names_its_own_step(tmp_path, on_device):
    # Sample 21 is in batch 6 of each epoch, which is not shuffled.
    experiment = Bars(poison=21, on_device=on_device)

    with pytest.raises(DivergenceError, match="loss is nan at step 6 of epoch 1"):
        trained(experiment, tmp_path, steps_per_call=8)

    assert [step for step, _, _ in losses(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_convolution_is_not_looped_on_the_cpu(tmp_path):
    trained(Convolved(), tmp_path)

    program = next(p for p in store.programs()[::-1] if p.key.role == "train step")
    assert program.key.parts["step plan"].display == "1 steps per call, unrolled, accum 1"
    assert "while" not in program.compiled.as_text()


def test_unrolled_steps_give_what_single_steps_give(tmp_path):
    single = trained(Convolved(), tmp_path / "one")
    unrolled = trained(Convolved(), tmp_path / "four", steps_per_call=4)

    for left, right in zip(weights(single), weights(unrolled), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


def test_many_unrolled_convolutions_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="`steps_per_call` = 5 would unroll 10 convolutional"):
        trained(Convolved(samples=40), tmp_path, steps_per_call=5, accum=2)


@pytest.mark.parametrize(
    ("given", "words", "fix"),
    [
        ({"accum": 10}, "^`accum` = 10 would unroll 10", "^lower `accum` and raise the batch size"),
        ({"steps_per_call": 10}, "^`steps_per_call` = 10 would unroll", "^leave `steps_per_call`"),
    ],
)
def test_refusal_of_unrolled_convolutions_speaks_of_what_was_given(tmp_path, given, words, fix):
    with pytest.raises(ConfigError, match=words) as error:
        trained(Convolved(samples=40), tmp_path, **given)

    assert re.search(fix, error.value.fix)
    assert ";" not in error.value.fix
