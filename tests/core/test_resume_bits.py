"""Interrupted runs end with the bits of a run that never stopped; real processes and signals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytestmark = pytest.mark.slow

KILLS = 20
GRAIN = ("grain-map", "grain-iter", "grain-loader", "grain-stream")


class Outcome(NamedTuple):
    """What a run leaves: arrays, history, and the lines of its log that no clock decides."""

    arrays: dict[str, np.ndarray]
    history: Any
    log: list[dict[str, Any]]


class Runs(NamedTuple):
    """The runs of one source, and how those that were killed ended."""

    directory: Path
    kills: list[dict[str, Any]]

    def outcome(self, name: str) -> Outcome:
        run_dir = self.directory / name
        with np.load(run_dir / "final.npz") as arrays:
            held = dict(arrays)
        history = json.loads((run_dir / "history.json").read_text())
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        return Outcome(held, history, [_without_clock(json.loads(line)) for line in lines])

    def killed(self) -> list[str]:
        """The runs that were killed, some of them more than once."""
        return sorted({kill["run"] for kill in self.kills})


def _without_clock(line: dict[str, Any]) -> dict[str, Any]:
    if line["type"] == "other":
        line.pop("value")  # the binding report names the run's directory
    return {k: v for k, v in line.items() if k not in ("data_wait_frac", "run_dir")}


def _interrupted(directory: Path, kills: dict[str, int]) -> dict[str, Runs]:
    script = Path(__file__).with_name("interrupted_runs.py")
    sources = [f"{source}={number}" for source, number in kills.items()]
    done = subprocess.run(
        [sys.executable, str(script), str(directory), *sources],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    killed = json.loads(done.stdout.splitlines()[-1])
    return {source: Runs(directory / source, killed[source]) for source in kills}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return _interrupted(tmp_path_factory.mktemp("interrupted"), {"arrays": KILLS})["arrays"]


@pytest.fixture(scope="module")
def grain_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Runs]:
    pytest.importorskip("grain", reason="needs Grain: `uv sync --group loaders`")
    return _interrupted(tmp_path_factory.mktemp("grain"), dict.fromkeys(GRAIN, 1))


def _check_same(got: Outcome, expected: Outcome) -> None:
    assert got.arrays.keys() == expected.arrays.keys()
    for name, array in expected.arrays.items():
        np.testing.assert_array_equal(got.arrays[name], array, err_msg=name)
    assert got.history == expected.history
    assert got.log == expected.log


def test_the_straight_run_logs_each_step_once(runs: Runs) -> None:
    log = runs.outcome("straight").log

    steps = [line["step"] for line in log if line.get("context") == "train"]
    assert steps == list(range(1, 71))
    assert [line["type"] for line in log if line["type"] != "metrics"] == [
        "params",
        "other",
        "finish",
    ]


@pytest.mark.parametrize("name", ["epoch-end", "sigterm"])
def test_a_stopped_run_ends_with_the_same_bits(runs: Runs, name: str) -> None:
    _check_same(runs.outcome(name), runs.outcome("straight"))


def test_kills_hit_in_saves_between_them_and_before_the_end(runs: Runs) -> None:
    kills = runs.kills

    assert [kill["by_signal"] for kill in kills] == [signal.SIGKILL] * KILLS
    assert not any(kill["has_finished"] for kill in kills)
    assert sum(kill["in_save"] for kill in kills) >= 5
    assert sum(kill["has_records"] and not kill["in_save"] for kill in kills) >= 5


def test_a_killed_run_ends_with_the_same_bits(runs: Runs) -> None:
    for name in runs.killed():
        _check_same(runs.outcome(name), runs.outcome("straight"))


@pytest.mark.parametrize("source", GRAIN)
def test_an_interrupted_run_on_grain_ends_with_the_same_bits(
    grain_runs: dict[str, Runs], source: str
) -> None:
    runs = grain_runs[source]

    assert {kill["by_signal"] for kill in runs.kills} == {signal.SIGKILL}
    for name in ("epoch-end", "sigterm", *runs.killed()):
        _check_same(runs.outcome(name), runs.outcome("straight"))


def test_a_stream_of_grain_shuffles_each_epoch_anew(grain_runs: dict[str, Runs]) -> None:
    anew, same = (grain_runs[name].outcome("straight") for name in ("grain-stream", "grain-iter"))

    # The first epoch is the same; from the second on the orders differ.
    assert anew.history[0] == same.history[0]
    assert anew.history[1] != same.history[1]


def test_nothing_half_written_is_left(runs: Runs) -> None:
    names = [path.name for path in runs.directory.glob("*/checkpoints/*")]

    assert names
    assert not [name for name in names if "tmp" in name or "trash" in name]
    assert not list(runs.directory.glob("*/nitro.lock"))
