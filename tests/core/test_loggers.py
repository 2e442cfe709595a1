"""TensorBoard and MLflow, read back from what they really write; and several loggers at once."""

from __future__ import annotations

import http.server
import json
import shutil
import signal
import socket
import struct
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nitro
from nitro import JSONLinesLogger, MLflowLogger, MultiLogger, TensorBoardLogger
from nitro.errors import (
    CheckpointError,
    ConfigError,
    DivergenceError,
    MissingPackageError,
    NitroWarning,
)


class Recorder:
    """A logger that keeps what it is told."""

    def __init__(self, state: Any = None) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.state = state

    def metrics(self, values: Any, *, context: Any, step: Any, epoch: Any, **more: Any) -> Any:
        self.calls.append(("metrics", (context, step)))

    def params(self, values: Any, **more: Any) -> Any:
        self.calls.append(("params", dict(values)))

    def tags(self, values: Any, **more: Any) -> Any:
        self.calls.append(("tags", values))

    def other(self, name: Any, value: Any, **more: Any) -> Any:
        self.calls.append((f"other {name}", value))

    def confusion(self, matrix: Any, **more: Any) -> Any:
        self.calls.append(("confusion", matrix))

    def finish(self, status: Any, **more: Any) -> Any:
        self.calls.append(("finish", status))

    def run_id(self) -> Any:
        return "id-7"

    def run_url(self) -> Any:
        return None

    def logger_state(self) -> Any:
        return self.state

    def reattach(self, state: Any) -> Any:
        self.calls.append(("reattach", state))

    def verbs(self) -> list[str]:
        return [verb for verb, _ in self.calls]


