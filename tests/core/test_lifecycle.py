"""Phases, monitors, graceful stops, early stopping and stop reasons."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

import nitro
from nitro import EarlyStop, Phase
from nitro.errors import ConfigError, DivergenceError, NitroWarning


class Line(nitro.Experiment):
    """Fits a line; `val_loss` falls for as long as it trains."""

    max_epochs: int = 4
    device_data: bool | None = None

    def build_data(self):
        x = np.linspace(-1, 1, 40, dtype=np.float32)[:, None]
        arrays = {"x": x, "y": 3 * x[:, 0]}
        return {
            "train": nitro.ArrayLoader(arrays, 4, shuffle=True, device=self.device_data),
            "val": nitro.ArrayLoader(arrays, 8),
        }

    def build_model(self, rngs):
        return nnx.Linear(1, 1, rngs=rngs)

    def forward(self, model, *, x):
        return model(x)[:, 0]

    def loss(self, height, *, y):
        return ((height - y) ** 2).mean()


class Scripted:
    """Stops after an epoch of its own choosing, and remembers what it was asked."""

    def __init__(self, stop_at: int) -> None:
        self.stop_at = stop_at
        self.asked: list[int] = []

    def should_stop(self, epoch, metrics):
        self.asked.append(epoch)
        return epoch >= self.stop_at


@pytest.fixture
def handle(tmp_path):
    def make(experiment=None, **options) -> nitro.Nitro:
        options = {"run_dir": tmp_path, "checkpointer": None, **options}
        return nitro.Nitro(experiment or Line(), **options)

    return make


def log_lines(run):
    return [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_goes_through_its_phases_in_order(handle):
    run = handle(Line(max_epochs=1), checkpointer=nitro.TopK())
    seen = []
    run.on_phase(lambda event: seen.append(event.phase.value))

    run.train()

    assert seen == [
        "training", "compiling", "training", "evaluating", "training", "checkpointing",
        "training", "done", "idle",
    ]  # fmt: skip
    assert run.phase is Phase.DONE


def test_the_way_out_of_evaluation_carries_the_metrics(handle):
    run = handle(Line(max_epochs=2))
    events = []
    run.on_phase(events.append)

    run.train()

    told = [(e.epoch, e.metrics["val_loss"]) for e in events if e.metrics]
    assert told == [(row["epoch"], row["val_loss"]) for row in run.history]
    assert all(e.before is Phase.EVALUATING and e.run is run for e in events if e.metrics)


def test_a_monitor_of_the_process_sees_every_handle_until_it_leaves(handle):
    seen = []
    leave = nitro.on_phase(lambda event: seen.append(event.run))
    first, second = handle(), handle()

    first.validate()
    leave()
    leave()
    second.validate()

    assert set(seen) == {first}


@dataclasses.dataclass
class Broken:
    """A monitor without a hash, as every dataclass that compares by content."""

    key: str = "lost"

    def __call__(self, event):
        raise KeyError(self.key)


@pytest.mark.parametrize("broken", [Broken().__call__, Broken()], ids=["method", "object"])
def test_a_failing_monitor_warns_once_and_disturbs_nothing(handle, broken):
    run = handle(Line(max_epochs=2))

    run.on_phase(broken)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.train()

    messages = [str(w.message) for w in caught if issubclass(w.category, NitroWarning)]
    assert len(messages) == 1
    assert re.search(r"monitor .*Broken.* raised KeyError: 'lost'", messages[0])
    assert run.epoch == 2


@pytest.mark.parametrize("device_data", [True, False])
def test_a_requested_stop_leaves_a_record_in_mid_epoch(handle, device_data):
    run = handle(
        Line(device_data=device_data),
        checkpointer=nitro.TopK(),
        steps_per_call=3,
        checkpoint_every_steps=4,
    )
    run.on_phase(lambda event: event.step == 4 and run.request_stop())

    run.train()

    assert (run.step, run.epoch, run.stop_reason) == (7, 0, "stopped")
    assert len(run.history) == 0
    assert (run.run_dir / "checkpoints" / "epoch0000-step00000007").is_dir()


def test_a_stop_requested_at_the_end_of_an_epoch_finishes_it(handle):
    run = handle(steps_per_call=10)
    run.on_phase(lambda event: event.phase is Phase.EVALUATING and run.request_stop())

    run.train()

    assert (run.epoch, run.stop_reason) == (1, "stopped")
    assert len(run.history) == 1
    assert log_lines(run)[-1] == {"type": "finish", "status": "stopped"}


def test_a_stop_may_come_from_another_thread(handle):
    run = handle(Line(max_epochs=100_000, device_data=False))
    started = threading.Event()
    run.on_phase(lambda event: event.epoch >= 1 and started.set())

    def stop():
        started.wait()
        run.request_stop()

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    run.train()
    thread.join()

    assert run.stop_reason == "stopped"


def test_device_field_keeps_no_memory_of_the_user(handle):
    class Shifted(Line):
        shift: nitro.Device[Any]

    raw = np.empty(4096 + 16, np.float32)
    start = -raw.ctypes.data // 4 % 16
    shift = raw[start : start + 4096]  # as JAX could use it without a copy
    shift[...] = 1
    run = handle(Shifted(shift=shift))
    shift[...] = 2
    first = run.device_value("shift")
    run.set_device(shift=shift.astype(">f4"))
    shift[...] = 3

    assert (first.max(), run.device_value("shift").max()) == (1, 2)


def test_device_integer_that_would_wrap_around_is_refused(handle):
    class Counted(Line):
        steps: nitro.Device[int] = -(2**31) - 1

    with pytest.raises(ConfigError, match=r"`Counted\.steps` holds -2147483649[\s\S]*fit int32"):
        handle(Counted())


def test_training_within_training_is_refused(handle):
    run = handle(Line(max_epochs=2))
    run.on_phase(lambda event: run.train() if event.phase is nitro.Phase.EVALUATING else None)

    with pytest.warns(NitroWarning, match=r"Line is training already, at step 10\."):
        run.train()

    assert (run.epoch, run.step, len(run.history)) == (2, 20, 2)


def test_other_threads_neither_train_nor_read_what_is_being_trained(handle):
    run = handle(Line(max_epochs=100_000, device_data=False))
    x = np.zeros((3, 1), np.float32)
    calls = [run.train, run.validate, lambda: run.predict({"x": x}), lambda: run.model]
    started, refused = threading.Event(), []
    run.on_phase(lambda event: event.epoch >= 1 and started.set())

    def call():
        started.wait()
        try:
            for forbidden in calls:
                with pytest.raises(ConfigError, match="training in another thread"):
                    forbidden()
                refused.append(forbidden)
        finally:
            run.request_stop()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    run.train()
    thread.join()

    assert refused == calls
    assert run.predict({"x": x}).shape == (3,)


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import nitro
from test_lifecycle import Line
for name in ("first", "second"):
    run = nitro.Nitro(Line(max_epochs=1_000_000), run_dir=f"{sys.argv[2]}/{name}")
    run.on_phase(lambda event: event.epoch == 1 and print("going", flush=True))
    run.train(**{keywords})
    print(run.stop_reason, run.step, flush=True)
"""


