"""Training compared with loops written by hand in JAX and optax."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nitro
from nitro.errors import ConfigError, DataError, DivergenceError, HookError, NitroWarning


class Classes(nitro.Experiment):
    """A perceptron with a Device field in its loss; 96 points of 6 numbers in 3 classes."""

    smoothing: nitro.Device[float] = 0.1

    def build_data(self) -> Any:
        rng = np.random.default_rng(0)
        x = rng.normal(size=(96, 6)).astype(np.float32)
        label = (x @ rng.normal(size=(6, 3))).argmax(-1)
        return {"train": nitro.ArrayLoader({"x": x, "label": label}, 8, shuffle=True, seed=4)}

    def build_model(self, rngs: nnx.Rngs) -> Any:
        return nnx.Sequential(nnx.Linear(6, 16, rngs=rngs), nnx.relu, nnx.Linear(16, 3, rngs=rngs))

    def forward(self, model: Any, *, x: Any) -> Any:
        return model(x)

    def loss(self, logits: Any, *, label: Any) -> Any:
        targets = optax.smooth_labels(jax.nn.one_hot(label, 3), self.smoothing)
        return optax.softmax_cross_entropy(logits, targets).mean()


def hand_written_losses(seed: int, *, epochs: int, accum: int) -> list[float]:
    """The same run without Nitro: one jitted step on the mean gradient of `accum` batches."""
    experiment = Classes()
    graph, params = nnx.split(experiment.build_model(nnx.Rngs(seed)))
    optimizer = optax.radam(1e-3)
    opt_state = optimizer.init(params)

    def loss(params: Any, x: jax.Array, label: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, params)(x)
        targets = optax.smooth_labels(jax.nn.one_hot(label, 3), 0.1)
        return optax.softmax_cross_entropy(logits, targets).mean()

    @jax.jit
    def step(params: Any, opt_state: Any, x: jax.Array, label: jax.Array) -> Any:
        each = [jax.value_and_grad(loss)(params, x[i], label[i]) for i in range(accum)]
        losses, grads = zip(*each, strict=True)
        mean = jax.tree.map(lambda *g: sum(g) / accum, *grads)
        updates, opt_state = optimizer.update(mean, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jnp.stack(losses).mean()

    loader = nitro.ArrayLoader(experiment.build_data()["train"].arrays, 8, shuffle=True, seed=4)
    losses: list[float] = []
    for _ in range(epochs):
        batches = list(loader)
        for i in range(0, len(batches), accum):
            x, label = (np.stack([b[n] for b in batches[i : i + accum]]) for n in ("x", "label"))
            params, opt_state, value = step(params, opt_state, x, label)
            losses.append(float(value))
    return losses


def step_lines(run: nitro.Nitro) -> list[dict[str, Any]]:
    lines = map(json.loads, (run.run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line.get("context") == "train"]


@pytest.mark.parametrize(("accum", "epochs"), [(1, 9), (3, 26)])
def test_losses_equal_those_of_a_hand_written_loop(make_run: Any, accum: int, epochs: int) -> None:
    run = make_run(Classes(), seed=2, accum=accum, max_epochs=epochs).train()

    losses = [line["loss"] for line in step_lines(run)]

    assert len(losses) >= 100
    expected = hand_written_losses(2, epochs=epochs, accum=accum)
    # The same operations in the same order; only fusion may round differently.
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-6)


def test_seed_decides_the_bits(make_run: Any, images: Any, tmp_path: Any) -> None:
    def weights(seed: int, folder: str) -> list[bytes]:
        run = make_run(images(), seed=seed, max_epochs=2, run_dir=tmp_path / folder).train()
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(_arrays(run.model))]

    first = weights(1, "a")

    assert weights(1, "b") == first
    assert weights(2, "c") != first


def _arrays(model: Any) -> Any:
    return nnx.state(model, (nnx.Param, nnx.BatchStat))


class _Events:
    """A logger that keeps what it gets, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def metrics(self, values: Any, *, context: str, step: int, epoch: int) -> None:
        self.events.append((context, step, epoch, *values))

    def params(self, values: Any) -> None:
        self.events.append(("params",))

    def finish(self, status: str) -> None:
        self.events.append(("finish", status))

    def tags(self, values: Any) -> None: ...
    def other(self, name: str, value: Any) -> None: ...
    def confusion(self, matrix: Any, **more: Any) -> None: ...
    def run_id(self) -> None: ...
    def run_url(self) -> None: ...
    def logger_state(self) -> None: ...
    def reattach(self, state: Any) -> None: ...


