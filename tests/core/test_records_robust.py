"""Records on disks that are full, read-only or shared, and records that are damaged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import nitro
from nitro import TopK
from nitro._checkpoint import DirectoryLock
from nitro._run import session_of
from nitro.errors import CheckpointError


def _make(experiment: Any, **options: Any) -> nitro.Nitro:
    return nitro.Nitro(experiment, **options)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB; the test makes a mount, so it needs root."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    done = subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)],
        check=False,
        capture_output=True,
    )
    if done.returncode:
        pytest.skip(f"mounting a small disk fails here: {done.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def _fill(disk: Path) -> Path:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
    return filler


@pytest.mark.filterwarnings("ignore:.run.json. in .* cannot be written")
# Where a write fails, Orbax may leave coroutines of its own that nobody awaits.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_full_disk_is_told_and_loses_nothing(plane: Any, small_disk: Path, tmp_path: Path) -> None:
    run_dir = small_disk / "run"
    options: Any = {"run_dir": run_dir, "max_epochs": 6, "checkpointer": TopK(k=1), "logger": None}
    run = nitro.Nitro(plane(), **options)
    run.on_phase(
        lambda e: _fill(small_disk) if (e.phase.value, e.epoch) == ("evaluating", 3) else None
    )

    with pytest.raises(CheckpointError, match=r"could not be written[\s\S]*free the disk"):
        run.train()

    entries = nitro.checkpoints(run_dir)
    assert entries
    assert all(entry.epoch < 3 for entry in entries)
    (small_disk / "filler").unlink()
    resumed = nitro.Nitro(plane(), **options, resume="auto").train()
    straight = _make(plane(), **{**options, "run_dir": tmp_path / "straight"}).train()
    for name, value in session_of(straight).state.params.items():
        np.testing.assert_array_equal(session_of(resumed).state.params[name], value)
    assert not list((run_dir / "checkpoints").glob("*tmp*"))


@pytest.mark.filterwarnings("ignore:.run.json. in .* cannot be written")
# Where a write fails, Orbax may leave coroutines of its own that nobody awaits.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_handle_goes_on_after_the_disk_is_free_again(plane: Any, small_disk: Path) -> None:
    run = nitro.Nitro(plane(), run_dir=small_disk / "run", max_epochs=4, logger=None)
    run.on_phase(
        lambda e: (
            _fill(small_disk) if (e.phase.value, e.epoch, e.step) == ("evaluating", 2, 8) else None
        )
    )
    with pytest.raises(CheckpointError, match="could not be written"):
        run.train()
    (small_disk / "filler").unlink()

    run.checkpoint()

    assert nitro.checkpoints(run.run_dir)[-1].step == run.step


def test_read_only_disk_is_told_before_the_first_step(plane: Any, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    run = nitro.Nitro(plane(), run_dir=small_disk / "run")

    with pytest.raises(
        CheckpointError, match=r"cannot be written: Read-only[\s\S]*another `run_dir=`"
    ):
        run.train()
    assert run.step == 0


def test_file_in_place_of_the_directory_is_told(plane: Any, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")

    with pytest.raises(CheckpointError, match="cannot be written"):
        nitro.Nitro(plane(), run_dir=tmp_path / "run").train()


# Two at once ----------------------------------------------------------------------------------

_HOLDER = """
import sys
from conftest import Plane
import nitro
from nitro._run import session_of

def wait(event):
    if event.phase.value == "evaluating" and event.epoch == 2:
        session_of(event.run).records.wait()
        print("trains", flush=True)
        sys.stdin.readline()

