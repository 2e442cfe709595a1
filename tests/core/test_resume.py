"""Going on from a record: which one, as which run, and what is refused."""

from __future__ import annotations

import functools
import json
import re
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import nitro
from nitro import TopK
from nitro._checkpoint import DirectoryLock
from nitro._run import session_of
from nitro.errors import CheckpointError, ConfigError, NitroWarning


def _params(run: nitro.Nitro) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in session_of(run).state.params.items()}


def _check_same(got: nitro.Nitro, expected: nitro.Nitro) -> None:
    for name, array in _params(expected).items():
        np.testing.assert_array_equal(_params(got)[name], array, err_msg=name)
    assert got.history.rows == expected.history.rows


@pytest.fixture
def half(plane: Any, make_run: Any) -> nitro.Nitro:
    """A plane after 2 of 4 epochs, stopped by request."""
    run = make_run(plane(), max_epochs=4, checkpointer=TopK(k=4))
    run.on_phase(
        lambda e: e.run.request_stop() if (e.phase.value, e.epoch) == ("evaluating", 2) else None
    )
    return run.train()


@pytest.fixture
def whole(plane: Any, tmp_path: Path) -> nitro.Nitro:
    """The same plane after 4 epochs without a stop."""
    run = nitro.Nitro(plane(), max_epochs=4, checkpointer=TopK(k=4), run_dir=tmp_path / "whole")
    return run.train()


# Which record, as which run ------------------------------------------------------------------


def test_newest_record_goes_on_as_the_same_run(
    plane: Any, make_run: Any, half: nitro.Nitro, whole: nitro.Nitro
) -> None:
    run = make_run(plane(), max_epochs=4, checkpointer=TopK(k=4), resume="auto")
    assert (run.epoch, run.step) == (2, 8)
    assert "resumed from" in str(run.binding)

    run.train()

    _check_same(run, whole)
    entries = nitro.checkpoints(run.run_dir)
    assert [entry.epoch for entry in entries] == [1, 2, 3, 4]
    assert len({entry.run for entry in entries}) == 1
    assert [entry.stop_reason for entry in entries] == [None, "stopped", None, "completed"]
    assert all(entry.parent is None and entry.time for entry in entries)


def test_key_in_the_state_of_the_optimizer_comes_back(plane: Any, tmp_path: Path) -> None:
    class Noisy(plane):
        def optimizer(self, group: str) -> Any:
            return functools.partial(optax.noisy_sgd, key=jax.random.key(3))

    def build(name: str, **options: Any) -> nitro.Nitro:
        return nitro.Nitro(Noisy(), run_dir=tmp_path / name, progress=False, **options)

    whole = build("whole", max_epochs=3).train()
    build("part", max_epochs=1).train()

    _check_same(build("part", max_epochs=3, resume="auto").train(), whole)


def test_older_record_branches_off_as_a_new_run(
    plane: Any, make_run: Any, whole: nitro.Nitro
) -> None:
    second = nitro.checkpoints(whole.run_dir)[1]

    run = nitro.Nitro(
        plane(),
        max_epochs=4,
        run_dir=whole.run_dir,
        checkpointer=TopK(k=4),
        resume=whole.run_dir / "checkpoints" / second.name,
    )
    assert f"as a branch of {second.run}/{second.name}" in str(run.binding)
    run.train()

    _check_same(run, whole)
    entries = nitro.checkpoints(whole.run_dir)
    assert [entry.epoch for entry in entries] == [1, 2, 3, 4, 3, 4]
    assert {entry.parent for entry in entries[4:]} == {f"{second.run}/{second.name}"}
    assert entries[4].run != second.run


def test_record_of_another_directory_branches_off(
    plane: Any, tmp_path: Path, half: nitro.Nitro, whole: nitro.Nitro
) -> None:
    run = nitro.Nitro(plane(), max_epochs=4, run_dir=tmp_path / "new", resume=half.run_dir)
    run.train()

    _check_same(run, whole)
    assert [entry.epoch for entry in nitro.checkpoints(half.run_dir)] == [1, 2]
    steps = [json.loads(line).get("step") for line in _log(run) if '"train"' in line]
    assert steps == list(range(1, 17))


def _log(run: nitro.Nitro, name: str = "metrics.jsonl") -> list[str]:
    return (run.run_dir / name).read_text().splitlines()


