"""Groups that are frozen: no gradient, no state, no decay, no part in the norm."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nitro
from nitro._run import session_of
from nitro.errors import CheckpointError, ConfigError, HookError

NUM_ROWS, BATCH, CLIP, DECAY = 16, 4, 0.5, 0.1


class Net(nnx.Module):
    """A body that is to be frozen, and a head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.body = nnx.Linear(4, 6, rngs=rngs)
        self.head = nnx.Linear(6, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(20 * jnp.tanh(self.body(x)))


class Tuned(nitro.Experiment):
    """Trains the head on a body that stays as it is."""

    def build_data(self):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(NUM_ROWS, 4)).astype(np.float32)
        return {"train": nitro.ArrayLoader({"x": x, "y": x @ np.ones(4, np.float32)}, BATCH)}

    def build_model(self, rngs: nnx.Rngs):
        return Net(rngs)

    def forward(self, model, *, x):
        return model(x)[:, 0]

    def loss(self, height, *, y):
        return ((height - y) ** 2).mean()

    def optimizer(self, group):
        return optax.adam

    def param_group(self, path):
        return path.partition(".")[0]

    def learning_rate(self, group=None):
        return nitro.FROZEN if group == "body" else 1e-2

    def weight_decay(self, group):
        return DECAY

    def no_decay(self, path, leaf):
        return False


def by_hand(epochs: int) -> dict[str, np.ndarray]:
    """The same run in plain optax, which knows of the head alone."""
    experiment = Tuned()
    state = nnx.to_pure_dict(nnx.state(experiment.build_model(nnx.Rngs(0)), nnx.Param))
    body, head = state["body"], state["head"]
    chain = optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(1e-2, weight_decay=DECAY))
    arrays: Any = experiment.build_data()["train"].arrays

    def loss(head: Any, x: Any, y: Any) -> Any:
        hidden = 20 * jnp.tanh(x @ body["kernel"] + body["bias"])
        return (((hidden @ head["kernel"] + head["bias"])[:, 0] - y) ** 2).mean()

    opt_state = chain.init(head)
    for start in [*range(0, NUM_ROWS, BATCH)] * epochs:
        batch = {name: array[start : start + BATCH] for name, array in arrays.items()}
        updates, opt_state = chain.update(jax.grad(loss)(head, **batch), opt_state, head)
        head: Any = optax.apply_updates(head, updates)
    return {
        f"{part}.{n}": np.asarray(a)
        for part, t in (("body", body), ("head", head))
        for n, a in t.items()
    }


def test_frozen_group_is_out_of_norm_and_decay_as_by_hand_in_optax(make_run: Any) -> None:
    run = make_run(Tuned(), gradient_clip_norm=CLIP, max_epochs=3).train()

    expected = by_hand(3)
    assert expected.keys() == run.params.keys()
    for name, array in expected.items():
        # Rounding of another order of sums; a norm with the body in it differs in the first digit.
        np.testing.assert_allclose(run.params[name], array, rtol=2e-5, err_msg=name)
    np.testing.assert_array_equal(run.params["body.kernel"], expected["body.kernel"])


def test_frozen_group_has_no_optimizer_state(make_run: Any) -> None:
    state = session_of(make_run(Tuned())).state.opt_state

    # Adam: two moments of each weight of the head, and a counter.
    assert state.keys() == {"head"}
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == 2 * 7 + 1


def test_step_program_computes_no_gradient_of_a_frozen_group(make_run: Any) -> None:
    class Stopped(Tuned):
        def build_model(self, rngs: nnx.Rngs):
            model = Net(rngs)
            # No gradient exists for whole numbers: with one, the step could not be traced.
            model.body.kernel = nnx.Param(jnp.ones((4, 6), jnp.int8))
            return model

    run = make_run(Stopped()).train()

    assert run.step == 4
    assert run.params["body.kernel"].dtype == np.int8


def test_params_and_report_count_trained_and_frozen(make_run: Any) -> None:
    run = make_run(Tuned())

    params, report = run.params, str(run.binding)

    assert (params.num_trained, params.num_frozen) == (7, 30)
    assert params.frozen == {"body.kernel", "body.bias"}
    assert "body.kernel: float32(4, 6), frozen" in repr(params)
    assert "37 parameters, 30 of them frozen" in report
    assert "group `body`: frozen, 30 parameters" in report


