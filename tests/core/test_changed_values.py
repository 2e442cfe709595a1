"""A run that is resumed with other values says so once, and its records keep it."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

import nitro
from nitro import Device
from nitro._cli import main
from nitro.errors import NitroWarning


@pytest.fixture
def tuned(plane: Any) -> Any:
    class Tuned(plane):
        learning_rate: float = 3e-3
        decay: float = 0.01
        scale: Device[float] = 1.0
        source: str = "a"

        def weight_decay(self, group: str) -> float:
            return self.decay

        def optimizer(self, group: str) -> Any:
            return optax.sgd

        def loss(self, height: Any, *, y: Any) -> Any:
            return self.scale * super().loss(height, y=y)

    return Tuned


def resumed(experiment: Any, run_dir: Path, **options: Any) -> tuple[nitro.Nitro, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = nitro.Nitro(experiment, run_dir=run_dir, resume="auto", progress=False, **options)
    return run, [str(w.message) for w in caught if issubclass(w.category, NitroWarning)]


def test_each_changed_value_is_told_once_and_kept(
    tuned: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    nitro.Nitro(tuned(), run_dir=run_dir, gradient_clip_norm=1.0, progress=False).train()

    changed = tuned(learning_rate=0.3, decay=0.5, scale=2.0, source="b")
    run, told = resumed(changed, run_dir, max_epochs=2, gradient_clip_norm=100.0)
    run.train()
    again, silent = resumed(changed, run_dir, max_epochs=3, gradient_clip_norm=100.0)
    again.train()

    lines = {
        "decay: 0.01 → 0.5",
        "gradient_clip_norm: 1.0 → 100.0",
        "learning_rate: 0.003 → 0.3",
        "scale: 1.0 → 2.0",
        "source: a → b",
        "weight_decay: 0.01 → 0.5",
    }
    (message,) = told
    assert lines == {line.strip() for line in message.splitlines() if "→" in line}
    assert silent == []
    lineage = nitro.checkpoint_info(f"{run_dir}@latest")["lineage"]
    assert [(entry["step"], len(entry["changes"])) for entry in lineage] == [(4, 7), (8, 1)]
    with pytest.raises(SystemExit):
        main(["show", str(run_dir)])
    shown = capsys.readouterr().out
    assert re.search(r"resumed at step 4 with decay: 0\.01 → 0\.5, .*learning_rate: 0\.003", shown)


def test_changed_schedule_is_told_and_a_longer_one_is_not_told_twice(
    tuned: Any, tmp_path: Path
) -> None:
    def falling(peak: float) -> Any:
        return {"learning_rate": lambda total: optax.linear_schedule(peak, 0.0, 100)}

    nitro.Nitro(tuned(), run_dir=tmp_path, schedules=falling(1e-3), progress=False).train()

    _, same = resumed(tuned(), tmp_path, schedules=falling(1e-3))
    _, higher = resumed(tuned(), tmp_path, schedules=falling(1e-2))
    _, constant = resumed(tuned(), tmp_path)

    assert [text for text in same if "other values" in text] == []
    assert any(
        re.search(r"learning_rate: 0\.001 to 0\.00097 in 4 steps .* → 0\.01 to", t) for t in higher
    )
    assert any(re.search(r"learning_rate: 0\.001 to .* → 0\.003\n", t) for t in constant)


def test_changed_values_take_effect_from_the_resumed_step(tuned: Any, tmp_path: Path) -> None:
    first = nitro.Nitro(tuned(decay=0.0), run_dir=tmp_path, progress=False).train()
    kernel = np.array(first.model.kernel[...])
    run, _ = resumed(tuned(decay=0.0, learning_rate=1e-30), tmp_path, max_epochs=2)

    run.train()

    np.testing.assert_array_equal(run.model.kernel[...], kernel)