def _logged_steps(lines: list[str]) -> list[int]:
    logged = [json.loads(line) for line in lines]
    return [line["step"] for line in logged if line.get("context") == "train"]


def test_branch_into_a_directory_with_another_run_takes_its_own_log_along(
    plane: Any, tmp_path: Path, half: nitro.Nitro, whole: nitro.Nitro
) -> None:
    other = nitro.Nitro(plane(), max_epochs=3, seed=3, run_dir=tmp_path / "other").train()
    before = _log(other)

    run = nitro.Nitro(plane(), max_epochs=4, run_dir=tmp_path / "other", resume=half.run_dir)
    run.train()

    _check_same(run, whole)
    assert _logged_steps(_log(run)) == list(range(1, 17))
    assert json.loads(_log(run)[0])["seed"] == 0
    assert _log(run, "metrics.1.jsonl") == before
    assert len(nitro.checkpoints(other.run_dir)) == 3 + 2


def test_run_that_goes_on_after_a_branch_finds_its_own_log_again(
    plane: Any, make_run: Any, half: nitro.Nitro
) -> None:
    first, last = nitro.checkpoints(half.run_dir)
    own = _log(half)
    branch = make_run(
        plane(), max_epochs=3, resume=half.run_dir / "checkpoints" / first.name
    ).train()
    of_branch = _log(branch)

    run = make_run(plane(), max_epochs=4, resume=f"#{last.run}").train()

    assert _logged_steps(_log(run)) == list(range(1, 17))
    assert _log(run)[: len(own) - 1] == own[:-1]  # all but the line that said it was over
    assert _log(run, "metrics.1.jsonl") == own
    assert _log(run, "metrics.2.jsonl") == of_branch


def test_run_that_goes_on_sets_aside_what_a_later_one_logged_behind_it(
    plane: Any, make_run: Any, half: nitro.Nitro
) -> None:
    run_id = nitro.checkpoints(half.run_dir)[-1].run
    make_run(plane(), seed=1).train()
    later = _log(half)
    assert _logged_steps(later) == list(range(1, 5))

    run = make_run(plane(), max_epochs=4, resume=run_id).train()

    assert _logged_steps(_log(run)) == list(range(1, 17))
    assert _log(run, "metrics.2.jsonl") == later
    assert sorted(path.name for path in run.run_dir.glob("run*.json")) == ["run.1.json", "run.json"]


@pytest.mark.parametrize("keeps", [0, 5, -2])
def test_log_that_was_edited_is_set_aside_and_begun_anew(
    plane: Any, make_run: Any, half: nitro.Nitro, whole: nitro.Nitro, keeps: int
) -> None:
    log = half.run_dir / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    edited = "".join(lines[keeps:]) if keeps else "".join(reversed(lines))
    log.write_text(edited)

    run = make_run(plane(), max_epochs=4, resume="auto").train()

    _check_same(run, whole)
    assert _logged_steps(_log(run)) == list(range(9, 17))
    assert (half.run_dir / "metrics.1.jsonl").read_text() == edited


@pytest.mark.parametrize("form", ["{dir}#{run}@latest", "{dir}#{run}", "{run}@latest", "{run}"])
def test_run_is_named_by_its_id(plane: Any, make_run: Any, half: nitro.Nitro, form: str) -> None:
    first = nitro.checkpoints(half.run_dir)[-1]
    make_run(plane(), seed=1).train()

    run = make_run(plane(), max_epochs=4, resume=form.format(dir=half.run_dir, run=first.run))

    assert (run.epoch, run.step) == (2, 8)
    assert run.train().epoch == 4
    assert nitro.checkpoints(half.run_dir)[-1].run == first.run


def test_best_of_a_run_is_found_by_its_id(plane: Any, make_run: Any, half: nitro.Nitro) -> None:
    first = nitro.checkpoints(half.run_dir)
    make_run(plane(), seed=1).train()

    run = make_run(plane(), data={}, checkpoint=f"{half.run_dir}#{first[0].run}@best")

    assert min(first, key=lambda entry: entry.score or 0).name in str(run.binding)


def test_unknown_run_lists_the_runs(plane: Any, make_run: Any, half: nitro.Nitro) -> None:
    known = nitro.checkpoints(half.run_dir)[0].run

    with pytest.raises(CheckpointError, match=rf"no run `12345678`[\s\S]*`{known}`"):
        make_run(plane(), resume=f"{half.run_dir}#12345678")


