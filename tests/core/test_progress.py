from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import textwrap
import threading
import types
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import nitro
from nitro._progress import Advance, BarReporter, LineReporter
from nitro.errors import ConfigError, NitroWarning

_DRIVE = textwrap.dedent(
    """
    import sys, time
    from nitro._progress import make_reporter
    reporter = make_reporter(progress=None)
    reporter.begin(total_steps=6, done_steps=0, max_epochs=3)
    reporter.phase("compiling")
    time.sleep(0.3)
    reporter.phase("training")
    for epoch in (1, 2, 3):
        for step in (2 * epoch - 1, 2 * epoch):
            reporter.advance(step=step, epoch=epoch, loss=1 / step, data_wait_frac=0.25)
            time.sleep(0.15)
        print("printed by the user")
        reporter.phase("evaluating")
        time.sleep(0.15)
        reporter.epoch_end(epoch=epoch, metrics={"loss": 1 / epoch, "acc": 0.5})
        reporter.phase("training")
    reporter.end(reason="completed")
    """
)


def _environment(**changes: str) -> dict[str, str]:
    left_out = ("CI", "TERM", "FORCE_COLOR", "NO_COLOR", "COLUMNS", "LINES")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**kept, "TERM": "xterm-256color", **changes}


def _on_a_terminal(**environment: str) -> tuple[str, str]:
    """Drives a reporter with stderr on a pseudo-terminal; returns stdout (a pipe) and it."""
    master, slave = pty.openpty()
    seen: list[bytes] = []

    def read() -> None:
        while True:
            try:
                data = os.read(master, 4096)
            except OSError:  # Linux says so when the other end is closed
                return
            if not data:
                return
            seen.append(data)

    reader = threading.Thread(target=read)
    process = subprocess.Popen(
        [sys.executable, "-c", _DRIVE],
        stdout=subprocess.PIPE,
        stderr=slave,
        env=_environment(COLUMNS="110", **environment),
    )
    os.close(slave)
    reader.start()
    out, _ = process.communicate(timeout=60)
    reader.join(timeout=10)
    os.close(master)
    assert process.returncode == 0
    return out.decode(), b"".join(seen).decode()


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_terminal_gets_one_line_that_is_redrawn() -> None:
    out, drawn = _on_a_terminal()

    text = _plain(drawn)
    assert "\x1b[2K" in drawn  # the line is cleared and drawn again
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")  # the cursor is back
    assert "compiling" in text
    assert "evaluating" in text
    assert re.search(r"epoch 3/3 +6/6", text)
    assert re.search(r"steps/s", text)
    assert re.search(r"0:0\d left", text)
    assert "data wait 25%" in text
    assert "epoch 2/3  step 4  loss 0.5  acc 0.5" in text
    # What the user prints to a pipe stays in it.
    assert out == "printed by the user\n" * 3
    assert "printed" not in drawn


@pytest.mark.parametrize("environment", [{"CI": "true"}, {"TERM": "dumb"}])
def test_ci_and_dumb_terminals_get_plain_lines(environment: dict[str, str]) -> None:
    _, drawn = _on_a_terminal(**environment)

    assert "\x1b" not in drawn
    assert "epoch 3/3  step 6" in drawn


def test_pipe_gets_plain_lines_even_where_colour_is_forced() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _DRIVE],
        capture_output=True,
        env=_environment(FORCE_COLOR="1", TTY_COMPATIBLE="1"),
        check=True,
    )

    lines = done.stderr.decode().splitlines()
    assert re.fullmatch(r"[ -~]*", "".join(lines))
    assert lines[0].startswith("epoch 1/3  step 2  loss 1  acc 0.5")
    assert lines[-1].startswith("epoch 3/3  step 6  loss 0.3333  acc 0.5")
    assert lines[-1].endswith("  completed")


