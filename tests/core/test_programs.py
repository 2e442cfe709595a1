"""Programs: shared, keyed by what decides them, explained, and never compiled in secret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import numpy as np
import optax
import pytest
from flax import linen, nnx

import nitro
from nitro._logs import NullLogger
from nitro.errors import ConfigError, DriftWarning, ProgramError

SCALE = 2.0
_COMPILES: list[float] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: (
        _COMPILES.append(seconds) if event == "/jax/core/compile/backend_compile_duration" else None
    )
)


def scaled(loss):
    return SCALE * loss


class Probe(nitro.Experiment):
    """A small classifier with a field of every residency and a ragged validation split."""

    width: nitro.GraphConst[int] = 8
    power: nitro.GraphConst[int] = 2
    smoothing: nitro.Device[float] = 0.1
    note: str = "host"
    max_epochs: int = 2

    def build_data(self):
        rng = np.random.default_rng(0)
        train = {"x": rng.normal(size=(40, 6)).astype(np.float32), "y": rng.integers(0, 3, 40)}
        val = {"x": train["x"][:11], "y": train["y"][:11]}
        return {
            "train": nitro.ArrayLoader(train, 4, shuffle=True),
            "val": nitro.ArrayLoader(val, 4),
        }

    def build_model(self, rngs):
        return nnx.Sequential(
            nnx.Linear(6, self.width, rngs=rngs), nnx.relu, nnx.Linear(self.width, 3, rngs=rngs)
        )

    def forward(self, model, *, x):
        return model(x)

    def loss(self, logits, *, y):
        targets = optax.smooth_labels(jax.nn.one_hot(y, 3), self.smoothing)
        return scaled((optax.softmax_cross_entropy(logits, targets) ** self.power).mean())


class WithMetrics(Probe):
    def metrics(self, logits, *, y):
        return {"acc": ((logits.argmax(-1) == y).sum(), y.size)}


class FirstStep(NullLogger):
    """Notes how many compiles there had been when the first step was logged."""

    def metrics(self, values, *, context, step, epoch, **more):
        if context == "train" and step == 1:
            self.compiles = len(_COMPILES)


class FirstLoss(NullLogger):
    """Notes the loss of the first step."""

    def metrics(self, values, *, context, step, epoch, **more):
        if context == "train" and step == 1:
            self.loss = values["loss"]


@pytest.fixture
def handle(tmp_path):
    def make(experiment: Any = None, **options: Any) -> nitro.Nitro:
        options = {"run_dir": tmp_path, "logger": None, "checkpointer": None, **options}
        return nitro.Nitro(experiment or Probe(), **options)

    nitro.cache_clear()
    return make


def test_two_handles_share_every_program(handle):
    handle().train()
    before = nitro.cache_stats()

    handle().train()

    after = nitro.cache_stats()
    assert after["entries"] == before["entries"] == before["misses"]
    assert after["misses"] == before["misses"]
    assert after["hits"] > before["hits"]


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        pytest.param({"smoothing": 0.3}, {}, id="Device field"),
        pytest.param({"note": "another"}, {}, id="host field"),
        pytest.param({"max_epochs": 3}, {}, id="max_epochs"),
        pytest.param({}, {"seed": 7}, id="seed"),
        pytest.param({}, {"run_dir": "elsewhere"}, id="run_dir"),
        pytest.param({}, {"check_divergence": False}, id="check_divergence"),
    ],
)
def test_what_xla_need_not_know_compiles_nothing(handle, tmp_path, fields, options):
    handle().train()
    options = {n: tmp_path / v if n == "run_dir" else v for n, v in options.items()}
    before = len(_COMPILES)

    handle(Probe(**fields), **options).train()

    assert len(_COMPILES) == before


def test_another_metrics_hook_compiles_nothing(handle):
    class OtherMetrics(WithMetrics):
        def metrics(self, logits, *, y):
            return {"wrong": ((logits.argmax(-1) != y).sum(), y.size)}

        def finalize_metrics(self, reduced, split):
            return {"percent": 100 * reduced["wrong"]}

    OtherMetrics.__name__ = WithMetrics.__name__
    options = {"checkpointer": None}
    handle(WithMetrics(), **options).train()
    before = len(_COMPILES)

    handle(OtherMetrics(), **options).train()

    assert len(_COMPILES) == before


def test_a_structural_field_recompiles_exactly_the_programs_that_read_it(handle):
    handle().train()
    before = nitro.cache_stats()["by_role"]

    handle(Probe(power=3)).train()

    after = nitro.cache_stats()["by_role"]
    new = {role: after[role]["misses"] - before[role]["misses"] for role in after}
    # `power` is read by `loss` alone: for batches of 4 and the ragged 3.
    assert new == {"train step": 1, "loss": 2, "forward": 0}


def test_width_recompiles_what_has_other_weights(handle):
    handle().train()
    before = nitro.cache_stats()["by_role"]

    handle(Probe(width=5)).train()

    after = nitro.cache_stats()["by_role"]
    new = {role: after[role]["misses"] - before[role]["misses"] for role in after}
    assert new == {"train step": 1, "loss": 0, "forward": 1}


class LinenNet(linen.Module):
    width: int

    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(linen.relu(linen.Dense(self.width)(x)))


class Bridged(Probe):
    def build_model(self, rngs):
        return nnx.bridge.ToNNX(LinenNet(self.width), rngs=rngs).lazy_init(np.zeros((1, 6)))


def test_two_handles_of_a_linen_model_share_every_program(handle, tmp_path):
    handle(Bridged(), run_dir=tmp_path / "a", checkpointer=nitro.TopK()).train()
    before = nitro.cache_stats()["misses"]

    handle(Bridged(), run_dir=tmp_path / "b", seed=1).train()
    resumed = handle(Bridged(max_epochs=3), run_dir=tmp_path / "a", resume="auto").train()

    assert nitro.cache_stats()["misses"] == before
    assert resumed.epoch == 3


def test_accum_recompiles_the_step_alone(handle):
    handle().train()
    before = nitro.cache_stats()["by_role"]

    handle(accum=2).train()

    after = nitro.cache_stats()["by_role"]
    new = {role: after[role]["misses"] - before[role]["misses"] for role in after}
    assert new == {"train step": 1, "loss": 0, "forward": 0}


def test_nothing_compiles_after_step_one(handle, tmp_path):
    logger = FirstStep()
    run = handle(Probe(max_epochs=3), logger=logger, checkpointer=nitro.TopK(), run_dir=tmp_path)

    run.train()
    for rows in range(1, 21):
        run.predict({"x": np.zeros((rows, 6), np.float32)})
    run.validate()

    assert len(_COMPILES) == logger.compiles


class OnDevice(WithMetrics):
    def metrics_residency(self, hook):
        return "device"


@pytest.mark.parametrize("kind", [Probe, OnDevice])
def test_ragged_batches_of_a_list_compile_before_step_one(handle, kind):
    logger = FirstStep()
    experiment = kind()
    splits = {name: list(split) for name, split in experiment.build_data().items()}
    splits["val"].append({name: array[:2] for name, array in splits["val"][0].items()})
    assert [len(batch["y"]) for batch in splits["val"]] == [4, 4, 3, 2]

    handle(experiment, logger=logger, data=splits).train()

    assert len(_COMPILES) == logger.compiles


def test_a_call_that_does_not_fit_names_the_leaf(handle):
    run = handle()
    run.train()
    program = next(p for p in run._session.setup.programs.held() if p.key.role == "forward")
    state = run._session.state

    with pytest.raises(ProgramError, match=r"forward program.*`3\.x` is float32\(9, 6\), expected"):
        program(state.params, state.model_state, {"smoothing": jax.numpy.float32(0)},
                {"x": np.zeros((9, 6), np.float32)})  # fmt: skip


def test_threads_compile_each_program_once(handle):
    runs = [handle() for _ in range(4)]
    threads = [threading.Thread(target=run.train) for run in runs]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    stats = nitro.cache_stats()
    assert stats["misses"] == stats["entries"] == 4  # step, forward, loss at 4 and at 3 rows


def test_an_edited_global_warns_and_a_new_handle_picks_it_up(handle, monkeypatch):
    run = handle()
    run.train()
    before = run.validate()["val_loss"]
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)

    with pytest.warns(DriftWarning, match=r"SCALE: 2\.0 → 3\.0.*\n.*new `Nitro") as told:
        kept = run.validate()["val_loss"]
    fresh = handle().train().validate()["val_loss"]

    assert kept == before
    assert [warning.filename for warning in told] == [__file__]
    assert fresh == pytest.approx(1.5 * before, rel=0.2)
    assert any("SCALE: 2.0 → 3.0" in str(line) for line in nitro.explain_compiles())


def test_drift_is_told_once(handle, monkeypatch, recwarn):
    run = handle()
    run.validate()
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 4.0)

    with pytest.warns(DriftWarning):
        run.validate()
    run.validate()

    assert not recwarn.list


def test_code_that_moves_before_the_first_trace_is_traced_as_it_is_then(handle, monkeypatch):
    run = handle()
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 8.0)

    with pytest.warns(DriftWarning, match="SCALE"):
        moved = run.validate()["val_loss"]
    monkeypatch.undo()
    plain = handle().validate()["val_loss"]

    assert moved == pytest.approx(4 * plain, rel=1e-6)


def _times(x):
    return SCALE * x


def _times_once(_, x):
    return SCALE * x


def _sum_times(total, x):
    return total + SCALE * x, None


_KEEPING_TRACES = {
    "jit": jax.jit(_times),
    "nnx.jit": nnx.jit(_times),
    "checkpoint": jax.checkpoint(_times),
    "cond": lambda x: jax.lax.cond(x > 0, _times, _times, x),
    "fori_loop": lambda x: jax.lax.fori_loop(0, 1, _times_once, x),
    "scan": lambda x: jax.lax.scan(_sum_times, 0 * x, x[None])[0],
}
"""Ways to call `_times` in which JAX remembers a trace by the function object."""


@pytest.mark.parametrize("way", _KEEPING_TRACES)
def test_a_trace_that_jax_remembers_is_not_used_for_changed_code(handle, monkeypatch, way):
    class Weighted(Probe):
        def loss(self, logits, *, y):
            return _KEEPING_TRACES[way](
                optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
            )

    monkeypatch.setattr(sys.modules[__name__], "SCALE", 1.0)
    plain = handle(Weighted(max_epochs=1))
    before = plain.validate()["val_loss"]
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)
    tripled = handle(Weighted(max_epochs=1), logger=(first := FirstLoss()))

    assert tripled.validate()["val_loss"] == pytest.approx(3 * before)
    tripled.train()
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 1.0)
    handle(Weighted(max_epochs=1), logger=(unscaled := FirstLoss())).train()
    assert first.loss == pytest.approx(3 * unscaled.loss)


def test_explanations_speak_of_fields(handle):
    handle().validate()
    handle(Probe(width=5)).validate()

    lines = [str(line) for line in nitro.explain_compiles() if line.role == "forward"]

    assert "the first of its kind" in lines[0]
    assert lines[1].endswith("Probe.width: 8 → 5")


def test_explanations_compare_with_the_nearest_program(handle):
    for options in ({}, {"power": 3}, {"accum": 2}):
        accum = options.pop("accum", 1)
        handle(Probe(**options), accum=accum).train()

    lines = [str(line) for line in nitro.explain_compiles() if line.role == "train step"]

    assert lines[1].endswith("Probe.power: 2 → 3")
    assert "Probe.power" not in lines[2]
    assert lines[2].endswith("accum 2")


def test_explanations_speak_of_the_optimizer(handle):
    class Grouped(Probe):
        def param_group(self, path):
            return "biases" if path.endswith("bias") else "default"

    handle().train()
    handle(gradient_clip_norm=1.0).train()
    handle(Grouped()).train()

    _, clipped, grouped = [e for e in nitro.explain_compiles() if e.role == "train step"]
    assert clipped.reasons == ("step['gradient clipping']: 'off' → 'on'",)
    assert any("step['groups']" in why and "biases: " in why for why in grouped.reasons)


def test_an_unknown_compile_option_is_refused_by_name(handle):
    with pytest.raises(ConfigError, match=r"`xla_nonsense` = 3.*No such compile option"):
        handle(compile_options={"xla_nonsense": 3})


def test_compile_options_are_part_of_the_key(handle):
    handle().validate()
    before = nitro.cache_stats()["misses"]

    handle(compile_options={"xla_cpu_enable_fast_math": True}).validate()

    assert nitro.cache_stats()["misses"] == 2 * before


def test_a_structural_value_without_content_is_refused(handle):
    class Locked(Probe):
        lock: nitro.GraphConst[Any] = None

    with pytest.raises(ConfigError, match=r"`Locked\.lock` cannot be compared by content"):
        handle(Locked(lock=threading.Lock()))


def test_a_structural_run_option_is_refused(handle):
    class Baked(Probe):
        max_epochs: nitro.GraphConst[int] = 3

    with pytest.raises(ConfigError, match="marks max_epochs as GraphConst"):
        handle(Baked())


SWEEP = """
import json, sys
sys.path.insert(0, sys.argv[1])
import nitro
from test_programs import Probe
run = nitro.Nitro(Probe(smoothing=float(sys.argv[2])), seed=int(sys.argv[3]),
                  run_dir=sys.argv[4], logger=None, checkpointer=None)
