"""Records on disks that are full, read-only or shared, and records that are damaged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nitro
from nitro import TopK
from nitro._checkpoint import DirectoryLock
from nitro._run import session_of
from nitro.errors import CheckpointError


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
    straight = nitro.Nitro(plane(), **{**options, "run_dir": tmp_path / "straight"}).train()
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
from pathlib import Path
from nitro._checkpoint import DirectoryLock
DirectoryLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
sys.stdin.read()
"""


def test_second_process_in_a_directory_is_refused(plane: Any, tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    run = nitro.Nitro(plane(), run_dir=tmp_path)

    with pytest.raises(CheckpointError, match=rf"process {holder.pid} on .* trains into it"):
        run.train()
    assert not (tmp_path / "metrics.jsonl").exists()

    holder.kill()
    holder.communicate()
    # The lock of a process that was killed holds nothing back.
    assert run.train().epoch == 1
    assert not (tmp_path / "nitro.lock").exists()


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


def test_directory_may_be_copied_elsewhere(
    plane: Any, copied: Path, trained_plane: nitro.Nitro
) -> None:
    run = nitro.Nitro(plane(), run_dir=copied, max_epochs=7, resume="auto").train()

    before, after = nitro.checkpoints(trained_plane.run_dir), nitro.checkpoints(copied)
    assert (run.epoch, len(run.history)) == (7, 7)
    assert after[-1].run == before[-1].run
    lines = (copied / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if '"train"' in line]
    assert steps == list(range(1, 29))


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
    for entry in nitro.checkpoints(trained_plane.run_dir):
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