def test_bare_word_shows_the_form_to_use(plane: Any, make_run: Any, half: nitro.Nitro) -> None:
    with pytest.raises(
        CheckpointError, match=rf'`best` holds no record[\s\S]*"{half.run_dir}@best"'
    ):
        make_run(plane(), resume="best")


def test_auto_without_a_record_starts_anew(plane: Any, tmp_path: Path) -> None:
    with pytest.warns(NitroWarning, match="found no record") as told:
        run = nitro.Nitro(plane(), run_dir=tmp_path, progress=False, resume="auto")

    assert told[0].filename == __file__  # the user's own line, however deep the check is
    assert run.train().epoch == 1


def test_fresh_run_beside_others_is_announced(plane: Any, make_run: Any, half: nitro.Nitro) -> None:
    run = make_run(plane())

    assert re.search(r"run [0-9a-f]{8} is new beside 2 records of 1 earlier", str(run.binding))


def test_run_that_has_ended_returns_with_a_warning(
    plane: Any, make_run: Any, whole: nitro.Nitro
) -> None:
    with pytest.warns(
        NitroWarning, match=r"ended: epoch 4 of max_epochs=4 \(completed\)[\s\S]*above 4"
    ):
        run = make_run(plane(), max_epochs=4, resume=whole.run_dir)

    assert run.train().epoch == 4
    assert not (run.run_dir / "checkpoints").exists()


_KILLED_AT_THE_END = """
import os, signal, sys
import numpy as np
from flax import nnx
import nitro

class JSONLinesLogger(nitro.JSONLinesLogger):
    def finish(self, status, **more):
        if sys.argv[2] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        super().finish(status, **more)

class Line(nitro.Experiment):
    def build_data(self):
        x = np.linspace(0, 1, 8, dtype=np.float32)[:, None]
        return {name: nitro.ArrayLoader({"x": x}, 4) for name in ("train", "val")}
    def build_model(self, rngs):
        return nnx.Linear(1, 1, rngs=rngs)
    def forward(self, model, *, x):
        return model(x)
    def loss(self, y, *, x):
        return ((y - 5) ** 2).mean()

options = {"resume": "auto"} if sys.argv[2] == "resumed" else {}
# The loss falls, so that the first record, of the highest, is the best.
best = {"checkpointer": nitro.TopK(mode="max"), "restore_best": True}
run = nitro.Nitro(
    Line(), run_dir=sys.argv[1], max_epochs=2, logger=JSONLinesLogger(), **best, **options
)
run.train()
np.save(sys.argv[1] + "/kernel.npy", np.asarray(run.model.kernel[...]))
"""


