from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nitro
from nitro.errors import ConfigError


def test_history_has_a_row_for_each_epoch(trained_plane: nitro.Nitro) -> None:
    history = trained_plane.history

    assert len(history) == 6
    assert history.columns == ["epoch", "step", "loss", "val_loss"]
    assert history["step"] == [4, 8, 12, 16, 20, 24]
    assert history[3] == list(history)[2]
    assert history.to_dict()["epoch"] == [1, 2, 3, 4, 5, 6]


def test_loss_column_is_the_mean_over_the_epochs_steps(
    trained_plane: nitro.Nitro,
) -> None:
    lines = (trained_plane.run_dir / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in lines if '"train"' in line and '"epoch": 2' in line]

    losses = [float(line.split('"loss": ')[1].rstrip("}")) for line in steps]

    assert trained_plane.history[2]["loss"] == pytest.approx(np.mean(losses))


def test_history_shows_as_a_table(trained_plane: nitro.Nitro) -> None:
    rows = repr(trained_plane.history).splitlines()

    assert rows[0].split() == ["epoch", "step", "loss", "val_loss"]
    assert len(rows) == 7


def test_new_handle_has_an_empty_history(plane: Any, make_run: Any) -> None:
    history = make_run(plane()).history

    assert (len(history), list(history)) == (0, [])
    with pytest.raises(ConfigError, match=r"no epoch 1\.[\s\S]*holds: none"):
        history[1]


def test_unknown_epoch_and_column_say_what_there_is(trained_plane: nitro.Nitro) -> None:
    with pytest.raises(ConfigError, match=r"no epoch 7[\s\S]*epochs 1 to 6"):
        trained_plane.history[7]
    with pytest.raises(ConfigError, match=r"no column `val_los`[\s\S]*did you mean `val_loss`\?"):
        trained_plane.history["val_los"]
