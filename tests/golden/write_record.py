"""Writes the golden record of the current format: `python tests/golden/write_record.py`.

Run it once for each new format number, and never again: what is in `record-format-<n>` is what
users have on their disks. `test_golden_records` loads all of them.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

import nitro
from nitro._checkpoint._index import FORMAT_VERSION

HERE = Path(__file__).parent
SEED = 5


class Golden(nitro.Experiment):
    """BatchNorm and Dropout, a structural field, a Device field, a schedule."""

    width: nitro.GraphConst[int] = 3
    scale: nitro.Device[float] = 0.5

    def build_data(self) -> Any:
        rng = np.random.default_rng(0)
        x = rng.normal(size=(12, 2)).astype(np.float32)
        fields = {"x": x, "y": x.sum(1)}
        return {"train": nitro.ArrayLoader(fields, 4), "val": nitro.ArrayLoader(fields, 4)}

    def build_model(self, rngs: nnx.Rngs) -> Any:
        return nnx.Sequential(
            nnx.Linear(2, self.width, rngs=rngs),
            nnx.BatchNorm(self.width, rngs=rngs),
            nnx.Dropout(0.5, rngs=rngs),
            nnx.Linear(self.width, 1, rngs=rngs),
        )

    def forward(self, model: Any, *, x: Any) -> Any:
        return model(x)[:, 0]

    def loss(self, height: Any, *, y: Any) -> Any:
        return self.scale * ((height - y) ** 2).mean()


def make(run_dir: Path, **options: Any) -> nitro.Nitro:
    return nitro.Nitro(Golden(), run_dir=run_dir, progress=False, **options)


def main() -> None:
    target = HERE / f"record-format-{FORMAT_VERSION}"
    if target.exists():
        sys.exit(f"{target} is there already; it must stay as it is")
    run = make(target, max_epochs=2, seed=SEED).train()
    leaves = nnx.to_flat_state(nnx.state(run.model, nnx.Param))
    arrays = {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in leaves}
    np.savez(target / "expected.npz", val_loss=run.history["val_loss"][-1], **arrays)
    (target / "run.json").unlink(missing_ok=True)
    for entry in nitro.checkpoints(target)[:-1]:
        shutil.rmtree(target / "checkpoints" / entry.name)


if __name__ == "__main__":
    main()