def signalled(tmp_path, number, keywords="{}"):
    """What a script with two runs left when its first one got a signal: code, stdout, stderr."""
    script = SCRIPT.replace("{keywords}", keywords)
    words = [sys.executable, "-c", script, str(Path(__file__).parent), str(tmp_path)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGINT, -signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")],
)
def test_a_signal_ends_the_program_once_the_checkpoint_is_safe(tmp_path, number, code, word):
    returncode, _, err = signalled(tmp_path, number)

    (said,) = re.findall(rf"{word}: stopped after epoch (\d+)/1000000, step (\d+)", err)
    (path,) = re.findall(r"  checkpoint: (.+)", err)
    resumed = nitro.Nitro(Line(max_epochs=1_000_000), run_dir=tmp_path / "first", resume="auto")
    assert returncode == code
    assert f"{word}: stopping at the next step boundary" in err
    assert (resumed.epoch, resumed.step) == tuple(map(int, said))
    assert nitro.checkpoint_info(path)["step"] == resumed.step
    assert f'nitro.Nitro(Line(...), run_dir="{tmp_path}/first", resume="auto").train()' in err
    assert not (tmp_path / "second").exists()


def test_a_signal_may_return(tmp_path):
    returncode, out, err = signalled(
        tmp_path, signal.SIGTERM, '{"on_interrupt": "return"} if name == "first" else sys.exit(7)'
    )

    assert returncode == 7
    assert out.splitlines()[-1].startswith("stopped ")
    assert "  checkpoint: " in err


