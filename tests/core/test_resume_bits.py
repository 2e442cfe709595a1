"""Interrupted runs end with the bits of a run that never stopped; real processes and signals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytestmark = pytest.mark.slow

KILLS = 20


class Outcome(NamedTuple):
    """What a run leaves: arrays, history, and the lines of its log that no clock decides."""

    arrays: dict[str, np.ndarray]
    history: Any
    log: list[dict[str, Any]]


class Runs(NamedTuple):
    directory: Path
    summary: dict[str, Any]

    def outcome(self, name: str) -> Outcome:
        run_dir = self.directory / name
        with np.load(run_dir / "final.npz") as arrays:
            held = dict(arrays)
        history = json.loads((run_dir / "history.json").read_text())
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        return Outcome(held, history, [_without_clock(json.loads(line)) for line in lines])


def _without_clock(line: dict[str, Any]) -> dict[str, Any]:
    if line["type"] == "other":
        line.pop("value")  # the binding report names the run's directory
    return {k: v for k, v in line.items() if k not in ("data_wait_frac", "run_dir")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    directory = tmp_path_factory.mktemp("interrupted")
    script = Path(__file__).with_name("interrupted_runs.py")
    done = subprocess.run(
        [sys.executable, str(script), str(directory), str(KILLS)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Runs(directory, json.loads(done.stdout.splitlines()[-1]))


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


def test_a_killed_run_ends_with_the_same_bits(runs: Runs) -> None:
    assert runs.summary["killed"] == KILLS
    for name in runs.summary["runs"]:
        _check_same(runs.outcome(name), runs.outcome("straight"))


def test_nothing_half_written_is_left(runs: Runs) -> None:
    names = [path.name for path in runs.directory.glob("*/checkpoints/*")]

    assert not [name for name in names if "tmp" in name or "trash" in name]
    assert not list(runs.directory.glob("*/nitro.lock"))
