"""An entry of `nitro.checkpoints` stands for its record."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nitro


def test_entry_names_its_record_wherever_a_record_is_named(
    trained_plane: nitro.Nitro, plane: Any, make_run: Any
) -> None:
    entries = nitro.checkpoints(trained_plane.run_dir)
    best = min(entries, key=lambda entry: entry.score or 9e9)

    taken = make_run(plane(), checkpoint=best, data={})
    weights = make_run(plane(), weights=best, data={})
    newest = make_run(plane(), resume=entries[-1], max_epochs=7, progress=False)

    named = make_run(plane(), checkpoint=f"{trained_plane.run_dir}@best", data={})
    np.testing.assert_array_equal(taken.model.kernel[...], named.model.kernel[...])
    np.testing.assert_array_equal(weights.model.kernel[...], named.model.kernel[...])
    assert (newest.step, newest.epoch) == (24, 6)
    assert nitro.checkpoint_info(best)["step"] == best.step


def test_entry_is_found_from_elsewhere(
    trained_plane: nitro.Nitro, plane: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained_plane.run_dir.parent)
    entry = nitro.checkpoints(trained_plane.run_dir.name)[-1]
    monkeypatch.chdir(tmp_path)

    run = nitro.Nitro(plane(), checkpoint=entry, data={})

    assert f"restored from {trained_plane.run_dir.absolute()}" in run.binding


def test_entry_reads_as_one_line_and_the_index_keeps_no_path(trained_plane: nitro.Nitro) -> None:
    entry = nitro.checkpoints(trained_plane.run_dir)[-1]

    pattern = (
        r"<epoch 6, step 24, val_loss \d\.\d+ \(min\), completed, /.*/checkpoints/epoch0006-\S+>"
    )
    assert re.fullmatch(pattern, repr(entry))
    index = json.loads((trained_plane.run_dir / "checkpoints/index.json").read_text())
    assert all("path" not in record for record in index["records"])