def test_an_interrupted_run_without_checkpoints_says_so(handle, capfd):
    run = handle(Line(max_epochs=1000))
    interrupts = {2: signal.SIGINT}

    def interrupt(event):
        if event.phase is Phase.EVALUATING and event.epoch in interrupts:
            signal.raise_signal(interrupts.pop(event.epoch))

    run.on_phase(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.train()

    said = capfd.readouterr().err
    assert run.stop_reason == "stopped"
    assert "Ctrl-C: stopped after epoch 2/1000, step 20" in said
    assert "checkpoint: none, so this run cannot be resumed" in said
    assert log_lines(run)[-1] == {"type": "finish", "status": "stopped"}


def test_an_answer_to_interrupts_that_is_none_is_refused(handle):
    with pytest.raises(ConfigError, match=r'on_interrupt=.ignore.\)[\s\S]*"raise"[\s\S]*fix: '):
        handle().train(on_interrupt="ignore")


def test_a_terminal_is_told_that_training_stops(tmp_path):
    script = SCRIPT.replace("{keywords}", "{}")
    words = [sys.executable, "-c", script, str(Path(__file__).parent), str(tmp_path)]
    screen, terminal = pty.openpty()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=terminal, text=True)
    os.close(terminal)
    shown: list[bytes] = []

    def watch():
        # Linux ends a terminal that nobody holds any more with an error.
        with contextlib.suppress(OSError):
            while part := os.read(screen, 4096):
                shown.append(part)

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    watcher.join()
    os.close(screen)

    assert b"with a checkpoint; Ctrl-C again aborts" in b"".join(shown)


def test_a_monitor_may_evaluate_without_being_called_again(handle):
    run = handle(Line(max_epochs=2), checkpointer=nitro.TopK())
    seen: list[tuple[int, float]] = []
    others: list[Phase] = []

    def evaluate(event):
        if event.phase is Phase.CHECKPOINTING:
            seen.append((event.epoch, event.run.evaluate("val")["val_loss"]))

    run.on_phase(evaluate)
    run.on_phase(lambda event: others.append(event.phase))
    run.train()

    assert seen == [(epoch, run.history[epoch]["val_loss"]) for epoch in (1, 2)]
    # Whoever did not cause them is told of the additional phases.
    assert others.count(Phase.EVALUATING) == 4


def test_signal_handlers_come_back(handle):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    handle(Line(max_epochs=1)).train()

    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_second_interrupt_aborts(handle):
    run = handle(Line(max_epochs=1000))

    def interrupt_twice(event):
        if event.phase is Phase.EVALUATING:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    run.on_phase(interrupt_twice)
    with pytest.raises(KeyboardInterrupt):
        run.train()

    assert run.stop_reason == "failed"
    assert run.phase is Phase.FAILED
    assert log_lines(run)[-1]["status"] == "failed"


def test_early_stopping_waits_for_its_patience(handle):
    # A gain of 10 is never reached: the first epoch is the best, three more are waited for.
    run = handle(Line(max_epochs=50), early_stop=EarlyStop(patience=3, min_delta=10.0))

    run.train()

    assert (run.epoch, run.stop_reason) == (4, "early_stop")
    assert log_lines(run)[-1]["status"] == "early_stop"


@pytest.mark.parametrize(("mode", "values", "stops"), [
    ("min", [3.0, 2.0, 2.5, 2.4], [False, False, False, True]),
    ("max", [0.1, 0.3, 0.3, 0.4], [False, False, False, False]),
    ("max", [0.5, 0.4, 0.50005], [False, False, True]),
])  # fmt: skip
def test_early_stopping_counts_improvements(mode, values, stops):
    stopper = EarlyStop(metric="m", mode=mode, patience=2)

    assert [stopper.should_stop(i, {"m": v}) for i, v in enumerate(values, 1)] == stops


