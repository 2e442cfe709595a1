"""Weights that come from elsewhere: a record, another handle, a module, arrays by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nitro
from nitro import TopK
from nitro._run import session_of
from nitro.errors import ConfigError, NitroWarning


def _params(run: nitro.Nitro) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in session_of(run).state.params.items()}


def _check_same(got: nitro.Nitro, expected: nitro.Nitro) -> None:
    for name, array in _params(expected).items():
        np.testing.assert_array_equal(_params(got)[name], array, err_msg=name)


def test_weights_of_another_handle_are_copied(images: Any, make_run: Any, tmp_path: Path) -> None:
    source = nitro.Nitro(images(), run_dir=tmp_path / "source").train()

    run = make_run(images(), weights=source)

    _check_same(run, source)
    assert f"taken from Images at epoch 1 ({source.run_dir})" in str(run.binding)
    for name, value in session_of(source).state.model_state.items():
        assert (session_of(run).state.model_state[name] == value).all(), name
    run.train()
    assert source.validate().keys() == {"val_loss"}  # its buffers are its own


@pytest.mark.parametrize("form", ["module", "state", "nested", "flat"])
def test_weights_may_be_a_tree(plane: Any, make_run: Any, form: str) -> None:
    kernel, bias = np.full((4, 1), 2.0), np.full(1, 3.0)
    module: Any = nnx.Linear(4, 1, rngs=nnx.Rngs(9))
    module.kernel[...], module.bias[...] = jnp.asarray(kernel, jnp.float32), jnp.asarray(bias)
    weights = {
        "module": module,
        "state": nnx.state(module, nnx.Param),
        "nested": nnx.to_pure_dict(nnx.state(module)),
        "flat": {"kernel": kernel, "bias": bias},
    }[form]

    run = make_run(plane(), weights=weights)

    np.testing.assert_array_equal(_params(run)["kernel"], kernel)
    assert _params(run)["kernel"].dtype == np.float32
    assert run.train().epoch == 1


def test_weights_that_do_not_fit_are_listed(plane: Any, make_run: Any) -> None:
    weights = {"kernel": np.zeros((5, 1), np.float32), "known": np.zeros(1, np.float32)}

    with pytest.raises(
        ConfigError,
        match=r"given as dict, do not fit[^\n]*\n"
        r"    `kernel`: float32\(5, 1\) given, float32\(4, 1\) in the model\n"
        r"    `known`: float32\(1,\) given, not in the model\n"
        r"    `bias`: not given, float32\(1,\) in the model\n",
    ):
        make_run(plane(), weights=weights)


def test_path_as_weights_is_a_record(plane: Any, make_run: Any, trained_plane: nitro.Nitro) -> None:
    run = make_run(plane(), weights=f"{trained_plane.run_dir}@latest")

    _check_same(run, trained_plane)


def test_record_is_converted_to_the_models_dtype(
    plane: Any, make_run: Any, trained_plane: nitro.Nitro
) -> None:
    class Half(plane):
        def build_model(self, rngs: nnx.Rngs) -> Any:
            return nnx.Linear(4, 1, param_dtype=jnp.bfloat16, rngs=rngs)

    run = make_run(Half(), checkpoint=f"{trained_plane.run_dir}@latest", data={})

    kernel = session_of(run).state.params["kernel"]
    assert kernel.dtype == jnp.bfloat16
    expected = session_of(trained_plane).state.params["kernel"].astype(jnp.bfloat16)
    assert (kernel == expected).all()


def test_record_is_placed_as_the_model_is(
    plane: Any, make_run: Any, trained_plane: nitro.Nitro
) -> None:
    run = make_run(plane(), checkpoint=trained_plane.run_dir, data={})

    (kernel,) = [a for n, a in session_of(run).state.params.items() if n == "kernel"]
    assert kernel.sharding == jax.sharding.SingleDeviceSharding(jax.devices()[0])


def test_optimizer_of_a_record_can_come_along(
    plane: Any, make_run: Any, trained_plane: nitro.Nitro
) -> None:
    source = f"{trained_plane.run_dir}@latest"

    run = make_run(plane(), checkpoint=source, restore_optimizer=True)

    expected = session_of(trained_plane).state.opt_state
    got = session_of(run).state.opt_state
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), got, expected)))
    assert (run.step, run.epoch) == (0, 0)
    assert run.train().step == 4


class Anchored(nitro.Experiment):
    """Its decay pulls everything to where it started, and the loss does nothing."""

    def build_data(self) -> Any:
        x = np.ones((8, 2), np.float32)
        return {"train": nitro.ArrayLoader({"x": x}, 4)}

    def build_model(self, rngs: nnx.Rngs) -> Any:
        return nnx.Linear(2, 2, rngs=rngs)

    def forward(self, model: Any, *, x: Any) -> Any:
        return model(x)

    def loss(self, outputs: Any) -> Any:
        return (outputs * 0).mean()

    def weight_decay(self, group: str) -> float:
        return 0.1

    def decay_anchor(self, group: str) -> str:
        return "init"


@pytest.mark.parametrize("w0", ["weights", "tree"])
def test_anchor_may_be_other_weights_and_is_resumed(tmp_path: Path, w0: str) -> None:
    weights = {"kernel": np.full((2, 2), 5.0, np.float32), "bias": np.zeros(2, np.float32)}
    given = weights if w0 == "tree" else w0

    def make(name: str, **options: Any) -> nitro.Nitro:
        return nitro.Nitro(Anchored(), run_dir=tmp_path / name, **options)

    straight = make("a", weights=weights, w0=given, max_epochs=2).train()
    np.testing.assert_array_equal(_params(straight)["kernel"], weights["kernel"])
    make("b", weights=weights, w0=given, max_epochs=1).train()

    _check_same(make("b", max_epochs=2, resume="auto").train(), straight)


# The best record at the end -------------------------------------------------------------------


@pytest.fixture
def best_run(plane: Any, make_run: Any) -> nitro.Nitro:
    scores = iter([0.5, 0.1, 0.4])

    class Scripted(plane):
        def metrics(self, height: Any, *, y: Any) -> Any:
            return {"n": (1, None)}

        def finalize_metrics(self, reduced: Any, split: str) -> Any:
            return {"score": next(scores)}

    return make_run(
        Scripted(), max_epochs=3, checkpointer=TopK(metric="score"), restore_best=True
    ).train()


def test_run_may_end_with_its_best_weights(plane: Any, best_run: nitro.Nitro) -> None:
    best = nitro.Nitro(plane(), checkpoint=f"{best_run.run_dir}@best", data={})

    _check_same(best_run, best)
    assert (best_run.epoch, len(best_run.history)) == (3, 3)
    assert "weights of the best record" in str(best_run.binding)


def test_training_on_from_restored_weights_is_refused(best_run: nitro.Nitro) -> None:
    with pytest.raises(
        ConfigError, match=r"best record \(epoch 2\)[\s\S]*restore_optimizer=True[\s\S]*@latest"
    ):
        best_run.train()


def test_record_of_restored_weights_is_refused(best_run: nitro.Nitro) -> None:
    before = nitro.checkpoints(best_run.run_dir)

    with pytest.raises(ConfigError, match=r"best record \(epoch 2\).* a record, would mix"):
        best_run.checkpoint()
    assert nitro.checkpoints(best_run.run_dir) == before


def test_run_without_a_score_keeps_its_weights(plane: Any, make_run: Any) -> None:
    run = make_run(plane(), max_epochs=2, restore_best=True, steps_per_call=1)
    run.on_phase(lambda e: e.run.request_stop() if e.phase.value == "training" else None)

    with pytest.warns(NitroWarning, match="no record with a score"):
        run.train()
