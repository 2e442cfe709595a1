from __future__ import annotations

import builtins
import copy
import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nitro
from nitro._journal import History
from nitro.errors import ConfigError, MissingPackageError


@pytest.fixture
def long() -> History:
    """Three hundred epochs, the best of which is number 151."""
    return History(
        (
            {
                "epoch": n,
                "step": 10 * n,
                "loss": 1 / n,
                "acc": 1 - abs(n - 151) / 300,
                "val_f1": 0.5,
            }
            for n in range(1, 301)
        ),
        metric="acc",
        mode="max",
    )


def test_history_has_a_row_for_each_epoch(trained_plane: nitro.Nitro) -> None:
    history = trained_plane.history

    assert len(history) == 6
    assert history.columns == ["epoch", "step", "loss", "val_loss"]
    assert history["step"] == history.step == [4, 8, 12, 16, 20, 24]
    assert history[3] == list(history)[2]
    assert history.to_dict()["epoch"] == [1, 2, 3, 4, 5, 6]


def test_loss_column_is_the_mean_over_the_epochs_steps(
    trained_plane: nitro.Nitro,
) -> None:
    lines = (trained_plane.run_dir / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in lines if '"train"' in line and '"epoch": 2' in line]

    losses = [float(line.split('"loss": ')[1].rstrip("}")) for line in steps]

    assert trained_plane.history[2]["loss"] == pytest.approx(np.mean(losses))


def test_history_shows_as_a_table_with_the_best_epoch_starred(trained_plane: nitro.Nitro) -> None:
    history = trained_plane.history
    rows = repr(history).splitlines()

    assert rows[0].split() == ["epoch", "step", "loss", "val_loss"]
    assert [row for row in rows[1:7] if "*" in row] == [rows[history.best["epoch"]]]
    assert rows[7:] == ["* best by val_loss (min)"]
    assert history.best["val_loss"] == min(history["val_loss"])


def test_new_handle_has_an_empty_history(plane: Any, make_run: Any) -> None:
    history = make_run(plane()).history

    assert (len(history), list(history), history.has_best) == (0, [], False)
    assert repr(history).split() == ["epoch", "step", "loss"]
    with pytest.raises(ConfigError, match=r"no epoch 1\.[\s\S]*holds: none"):
        history[1]


@pytest.mark.parametrize(
    ("rows", "metric", "problem"),
    [
        ([], "acc", "no epoch has finished"),
        ([{"epoch": 1, "step": 4, "loss": 1.0}], "acc", "none of 1 has a finite `acc`"),
        ([{"epoch": 1, "acc": float("nan")}], "acc", "none of 1 has a finite `acc`"),
        ([{"epoch": 1, "step": 4, "loss": 1.0}], None, "no metric to rank by"),
    ],
)
def test_best_epoch_before_one_is_scored_is_an_error_that_says_so(
    rows: Any, metric: Any, problem: str
) -> None:
    history = History(rows, metric=metric)

    with pytest.raises(ConfigError, match=rf"no best epoch: .*{problem}[\s\S]*has_best"):
        _ = history.best
    assert not history.has_best


def test_unknown_epoch_and_column_say_what_there_is(trained_plane: nitro.Nitro) -> None:
    history = trained_plane.history

    with pytest.raises(ConfigError, match=r"no epoch 7[\s\S]*epochs 1 to 6"):
        history[7]
    with pytest.raises(ConfigError, match=r"no epoch 0[\s\S]*epochs 1 to 6"):
        history[0]
    with pytest.raises(ConfigError, match=r"no column `val_los`[\s\S]*did you mean `val_loss`\?"):
        history["val_los"]
    with pytest.raises(AttributeError, match=r"no column `val_los`.*did you mean `val_loss`\?"):
        _ = history.val_los


def test_ranges_of_epochs_and_lists_of_columns_select(long: History) -> None:
    assert long[3:7]["epoch"] == [3, 4, 5, 6]
    assert long[-2:]["epoch"] == [299, 300]
    assert long[:3]["epoch"] == [1, 2]
    assert long[range(1, 300, 100)]["epoch"] == [1, 101, 201]
    assert long[-1]["epoch"] == 300
    assert long[["acc"]].columns == ["epoch", "acc"]
    assert long[3:7].best == long[6]


def test_history_can_be_copied(long: History) -> None:
    assert copy.deepcopy(long).to_dict() == long.to_dict()


def test_ranking_metric_stands_first_and_the_older_of_equals_is_best() -> None:
    rows = [{"epoch": n, "step": n, "loss": 1.0, "b": 0.5, "a": 0.5} for n in (1, 2)]

    history = History(rows, metric="a", mode="max")

    assert history.columns == ["epoch", "step", "loss", "a", "b"]
    assert history.best == rows[0]


