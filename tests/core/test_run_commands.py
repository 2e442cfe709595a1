"""`nitro train`, `evaluate`, `runs`, `show`, `plot`, and the file `run.json` behind them."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import nitro
from nitro import _cli
from nitro._journal import RunFileWriter, plot_histories, read_run_file

_SOURCE = textwrap.dedent(
    '''
    """An experiment in a file of its own."""

    import dataclasses
    from typing import Literal

    import numpy as np
    from flax import nnx

    import nitro
    from nitro import Device, GraphConst


    @dataclasses.dataclass(frozen=True)
    class Size:
        width: GraphConst[int] = 4
        deep: bool = False


    class Slope(nitro.Experiment):
        size: Size = Size()
        rate: Device[float] = 0.5
        kind: Literal["a", "b"] = "a"
        title: str = "none"
        max_epochs: int = 2

        @classmethod
        def presets(cls):
            return {"wide": {"size.width": 16}}

        def build_data(self):
            x = np.linspace(0, 1, 12, dtype=np.float32)[:, None]
            loader = lambda: nitro.ArrayLoader({"x": x, "y": 2 * x[:, 0]}, 4)
            return {"train": loader(), "val": loader(), "test": loader()}

        def build_model(self, rngs):
            return nnx.Sequential(
                nnx.Linear(1, self.size.width, rngs=rngs), nnx.Linear(self.size.width, 1, rngs=rngs)
            )

        def forward(self, model, *, x):
            return model(x)[:, 0]

        def loss(self, out, *, y):
            return self.rate * ((out - y) ** 2).mean()
    '''
)


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `nitro` in a folder with `slope.py`; returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "slope", raising=False)
    (tmp_path / "slope.py").write_text(_SOURCE)

    def invoke(*words: str) -> tuple[int, str, str]:
        code: Any = 0
        try:
            _cli.main(words)
        except SystemExit as exit_:
            code = exit_.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    yield invoke
    sys.modules.pop("slope", None)


def test_train_sets_fields_and_options(cli: Any) -> None:
    sets = ["--set", "size.width=8", "--set", "rate=0.25", "--set", "kind=b", "--set", "title=7"]

    code, out, err = cli(
        "train",
        "slope.py:Slope",
        *sets,
        "--max-epochs",
        "3",
        "--run-dir",
        "runs/one",
        "--seed",
        "5",
        "-v",
    )

    assert code == 0, err
    run = read_run_file("runs/one")
    assert run.experiment == "slope:Slope"
    assert (run.status, run.epoch, run.step, run.max_epochs) == ("completed", 3, 9, 3)
    assert run.config["size.width"] == 8
    assert (run.config["rate"], run.config["kind"], run.config["title"]) == (0.25, "b", "7")
    assert "seed = 5 (keyword)" in err
    assert "epoch 3/3  step 9" in err
    assert "slope:Slope: completed, epoch 3/3, step 9" in out
    assert "best: epoch 3" in out


def test_class_may_be_left_out_and_a_preset_be_named(cli: Any) -> None:
    code, _, err = cli("train", "slope.py", "--preset", "wide", "--set", "rate=1")

    assert code == 0, err
    run = read_run_file("runs/Slope")
    assert (run.preset, run.config["size.width"], run.config["rate"]) == ("wide", 16, 1.0)


def test_module_is_found_from_the_current_directory_and_resume_goes_on(cli: Any) -> None:
    assert cli("train", "slope:Slope")[0] == 0

    code, out, err = cli("train", "slope:Slope", "--max-epochs", "4", "--resume")

    assert code == 0, err
    assert "epoch 4/4, step 12" in out
    assert [row["epoch"] for row in read_run_file("runs/Slope").history] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slope.py:Slop"], r"no class `Slop`"),
        (["slop.py:Slope"], "There is no file `slop.py`."),
        (["nowhere.at.all:Slope"], "There is no module `nowhere.at.all`."),
        (["slope.py:np"], "expected: a subclass of `nitro.Experiment`"),
        (["slope.py:Slope", "--set", "widht=3"], "has no field `widht`"),
        (["slope.py:Slope", "--set", "size.wdth=3"], "did you mean `size.width`?"),
        (["slope.py:Slope", "--set", "size.width=wide"], "declared type int"),
        (["slope.py:Slope", "--set", "kind=c"], "does not fit the field"),
        (["slope.py:Slope", "--set", "rate"], "sets nothing"),
        (["slope.py:Slope", "--set", "rate=1", "--set", "rate=2"], "`--set rate` is given twice"),
        (["slope.py:Slope", "--set", "max_epochs=1", "--max-epochs", "2"], "is given twice"),
        (["slope.py:Slope", "--preset", "wid"], "did you mean `wide`?"),
    ],
)
def test_mistake_is_one_message(cli: Any, words: list[str], message: str) -> None:
    code, out, err = cli("train", *words)

    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "problem", "expected"),
    [
        (["one.py"], "`one.py` has no experiment.", "a subclass of `nitro.Experiment` in `one.py`"),
        (
            ["one.py:A"],
            "`one.py` has no class `A`.",
            "a subclass of `nitro.Experiment` in `one.py`",
        ),
        (["two.py"], "2 experiments, and no class is named", "one of `A`, `B`"),
        (["two.py:A", "--set", "x=1"], "`A` has no field `x`.", "no name, as there is none"),
    ],
)
def test_absent_name_among_few_or_none_is_told_what_there_is(
    cli: Any, words: list[str], problem: str, expected: str
) -> None:
    Path("one.py").write_text("import nitro\n")
    Path("two.py").write_text(
        "import nitro\nclass A(nitro.Experiment): ...\nclass B(nitro.Experiment): ...\n"
    )

    code, _, err = cli("train", *words)

    assert code == 1
    assert problem in err
    assert f"expected: {expected}" in err


def test_file_that_cannot_be_imported_says_where(cli: Any) -> None:
    Path("broken.py").write_text("import nitro\n\nraise KeyError('x')\n")

    code, _, err = cli("train", "broken.py:Any")

    assert code == 1
    assert "`" + str(Path("broken.py").resolve()) + "` cannot be imported: KeyError: 'x'" in err
    assert "broken.py:3)" in err


def test_run_alone_is_evaluated_with_the_values_that_it_had(cli: Any) -> None:
    cli("train", "slope.py:Slope", "--set", "size.width=8", "--run-dir", "r")

    code, out, err = cli("evaluate", "r")
    by_class = cli(
        "evaluate", "slope.py:Slope", "--checkpoint", "r@best", "--split", "val", "--json"
    )

    assert code == 0, err
    assert "val_loss  " in out
    assert ", test:" in out
    best = read_run_file("r").to_history().best
    assert json.loads(by_class[1])["val_loss"] == pytest.approx(best["val_loss"], rel=1e-6)
    # Evaluating leaves the run as it was.
    assert read_run_file("r").status == "completed"


def test_evaluate_without_weights_or_without_the_file_says_what_to_do(cli: Any) -> None:
    cli("train", "slope.py:Slope", "--run-dir", "r")
    Path("slope.py").rename("moved.py")
    sys.modules.pop("slope")

    assert "--checkpoint RUN" in cli("evaluate", "moved.py:Slope")[2]
    code, _, err = cli("evaluate", "r")
    assert code == 1
    assert "slope.py` is gone" in err
    assert "nitro evaluate FILE:Slope --checkpoint" in err
    assert cli("evaluate", "moved.py:Slope", "--checkpoint", "r")[0] == 0


def test_unknown_split_lists_those_there_are(cli: Any) -> None:
    cli("train", "slope.py:Slope", "--run-dir", "r")

    assert "did you mean `test`?" in cli("evaluate", "r", "--split", "tests")[2]


def test_runs_and_show_tell_how_far_each_run_is(cli: Any) -> None:
    cli("train", "slope.py:Slope", "--run-dir", "runs/deep/a")
    cli("train", "slope.py:Slope", "--preset", "wide", "--run-dir", "runs/b")

    code, table, _ = cli("runs")
    shown = cli("show", "runs/b")[1]
    facts = json.loads(cli("runs", "--json")[1])
    state = json.loads(cli("show", "runs/b", "--json")[1])

    assert code == 0
    lines = [line.split() for line in table.splitlines()]
    assert lines[0][:4] == ["run", "experiment", "status", "epoch"]
    assert {line[0] for line in lines[1:]} == {"b", "deep/a"}
    assert "slope:Slope (wide)" in table
    assert "slope:Slope, preset wide: completed, epoch 2/2, step 6" in shown
    assert "size.width = 16 (GraphConst)" in shown
    assert "* best by val_loss (min)" in shown
    assert {fact["status"] for fact in facts} == {"completed"}
    assert state["history"][0].keys() == {"epoch", "step", "loss", "val_loss"}


def test_table_of_a_sweep_has_what_differs_and_the_scores(cli: Any) -> None:
    for rate in ("0.25", "0.5"):
        for seed in ("1", "2"):
            name = f"sweep/{rate}/{seed}"
            cli("train", "slope.py", "--set", f"rate={rate}", "--seed", seed, "--run-dir", name)

    table = cli("runs", "sweep")[1].splitlines()
    facts = json.loads(cli("runs", "sweep", "--json")[1])
    found = nitro.runs("sweep")

    head = ["run", "experiment", "status", "epoch", "seed", "rate", "metric", "best", "last"]
    assert table[0].split() == [*head, "updated"]
    rows = {line.split()[0]: line.split() for line in table[1:]}
    assert {name: row[4:7] for name, row in rows.items()} == {
        f"{rate}/{seed}": [seed, rate, "val_loss"] for rate in ("0.25", "0.5") for seed in "12"
    }
    for fact in facts:
        history = read_run_file(fact["run_dir"]).history
        best = min(history, key=lambda row: row["val_loss"])
        assert fact["best"] == {"value": best["val_loss"], "epoch": best["epoch"]}
        assert (fact["loss"], fact["config"]["kind"]) == (history[-1]["loss"], "a")
        row = rows[str(Path(fact["run_dir"]).relative_to(Path("sweep").absolute()))]
        assert row[7:9] == [f"{best['val_loss']:.6g}", "(epoch"]
    assert [str(run.run_dir) for run in found] == [fact["run_dir"] for fact in facts]
    assert [run.config["rate"] for run in found] == [fact["config"]["rate"] for fact in facts]
    assert {run.status for run in found} == {"completed"}
    assert found[0].history.best["epoch"] == facts[0]["best"]["epoch"]


def test_failed_run_shows_its_error(cli: Any) -> None:
    text = _SOURCE.replace("self.rate * (", "float('nan') * (")
    Path("slope.py").write_text(text)

    code, _, err = cli("train", "slope.py:Slope")

    assert code == 1
    assert "error: The loss is nan at step 1 of epoch 1." in err
    assert read_run_file("runs/Slope").status == "failed"
    assert "error: DivergenceError: The loss is nan" in cli("show", "runs/Slope")[1]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_command_tells_schedulers_and_how_to_resume(
    cli: Any, number: int, code: int
) -> None:
    words = ["train", "slope.py:Slope", "--set", "title=a b", "--run-dir", "r"]
    process = subprocess.Popen(
        [sys.executable, "-m", "nitro", *words, "--max-epochs", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while "epoch 1/1000000" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(number)
    out, err = process.communicate(timeout=60)

    (command,) = re.findall("  resume: nitro (.+)", err)
    resumed = cli(*shlex.split(command.replace("1000000", "1")))  # over: nothing to train
    assert (process.returncode, out) == (code, "")
    assert read_run_file("r").config["title"] == "a b"
    assert resumed[0] == 0
    assert "Traceback" not in err
    assert resumed[1].startswith("slope:Slope: completed, epoch ")


def test_resume_below_where_the_run_stands_has_completed(cli: Any) -> None:
    cli("train", "slope.py:Slope", "--max-epochs", "3")

    code, out, err = cli("train", "slope.py:Slope", "--max-epochs", "2", "--resume")

    assert code == 0, err
    assert "warning: The resumed run has ended: epoch 3 of max_epochs=2" in err
    assert "typer" not in err
    assert out.startswith("slope:Slope: completed, epoch 3/2, step 9")


def test_run_whose_process_is_gone_is_interrupted(cli: Any) -> None:
    import dataclasses

    cli("train", "slope.py:Slope")
    run = read_run_file("runs/Slope")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()

    RunFileWriter().write(dataclasses.replace(run, status="running", pid=dead.pid))
    assert read_run_file("runs/Slope").status == "interrupted"
    RunFileWriter().write(dataclasses.replace(run, status="running"))
    assert "`kill " in cli("show", "runs/Slope")[1]


def test_plot_writes_the_curves(cli: Any) -> None:
    pytest.importorskip("matplotlib")
    cli("train", "slope.py:Slope", "--run-dir", "r")

    assert cli("plot", "r") == (0, "r/history.png\n", "")
    assert cli("plot", "r", "--out", "new/curves.svg")[0] == 0
    assert "<svg" in Path("new/curves.svg").read_text()


def test_plot_of_several_runs_compares_them(cli: Any) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a", "b"):
        cli("train", "slope.py:Slope", "--run-dir", f"r/{name}")

    assert cli("plot", "r/a", "r/b") == (0, "comparison.png\n", "")
    figure = plot_histories(
        {name: read_run_file(name).to_history() for name in ("r/a", "r/b")}, title="Slope"
    )

    assert [axes.get_title() for axes in figure.axes] == ["train loss", "val_loss"]
    for axes in figure.axes:
        drawn = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
        column = "loss" if axes.get_title() == "train loss" else "val_loss"
        rows = {name: read_run_file(name).history for name in ("r/a", "r/b")}
        assert drawn == {name: [row[column] for row in rows[name]] for name in rows}


@pytest.mark.parametrize("command", ["show", "plot"])
def test_missing_run_is_named_with_a_guess(cli: Any, command: str) -> None:
    cli("train", "slope.py:Slope")

    code, _, err = cli(command, "runs/Slop")

    assert code == 1
    assert "There is no run `runs/Slop`." in err
    assert "did you mean `Slope`?" in err
    assert "holds no run" in cli(command, ".")[2]
    assert "no directory `nowhere`" in cli("runs", "nowhere")[2]


def test_damaged_and_foreign_files_are_refused(cli: Any) -> None:
    Path("r").mkdir()
    (Path("r") / "run.json").write_text("{")
    assert "`r/run.json` is no description of a run" in cli("show", "r")[2]

    (Path("r") / "run.json").write_text('{"format_version": 99}')
    assert "format version 99" in cli("show", "r")[2]


def test_run_that_leaves_nothing_has_no_file(plane: Any, make_run: Any) -> None:
    run = make_run(plane(), logger=None, checkpointer=None).train()

    assert not run.run_dir.exists()


def test_file_is_whole_at_each_moment_of_the_training(
    plane: Any, make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nitro._run._journaling._EVERY_S", 0)  # else once a second
    run = make_run(plane(), max_epochs=3)
    seen: list[Any] = []
    run.on_phase(lambda event: event.metrics and seen.append(read_run_file(run.run_dir)))

    run.train()
    seen.append(read_run_file(run.run_dir))

    assert [(file.status, file.step) for file in seen] == [
        *[("running", step) for step in (4, 8, 12)],
        ("completed", 12),
    ]
    assert [len(file.history) for file in seen] == [0, 1, 2, 3]
    assert seen[-1].history == run.history.scalar_rows()
    assert [file.binding for file in seen] == [str(run.binding)] * 4
    assert "memory\n" in seen[0].binding


def test_script_is_remembered_by_its_file(tmp_path: Path, warm_python: Any) -> None:
    script = _SOURCE + "\n\nnitro.Nitro(Slope(), run_dir='r', progress=False).train()\n"
    (tmp_path / "script.py").write_text(script)

    warm_python.run("script.py", cwd=tmp_path)

    run = read_run_file(tmp_path / "r")
    assert run.experiment == "script:Slope"
    assert run.file == str(tmp_path / "script.py")


def test_summary_tells_state_then_binding(trained_plane: nitro.Nitro) -> None:
    summary = trained_plane.summary()

    assert repr(trained_plane).startswith("Nitro(Plane: done, epoch 6, step 24, 5 parameters")
    assert str(summary).startswith(repr(trained_plane))
    assert "training ended: completed" in summary
    assert "best record: " in summary
    assert "last epoch: epoch 6, step 24" in summary
    html = trained_plane._repr_html_()
    assert "<summary>options</summary>" in html
    assert repr(summary) == str(summary)


def test_binding_names_where_options_and_fields_come_from(plane: Any, make_run: Any) -> None:
    class Configured(plane):
        width: nitro.GraphConst[int] = 8
        rate: nitro.Device[float] = 0.1
        early_stop: Any = None

        def loss(self, height, *, y, wieght=1.0):
            return super().loss(height, y=y) * wieght

    binding = make_run(Configured(), logger=None).binding

    assert "width = 8 (GraphConst)" in binding
    assert "rate = 0.1 (Device)" in binding
    assert "logger = None (keyword)" in binding
    assert "early_stop = None (experiment)" in binding
    assert "checkpointer = TopK(k=3, metric='val_loss', mode='min') (default)" in binding
    assert "y, wieght (no such field: takes its default)" in binding
    assert "test_run_commands.py:" in binding.splitlines()[0]


def test_second_run_in_a_directory_keeps_the_files_of_the_first(cli: Any) -> None:
    cli("train", "slope.py:Slope", "--max-epochs", "1", "--run-dir", "r")
    first = read_run_file("r")

    code, out, err = cli("train", "slope.py:Slope", "--max-epochs", "3", "--run-dir", "r")

    second = read_run_file("r")
    logged = [
        [json.loads(line) for line in Path("r", name).read_text().splitlines()]
        for name in ("metrics.1.jsonl", "metrics.jsonl")
    ]
    assert code == 0, err
    assert f"`r` holds an earlier run ({first.run}, completed at epoch 1/1)" in err
    assert "fix: pass `--resume` to continue the earlier run, or another `--run-dir`" in err
    assert [sum(line["type"] == "params" for line in lines) for lines in logged] == [1, 1]
    assert [max(line.get("epoch", 0) for line in lines) for lines in logged] == [1, 3]
    assert read_run_file(f"r#{first.run}").history == first.history
    assert f"({second.run})" in out
    shown = cli("show", "r")[1]
    assert f"r#{first.run}: {first.run}, completed at epoch 1/1" in shown
    assert f"({first.run})" in cli("show", f"r#{first.run}")[1]


def test_resume_says_where_the_last_run_left_no_checkpoint(make_run: Any, plane: Any) -> None:
    first = make_run(plane(), max_epochs=1).train()
    with pytest.warns(nitro.errors.NitroWarning, match="holds an earlier run"):
        make_run(plane(), max_epochs=1, run_dir=first.run_dir, checkpointer=None).train()

    with pytest.warns(nitro.errors.NitroWarning, match="left no checkpoint") as told:
        resumed = make_run(plane(), max_epochs=2, run_dir=first.run_dir, resume="auto")
    named = f"{first.run_dir}#{first.run_id}"

    assert resumed.run_id == first.run_id
    assert f'resume="{named}"' in str(told[0].message)
    again = make_run(plane(), max_epochs=2, run_dir=first.run_dir, resume=named)
    assert (again.run_id, again.epoch) == (first.run_id, 1)


def test_train_begins_with_one_line(cli: Any) -> None:
    _, _, err = cli("train", "slope.py:Slope", "--run-dir", "r")

    first, second, *_ = err.splitlines()
    assert re.fullmatch(
        r"Slope \(.*slope\.py:\d+\): built by `build_model`; 13 parameters, .* MiB; "
        r"into r \(-v for the whole report\)",
        first,
    )
    assert second.startswith("epoch 1/2")


def test_evaluate_takes_val_where_there_is_no_test_and_says_so(cli: Any) -> None:
    source = _SOURCE.replace(', "test": loader()', "")
    Path("slope.py").write_text(source)
    cli("train", "slope.py:Slope", "--run-dir", "r")

    code, out, err = cli("evaluate", "r")

    best = read_run_file("r").to_history().best
    assert (code, err) == (0, "There is no split `test`: evaluated on `val`.\n")
    assert ", val:\n" in out
    assert f"val_loss  {best['val_loss']:.6g}" in out


def test_folder_of_runs_lists_them_where_a_run_is_wanted(cli: Any) -> None:
    for name in ("a", "b"):
        cli("train", "slope.py:Slope", "--run-dir", f"sweep/{name}")

    code, _, err = cli("evaluate", "sweep")

    here = Path("sweep").absolute()
    assert code == 1
    assert f"fix: name one of the runs in it: `{here}/a`, `{here}/b`" in err