def test_params_keep_their_values_while_training_goes_on(make_run: Any) -> None:
    run = make_run(Tuned())
    before = run.params
    kernel = before["head.kernel"].copy()

    run.train()

    np.testing.assert_array_equal(before["head.kernel"], kernel)
    assert not np.array_equal(run.params["head.kernel"], kernel)


def test_resumed_run_with_a_frozen_group_has_the_bits_of_one_that_never_stopped(
    tmp_path: Any,
) -> None:
    straight = nitro.Nitro(Tuned(), run_dir=tmp_path / "a", max_epochs=2).train()
    nitro.Nitro(Tuned(), run_dir=tmp_path / "b", max_epochs=1).train()

    resumed = nitro.Nitro(Tuned(), run_dir=tmp_path / "b", max_epochs=2, resume="auto").train()

    for name, array in straight.params.items():
        np.testing.assert_array_equal(resumed.params[name], array, err_msg=name)
    assert nitro.checkpoint_info(tmp_path / "b")["frozen"] == ["body.bias", "body.kernel"]


class Thawed(Tuned):
    def learning_rate(self, group=None):
        return 1e-3


def test_thawing_a_group_starts_from_weights_and_is_no_resume(tmp_path: Any) -> None:
    first = nitro.Nitro(Tuned(), run_dir=tmp_path / "a").train()

    with pytest.raises(
        CheckpointError,
        match=r"other frozen groups:\n +`body\.\w+`: frozen in the record, trained now[\s\S]*"
        r"nitro\.FROZEN[\s\S]*Nitro\(\.\.\., checkpoint=",
    ):
        nitro.Nitro(Thawed(), run_dir=tmp_path / "a", max_epochs=2, resume="auto")
    second = nitro.Nitro(Thawed(), run_dir=tmp_path / "b", checkpoint=f"{tmp_path / 'a'}@latest")

    np.testing.assert_array_equal(second.params["head.kernel"], first.params["head.kernel"])
    assert second.train().params.num_frozen == 0


class Nothing(Tuned):
    def learning_rate(self, group=None):
        return 1e-2 if group is None else nitro.FROZEN


class NoBase(Tuned):
    def learning_rate(self, group=None):
        return 1e-2 if group == "head" else nitro.FROZEN


class Scheduled(Tuned):
    def schedules(self):
        return {"opt.body.learning_rate": 1e-3}


@pytest.mark.parametrize(
    ("experiment", "error", "words"),
    [
        (Nothing(), ConfigError, r"`body`, `head`\): nothing would be trained[\s\S]*data=\{\}"),
        (NoBase(), HookError, r'`NoBase\.learning_rate` is None for the base rate[\s\S]*"body"'),
        (Scheduled(), ConfigError, r"`body`, which is frozen[\s\S]*trains: `head`[\s\S]*drop"),
    ],
)
def test_frozen_group_that_cannot_be_meant_is_refused(
    experiment: Any, error: type[Exception], words: str, make_run: Any
) -> None:
    with pytest.raises(error, match=words):
        make_run(experiment)


@pytest.mark.parametrize("level", [1, 2])
def test_report_says_that_a_clip_of_its_own_is_for_each_group_alone(
    make_run: Any, level: int
) -> None:
    def chain(learning_rate: Any) -> Any:
        return optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(learning_rate))

    class Factories(Thawed):
        def optimizer(self, group):
            return chain

    class Chains(Thawed):
        def optimizer(self, group, hyper):
            return chain(hyper.learning_rate)

    run = make_run(Factories() if level == 1 else Chains())

    for group in ("body", "head"):
        assert f"group `{group}`: its optimizer clips the norm of this group alone" in str(
            run.binding
        )
    assert "clips the norm" not in str(make_run(Thawed(), gradient_clip_norm=0.1).binding)


def test_clip_of_each_group_alone_gives_a_larger_joint_norm(make_run: Any) -> None:
    class Chains(Thawed):
        def optimizer(self, group, hyper):
            return optax.chain(optax.clip_by_global_norm(0.1), optax.scale(-1.0))

    run = make_run(Chains(), steps_per_call=1)
    run.on_phase(lambda e: e.run.request_stop() if e.phase.value == "training" else None)
    before = run.params

    run.train()

    moved = [run.params[name] - before[name] for name in before]
    norm = np.sqrt(sum(float((m.astype(np.float64) ** 2).sum()) for m in moved))
    assert norm == pytest.approx(0.1 * np.sqrt(2), rel=1e-4)