def test_table_is_thinned_around_first_best_and_last(long: History) -> None:
    table = long.table(width=80, height=16)

    shown = [row[0] for row in table.rows]
    assert len(shown) <= 16
    assert shown[:2] == ["1", "2"]
    assert shown[-1] == "300"
    assert {"150", "151 *", "152"} <= set(shown)
    assert shown.count("...") == 2
    assert any("of 300 epochs; a range shows others" in note for note in table.notes)


def test_columns_that_do_not_fit_are_named(long: History) -> None:
    text = long.table(width=36, height=10).to_text()

    head, *lines = text.splitlines()
    assert "val_f1" not in head
    assert max(map(len, lines[:10])) <= 36
    assert "not shown: val_f1; select with history[['val_f1']]" in lines


def test_html_is_escaped(long: History) -> None:
    history = History([{"epoch": 1, "step": 1, "loss": 1.0, "<b>": 2.0}])

    assert "<th>&lt;b&gt;</th>" in history._repr_html_()
    assert "151 *" in long._repr_html_()


def test_arrays_are_kept_and_noted_but_not_tabulated(plane: Any, make_run: Any) -> None:
    class Confused(plane):
        def metrics(self, height, *, y):
            return {"val_loss": (abs(height - y).sum(), y.size), "matrix": (np.eye(2), None)}

    history = make_run(Confused()).train().history

    assert history.columns == ["epoch", "step", "loss", "val_loss"]
    assert history["matrix"][0].shape == (2, 2)
    assert "not tabulated: matrix (2, 2); read history['matrix']" in repr(history)
    json.dumps(history.scalar_rows())


def test_csv_holds_the_columns(long: History, tmp_path: Path) -> None:
    path = long.to_csv(tmp_path / "new" / "h.csv")

    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 300
    assert list(rows[0]) == long.columns
    assert float(rows[150]["acc"]) == 1.0


def test_missing_values_are_empty_in_csv(tmp_path: Path) -> None:
    rows = [{"epoch": 1, "step": 1, "loss": 1.0}, {"epoch": 2, "step": 2, "loss": 1.0, "acc": 0.5}]

    path = History(rows).to_csv(tmp_path / "h.csv")

    assert path.read_text().splitlines() == ["epoch,step,loss,acc", "1,1,1.0,", "2,2,1.0,0.5"]


def test_pandas_frame_is_indexed_by_epoch(long: History) -> None:
    pytest.importorskip("pandas")

    frame = long.to_pandas()

    assert frame.index.name == "epoch"
    assert frame.loc[151, "acc"] == 1.0
    assert list(frame.columns) == ["step", "loss", "acc", "val_f1"]


@pytest.mark.parametrize(
    ("package", "call", "fix"),
    [
        ("pandas", lambda run: run.history.to_pandas(), "pip install pandas"),
        ("matplotlib", lambda run: run.plot(), r'pip install "nitro-core\[plot\]"'),
    ],
)
def test_missing_package_names_the_command(
    trained_plane: nitro.Nitro, monkeypatch: pytest.MonkeyPatch, package: str, call: Any, fix: str
) -> None:
    from importlib import import_module

    def refuse(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ImportError(name)
        return import_module(name, *rest)

    monkeypatch.setattr("importlib.import_module", refuse)

    with pytest.raises(MissingPackageError, match=fix):
        call(trained_plane)
    assert issubclass(MissingPackageError, builtins.ImportError)


def test_plot_has_a_panel_for_each_curve_with_the_best_marked(
    trained_plane: nitro.Nitro, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")

    figure = trained_plane.plot(tmp_path / "out" / "curves.png")

    best = trained_plane.history.best
    assert [axes.get_title() for axes in figure.axes] == ["train loss", "val_loss"]
    labels = figure.axes[1].get_legend().get_texts()
    assert labels[0].get_text().startswith(f"best epoch {best['epoch']}: ")
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_plot_of_nothing_is_refused(plane: Any, make_run: Any) -> None:
    pytest.importorskip("matplotlib")

    with pytest.raises(ConfigError, match="no epoch has finished"):
        make_run(plane()).plot()


def test_plot_as_the_value_of_a_cell_is_a_picture(trained_plane: nitro.Nitro) -> None:
    pytest.importorskip("matplotlib")
    formatters = pytest.importorskip("IPython.core.formatters")

    shown, _ = formatters.DisplayFormatter().format(trained_plane.plot())

    assert shown["image/png"].startswith(b"\x89PNG\r\n")
