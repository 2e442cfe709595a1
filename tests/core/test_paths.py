"""Addresses of other file systems are refused; no folder is named after a scheme."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import nitro
from nitro.errors import ConfigError


@pytest.mark.parametrize("address", ["gs://bucket/run", "s3://bucket/a/b", "memory://run"])
@pytest.mark.parametrize("kind", [str, Path])
def test_remote_run_directory_is_refused_at_setup(
    plane: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, kind: Any
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError, match=rf"`run_dir` is the address `{address}`") as error:
        nitro.Nitro(plane(), run_dir=kind(address))

    assert "copy it afterwards" in error.value.fix
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (lambda run: nitro.export_model(run, "stablehlo", dir="s3://b/m", name="m"), "dir"),
        (lambda run: run.render(out_dir="gs://b/viz"), "out_dir"),
        (lambda run: run.history.to_csv("gs://b/h.csv"), "path"),
        (lambda run: run.plot("gs://b/h.png"), "path"),
        (lambda _: nitro.JSONLinesLogger("gs://b/m.jsonl"), "path"),
        (lambda _: nitro.TensorBoardLogger("gs://b/tb"), "log_dir"),
        (lambda _: nitro.checkpoints("gs://b/run"), "directory"),
        (lambda run: nitro.Nitro(type(run.experiment)(), checkpoint="gs://b/r@best"), "checkpoint"),
        (lambda run: nitro.Nitro(type(run.experiment)(), resume="s3://b/r"), "checkpoint"),
        (lambda run: nitro.Nitro(type(run.experiment)(), weights="s3://b/r"), "checkpoint"),
        (lambda _: nitro.setup_devices(cache_dir="gs://b/xla"), "cache_dir"),
    ],
)
def test_remote_place_of_anything_else_is_refused(
    trained_plane: nitro.Nitro,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    use: Any,
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError, match=rf"`{name}` is the address `(s3|gs)://b/"):
        use(trained_plane)

    assert list(tmp_path.iterdir()) == []


def test_file_address_is_told_the_path_that_works(plane: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        nitro.Nitro(plane(), run_dir=f"file://{tmp_path}/run", data={})

    fixed = error.value.fix.split("`")[1]
    assert nitro.Nitro(plane(), run_dir=fixed, data={}).run_dir == tmp_path / "run"


def test_colon_inside_a_name_is_no_address(plane: Any, tmp_path: Path) -> None:
    run = nitro.Nitro(plane(), run_dir=tmp_path / "12:30" / "x:", data={})

    assert run.run_dir == tmp_path / "12:30" / "x:"