def test_run_that_was_killed_behind_its_last_record_is_ended_by_the_next(
    tmp_path: Path, warm_python: Any
) -> None:
    script = tmp_path / "line.py"
    script.write_text(_KILLED_AT_THE_END)

    def launch(folder: str, how: str) -> int:
        return warm_python.run(script, tmp_path / folder, how, check=False).returncode

    assert launch("straight", "whole") == 0
    assert launch("cut", "killed") == -signal.SIGKILL
    assert not (tmp_path / "cut" / "kernel.npy").exists()
    assert launch("cut", "resumed") == 0

    def ended(folder: str) -> Any:
        lines = (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        logged = [{**line, "data_wait_frac": 0} for line in map(json.loads, lines)]
        run_file = json.loads((tmp_path / folder / "run.json").read_text())
        return [x for x in logged if x["type"] in ("metrics", "finish")], run_file["status"]

    assert ended("cut") == ended("straight")
    assert ended("cut")[1] == "completed"
    kernels = [np.load(tmp_path / folder / "kernel.npy") for folder in ("cut", "straight")]
    np.testing.assert_array_equal(*kernels)


def test_run_that_stopped_early_stays_stopped(plane: Any, make_run: Any) -> None:
    stop = nitro.EarlyStop(patience=1, min_delta=1e9)
    first = make_run(plane(), max_epochs=9, early_stop=stop).train()
    assert first.stop_reason == "early_stop"

    with pytest.warns(NitroWarning, match=r"\(early_stop\)[\s\S]*`early_stop=None`"):
        run = make_run(plane(), max_epochs=9, early_stop=stop, resume="auto")
    assert run.train().epoch == first.epoch

    on = make_run(plane(), max_epochs=first.epoch + 1, early_stop=None, resume="auto")
    assert on.train().epoch == first.epoch + 1


def test_run_that_stopped_early_goes_on_with_more_patience(plane: Any, make_run: Any) -> None:
    first = make_run(
        plane(), max_epochs=9, early_stop=nitro.EarlyStop(patience=1, min_delta=1e9)
    ).train()
    patient = nitro.EarlyStop(patience=4, min_delta=1e9)

    run = make_run(plane(), max_epochs=9, early_stop=patient, resume="auto").train()

    # Both epochs count alike: the first value is the best, and then nothing improves.
    assert (first.epoch, run.epoch, run.stop_reason) == (2, 5, "early_stop")


def test_run_may_be_prolonged(plane: Any, make_run: Any, half: nitro.Nitro) -> None:
    run = make_run(plane(), max_epochs=5, resume="auto")

    assert "horizon: 16 steps in the record, 20 now" in str(run.binding)
    assert run.train().epoch == 5


def test_prolonged_schedule_is_told(plane: Any, make_run: Any) -> None:
    schedules = {"learning_rate": lambda total: optax.cosine_decay_schedule(1e-2, total)}
    make_run(plane(), max_epochs=2, schedules=schedules).train()

    with pytest.warns(
        NitroWarning,
        match=r"8 steps in the record, 12 now. The schedules of `[^`]*learning_rate` are",
    ):
        make_run(plane(), max_epochs=3, schedules=schedules, resume="auto")


def test_handle_that_was_overtaken_overwrites_nothing(
    plane: Any, make_run: Any, half: nitro.Nitro
) -> None:
    late = make_run(plane(), max_epochs=3, resume="auto")
    make_run(plane(), max_epochs=4, checkpointer=TopK(k=4), resume="auto").train()
    before = nitro.checkpoints(half.run_dir), (half.run_dir / "metrics.jsonl").read_bytes()

    for overwrite in (late.train, late.checkpoint):
        with pytest.raises(
            CheckpointError, match=r"at step 8 of the run [0-9a-f]{8}.* step 16 since[\s\S]*\"auto"
        ):
            overwrite()

    after = nitro.checkpoints(half.run_dir), (half.run_dir / "metrics.jsonl").read_bytes()
    assert after == before
    # The directory is free for others.
    assert make_run(plane(), max_epochs=5, resume="auto").train().epoch == 5


def test_handle_without_an_optimizer_writes_no_record(
    plane: Any, make_run: Any, half: nitro.Nitro
) -> None:
    run = make_run(plane(), checkpoint=half.run_dir, data={})

    with pytest.raises(ConfigError, match=r"no split `train`[\s\S]*export_model"):
        run.checkpoint()
    assert make_run(plane(), max_epochs=4, resume="auto").epoch == 2


@pytest.mark.parametrize("phase", ["compiling", "training", "evaluating", "checkpointing"])
def test_record_that_a_monitor_asks_for_disturbs_nothing(
    plane: Any, make_run: Any, whole: nitro.Nitro, phase: str
) -> None:
    kept_out: list[str] = []

    def ask(event: Any) -> None:
        if event.phase.value == phase:
            event.run.checkpoint()
            with pytest.raises(CheckpointError, match="is in use") as refused:
                DirectoryLock(event.run.run_dir).acquire()
            kept_out.append(str(refused.value))

    run = make_run(plane(), max_epochs=4, steps_per_call=1, checkpointer=TopK(k=4))
    run.on_phase(ask)
    run.train()

    _check_same(run, whole)
    assert kept_out
    assert [e.epoch for e in nitro.checkpoints(run.run_dir) if e.score is not None] == [1, 2, 3, 4]


# The record's values --------------------------------------------------------------------------


def test_seed_of_the_record_wins(plane: Any, make_run: Any, half: nitro.Nitro, whole: Any) -> None:
    with pytest.warns(NitroWarning, match="`seed=7` is not used"):
        run = make_run(plane(), seed=7, max_epochs=4, resume="auto")

    _check_same(run.train(), whole)


def test_device_fields_come_back_unless_they_are_declared_anew(plane: Any, make_run: Any) -> None:
    class Scaled(plane):
        scale: nitro.Device[float] = 1.0

        def loss(self, height: Any, *, y: Any) -> Any:
            return self.scale * super().loss(height, y=y)

    run = make_run(Scaled(), max_epochs=1)
    run.set_device(scale=0.25).train()

    same = make_run(Scaled(), max_epochs=2, resume="auto")
    with pytest.warns(NitroWarning, match="scale: 1.0 → 3.0"):
        other = make_run(Scaled(scale=3.0), max_epochs=2, resume="auto")

    assert same.device_value("scale") == np.float32(0.25)
    assert other.device_value("scale") == np.float32(3.0)
    assert "not the record's: scale" in str(other.binding)


def test_resumed_handle_touches_no_file_before_it_trains(
    plane: Any, make_run: Any, half: nitro.Nitro
) -> None:
    before = (half.run_dir / "metrics.jsonl").read_bytes()

    make_run(plane(), max_epochs=4, resume="auto").validate()

    assert (half.run_dir / "metrics.jsonl").read_bytes() == before


# Refusals -------------------------------------------------------------------------------------


class Base(nitro.Experiment):
    """What the refusals start from: a helper, two layers, a group that is anchored."""

    width: nitro.GraphConst[int] = 4

    def build_data(self) -> Any:
        rng = np.random.default_rng(0)
        x = rng.normal(size=(8, 3)).astype(np.float32)
        return {"train": nitro.ArrayLoader({"x": x, "y": x.sum(1)}, 4)}

    def build_model(self, rngs: nnx.Rngs) -> Any:
        return nnx.Sequential(
            nnx.Linear(3, self.width, rngs=rngs),
            nnx.Dropout(0.5, rngs=rngs),
            nnx.Linear(self.width, 1, rngs=rngs),
        )

    def forward(self, model: Any, *, x: Any) -> Any:
        return model(x)[:, 0] * 1.0

    def loss(self, height: Any, *, y: Any) -> Any:
        return ((height - y) ** 2).mean()

    def decay_anchor(self, group: str) -> Any:
        return "init"


class OtherLoss(Base):
    def loss(self, height: Any, *, y: Any) -> Any:
        return abs(height - y).mean()


class OtherDropout(Base):
    def build_model(self, rngs: nnx.Rngs) -> Any:
        model = super().build_model(rngs)
        model.layers[1].rate = 0.25
        return model


class OtherLayer(Base):
    def build_model(self, rngs: nnx.Rngs) -> Any:
        model = super().build_model(rngs)
        model.layers[2] = nnx.Linear(self.width, 1, use_bias=False, rngs=rngs)
        return model


class OtherOptimizer(Base):
    def optimizer(self, group: str) -> Any:
        return optax.sgd


class OtherMomentum(Base):
    def optimizer(self, group: str) -> Any:
        return lambda learning_rate: optax.radam(learning_rate, b1=0.5)


class OtherAnchor(Base):
    def decay_anchor(self, group: str) -> Any:
        return {
            "layers.0.kernel": np.zeros((3, 4)),
            "layers.0.bias": np.zeros(4),
            "layers.2.kernel": np.zeros((4, 1)),
            "layers.2.bias": np.zeros(1),
        }


@pytest.fixture(scope="module")
def base_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("base")
    nitro.Nitro(Base(), run_dir=run_dir).train()
    return run_dir


@pytest.mark.parametrize(
    ("experiment", "words"),
    [
        (
            Base(width=5),
            r"GraphConst values:\n    width: 4 in the record, 5 now[\s\S]*record's values",
        ),
        (OtherLayer(), r"parameters:\n    `layers.2.bias`: float32\(1,\) in the record, gone now"),
        (OtherOptimizer(), r"optimizer's state:\n    `default[^\n]*gone now[\s\S]*checkpoint="),
        (OtherAnchor(), r"decay anchors \(SHA-256\):\n    group `default`: [0-9a-f]{12} in the"),
        (OtherLoss(), r"OtherLoss.loss[^\n]*\n[\s\S]*allow_code_change=True"),
        (OtherDropout(), r"rate'\]: 0.5 in the record, 0.25 now[\s\S]*allow_code_change=True"),
        (OtherMomentum(), r"optimizer[\s\S]*allow_code_change=True\)`; or start from the weights"),
    ],
    ids=["const", "layout", "optimizer", "anchor", "code", "structure", "hyperparameter"],
)
def test_what_would_be_another_run_is_refused(
    base_run: Path, tmp_path: Path, experiment: Any, words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        nitro.Nitro(experiment, run_dir=tmp_path, max_epochs=2, resume=base_run)


@pytest.mark.parametrize("experiment", [OtherLoss(), OtherDropout(), OtherMomentum()])
def test_changed_code_may_be_accepted(base_run: Path, tmp_path: Path, experiment: Any) -> None:
    with pytest.warns(NitroWarning, match="made of has changed"):
        run = nitro.Nitro(
            experiment, run_dir=tmp_path, max_epochs=2, resume=base_run, allow_code_change=True
        )

    assert run.train().epoch == 2


def test_weights_can_still_be_taken_from_what_cannot_be_resumed(
    base_run: Path, tmp_path: Path
) -> None:
    for experiment in (OtherOptimizer(), OtherAnchor(), OtherLoss()):
        assert nitro.Nitro(experiment, run_dir=tmp_path, checkpoint=base_run).step == 0


def test_other_logger_is_refused(base_run: Path, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="logged by JSONLinesLogger, this handle logs by Null"
    ):
        nitro.Nitro(Base(), run_dir=tmp_path, max_epochs=2, resume=base_run, logger=None)


@pytest.mark.parametrize(
    ("rows", "loader", "words"),
    [
        (25, {}, "batches_per_epoch: 4 in the record, 5 now"),
        (16, {"batch_size": 4}, "batch_size: 5 in the record, 4 now"),
        (22, {}, "num_samples: 20 in the record, 22 now"),
        (20, {"shuffle": False}, "shuffle: 1 in the record, 0 now"),
        (20, {"seed": 3}, "loader_seed: 0 in the record, 3 now"),
    ],
)
def test_other_epoch_is_refused_inside_an_epoch_only(
    plane: Any, points: Any, make_run: Any, rows: int, loader: dict[str, Any], words: str
) -> None:
    def data(count: int, **options: Any) -> Any:
        options = {"batch_size": 5, "shuffle": True, **options}
        return {"train": nitro.ArrayLoader(points(count, seed=0), **options)}

    run = make_run(plane(), max_epochs=2, data=data(20), steps_per_call=1)
    _stop_at_step(run, 1)
    run.train()

    with pytest.raises(CheckpointError, match=words):
        make_run(plane(), max_epochs=2, data=data(rows, **loader), resume="auto")
    make_run(plane(), max_epochs=2, data=data(20), resume="auto").train()
    with pytest.warns(NitroWarning, match=words):
        make_run(plane(), max_epochs=3, data=data(rows, **loader), resume="auto")


def test_other_batch_size_of_any_loader_is_refused_inside_an_epoch(
    plane: Any, points: Any, make_run: Any
) -> None:
    def data(rows: int) -> Any:
        return {"train": [points(rows, seed=n) for n in range(4)]}

    run = make_run(plane(), max_epochs=2, data=data(5), steps_per_call=1)
    _stop_at_step(run, 1)
    run.train()

    with pytest.raises(CheckpointError, match="batch_size: 5 in the record, 6 now"):
        make_run(plane(), max_epochs=2, data=data(6), resume="auto")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"resume": "auto", "checkpoint": "x"}, "Both `resume` and `checkpoint`"),
        ({"resume": "auto", "weights": {}}, "Both `resume` and `weights`"),
        ({"resume": 3}, "`resume` is 3"),
        ({"restore_optimizer": True}, "no record is given"),
        ({"w0": "weights"}, "takes its weights from `build_model`"),
        ({"w0": "init"}, "`w0` is 'init'"),
        ({"weights": 3}, r"`weights` is 3 \(int\)"),
        ({"restore_best": True, "checkpointer": None}, "`checkpointer` is None"),
    ],
)
def test_contradictions_are_refused(plane: Any, make_run: Any, options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_run(plane(), **options)


# Sources that cannot say where they stand -----------------------------------------------------


class Stream:
    """Batches in the same order each epoch; says where it stands if it may."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches_ = batches
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.batches_)

    def __iter__(self) -> Any:
        return iter(tuple(self.batches_))


class CountingStream(Stream):
    """Each epoch has another order, which only its own state knows."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__(batches)
        self.position = 0

    def __iter__(self) -> Any:
        while self.position < len(self):
            self.position += 1
            yield self.batches_[(self.epoch * 3 + self.position) % len(self)]
        self.epoch, self.position = self.epoch + 1, 0

    def get_state(self) -> Any:
        return {"epoch": self.epoch, "position": self.position, "token": b"\x00\xff"}

    def set_state(self, state: Any) -> None:
        assert state["token"] == b"\x00\xff"
        self.epoch, self.position = state["epoch"], state["position"]


def test_source_without_a_position_resumes_at_epoch_starts_only(
    plane: Any, make_run: Any, points: Any
) -> None:
    def make(**options: Any) -> nitro.Nitro:
        batches = [points(5, seed=n) for n in range(4)]
        with pytest.warns(NitroWarning, match="Stream has no position.*epoch starts only"):
            return make_run(
                plane(), max_epochs=3, steps_per_call=1, data={"train": Stream(batches)}, **options
            )

    run = make()
    assert "no position: runs resume at epoch starts only" in str(run.binding)
    _stop_at_step(run, 6)
    with pytest.warns(NitroWarning, match="No record of step [67]"):
        run.train()

    resumed = make(resume="auto")
    assert (resumed.epoch, resumed.step) == (1, 4)
    straight = nitro.Nitro(
        plane(),
        max_epochs=3,
        run_dir=run.run_dir.parent / "straight",
        data={"train": [points(5, seed=n) for n in range(4)]},
    )
    _check_same(resumed.train(), straight.train())


def test_record_on_request_inside_an_epoch_needs_a_position(
    plane: Any, make_run: Any, points: Any
) -> None:
    def make(**options: Any) -> nitro.Nitro:
        data = {"train": Stream([points(5, seed=n) for n in range(4)])}
        with pytest.warns(NitroWarning, match="Stream has no position"):
            return make_run(plane(), max_epochs=3, steps_per_call=1, data=data, **options)

    run = make()
    _stop_at_step(run, 6)
    with pytest.warns(NitroWarning, match="No record of step"):
        run.train()
    assert run.step % 4

    with pytest.warns(NitroWarning, match="No record of step"):
        run.checkpoint()

    # What there is stays, and can be resumed.
    assert [entry.step for entry in nitro.checkpoints(run.run_dir)] == [4]
    assert make(resume="auto").train().epoch == 3


def _stop_at_step(run: nitro.Nitro, step: int) -> None:
    logger = run.logger
    log = logger.metrics

    def metrics(values: Any, **keys: Any) -> None:
        log(values, **keys)
        if keys["step"] >= step:
            run.request_stop()

    logger.metrics = metrics


def _grain(points: Any) -> Any:
    grain = pytest.importorskip("grain", reason="needs the group `loaders`")
    samples = points(20, seed=0)
    rows = [{"x": samples["x"][i], "y": samples["y"][i]} for i in range(20)]
    return grain.MapDataset.source(rows).seed(3).shuffle().batch(5)


@pytest.mark.parametrize("kind", ["list", "counting", "grain"])
def test_position_of_a_source_comes_back(
    plane: Any, tmp_path: Path, points: Any, kind: str
) -> None:
    def source() -> Any:
        batches = [points(5, seed=n) for n in range(4)]
        return {"list": list, "counting": CountingStream, "grain": lambda _: _grain(points)}[kind](
            batches
        )

    def make(name: str, **options: Any) -> nitro.Nitro:
        options |= {"steps_per_call": 1, "max_epochs": 3, "run_dir": tmp_path / name}
        return nitro.Nitro(plane(), data={"train": source()}, **options)

    straight = make("straight").train()
    stopped = make("stopped")
    _stop_at_step(stopped, 6)
    stopped.train()
    assert straight.step == 12
    assert 6 <= stopped.step < 8

    _check_same(make("stopped", resume="auto").train(), straight)


def test_state_that_no_record_can_hold_is_refused(plane: Any, make_run: Any, points: Any) -> None:
    class Odd(CountingStream):
        def get_state(self) -> Any:
            return {**super().get_state(), "rng": object()}

    run = make_run(plane(), data={"train": Odd([points(5, seed=0)])})

    with pytest.raises(
        CheckpointError, match="`get_state` of the training loader returned a object"
    ):
        run.train()


def test_unchanged_run_goes_on_without_a_warning(
    plane: Any, make_run: Any, half: nitro.Nitro, recwarn: pytest.WarningsRecorder
) -> None:
    assert make_run(plane(), max_epochs=4, resume="auto").train().epoch == 4
    assert not recwarn.list


def test_resume_true_is_told_what_to_write(plane: Any, make_run: Any) -> None:
    with pytest.raises(ConfigError, match=r'`resume` is True[\s\S]*fix: write `resume="auto"`'):
        make_run(plane(), resume=True)