def test_epoch_is_its_steps_then_validation(plane: Any, make_run: Any) -> None:
    logger = _Events()

    make_run(plane(), logger=logger, max_epochs=2).train()

    def steps(epoch: int, numbers: range) -> list[Any]:
        return [("train", step, epoch, "loss") for step in numbers]

    assert logger.events == [
        ("params",),
        *steps(1, range(1, 5)),
        ("data", 4, 1, "data_wait_frac"),
        ("val", 4, 1, "val_loss"),
        *steps(2, range(5, 9)),
        ("data", 8, 2, "data_wait_frac"),
        ("val", 8, 2, "val_loss"),
        ("finish", "completed"),
    ]


def test_trained_handle_trains_no_further(plane: Any, make_run: Any) -> None:
    logger = _Events()
    run = make_run(plane(), logger=logger).train()
    before = list(logger.events)

    assert run.train() is run
    assert (run.epoch, logger.events) == (1, before)


def test_training_without_a_training_split_is_refused(
    plane: Any, make_run: Any, points: Any
) -> None:
    run = make_run(plane(), data={"val": [points(5, seed=0)]})

    with pytest.raises(
        ConfigError, match=r"`Plane` has no split `train`.*no optimizer[\s\S]*data="
    ):
        run.train()


def test_training_without_validation_has_no_val_loss(
    plane: Any, make_run: Any, points: Any
) -> None:
    run = make_run(plane(), data={"train": [points(5, seed=0)]}).train()

    assert run.history[1].keys() == {"epoch", "step", "loss"}


def _poisoned(points: Any) -> Any:
    batches = [points(5, seed=seed) for seed in range(4)]
    batches[2]["y"][3] = np.nan
    return {"train": batches, "val": [points(5, seed=5)]}


def test_loss_that_is_not_finite_stops_the_run(plane: Any, make_run: Any, points: Any) -> None:
    logger = _Events()
    run = make_run(plane(), data=_poisoned(points), logger=logger, checkpointer=None)

    with pytest.raises(
        DivergenceError,
        match=r"loss is nan at step 3 of epoch 1, .*in `train` `y` holds NaN in 1 of 5 rows, from "
        r"0: 3\.[\s\S]*leave out these rows",
    ):
        run.train()
    assert run.phase.value == "failed"
    assert logger.events[-1] == ("finish", "failed")


def test_unchecked_divergence_is_left_out_of_the_log(
    plane: Any, make_run: Any, points: Any
) -> None:
    run = make_run(plane(), data=_poisoned(points), check_divergence=False, checkpointer=None)
    with pytest.warns(NitroWarning, match="is nan at step") as told:
        run.train()

    assert [str(warning.message).split(" is nan")[0] for warning in told] == [
        "The metric `loss` of `train`",
        "The metric `val_loss` of `val`",
    ]
    assert [line["step"] for line in step_lines(run) if "loss" in line] == [1, 2]
    assert len(step_lines(run)) == 4


def test_loader_that_keeps_its_ragged_batch_cannot_train(
    plane: Any, make_run: Any, points: Any
) -> None:
    loader = nitro.ArrayLoader(points(12, seed=0), 5, drop_last=False)
    run = make_run(plane(), data={"train": loader})

    with pytest.raises(DataError, match=r"batch 3 of `train` has 2 samples[\s\S]*drop_last=True"):
        run.train()


def test_progress_bar_changes_nothing(
    plane: Any, make_run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(plane(), progress=True, max_epochs=2).train()

    assert run.step == 8
    assert "epoch 2/2  " in capsys.readouterr().err


def test_model_that_is_no_nnx_module_is_refused(plane: Any, make_run: Any) -> None:
    class Wrong(plane):
        def build_model(self, rngs: Any) -> Any:
            return lambda x: x

    with pytest.raises(
        HookError, match=r"`Wrong\.build_model` returned function[\s\S]*return the module"
    ):
        make_run(Wrong())


def test_output_that_is_no_array_is_named_by_its_path(plane: Any, make_run: Any) -> None:
    class Listed(plane):
        def forward(self, model: Any, *, x: Any) -> Any:
            return {"maps": {"heights": [model(x)[:, 0]]}}

    with pytest.raises(HookError, match=r"`Listed.forward` returned list as `maps.heights`"):
        make_run(Listed()).train()