run.train()
print(json.dumps(nitro.cache_stats()))
"""


def test_a_sweep_in_separate_processes_compiles_once_on_the_machine(tmp_path):
    environment = {**os.environ, "NITRO_CACHE_DIR": str(tmp_path / "cache")}

    def sweep(smoothing: str, seed: str) -> dict[str, Any]:
        words = [str(Path(__file__).parent), smoothing, seed, str(tmp_path / seed)]
        done = subprocess.run(
            [sys.executable, "-c", SWEEP, *words], env=environment, capture_output=True, check=True
        )
        return json.loads(done.stdout)

    first, second = sweep("0.1", "0"), sweep("0.4", "1")

    assert (first["persistent_hits"], first["persistent_misses"]) == (0, 4)
    assert (second["persistent_hits"], second["persistent_misses"]) == (4, 0)


def test_a_resumed_run_compiles_nothing_after_its_first_step(handle, tmp_path):
    options = {"run_dir": tmp_path, "checkpointer": nitro.TopK()}
    handle(Probe(max_epochs=1), logger=FirstStep(), **options).train()

    logger = ResumedStep()
    handle(Probe(max_epochs=3), logger=logger, resume="auto", **options).train()

    assert len(_COMPILES) == logger.compiles


class ResumedStep(FirstStep):
    """Notes how many compiles there had been when the first step after a resume was logged."""

    def metrics(self, values, *, context, step, epoch, **more):
        super().metrics(values, context=context, step=step - 10, epoch=epoch, **more)


def test_a_program_that_xla_refuses_is_shown_whole_in_a_file(handle):
    class Foreign(Probe):
        def forward(self, model, *, x):
            logits = model(x)
            target = jax.ffi.ffi_call("no_such_target", logits, vmap_method="sequential")
            return jax.lax.stop_gradient(target(logits))

    with pytest.raises(
        ProgramError, match="XLA cannot compile the forward program of `Foreign`"
    ) as raised:
        handle(Foreign()).predict({"x": np.zeros((2, 6), np.float32)})

    assert "float32(4, 6)" in str(raised.value)  # the width of the split `val`
    dump = Path(str(raised.value).rpartition(" ")[2])
    text = dump.read_text()
    dump.unlink()
    assert text.startswith("// ")
    assert "no_such_target" in text
    assert "stablehlo.custom_call" in text
