"""The memory plan, compared with XLA's own figures and with sums of `nbytes`."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nitro
from nitro import _devices
from nitro._programs import Held, MemoryPart, MemoryPlan, program_memory
from nitro._run import session_of
from nitro.errors import ConfigError, MemoryPlanError, NitroWarning


class Perceptron(nitro.Experiment):
    """One hidden layer of 64 on 30 numbers; 100 samples to train on, 50 to validate."""

    def build_data(self) -> Any:
        return {
            "train": nitro.ArrayLoader(samples(100), 10, device=True),
            "val": nitro.ArrayLoader(samples(50), 25),
        }

    def build_model(self, rngs: nnx.Rngs) -> Any:
        return nnx.Sequential(nnx.Linear(30, 64, rngs=rngs), jnp.tanh, nnx.Linear(64, 1, rngs=rngs))

    def optimizer(self, group: str) -> Any:
        return optax.sgd

    def forward(self, model: Any, *, x: Any) -> Any:
        return model(x)

    def loss(self, outputs: Any, *, y: Any) -> Any:
        return ((outputs - y) ** 2).mean()


def samples(count: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(count, 30)).astype(np.float32)
    return {"x": x, "y": x[:, :1]}


class FromHost(Perceptron):
    def build_data(self) -> Any:
        data = super().build_data()
        return {**data, "train": nitro.ArrayLoader(samples(100), 10, device=False)}


PARAM_BYTES = 4 * (30 * 64 + 64 + 64 + 1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> nitro.Nitro:
    return nitro.Nitro(Perceptron(), run_dir=tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def plan(run: nitro.Nitro) -> MemoryPlan:
    return run.memory_plan()


def size(plan: MemoryPlan, name: str) -> int:
    return plan.parts[name].size_bytes


def step_stats(run: nitro.Nitro) -> Any:
    programs = session_of(run).setup.programs.held()
    (step,) = [program for program in programs if program.key.role == "train step"]
    return step.compiled.memory_analysis()


def test_weights_and_data_are_counted_exactly(plan):
    data = samples(100)

    assert size(plan, "parameters") == PARAM_BYTES
    assert size(plan, "model state") == 0
    assert size(plan, "training data") == data["x"].nbytes + data["y"].nbytes


def test_what_is_counted_adds_up_to_the_arguments_that_xla_sees(run, plan):
    kept = ("parameters", "model state", "optimizer state", "training data")
    one_chunk = size(plan, "batches in flight") // 2
    total = sum(size(plan, name) for name in (*kept, "Device fields and anchors"))

    assert total + one_chunk == step_stats(run).argument_size_in_bytes


def test_the_step_is_what_xla_says(run, plan):
    stats = step_stats(run)

    assert size(plan, "step: gradients") == PARAM_BYTES
    assert (
        size(plan, "step: gradients") + size(plan, "step: activations") == stats.temp_size_in_bytes
    )
    assert size(plan, "step: results and code") == (
        stats.output_size_in_bytes - stats.alias_size_in_bytes + stats.generated_code_size_in_bytes
    )


def test_the_evaluation_is_that_of_a_program_written_by_hand(run, plan):
    state = session_of(run).state

    def forward(params: Any, x: Any) -> Any:
        hidden = jnp.tanh(x @ params["layers.0.kernel"] + params["layers.0.bias"])
        return hidden @ params["layers.2.kernel"] + params["layers.2.bias"]

    x = samples(25)["x"]
    stats = jax.jit(forward).lower(state.params, x).compile().memory_analysis()
    outputs_bytes = 25 * 4
    by_hand = x.nbytes + outputs_bytes + stats.temp_size_in_bytes

    assert stats.output_size_in_bytes == outputs_bytes
    assert size(plan, "evaluation: forward") == by_hand


def test_batches_of_the_host_are_counted_while_they_wait(make_run):
    run = make_run(FromHost(), steps_per_call=3, checkpointer=None)
    plan = run.memory_plan()
    kept = ("parameters", "model state", "optimizer state", "Device fields and anchors")
    chunk = step_stats(run).argument_size_in_bytes - sum(size(plan, name) for name in kept)

    # Two chunks with the device; two wait, one is being made, from as many batches.
    assert size(plan, "batches in flight") == 2 * chunk
    assert size(plan, "batches ahead") == 5 * chunk
    assert size(plan, "training data") == 0
    assert chunk >= 3 * sum(array.nbytes for array in samples(10).values())


def test_staging_is_a_copy_of_the_state(run, plan, make_run):
    state = jax.tree.leaves(session_of(run).state)

    assert size(plan, "checkpoint staging") == sum(leaf.nbytes for leaf in state)
    assert size(make_run(Perceptron(), checkpointer=None).memory_plan(), "checkpoint staging") == 0


def test_planning_compiles_what_training_uses(run, plan):
    before = nitro.cache_stats()["misses"]
    run.train()

    assert nitro.cache_stats()["misses"] == before
    assert "memory plan" in run.binding
    assert "step: activations" in run.binding


def test_a_handle_without_training_has_a_plan_too(run, make_run):
    plan = make_run(Perceptron(), data={"val": nitro.ArrayLoader(samples(50), 25)}).memory_plan()

    assert size(plan, "evaluation: forward") == size(run.memory_plan(), "evaluation: forward")
    assert size(plan, "optimizer state") == 0


def test_the_total_holds_the_larger_of_step_and_evaluation(plan):
    always = sum(p.size_bytes for p in plan.parts.values() if p.held is Held.ALWAYS)
    step = sum(p.size_bytes for p in plan.parts.values() if p.held is Held.STEP)
    evaluation = sum(p.size_bytes for p in plan.parts.values() if p.held is Held.EVALUATION)

    assert plan.total_bytes == always + max(step, evaluation)


def test_a_plan_that_does_not_fit_is_refused_before_data_are_placed(plan, make_run):
    run = make_run(Perceptron(), memory_limit_bytes=plan.total_bytes)
    with pytest.raises(MemoryPlanError, match="training data") as caught:
        run.train()

    assert run.step == 0
    assert "100.0%" in caught.value.problem
    for way_out in ("batch_size", "accum", "nnx.remat", "device=False", "memory_limit_bytes"):
        assert way_out in caught.value.fix


def test_host_batches_are_to_be_cut_into_shorter_calls(make_run):
    with pytest.raises(MemoryPlanError) as caught:
        make_run(FromHost(), memory_limit_bytes=1000).train()

    assert "`steps_per_call`" in caught.value.fix
    assert "device=False" not in caught.value.fix


def test_a_plan_that_nearly_fills_the_memory_warns(plan, make_run):
    limit = int(plan.total_bytes / 0.86)
    run = make_run(Perceptron(), memory_limit_bytes=limit)

    with pytest.warns(NitroWarning, match=r"memory plan: 86\.0%"):
        run.train()


def test_a_plan_with_room_does_not_warn(plan, make_run):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_run(Perceptron(), memory_limit_bytes=int(plan.total_bytes / 0.84)).train()


def test_convolutions_on_the_cpu_are_checked_by_the_upper_figure(images, make_run):
    run = make_run(images())
    plan = run.memory_plan()

    assert plan.scratch_factor == 2.2
    # Below 200 MB it does not matter.
    assert plan.upper_bytes == plan.total_bytes


def test_the_upper_figure_is_in_the_table():
    parts = {"parameters": MemoryPart(300 * 10**6, Held.ALWAYS)}
    plan = MemoryPlan(parts=parts, limit_bytes=10**9, device="the host's RAM", scratch_factor=2.2)

    assert plan.upper_bytes == 660 * 10**6
    assert plan.share == 0.66
    assert "up to 2.2 times the plan: XLA leaves it out on the CPU" in str(plan)


def test_what_lies_on_the_host_does_not_fill_a_device():
    parts = {"kept": MemoryPart(10, Held.ALWAYS), "staging": MemoryPart(90, Held.HOST)}
    plan = MemoryPlan(parts=parts, limit_bytes=100, device="the device X")

    assert plan.total_bytes == 10
    assert "on the host" in str(plan)


def test_a_platform_without_an_analysis_gives_zeros():
    class Compiled:
        def memory_analysis(self) -> None:
            return None

    assert program_memory(Compiled()).temporary == 0


@pytest.mark.parametrize(("granted", "limit"), [("max", None), ("1234", 1234), ("9" * 25, None)])
def test_a_container_has_what_it_is_granted(tmp_path, monkeypatch, granted, limit):
    path = tmp_path / "memory.max"
    monkeypatch.setattr(_devices, "_CGROUP_LIMITS", (path,))
    ram = _devices.device_memory_bytes()
    path.write_text(granted + "\n")

    assert _devices.device_memory_bytes() == (limit or ram)


def test_a_limit_must_be_a_size(make_run):
    with pytest.raises(ConfigError, match="memory_limit_bytes"):
        make_run(Perceptron(), memory_limit_bytes=0)


def test_small_memory_keeps_the_data_on_the_host(make_run):
    class Auto(Perceptron):
        def build_data(self) -> Any:
            return {"train": nitro.ArrayLoader(samples(100), 10)}

    whole = sum(array.nbytes for array in samples(100).values())

    roomy = make_run(Auto(), memory_limit_bytes=10 * whole).memory_plan()
    assert size(roomy, "training data") == whole
    tight = make_run(Auto(), memory_limit_bytes=10 * whole - 1).memory_plan()
    assert tight.parts.get("training data", MemoryPart(0, Held.ALWAYS)).size_bytes < whole
