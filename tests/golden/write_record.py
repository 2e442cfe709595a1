"""Writes the golden record of the current format: `python tests/golden/write_record.py`.

Run it once for each new format number, and never again: what is in `record-format-<n>` is what
users have on their disks. `test_golden_records` loads all of them.
"""

from __future__ import annotations

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


def write(target: Path) -> None:
    """Writes a run of two epochs with one record, and what a third epoch must come to."""
    run = make(target, max_epochs=2, seed=SEED, checkpointer=nitro.TopK(k=1)).train()
    longer = make(Path("longer"), max_epochs=3, seed=SEED, checkpointer=None).train()
    expected: dict[str, Any] = {
        "val_loss": run.history["val_loss"][-1],
        **params_of(run),
        **{f"epoch3.{name}": array for name, array in params_of(longer).items()},
    }
    np.savez(target / "expected.npz", **expected)
    # It belongs to no record, and names the machine.
    (target / "run.json").unlink()


def params_of(run: nitro.Nitro) -> dict[str, np.ndarray]:
    leaves = nnx.to_flat_state(nnx.state(run.model, nnx.Param))
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in leaves}


def main() -> None:
    from elsewhere import write_elsewhere

    # A record names the experiment's file and the run's directory.
    target = HERE / f"record-format-{FORMAT_VERSION}"
    write_elsewhere(Path(__file__), made="run", argument="run", target=target)


if __name__ == "__main__":
    main()
