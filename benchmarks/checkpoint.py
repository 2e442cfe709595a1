"""What writing records costs: the stall of the training thread, time, and bytes.

    uv run benchmarks/checkpoint.py [--epochs 20] [--steps 512]

Trains the MNIST MLP (784-128-10, RAdam, batch 32, random images) with a record per epoch and
without, and prints

- the stall: how long a save holds the training thread, waiting for the record before included;
- the share of the wall-clock time that saving costs, from the fastest epoch of each run;
- the bytes of a record against those of the parameters and the optimizer's state.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import optax
from flax import nnx

import nitro
from nitro._checkpoint import flat_items
from nitro._run import session_of


class MLP(nitro.Experiment):
    def build_data(self) -> Any:
        raise NotImplementedError

    def build_model(self, rngs: nnx.Rngs) -> Any:
        return nnx.Sequential(
            nnx.Linear(784, 128, rngs=rngs), nnx.relu, nnx.Linear(128, 10, rngs=rngs)
        )

    def forward(self, model: Any, *, img: Any) -> Any:
        return model(img)

    def loss(self, logits: Any, *, label: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()


def data(steps: int) -> Any:
    rng = np.random.default_rng(0)
    img = rng.random((steps * 32, 784), np.float32)
    return {"train": nitro.ArrayLoader({"img": img, "label": rng.integers(0, 10, len(img))}, 32)}


def train(
    run_dir: Path, args: argparse.Namespace, *, saves: bool
) -> tuple[Any, list[float], list[float]]:
    """A trained handle, the seconds that each save held training, and those of each epoch."""
    run = nitro.Nitro(
        MLP(),
        data=data(args.steps),
        run_dir=run_dir,
        max_epochs=args.epochs,
        checkpointer=nitro.TopK() if saves else None,
        progress=False,
    )
    session = session_of(run)
    stalls: list[float] = []
    ends: list[float] = []
    save = session.save_record

    def timed(*arguments: Any) -> None:
        started = time.perf_counter()
        save(*arguments)
        ends.append(time.perf_counter())
        stalls.append(ends[-1] - started)

    session.save_record = timed
    if not saves:
        run.on_phase(
            lambda e: ends.append(time.perf_counter()) if e.phase.value == "training" else None
        )
        logger = run.logger
        log = logger.metrics

        def logged(values: Any, **keys: Any) -> None:
            log(values, **keys)
            if keys["context"] == "data":
                ends.append(time.perf_counter())

        logger.metrics = logged
    run.train()
    return run, stalls, np.diff(ends).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=512)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run, stalls, with_saves = train(Path(folder) / "saves", args, saves=True)
        _, _, without = train(Path(folder) / "none", args, saves=False)
        records = Path(folder) / "saves" / "checkpoints"
        newest = records / nitro.checkpoints(records)[-1].name
        written = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    held = sum(
        a.nbytes for flat in flat_items(session_of(run).state).values() for a in flat.values()
    )
    epoch_s, plain_s = statistics.median(with_saves), statistics.median(without)
    report = {
        "stall_ms": {
            "first": 1e3 * stalls[0],
            "median": 1e3 * statistics.median(stalls[1:]),
            "max": 1e3 * max(stalls[1:]),
        },
        "epoch_s": {"with records": epoch_s, "without": plain_s},
        "share_of_time": {
            "stall": statistics.median(stalls[1:]) / epoch_s,
            "all": epoch_s / plain_s - 1,
        },
        "bytes": {"record": written, "params + optimizer": held, "ratio": written / held},
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