def test_a_stopper_of_ones_own_is_asked_after_every_epoch(handle):
    stopper = Scripted(stop_at=2)
    run = handle(Line(max_epochs=5), early_stop=stopper)

    run.train()

    assert (run.epoch, run.stop_reason) == (2, "early_stop")
    assert stopper.asked == []  # the handle has a copy of its own
    assert run._session.setup.stopper.asked == [1, 2]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mode": "low"}, 'mode=.low.*\n.*"min" or "max"'),
        ({"patience": 0}, "patience=0"),
        ({"min_delta": -1.0}, "min_delta=-1.0"),
    ],
)
def test_a_bad_early_stop_is_refused(options, match):
    with pytest.raises(ConfigError, match=match):
        EarlyStop(**options)


def test_class_of_a_stopper_is_refused_at_setup(handle):
    with pytest.raises(
        ConfigError, match=r"`early_stop` is <class .*\n.*`nitro.EarlyStop\(\.\.\.\)`"
    ):
        handle(early_stop=EarlyStop)


def test_early_stopping_without_validation_is_refused_at_setup(handle):
    loader = Line().build_data()["train"]

    with pytest.raises(ConfigError, match="no split `val` to watch; there are `train`"):
        handle(data={"train": loader}, early_stop=EarlyStop())


def test_early_stopping_on_an_unknown_metric_is_refused_at_setup(handle):
    with pytest.raises(ConfigError, match="watches `acc`, but there is no `metrics` hook"):
        handle(early_stop=EarlyStop(metric="acc"))


def test_divergence_may_be_allowed(handle, tmp_path):
    class Diverging(Line):
        def loss(self, height, *, y):
            return super().loss(height, y=y) * np.nan

    loader = Line().build_data()["train"]
    with pytest.raises(DivergenceError, match="loss is nan at step 1 of epoch 1"):
        handle(Diverging(), data={"train": loader}).train()

    run = handle(Diverging(max_epochs=1), data={"train": loader}, check_divergence=False)
    with pytest.warns(NitroWarning, match="`loss` of `train` is nan at step 1"):
        run.train()

    assert run.stop_reason == "completed"
    assert "loss" not in log_lines(run)[-3]


def test_a_finished_run_is_not_trained_again(handle):
    run = handle(Line(max_epochs=1)).train()

    run.train()

    assert run.step == 10


@pytest.mark.parametrize("convert", [float, np.asarray, bool, lambda value: range(int(value))])
def test_value_that_a_traced_hook_wants_is_told_with_its_line(handle, convert):
    class Curious(Line):
        def loss(self, height, *, y):
            loss = super().loss(height, y=y)
            convert(loss)
            return loss

    with pytest.raises(nitro.errors.HookError) as told:
        handle(Curious()).train()

    assert re.match(
        r"`Curious.loss` is traced, and needs the value of a traced array, in "
        r"test_lifecycle\.py:\d+ in (Curious\.loss|.*lambda>): ",
        str(told.value),
    )
    assert "fix: use `jax.numpy`, or leave `float()`" in str(told.value)


def test_set_device_takes_effect_at_once_and_reads_back(handle):
    class Scaled(Line):
        scale: nitro.Device[float] = 1.0

        def loss(self, height, *, y):
            return self.scale * super().loss(height, y=y)

    run = handle(Scaled())
    before = run.validate()["val_loss"]
    run.set_device(scale=2.0)

    assert run.validate()["val_loss"] == pytest.approx(2 * before, rel=1e-6)
    assert run.device_value("scale") == np.float32(2.0)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({}, "got no fields"),
        ({"scal": 1.0}, "no field `scal`.*\n.*did you mean `scale`"),
        ({"max_epochs": 2}, "host-only: no trace sees it"),
        ({"size": 2}, "GraphConst: another value is another program"),
        ({"scale": [1.0, 2.0]}, r"got a list of 2 leaves: 0, 1\.[\s\S]*np\.asarray"),
        ({"scale": np.ones(2, np.float32)}, r"got float32\(2,\).*\n.*float32\(\)"),
        ({"scale": "high"}, "set_device"),
        ({"steps": 2**31}, r"set_device\(steps=\.\.\.\)` got 2147483648\.[\s\S]*fit int32"),
    ],
)
def test_set_device_refuses_what_does_not_fit(handle, values, match):
    class Scaled(Line):
        scale: nitro.Device[float] = 1.0
        size: nitro.GraphConst[int] = 1
        steps: nitro.Device[int] = 1

    run = handle(Scaled())

    with pytest.raises(ConfigError, match=match):
        run.set_device(**values)
    assert run.device_value("scale") == np.float32(1.0)