def test_lines_are_at_most_one_a_second_but_for_first_and_last(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reporter = LineReporter(sys.stderr)
    reporter.begin(total_steps=500, done_steps=0, max_epochs=500)

    for epoch in range(1, 501):
        reporter.epoch_end(epoch=epoch, metrics={"loss": 1.0})
    reporter.end(reason="completed")

    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("epoch 1/500")
    assert lines[-1].startswith("epoch 500/500")
    assert len(lines) < 20


@pytest.mark.parametrize(
    ("reason", "last"),
    [
        ("early_stop", r"epoch 23/25  step 46  loss 1 .*  early_stop"),
        ("stopped", r"stopped after epoch 23/25, step 46"),
    ],
)
def test_last_line_is_the_last_epoch_and_why_it_ended(
    capsys: pytest.CaptureFixture[str], reason: str, last: str
) -> None:
    reporter = LineReporter(sys.stderr)
    reporter.begin(total_steps=50, done_steps=0, max_epochs=25)
    reporter.phase("training")
    for epoch in range(1, 24):
        reporter.advance(step=2 * epoch, epoch=epoch, loss=1.0, data_wait_frac=0.0)
        reporter.epoch_end(epoch=epoch, metrics={"loss": 1.0, "acc": 0.5})
    reporter.end(reason=reason)

    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(last, lines[-1])
    assert any(line.startswith("epoch 23/25  step 46  loss 1  acc 0.5") for line in lines)


def test_bar_ends_with_why_and_no_time_left() -> None:
    at = Advance()
    at.begin(total_steps=100, done_steps=0, max_epochs=10)
    at.enter("training")
    at.advance(step=30, epoch=3, loss=0.5, data_wait_frac=0.0)
    assert any("left" in part for part in at.parts())

    at.enter("done")
    at.end("early_stop")

    assert list(at.parts())[:4] == ["epoch 3/10", "30/100", "early_stop", "loss 0.5"]
    assert not any("left" in part for part in at.parts())


@pytest.mark.parametrize("width", [20, 60, 80, 120])
def test_bar_is_one_line_at_any_width(width: int) -> None:
    console = Console(width=width, force_terminal=True)
    reporter = BarReporter(console)
    reporter._at.begin(total_steps=10**7, done_steps=0, max_epochs=10**4)
    reporter.phase("training")
    reporter.advance(step=123456, epoch=100, loss=1e-3, data_wait_frac=0.5)
    reporter.note("a note of the user's that is rather long")

    with console.capture() as capture:
        console.print(reporter)

    lines = _plain(capture.get()).splitlines()
    assert len(lines) == 1
    assert len(lines[0]) <= width


def test_speed_leaves_out_validation_and_the_time_left_includes_it() -> None:
    now = 0.0
    at = Advance(clock=lambda: now)
    at.begin(total_steps=100, done_steps=0, max_epochs=2)
    now = 50.0  # compiling
    at.enter("training")
    now = 60.0
    at.advance(step=50, epoch=1, loss=1.0, data_wait_frac=0.0)
    at.enter("evaluating")
    now = 70.0
    at.enter("training")
    at.advance(step=50, epoch=1, loss=1.0, data_wait_frac=0.0)

    assert at.steps_per_s == pytest.approx(5.0)
    assert at.left_s == pytest.approx(20.0)


def test_resumed_run_starts_where_it_was() -> None:
    at = Advance()
    at.begin(total_steps=100, done_steps=50, max_epochs=10)

    assert list(at.parts())[:2] == ["epoch 6/10", "50/100"]


def test_speed_and_time_left_after_a_resume_count_the_new_steps_only() -> None:
    now = 100.0
    at = Advance(clock=lambda: now)
    at.enter("training")  # as a handle does, before it knows where it stands
    at.begin(total_steps=9000, done_steps=7000, max_epochs=9)
    at.enter("compiling")
    now = 130.0
    at.enter("training")
    now = 132.0
    at.advance(step=7200, epoch=8, loss=1.0, data_wait_frac=0.0)

    assert at.steps_per_s == pytest.approx(100.0)
    assert at.left_s == pytest.approx(18.0)


class _Handle:
    def __init__(self) -> None:
        self.shown: list[Any] = []

    def update(self, value: Any) -> None:
        self.shown.append(value)


def test_notebook_gets_one_updating_line(
    plane: Any, make_run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    handle = _Handle()
    displayed: list[Any] = []

    def display(value: Any, *, display_id: bool) -> _Handle:
        displayed.append(value)
        return handle

    ipython: Any = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    shown: Any = types.ModuleType("IPython.display")
    shown.display, shown.HTML = display, str
    ipython.display = shown
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)

    make_run(plane(), max_epochs=2).train()

    assert len(displayed) == 1
    assert "<progress" in handle.shown[-1]
    assert "epoch 2/2  8/8  completed" in handle.shown[-1]
    assert "left" not in handle.shown[-1]
    assert re.search(r"val_loss [\d.e-]+</code>", handle.shown[-1])
    assert "\x1b" not in "".join(handle.shown)
    assert capsys.readouterr() == ("", "")


def test_no_progress_says_nothing(
    plane: Any, make_run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(plane(), progress=False).train()

    assert capsys.readouterr() == ("", "")


class _Recorder:
    """A reporter of the user's own."""

    def __init__(self, fails_in: str = "") -> None:
        self.calls: list[tuple[str, Any]] = []
        self.fails_in = fails_in

    def _take(self, verb: str, facts: Any) -> None:
        self.calls.append((verb, facts))
        if verb == self.fails_in:
            raise ValueError("broken pipe")

    def begin(self, **facts: Any) -> None:
        self._take("begin", facts)

    def advance(self, **facts: Any) -> None:
        self._take("advance", facts)

    def phase(self, name: str, **facts: Any) -> None:
        self._take("phase", name)

    def note(self, text: str, **facts: Any) -> None:
        self._take("note", text)

    def epoch_end(self, **facts: Any) -> None:
        self._take("epoch_end", facts)

    def end(self, **facts: Any) -> None:
        self._take("end", facts)


def test_own_reporter_hears_of_everything(plane: Any, make_run: Any) -> None:
    reporter = _Recorder()
    run = make_run(plane(), max_epochs=2, progress=reporter)
    run.on_phase(lambda event: run.note("here") if event.phase.value == "evaluating" else None)

    run.train()

    facts: dict[str, list[Any]] = {}
    for verb, value in reporter.calls:
        facts.setdefault(verb, []).append(value)
    assert facts["begin"] == [{"total_steps": 8, "done_steps": 0, "max_epochs": 2}]
    assert facts["advance"][-1]["step"] == 8
    assert 0 <= facts["advance"][-1]["data_wait_frac"] <= 1
    assert facts["phase"][:3] == ["training", "compiling", "training"]
    assert {"evaluating", "checkpointing", "done"} <= set(facts["phase"])
    assert [e["epoch"] for e in facts["epoch_end"]] == [1, 2]
    assert facts["epoch_end"][0]["metrics"].keys() == {"loss", "val_loss"}
    assert facts["note"] == ["here", "here"]
    assert len(facts["end"]) == 1


@pytest.mark.parametrize("verb", ["begin", "advance", "phase", "epoch_end", "end"])
def test_reporter_that_raises_is_switched_off_with_one_warning(
    plane: Any, make_run: Any, verb: str
) -> None:
    reporter = _Recorder(fails_in=verb)
    run = make_run(plane(), max_epochs=2, progress=reporter)

    with pytest.warns(NitroWarning, match=rf"_Recorder raised ValueError in `{verb}`") as warned:
        run.train()

    assert run.epoch == 2
    assert len(warned) == 1
    assert [v for v, _ in reporter.calls].count(verb) == (2 if verb == "end" else 1)


def test_reporter_ends_after_an_error(plane: Any, make_run: Any) -> None:
    class Diverging(plane):
        def loss(self, height, *, y):
            return super().loss(height, y=y) * float("nan")

    reporter = _Recorder()
    with pytest.raises(nitro.errors.DivergenceError):
        make_run(Diverging(), progress=reporter).train()

    assert ("end", {"reason": "failed"}) in reporter.calls


def test_reporter_without_verbs_is_refused_at_setup(plane: Any, make_run: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"`progress` is a str, which lacks begin, advance, phase"
    ):
        make_run(plane(), progress="bar")


def test_class_of_a_reporter_is_refused_at_setup(plane: Any, make_run: Any) -> None:
    with pytest.raises(ConfigError, match=r"class `_Recorder`[\s\S]*`progress=_Recorder\(\)`"):
        make_run(plane(), progress=_Recorder)


def test_process_without_a_stream_trains_without_progress(
    plane: Any, make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(sys, "stdout", None)

    assert make_run(plane(), progress=None).train().epoch == 1


def test_bar_does_not_touch_the_run(plane: Any, make_run: Any, tmp_path: Path) -> None:
    quiet = make_run(plane(), max_epochs=2, progress=False, run_dir=tmp_path / "a").train()
    shown = make_run(plane(), max_epochs=2, progress=_Recorder(), run_dir=tmp_path / "b").train()

    assert quiet.history.to_dict() == shown.history.to_dict()
