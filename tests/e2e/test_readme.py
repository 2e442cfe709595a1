"""The README's code runs as it stands, on the digits that scikit-learn ships."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

README = Path(__file__).parents[2] / "README.md"


def test_the_code_of_the_readme_runs(tmp_path, monkeypatch):
    digits = load_digits()
    pixels, label = digits.data.astype(np.uint8), digits.target.astype(np.int32)
    train_x, val_x, train_y, val_y = train_test_split(pixels, label, random_state=0)
    splits = [
        {"img": x.astype(np.float32) / 16, "label": y}
        for x, y in ((train_x, train_y), (val_x, val_y))
    ]
    training, serving = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    module = types.ModuleType("readme")
    names = vars(module)
    names |= {"load_digits": lambda: splits, "pixels": val_x}
    monkeypatch.setitem(sys.modules, "readme", module)
    monkeypatch.chdir(tmp_path)

    exec(compile(training, "README.md", "exec"), names)
    lines = serving.strip().splitlines()
    exec("\n".join(lines[:-1]), names)
    logits = eval(lines[-1], names)

    assert (logits.argmax(-1) == val_y).mean() >= 0.95
    assert names["run"].validate()["acc"] >= 0.95