run = nitro.Nitro(Plane(), run_dir=sys.argv[1], max_epochs=3, progress=False)
run.on_phase(wait)
run.train()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that trains in `run`; it has recorded an epoch, and waits in the next one."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path / "run")],
        cwd=Path(__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "trains\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("place", ["run", "moved"])
def test_second_process_in_a_directory_is_refused(
    plane: Any, tmp_path: Path, holder: subprocess.Popen[str], place: str
) -> None:
    if place == "moved":
        (tmp_path / "run").rename(tmp_path / "moved")
    before = (tmp_path / place / "metrics.jsonl").read_bytes()
    run = nitro.Nitro(plane(), run_dir=tmp_path / place, max_epochs=3, resume="auto")

    with pytest.raises(CheckpointError, match=rf"process {holder.pid} on .* trains into it"):
        run.train()
    assert (tmp_path / place / "metrics.jsonl").read_bytes() == before

    holder.kill()
    holder.communicate()
    # The lock of a process that was killed holds nothing back.
    assert run.train().epoch == 3
    assert not (tmp_path / place / "nitro.lock").exists()


def test_copy_of_a_directory_in_use_is_free(
    plane: Any, tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    copy = shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert (copy / "nitro.lock").exists()

    nitro.Nitro(plane(), run_dir=copy, max_epochs=3, resume="auto").train()
    holder.communicate("\n")

    assert holder.returncode == 0
    ends = [[(e.epoch, e.score) for e in nitro.checkpoints(tmp_path / d)] for d in ("run", "copy")]
    assert ends[0] == ends[1]
    assert len(ends[0]) == 3


def test_two_handles_of_one_process_are_kept_apart(tmp_path: Path) -> None:
    first, second = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    first.acquire()

    with pytest.raises(CheckpointError, match=rf"process {os.getpid()} on"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()


# Damage ---------------------------------------------------------------------------------------


@pytest.fixture
def copied(trained_plane: nitro.Nitro, tmp_path: Path) -> Path:
    return shutil.copytree(trained_plane.run_dir, tmp_path / "copied elsewhere")


def _contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


@pytest.mark.parametrize("how", ["copied", "moved"])
def test_directory_may_be_copied_or_moved(plane: Any, tmp_path: Path, how: str) -> None:
    first, elsewhere = tmp_path / "first", tmp_path / "elsewhere" / "run"
    stopped = nitro.Nitro(plane(), run_dir=first, max_epochs=4, steps_per_call=1)
    stopped.on_phase(lambda e: e.run.request_stop() if e.epoch == 2 else None)
    stopped.train()
    before, entries = _contents(first), nitro.checkpoints(first)
    (shutil.copytree if how == "copied" else shutil.move)(first, elsewhere)

    weights = nitro.Nitro(plane(), checkpoint=f"{elsewhere}@latest", data={}, run_dir=first)
    run = nitro.Nitro(plane(), run_dir=elsewhere, max_epochs=4, resume="auto").train()

    straight = nitro.Nitro(plane(), run_dir=tmp_path / "straight", max_epochs=4).train()
    for name, value in session_of(straight).state.params.items():
        np.testing.assert_array_equal(session_of(run).state.params[name], value)
        np.testing.assert_array_equal(
            session_of(weights).state.params[name], session_of(stopped).state.params[name]
        )
    assert run.history.rows == straight.history.rows
    assert {e.run for e in nitro.checkpoints(elsewhere)} == {entries[0].run}
    lines = (elsewhere / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if '"train"' in line] == list(range(1, 17))
    assert (_contents(first) == before) if how == "copied" else not first.exists()


def test_copy_on_a_read_only_disk_is_read(
    plane: Any, trained_plane: nitro.Nitro, small_disk: Path
) -> None:
    copied = shutil.copytree(trained_plane.run_dir, small_disk / "run")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)

    weights = nitro.Nitro(plane(), checkpoint=f"{copied}@latest", data={}, run_dir=copied)
    run = nitro.Nitro(plane(), run_dir=copied, max_epochs=7, resume="auto")

    for name, value in session_of(trained_plane).state.params.items():
        np.testing.assert_array_equal(session_of(weights).state.params[name], value)
    assert run.validate() == trained_plane.validate()
    with pytest.raises(CheckpointError, match="cannot be written: Read-only"):
        run.train()


# Where a read fails, Orbax may leave coroutines of its own that nobody awaits.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", ["truncated", "emptied", "gone", "foreign"])
def test_record_with_one_damaged_file_gives_its_own_bits_or_none(
    plane: Any, copied: Path, trained_plane: nitro.Nitro, damage: str
) -> None:
    record = copied / "checkpoints" / nitro.checkpoints(copied)[-1].name
    refused: list[str] = []
    for file, content in _contents(record).items():
        spoiled = {
            "truncated": content[: len(content) // 2],
            "emptied": b"",
            "foreign": np.random.default_rng(0).bytes(len(content)),
        }
        (record / file).unlink()
        if damage != "gone":
            (record / file).write_bytes(spoiled[damage])
        try:
            run = nitro.Nitro(plane(), run_dir=copied, max_epochs=7, resume=record)
        except CheckpointError:
            refused.append(file)
        else:
            _check_same_state(run, trained_plane)
        (record / file).write_bytes(content)

    assert {"meta/metadata", "arrays/manifest.ocdbt"} <= set(refused)
    assert any(file.startswith("arrays/d/") for file in refused)


def _check_same_state(got: nitro.Nitro, expected: nitro.Nitro) -> None:
    state, same = session_of(got).state, session_of(expected).state
    jax.tree.map(np.testing.assert_array_equal, state, same)


def test_checkpoint_of_another_program_is_refused(plane: Any, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(foreign, {"kernel": np.zeros((4, 1)), "bias": np.zeros(1)})
    inside = shutil.copytree(foreign, tmp_path / "run" / "checkpoints" / "7")

    options = [{o: p} for o in ("checkpoint", "weights", "resume") for p in (foreign, inside)]
    for option in options:
        with pytest.raises(CheckpointError, match=r"holds no record|no record that can be"):
            _make(plane(), run_dir=tmp_path / "run", **option)
    # One that lies beside our records disturbs nobody, and stays.
    run = nitro.Nitro(plane(), run_dir=tmp_path / "run").train()
    assert len(nitro.checkpoints(run.run_dir)) == 1
    assert _contents(inside) == _contents(foreign)


def test_truncated_record_is_told_with_another_one_to_use(plane: Any, copied: Path) -> None:
    *others, newest = nitro.checkpoints(copied)
    for path in (copied / "checkpoints" / newest.name / "arrays").rglob("*"):
        if path.is_file():
            os.truncate(path, path.stat().st_size // 2)

    with pytest.raises(
        CheckpointError, match=rf"is damaged[\s\S]*use another record: .*{others[-1].name}"
    ):
        nitro.Nitro(plane(), run_dir=copied, max_epochs=7, resume="auto")
    older = copied / "checkpoints" / others[-1].name
    assert nitro.Nitro(plane(), checkpoint=older, data={}).step == 0


def test_record_with_damaged_metadata_is_not_listed(plane: Any, copied: Path) -> None:
    newest = nitro.checkpoints(copied)[-1]
    meta = copied / "checkpoints" / newest.name / "meta" / "metadata"
    meta.write_text(meta.read_text()[:100])

    with pytest.raises(CheckpointError, match="no record that can be read"):
        nitro.checkpoint_info(copied / "checkpoints" / newest.name)


def test_record_of_a_later_format_is_told(plane: Any, copied: Path) -> None:
    newest = copied / "checkpoints" / nitro.checkpoints(copied)[-1].name
    meta = json.loads((newest / "meta" / "metadata").read_text())
    (newest / "meta" / "metadata").write_text(json.dumps({**meta, "format_version": 9}))

    with pytest.raises(CheckpointError, match=r"format version 9, of Nitro[\s\S]*version 1"):
        nitro.Nitro(plane(), checkpoint=newest, data={})


def test_record_that_was_not_listed_is_found_again(plane: Any, copied: Path) -> None:
    index = copied / "checkpoints" / "index.json"
    entries = nitro.checkpoints(copied)
    content = json.loads(index.read_text())
    content["records"] = content["records"][:-1]
    index.write_text(json.dumps(content))
    assert nitro.checkpoints(copied) == entries

    index.unlink()
    assert [e.name for e in nitro.checkpoints(copied)] == sorted(e.name for e in entries)
    assert nitro.Nitro(plane(), run_dir=copied, max_epochs=7, resume="auto").epoch == 6


def test_what_was_half_written_is_cleared_by_the_next_writer(plane: Any, copied: Path) -> None:
    folder = copied / "checkpoints"
    strays = ["epoch0009-step00000099.orbax-checkpoint-tmp-1", "epoch0001.nitro-trash"]
    for name in strays:
        (folder / name / "meta").mkdir(parents=True)
        (folder / name / "meta" / "metadata").write_text("{}")
    (folder / "mine").mkdir()
    assert not {e.name for e in nitro.checkpoints(copied)} & set(strays)

    nitro.Nitro(plane(), run_dir=copied, max_epochs=7, resume="auto").train()

    assert not [name for name in strays if (folder / name).exists()]
    assert (folder / "mine").exists()


# Information ----------------------------------------------------------------------------------


def test_record_tells_of_itself_without_its_arrays(trained_plane: nitro.Nitro) -> None:
    info = nitro.checkpoint_info(f"{trained_plane.run_dir}@latest")

    assert (info["epoch"], info["step"], info["steps_in_epoch"], info["seed"]) == (6, 24, 0, 0)
    assert info["entry"]["stop_reason"] == "completed"
    assert info["leaves"]["params"] == {"bias": "float32(1,)", "kernel": "float32(4, 1)"}
    assert len(info["history"]) == 6
    assert "jax" in info["versions"]


def test_names_say_what_a_person_looks_for(trained_plane: nitro.Nitro) -> None:
    entries = nitro.checkpoints(trained_plane.run_dir)

    assert entries
    for entry in entries:
        start = f"epoch{entry.epoch:04d}-step{entry.step:08d}-val_loss="
        assert entry.name.startswith(start)
        assert float(entry.name.removeprefix(start)) == pytest.approx(entry.score, rel=1e-5)


def test_unused_directory_holds_no_records(tmp_path: Path) -> None:
    assert nitro.checkpoints(tmp_path) == []


def test_record_on_request_replaces_the_one_of_the_same_step(plane: Any, make_run: Any) -> None:
    run = make_run(plane(), max_epochs=2).train()
    before = nitro.checkpoints(run.run_dir)

    run.checkpoint()
    run.checkpoint()

    after = nitro.checkpoints(run.run_dir)
    assert [(e.step, e.score) for e in after] == [(e.step, e.score) for e in before]
    assert after[-1].time > before[-1].time
    assert {p.name for p in (run.run_dir / "checkpoints").iterdir()} == {
        "index.json",
        *(e.name for e in after),
    }


def test_handles_in_threads_write_their_records_side_by_side(plane: Any, tmp_path: Path) -> None:
    runs = [
        _make(plane(), seed=seed, run_dir=tmp_path / str(seed), max_epochs=15, progress=False)
        for seed in range(3)
    ]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda run: run.train(), runs))

    for run in runs:
        kernel = _make(plane(), checkpoint=f"{run.run_dir}@latest", data={}).model.kernel
        np.testing.assert_array_equal(kernel[...], run.model.kernel[...])