def _events(directory: Path) -> Iterator[Any]:
    """The events of all files in a directory, oldest file first, read as TFRecords."""
    event = pytest.importorskip("tensorboardX.proto.event_pb2").Event
    for path in sorted(directory.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            yield event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def _scalars(directory: Path, tag: str) -> list[tuple[int, float]]:
    return [
        (event.step, value.simple_value)
        for event in _events(directory)
        for value in event.summary.value
        if value.tag == tag
    ]


def _texts(directory: Path, tag: str) -> list[str]:
    return [
        value.tensor.string_val[0].decode()
        for event in _events(directory)
        for value in event.summary.value
        if value.tag.startswith(tag) and value.tensor.string_val
    ]


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of a store in the test's own folder."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return mlflow.MlflowClient(tracking_uri=str(tmp_path / "mlruns"))


@pytest.fixture
def mlflow_logger(tmp_path: Path, client: Any) -> MLflowLogger:
    return MLflowLogger("planes", tracking_uri=tmp_path / "mlruns")


def test_all_missing_verbs_are_listed(plane: Any, make_run: Any) -> None:
    class Half:
        def metrics(self, values: Any, **more: Any) -> Any: ...

        def finish(self, status: Any) -> Any: ...

    with pytest.raises(
        ConfigError, match=r"Half lacks params, tags, other, confusion, run_id, run_url, logger_st"
    ):
        make_run(plane(), logger=Half())


@pytest.mark.parametrize("logger", ["tensorboard", JSONLinesLogger])
def test_name_or_class_of_a_logger_is_refused(plane: Any, make_run: Any, logger: Any) -> None:
    with pytest.raises(ConfigError, match=r"`logger` is .*(tensorboard|JSONLines)[\s\S]*make one"):
        make_run(plane(), logger=logger)


def test_params_and_binding_come_first_and_finish_last_and_once(plane: Any, make_run: Any) -> None:
    logger = Recorder()

    run = make_run(plane(), max_epochs=2, logger=logger).train()
    run.close()

    verbs = logger.verbs()
    assert verbs[:2] == ["params", "other binding"]
    assert "max_epochs = 2 (keyword)" in logger.calls[1][1]
    assert verbs[-1] == "finish"
    assert verbs.count("finish") == 1
    assert logger.calls[-1] == ("finish", "completed")


def test_params_hold_the_device_values_of_now(plane: Any, make_run: Any) -> None:
    class Rated(plane):
        rate: nitro.Device[float] = 0.1

    logger = Recorder()
    run = make_run(Rated(), logger=logger)
    run.set_device(rate=0.3)

    run.train()

    assert logger.calls[0][1]["rate"] == 0.3


@pytest.mark.parametrize("reason", ["early_stop", "stopped"])
def test_log_says_in_the_words_of_the_handle_how_a_run_ended(
    plane: Any, make_run: Any, reason: str
) -> None:
    logger = Recorder()
    stopper = types.SimpleNamespace(should_stop=lambda epoch, metrics: reason == "early_stop")
    run = make_run(plane(), max_epochs=3, logger=logger, early_stop=stopper)
    run.on_phase(lambda event: event.metrics and reason == "stopped" and run.request_stop())

    run.train()

    assert run.stop_reason == reason
    assert logger.calls[-1] == ("finish", reason)


def test_an_error_finishes_as_failed_and_is_raised_whatever_finish_does(
    plane: Any, make_run: Any
) -> None:
    class Diverging(plane):
        def loss(self, height: Any, *, y: Any) -> Any:
            return super().loss(height, y=y) * float("nan")

    class Failing(Recorder):
        def finish(self, status: Any, **more: Any) -> Any:
            super().finish(status)
            raise OSError("disk full")

    logger = Failing()
    with (
        pytest.raises(DivergenceError),
        pytest.warns(
            nitro.errors.NitroWarning, match="ending the logger raised OSError: disk full"
        ),
    ):
        make_run(Diverging(), logger=logger).train()

    assert [call for call in logger.calls if call[0] == "finish"] == [("finish", "failed")]


class Blocks(Recorder):
    """A recorder that takes the steps of a call at once."""

    def metrics_block(self, columns: Any, *, context: Any, first_step: Any, **more: Any) -> Any:
        self.calls.append(("block", (context, first_step, {**columns})))


def test_a_logger_with_blocks_gets_the_steps_of_a_call_at_once(plane: Any, make_run: Any) -> None:
    logger, lines = Blocks(), JSONLinesLogger()

    run = make_run(
        plane(), max_epochs=2, logger=MultiLogger(logger, lines), steps_per_call=3
    ).train()

    blocks = [told for verb, told in logger.calls if verb == "block"]
    assert [(context, first) for context, first, _ in blocks] == [
        *[("train", step) for step in (1, 4, 5, 8)]
    ]
    losses = [loss for *_, columns in blocks for loss in columns["loss"]]
    logged = _lines(run.run_dir / "metrics.jsonl")
    assert losses == [line["loss"] for line in logged if line.get("context") == "train"]
    contexts = [told[0] for verb, told in logger.calls if verb == "metrics"]
    assert contexts == ["data", "val"] * 2


def test_a_logger_that_changes_metrics_only_gets_each_step(
    plane: Any, make_run: Any, tmp_path: Path
) -> None:
    class Halved(JSONLinesLogger):
        def metrics(self, values: Any, **more: Any) -> None:
            super().metrics({name: value / 2 for name, value in values.items()}, **more)

    run = make_run(
        plane(), logger=MultiLogger(JSONLinesLogger(), Halved(tmp_path / "half.jsonl"))
    ).train()

    whole = _lines(run.run_dir / "metrics.jsonl")
    half = _lines(tmp_path / "half.jsonl")
    assert [line["loss"] / 2 for line in whole if line.get("context") == "train"] == [
        line["loss"] for line in half if line.get("context") == "train"
    ]
    assert _steps(half) == [*range(1, 5)]


def test_a_loss_that_diverges_inside_a_call_leaves_the_steps_before_it_in_the_log(
    plane: Any, make_run: Any
) -> None:
    class Diverging(plane):
        rate: nitro.Device[float] = 1.0

        def loss(self, height: Any, *, y: Any) -> Any:
            return super().loss(height, y=y) / self.rate

    # Step 3 divides by zero, and so do those behind it.
    schedules = {"rate": lambda _: lambda step: 1.0 * (step < 2)}
    run = make_run(Diverging(), schedules=schedules, steps_per_call=4)
    with pytest.raises(DivergenceError, match=r"The loss is (inf|nan) at step 3 of epoch 1"):
        run.train()

    assert _steps(_lines(run.run_dir / "metrics.jsonl")) == [1, 2]


def test_logger_is_built_last_so_a_failed_setup_leaves_nothing(plane: Any, make_run: Any) -> None:
    built: list[Recorder] = []

    class Logged(plane):
        def logger(self) -> Any:
            built.append(Recorder())
            return built[-1]

    with pytest.raises(ConfigError, match="early_stop"):
        make_run(Logged(), early_stop="never")
    assert built == []

    run = make_run(Logged())
    assert len(built) == 1
    assert run.logger is built[0]


def test_live_logger_state_is_refused_with_the_loggers_name(plane: Any, make_run: Any) -> None:
    with pytest.raises(ConfigError, match=r"`Recorder.logger_state` returned what no record"):
        make_run(plane(), logger=Recorder(state=object())).train()


def test_resume_reattaches_before_anything_is_logged(plane: Any, make_run: Any) -> None:
    make_run(plane(), max_epochs=1, logger=Recorder(state={"at": 3})).train()
    logger = Recorder()

    make_run(plane(), max_epochs=2, logger=logger, resume="auto").train()

    assert logger.calls[0] == ("reattach", {"at": 3})


def test_tensorboard_holds_scalars_parameters_and_outcome(plane: Any, make_run: Any) -> None:
    pytest.importorskip("tensorboardX")

    class Sized(plane):
        width: int = 7

    run = make_run(Sized(), max_epochs=2, logger=TensorBoardLogger()).train()

    directory = run.run_dir / "tensorboard"
    train = _scalars(directory, "train/loss")
    assert [step for step, _ in train] == [*range(1, 9)]
    assert _scalars(directory, "val/val_loss") == [
        (row["step"], pytest.approx(row["val_loss"], rel=1e-6)) for row in run.history
    ]
    assert [value for _, value in _scalars(directory, "epoch")] == [1, 2]
    assert "| width | 7 |" in _texts(directory, "params")[0]
    assert "max_epochs = 2 (keyword)" in _texts(directory, "other/binding")[0]
    assert _texts(directory, "status") == ["completed"]
    tags = {value.tag for event in _events(directory) for value in event.summary.value}
    assert {"_hparams_/experiment", "_hparams_/session_start_info"} <= tags


def test_tensorboard_has_on_disk_what_a_record_tells_of(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    logger = TensorBoardLogger(tmp_path)
    losses = [1 / step for step in range(1, 301)]

    logger.metrics_block({"loss": losses}, context="train", first_step=1, epoch=1)
    state = logger.logger_state()
    on_disk = _scalars(tmp_path, "train/loss")
    logger.finish("completed")

    assert state["step"] == 300
    assert [step for step, _ in on_disk] == [*range(1, 301)]
    assert [value for _, value in on_disk] == pytest.approx(losses, rel=1e-6)
    assert [step for step, _ in _scalars(tmp_path, "epoch")] == [1]


def test_tensorboard_writes_nothing_before_training(plane: Any, make_run: Any) -> None:
    pytest.importorskip("tensorboardX")

    run = make_run(plane(), logger=TensorBoardLogger())

    assert not (run.run_dir / "tensorboard").exists()


def test_resumed_tensorboard_purges_what_came_after_the_record(plane: Any, make_run: Any) -> None:
    pytest.importorskip("tensorboardX")
    session_log = pytest.importorskip("tensorboardX.proto.event_pb2").SessionLog
    run = make_run(plane(), max_epochs=1, logger=TensorBoardLogger()).train()

    make_run(plane(), max_epochs=2, logger=TensorBoardLogger(), resume="auto").train()

    directory = run.run_dir / "tensorboard"
    starts = [e.step for e in _events(directory) if e.session_log.status == session_log.START]
    assert starts == [5]
    assert [step for step, _ in _scalars(directory, "train/loss")] == [*range(1, 9)]


def test_tensorboard_refuses_to_resume_into_another_directory(
    plane: Any, make_run: Any, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboardX")
    make_run(plane(), max_epochs=1, logger=TensorBoardLogger()).train()

    with pytest.raises(CheckpointError, match=r"another directory[\s\S]*fix: pass `TensorBoardLog"):
        make_run(
            plane(), max_epochs=2, logger=TensorBoardLogger(tmp_path / "else"), resume="auto"
        ).train()
    assert not (tmp_path / "else").exists()


def test_confusion_and_tags_become_text(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    logger = TensorBoardLogger(tmp_path)

    logger.tags({"owner": "me"})
    logger.confusion([[1, 2], [3, 4]], step=3, epoch=1)
    logger.other("note", {"a": float("nan")})
    logger.finish("early_stop")

    assert _texts(tmp_path, "tags/owner") == ["me"]
    assert "| 3 | 4 |" in _texts(tmp_path, "confusion")[0]
    assert "null" in _texts(tmp_path, "other/note")[0]


def test_mlflow_holds_scalars_parameters_and_outcome(
    plane: Any, make_run: Any, mlflow_logger: MLflowLogger, client: Any
) -> None:
    class Sized(plane):
        width: int = 7

    run = make_run(Sized(), max_epochs=2, logger=mlflow_logger).train()

    stored = client.get_run(run.logger.run_id())
    assert stored.info.status == "FINISHED"
    assert stored.data.params["width"] == "7"
    assert stored.data.tags["nitro.status"] == "completed"
    points = client.get_metric_history(stored.info.run_id, "train/loss")
    assert [point.step for point in points] == [*range(1, 9)]
    assert stored.data.metrics["val/val_loss"] == run.history[2]["val_loss"]
    assert stored.data.metrics["epoch"] == 2
    assert client.get_experiment(stored.info.experiment_id).name == "planes"
    assert [f.path for f in client.list_artifacts(stored.info.run_id)] == ["binding.txt"]


def test_mlflow_run_that_fails_is_marked(
    plane: Any, make_run: Any, mlflow_logger: MLflowLogger, client: Any
) -> None:
    class Diverging(plane):
        def loss(self, height: Any, *, y: Any) -> Any:
            return super().loss(height, y=y) * float("nan")

    run = make_run(Diverging(), logger=mlflow_logger)
    with pytest.raises(DivergenceError):
        run.train()

    assert client.get_run(run.logger.run_id()).info.status == "FAILED"


def test_resume_continues_the_same_mlflow_run(
    plane: Any, make_run: Any, tmp_path: Path, mlflow_logger: MLflowLogger, client: Any
) -> None:
    first = make_run(plane(), max_epochs=1, logger=mlflow_logger).train()
    again = MLflowLogger("planes", tracking_uri=tmp_path / "mlruns")

    second = make_run(plane(), max_epochs=2, logger=again, resume="auto").train()

    run_id = first.logger.run_id()
    assert second.logger.run_id() == run_id
    points = client.get_metric_history(run_id, "train/loss")
    assert [point.step for point in points] == [*range(1, 9)]
    stored = client.get_run(run_id)
    assert stored.data.params["max_epochs"] == "1"
    assert stored.data.tags["changed.max_epochs"] == "2"
    assert stored.info.status == "FINISHED"


def test_mlflow_run_that_is_gone_is_refused(
    plane: Any, make_run: Any, tmp_path: Path, mlflow_logger: MLflowLogger
) -> None:
    make_run(plane(), max_epochs=1, logger=mlflow_logger).train()

    elsewhere = MLflowLogger("planes", tracking_uri=tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"does not have\.[\s\S]*tracking_uri"):
        make_run(plane(), max_epochs=2, logger=elsewhere, resume="auto").train()
    assert [e.name for e in elsewhere.client.search_experiments()] == ["Default"]


def test_local_mlflow_store_needs_no_setting_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "")  # so that it is put back afterwards
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    logger = MLflowLogger("planes", tracking_uri=tmp_path / "mlruns")

    with pytest.warns(NitroWarning, match=r"gets `val/acc@5 \(%\)` as `val/acc_5 ___-"):
        logger.metrics({"acc@5 (%)": 1.0}, context="val", step=1, epoch=1)
    logger.confusion([[1]], step=1, epoch=1)
    logger.other("facts", {"a": 1})
    logger.tags({"owner": "me"})
    logger.finish("early_stop")

    stored = logger.client.get_run(logger.run_id())
    (value,) = (v for n, v in stored.data.metrics.items() if n.startswith("val/acc_5 ___-"))
    assert value == 1.0
    assert stored.data.tags["owner"] == "me"
    assert logger.run_url() is None


def test_mlflow_page_is_the_runs_on_a_server() -> None:
    pytest.importorskip("mlflow")
    logger = MLflowLogger("planes", tracking_uri="https://mlflow.example/")
    logger._run_id, logger._experiment_id = "r1", "e1"

    assert logger.run_url() == "https://mlflow.example/#/experiments/e1/runs/r1"


@pytest.mark.parametrize(
    ("logger", "extra"), [(TensorBoardLogger, "tensorboard"), (MLflowLogger, "mlflow")]
)
def test_missing_package_names_the_command(
    monkeypatch: pytest.MonkeyPatch, logger: Any, extra: str
) -> None:
    def refuse(name: str, *rest: Any) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", refuse)

    with pytest.raises(MissingPackageError, match=rf'pip install "nitro-core\[{extra}\]"'):
        logger()


def test_several_loggers_get_everything_and_resume_together(
    plane: Any, make_run: Any, tmp_path: Path
) -> None:
    recorder = Recorder(state={"at": 1})
    run = make_run(plane(), logger=MultiLogger(JSONLinesLogger(), recorder)).train()
    run.logger.confusion([[1]], step=4, epoch=1)
    run.logger.loggers[0].close()  # what is logged behind the end opens the file again
    lines = (run.run_dir / "metrics.jsonl").read_text().splitlines()

    again = Recorder()
    make_run(
        plane(), max_epochs=2, logger=MultiLogger(JSONLinesLogger(), again), resume="auto"
    ).train()

    assert json.loads(lines[-2])["type"] == "finish"
    assert recorder.calls[-1] == ("confusion", [[1]])
    assert run.logger.run_id() == "id-7"
    assert again.calls[0] == ("reattach", {"at": 1})
    with pytest.raises(CheckpointError, match=r"fix: pass `MultiLogger\(JSONLinesLogger\(\), Rec"):
        make_run(plane(), max_epochs=3, logger=MultiLogger(Recorder()), resume="auto").train()


_KILLED = """
import os, signal, sys
from pathlib import Path
from conftest import Plane
from test_loggers import Recorder
import nitro

class Killer(Recorder):
    def metrics(self, values, *, context, step, epoch, **more):
        if context == "val":
            os.kill(os.getpid(), signal.SIGKILL)

directory = Path(sys.argv[1])
logger = nitro.MultiLogger(
    nitro.JSONLinesLogger(),
    nitro.TensorBoardLogger(),
    nitro.MLflowLogger("planes", tracking_uri=directory / "mlruns"),
    Killer(),
)
nitro.Nitro(Plane(), run_dir=directory / "run", max_epochs=2, logger=logger, progress=False).train()
"""


class Killer(Recorder):
    """Kills nobody: stands where the one of the killed process stood."""


@pytest.fixture
def killed_dir(tmp_path: Path, client: Any, warm_python: Any) -> Path:
    """The run of a process that was killed after an epoch was logged, before its record."""
    pytest.importorskip("tensorboardX")
    done = warm_python.run("-c", _KILLED, tmp_path, cwd=Path(__file__).parent, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert nitro.checkpoints(tmp_path / "run") == []
    return tmp_path


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _steps(lines: list[dict[str, Any]]) -> list[int]:
    return [line["step"] for line in lines if line.get("context") == "train"]


def _shown(directory: Path) -> list[Any]:
    """The events that TensorBoard shows: a session that starts at a step hides all from there."""
    start = pytest.importorskip("tensorboardX.proto.event_pb2").SessionLog.START
    shown: list[Any] = []
    for event in _events(directory):
        if event.session_log.status == start:
            shown = [earlier for earlier in shown if earlier.step < event.step]
        shown.append(event)
    return [(e.step, value.tag) for e in shown for value in e.summary.value]


def test_run_killed_before_its_first_record_starts_all_its_logs_over(
    plane: Any, make_run: Any, killed_dir: Path, client: Any
) -> None:
    mlflow_logger = MLflowLogger("planes", tracking_uri=killed_dir / "mlruns")
    logger = MultiLogger(JSONLinesLogger(), TensorBoardLogger(), mlflow_logger, Killer())
    with pytest.warns(NitroWarning, match="found no record"):
        run = make_run(plane(), max_epochs=2, logger=logger, resume="auto")
    run.train()

    lines = _lines(run.run_dir / "metrics.jsonl")
    assert _steps(lines) == [*range(1, 9)]
    assert [line["type"] for line in lines if line["type"] != "metrics"] == [
        "params",
        "other",
        "finish",
    ]
    assert _steps(_lines(run.run_dir / "metrics.1.jsonl")) == [*range(1, 5)]

    directory = run.run_dir / "tensorboard"
    shown = _shown(directory)
    assert [step for step, tag in shown if tag == "train/loss"] == [*range(1, 9)]
    texts = [tag.partition("/")[0] for _, tag in shown if not tag.startswith(("train", "val"))]
    assert texts.count("params") == texts.count("status") == 1
    assert len(_scalars(directory, "train/loss")) == 4 + 8  # the killed one's are there still

    (experiment,) = [e for e in client.search_experiments() if e.name == "planes"]
    ids = {found.info.run_id for found in client.search_runs([experiment.experiment_id])}
    steps = {i: [p.step for p in client.get_metric_history(i, "train/loss")] for i in ids}
    new = run.logger.run_id()
    assert steps.pop(new) == [*range(1, 9)]
    assert list(steps.values()) == [[*range(1, 5)]]
    assert client.get_run(new).info.status == "FINISHED"


def test_record_from_before_the_first_step_knows_of_the_new_log_only(
    plane: Any, make_run: Any, killed_dir: Path
) -> None:
    def make(**options: Any) -> nitro.Nitro:
        mlflow_logger = MLflowLogger("planes", tracking_uri=killed_dir / "mlruns")
        logger = MultiLogger(JSONLinesLogger(), TensorBoardLogger(), mlflow_logger, Killer())
        return make_run(plane(), max_epochs=1, logger=logger, **options)

    with pytest.warns(NitroWarning, match="found no record"):
        run = make(resume="auto")
    run.checkpoint()
    (entry,) = nitro.checkpoints(run.run_dir)
    record = shutil.copytree(run.run_dir / "checkpoints" / entry.name, killed_dir / "record")
    run.train()

    make(resume=record).train()

    assert _steps(_lines(run.run_dir / "metrics.jsonl")) == [*range(1, 5)]
    assert _steps(_lines(run.run_dir / "metrics.2.jsonl")) == [*range(1, 5)]
    shown = _shown(run.run_dir / "tensorboard")
    assert [step for step, tag in shown if tag == "train/loss"] == [*range(1, 5)]


def test_several_loggers_set_aside_what_a_branch_cuts_off(plane: Any, make_run: Any) -> None:
    def logger() -> MultiLogger:
        return MultiLogger(JSONLinesLogger(), JSONLinesLogger(run_dir / "more.jsonl"))

    run_dir = make_run(plane()).run_dir
    make_run(plane(), max_epochs=3, logger=logger()).train()
    before = {name: (run_dir / name).read_text() for name in ("metrics.jsonl", "more.jsonl")}
    first = nitro.checkpoints(run_dir)[0]

    branch = make_run(
        plane(), max_epochs=2, logger=logger(), resume=run_dir / "checkpoints" / first.name
    )
    branch.train()

    assert (run_dir / "metrics.1.jsonl").read_text() == before["metrics.jsonl"]
    assert (run_dir / "more.1.jsonl").read_text() == before["more.jsonl"]
    assert _steps(_lines(run_dir / "more.jsonl")) == [*range(1, 9)]


def test_all_loggers_are_finished_though_one_raises() -> None:
    class Failing(Recorder):
        def finish(self, status: Any, **more: Any) -> Any:
            raise OSError("disk full")

    last = Recorder()
    with pytest.raises(OSError, match="disk full"):
        MultiLogger(Failing(), last).finish("completed")

    assert last.calls == [("finish", "completed")]


@pytest.mark.parametrize("loggers", [(), (None,)])
def test_multi_logger_of_nothing_is_refused(loggers: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match="one or more loggers"):
        MultiLogger(*loggers)


def test_loggers_without_a_place_say_how_to_give_one() -> None:
    pytest.importorskip("tensorboardX")

    with pytest.raises(ConfigError, match=r'TensorBoardLogger\("tensorboard"\)'):
        TensorBoardLogger().tags({"a": "b"})


def _metrics_named(plane: Any, *names: str) -> Any:
    def metrics(self: Any, height: Any, *, y: Any) -> Any:
        del self, height, y
        return {name: (float(index), 1) for index, name in enumerate(names)}

    return type("Named", (plane,), {"metrics": metrics})()


@pytest.mark.parametrize(
    "names",
    [
        ("P@1", "P:1", "P_1"),
        ("..", "a//b", "/a", "a/..", "b/"),
        ("", ".", "x" * 300, "x" * 301),
        ("a", "a/b", "a/b/c"),
        ("größe", "größe " * 40),
    ],
)
def test_mlflow_keeps_metrics_apart_whatever_their_names(
    plane: Any, make_run: Any, mlflow_logger: MLflowLogger, client: Any, names: Any
) -> None:
    run = make_run(_metrics_named(plane, *names), logger=mlflow_logger, checkpointer=None)

    with pytest.warns(NitroWarning, match="MLflow does not take every name: it gets") as told:
        run.train()

    stored = client.get_run(run.logger.run_id()).data.metrics
    values = sorted(value for name, value in stored.items() if name.startswith("val/"))
    assert values == [float(index) for index in range(len(names))]
    assert len([w for w in told if "MLflow does not take" in str(w.message)]) == 1


def test_mlflow_keeps_a_name_that_it_takes(
    plane: Any, make_run: Any, mlflow_logger: MLflowLogger, client: Any
) -> None:
    names = ("acc", "iou/cat", "top 5", "f-1.0")
    run = make_run(_metrics_named(plane, *names), logger=mlflow_logger, checkpointer=None).train()

    stored = client.get_run(run.logger.run_id()).data.metrics
    assert {f"val/{name}" for name in names} <= set(stored)


def test_tensorboard_keeps_names_apart(plane: Any, make_run: Any, tmp_path: Path) -> None:
    experiment = _metrics_named(plane, "P@1", "P:1")
    make_run(experiment, logger=TensorBoardLogger(tmp_path), checkpointer=None).train()

    assert [v for _, v in _scalars(tmp_path, "val/P@1")] == [0.0]
    assert [v for _, v in _scalars(tmp_path, "val/P:1")] == [1.0]


def test_metric_with_a_long_name_ranks_records(plane: Any, make_run: Any) -> None:
    name = "m" * 300
    policy = nitro.TopK(metric=name, mode="max")
    run = make_run(_metrics_named(plane, "a", name), checkpointer=policy).train()

    (entry,) = nitro.checkpoints(run.run_dir)
    assert (entry.metric, entry.score) == (name, 1.0)


@pytest.mark.parametrize("listens", [True, False])
@pytest.mark.parametrize("wrap", [lambda one: one, nitro.MultiLogger])
def test_mlflow_server_that_does_not_answer_is_told_at_setup(
    plane: Any, make_run: Any, monkeypatch: pytest.MonkeyPatch, listens: bool, wrap: Any
) -> None:
    monkeypatch.setattr("nitro._logs._mlflow._ANSWERS_WITHIN_S", 0.5)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listens:
            server.listen()  # takes the connection, and says nothing
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"

        with pytest.raises(ConfigError, match=f"`{uri}` does not answer: ") as error:
            make_run(plane(), logger=wrap(MLflowLogger(tracking_uri=uri)))

        assert 'MLflowLogger(tracking_uri="mlruns")' in error.value.fix
        assert make_run(plane(), logger=MLflowLogger(tracking_uri=uri), data={}).step == 0


def test_mlflow_server_that_answers_anything_is_there() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        MLflowLogger(tracking_uri=f"http://127.0.0.1:{server.server_port}").check_ready()
        thread.join()