class Pictured(Line):
    """Counts its rows, and draws them."""

    max_epochs: int = 2

    def metrics(self, height, *, y):
        errors = (height - y) ** 2
        return {"rows": (len(y), None), "mse": (errors.sum(), len(y)), "errors": ("concat", errors)}

    def finalize_metrics(self, reduced, split):
        return {**reduced, "errors": float(reduced["errors"].max())}

    def figures(self, reduced, split):
        from matplotlib.figure import Figure

        figure = Figure()
        figure.add_subplot(title=split).hist(reduced["errors"])
        return {"errors of/rows": figure}


def test_figures_are_files_where_the_logger_shows_none(handle):
    pytest.importorskip("matplotlib")
    run = handle(Pictured()).train()

    names = sorted(path.name for path in (run.run_dir / "figures").iterdir())
    assert names == [f"val-errors-of-rows-epoch000{epoch}.png" for epoch in (1, 2)]
    assert (run.run_dir / "figures" / names[0]).read_bytes().startswith(b"\x89PNG")
    run.validate()  # a call of the user's draws nothing
    assert len(list((run.run_dir / "figures").iterdir())) == 2


class Wall:
    """Where figures end up: a JSON Lines log that shows images."""

    def __init__(self) -> None:
        self.shown: list[Any] = []

    def bind(self, run_dir):
        return self

    def figure(self, name, figure, *, context, step, epoch, **more):
        self.shown.append((name, context, step, epoch, len(figure.axes)))
        return True

    def __getattr__(self, verb):
        if verb not in nitro._logs._protocol.VERBS:
            raise AttributeError(verb)
        return lambda *values, **facts: None


def test_figures_go_to_every_logger_that_shows_images(handle):
    pytest.importorskip("matplotlib")
    first, second = Wall(), Wall()
    logger = nitro.MultiLogger(nitro.JSONLinesLogger(), first, second)
    run = handle(Pictured(), logger=logger).train()

    assert first.shown == second.shown
    assert first.shown == [("errors of/rows", "val", step, e, 1) for e, step in ((1, 10), (2, 20))]
    assert not (run.run_dir / "figures").exists()
    assert run.logger[Wall] is first
    assert run.logger[nitro.JSONLinesLogger].path == run.run_dir / "metrics.jsonl"
    with pytest.raises(ConfigError, match=r"no EarlyStop\.[\s\S]*`JSONLinesLogger`"):
        run.logger[EarlyStop]


def test_tensorboard_gets_figures_as_images(handle):
    pytest.importorskip("matplotlib")
    pytest.importorskip("tensorboardX")
    run = handle(Pictured(), logger=nitro.TensorBoardLogger()).train()

    (events,) = (run.run_dir / "tensorboard").iterdir()
    assert events.read_bytes().count(b"val/errors_of/rows") == 2
    assert b"\x89PNG" in events.read_bytes()


@pytest.mark.parametrize("drawn", [lambda: 1 / 0, lambda: [1], lambda: {"a": 1}])
def test_picture_that_fails_ends_no_run(handle, drawn):
    class Clumsy(Line):
        max_epochs: int = 1

        def figures(self, reduced, split):
            return drawn()

    with pytest.warns(NitroWarning, match=r"`Clumsy.figures` drew nothing for `val`"):
        run = handle(Clumsy()).train()

    assert run.stop_reason == "completed"


def test_totals_of_whole_numbers_stay_whole(handle):
    pytest.importorskip("matplotlib")
    run = handle(Pictured()).train()

    assert run.history["rows"] == [40, 40]
    assert all(type(rows) is int for rows in run.history["rows"])
    assert [line["rows"] for line in log_lines(run) if "rows" in line] == [40, 40]
    assert "40.0" not in repr(run.history)


def test_phases_say_which_split_is_evaluated_and_for_whom(handle):
    run = handle(Line(max_epochs=1))
    told = []
    run.on_phase(lambda event: told.append((event.phase.value, event.split, event.by_user)))

    run.train()
    run.evaluate("train")

    assert [one for one in told if one[1] is not None] == [
        ("evaluating", "val", False), ("training", "val", False),
        ("evaluating", "train", True), ("done", "train", True),
    ]  # fmt: skip
