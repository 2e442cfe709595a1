from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nitro
from nitro.errors import ConfigError, DataError, ExperimentError, HookError


class Picture:
    """A figure that saves itself, and remembers what it was drawn from."""

    def __init__(self, **facts: Any) -> None:
        self.facts = facts

    def save(self, path: Path) -> None:
        path.write_text(repr(self.facts))


@pytest.fixture
def drawn(plane: Any) -> Any:
    """A plane that draws, with what it drew in `drawn.seen`, and file names in its batches."""

    class Drawn(plane):
        def build_data(self):
            data = super().build_data()
            return {
                **data,
                "val": [{**b, "name": [f"n{i}" for i in range(len(b["y"]))]} for b in data["val"]],
            }

        def visualize(self, outputs, *, x, y, name):
            Drawn.seen.append((outputs, x, y, name))
            x[:] = 0  # a copy: nothing else changes
            return Picture(outputs=outputs, y=y)

    Drawn.seen = []
    return Drawn


def test_samples_are_drawn_one_by_one_without_padding(drawn: Any, make_run: Any) -> None:
    run = make_run(drawn())

    paths = run.render(batches=None)

    assert paths == [run.run_dir / "viz" / f"val_{index:05d}.png" for index in range(13)]
    assert all(path.is_file() for path in paths)
    outputs, x, y, name = drawn.seen[12]
    assert (np.shape(outputs), x.shape, np.shape(y), name) == ((), (4,), (), "n2")
    batch = {"x": drawn().build_data()["val"][2]["x"]}
    np.testing.assert_allclose(outputs, run.predict(batch)[2], rtol=1e-6)


def test_data_mode_gets_no_outputs_and_compiles_nothing(drawn: Any, make_run: Any) -> None:
    run = make_run(drawn())
    before = nitro.cache_stats()

    paths = run.render(predictions=False)

    after = nitro.cache_stats()
    assert len(paths) == 5
    assert all(outputs is None for outputs, *_ in drawn.seen)
    assert (after["hits"], after["misses"]) == (before["hits"], before["misses"])


def test_worst_samples_come_first(drawn: Any, make_run: Any) -> None:
    run = make_run(drawn())

    paths = run.render(worst=3, batches=None, tag="bad")

    everything = drawn().build_data()["val"]
    errors = np.concatenate([(run.predict({"x": b["x"]}) - b["y"]) ** 2 for b in everything])
    order = np.argsort(-errors)[:3]
    assert [path.name for path in paths] == [f"bad_{index:05d}.png" for index in order]


def test_one_batch_and_a_limit(drawn: Any, make_run: Any, tmp_path: Path) -> None:
    run = make_run(drawn())

    assert len(run.render(limit=2, out_dir=tmp_path / "here")) == 2
    assert sorted(p.name for p in (tmp_path / "here").iterdir()) == [
        "val_00000.png",
        "val_00001.png",
    ]
    batch = {"x": np.zeros((1, 4), np.float32), "y": np.ones(1), "name": ["a"]}
    assert [p.name for p in run.render(batch=batch)] == ["batch_00000.png"]


def test_matplotlib_figures_are_saved_and_closed(plane: Any, make_run: Any) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    pyplot = pytest.importorskip("matplotlib.pyplot")

    class Plotted(plane):
        def visualize(self, outputs, *, y):
            figure, axes = pyplot.subplots(figsize=(1, 1))
            axes.set_title(f"{outputs:.1f} {y:.1f}")
            return figure

    paths = make_run(Plotted()).render(limit=2)

    assert [path.read_bytes()[:4] for path in paths] == [b"\x89PNG"] * 2
    assert pyplot.get_fignums() == []


def test_save_figure_names_the_file(drawn: Any, make_run: Any) -> None:
    class Saving(drawn):
        def save_figure(self, figure, stem):
            path = stem.with_suffix(".txt")
            path.write_text("drawn")
            return path

    assert make_run(Saving()).render(limit=1)[0].name == "val_00000.txt"


def test_fields_of_visualize_never_go_to_the_device(drawn: Any, make_run: Any) -> None:
    run = make_run(drawn()).train()

    assert "Drawn.visualize" not in run.binding
    assert run.epoch == 1


def test_without_the_hook_its_signature_is_named(plane: Any, make_run: Any) -> None:
    with pytest.raises(ExperimentError, match=r"`Plane` has no hook `visualize`[\s\S]*outputs, \*"):
        make_run(plane()).render()


def test_figure_that_nothing_can_save_is_named(plane: Any, make_run: Any) -> None:
    class Tupled(plane):
        def visualize(self, outputs, *, y):
            return (1, 2)

    with pytest.raises(
        ExperimentError, match=r"`Tupled.visualize` returned tuple[\s\S]*save_figure"
    ):
        make_run(Tupled()).render()


def test_save_figure_must_return_a_path(drawn: Any, make_run: Any) -> None:
    class Silent(drawn):
        def save_figure(self, figure, stem):
            return None

    with pytest.raises(HookError, match=r"`Silent.save_figure` returned NoneType[\s\S]*the path"):
        make_run(Silent()).render()


@pytest.mark.parametrize("name", ["worst", "batches", "limit"])
def test_numbers_below_one_are_refused(drawn: Any, make_run: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"`{name}` is 0[\s\S]*at least 1"):
        make_run(drawn()).render(**{name: 0})


def test_unknown_split_missing_data_and_missing_field(drawn: Any, make_run: Any) -> None:
    run = make_run(drawn())

    with pytest.raises(ConfigError, match=r"no split `test`[\s\S]*`train`, `val`"):
        run.render("test")
    with pytest.raises(ConfigError, match=r"no split `val`[\s\S]*pass `batch=`"):
        make_run(drawn(), data={}).render()
    with pytest.raises(DataError, match=r"`Drawn.visualize` wants the batch field `name`"):
        run.render("train")
    with pytest.raises(ConfigError, match="needs `predictions=True`"):
        run.render(worst=1, predictions=False)
