"""An interrupted export leaves nothing, and an overwrite leaves no gap."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nitro.export._staging import staged, swap_in

_KILLED = """
import os, signal, sys
from pathlib import Path
from nitro.export._staging import staged

with staged(Path(sys.argv[1])) as staging:
    staging.mkdir()
    (staging / "half").write_text("x" * 1000)
    print("writing", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_killed_export_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"

    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(out / "m_v1")], capture_output=True, check=False
    )

    assert done.returncode == -signal.SIGKILL
    assert done.stdout == b"writing\n"
    deadline = time.monotonic() + 30
    while list(out.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.02)  # the janitor is another process
    assert list(out.iterdir()) == []


_ALL_KILLED = """
import os, signal, sys, time
from pathlib import Path
from nitro.export._staging import staged

with staged(Path(sys.argv[1])) as staging:
    staging.mkdir()
    (staging / "half").write_text("x" * 1000)
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="finds the janitor through /proc")
def test_what_a_killed_container_left_is_removed_by_the_next_export(tmp_path: Path) -> None:
    target = tmp_path / "m"
    command = [sys.executable, "-c", _ALL_KILLED, str(target)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    (tmp_path / ".m.v2.abcd1234.partial").mkdir()  # another target's

    with staged(target) as running, staged(target) as staging:
        # What belongs to an export that runs stays.
        assert running.parent.is_dir()
        staging.mkdir()
        swap_in(staging, target)

    assert sorted(p.name for p in tmp_path.iterdir()) == [".m.v2.abcd1234.partial", "m"]


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with staged(tmp_path / "out" / "m") as staging:
            staging.mkdir()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    assert list((tmp_path / "out").iterdir()) == []


def test_an_unfinished_folder_is_no_child_that_a_server_would_load(tmp_path: Path) -> None:
    with staged(tmp_path / "m") as staging:
        staging.mkdir()
        (staging / "manifest.yaml").write_text("")

        assert not list(tmp_path.glob("*/manifest.yaml"))


def test_an_overwrite_leaves_no_moment_without_an_artifact(tmp_path: Path) -> None:
    target = tmp_path / "m"
    target.mkdir()
    (target / "version").write_text("0")
    gaps: list[str] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            try:
                (target / "version").read_text()
            except FileNotFoundError as error:
                gaps.append(str(error))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for version in range(1, 20):
        with staged(target) as staging:
            staging.mkdir()
            (staging / "version").write_text(str(version))
            swap_in(staging, target)
    done.set()
    watcher.join()

    assert (target / "version").read_text() == "19"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]
    if sys.platform == "linux":
        assert not gaps


def test_two_exports_of_one_name_do_not_disturb_each_other(tmp_path: Path) -> None:
    target = tmp_path / "m"
    with staged(target) as first, staged(target) as second:
        for staging, text in ((first, "first"), (second, "second")):
            staging.mkdir()
            (staging / "who").write_text(text)
        swap_in(first, target)
        swap_in(second, target)

    assert (target / "who").read_text() == "second"
