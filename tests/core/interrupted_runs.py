"""Trains one experiment in processes that are stopped and killed; `test_resume_bits` reads it.

    python interrupted_runs.py DIRECTORY KILLS

Imports everything once and forks a process for each attempt, so that an attempt costs a
setup and no start of the interpreter. Prints what happened as JSON; the runs themselves, and
a file `final.npz` beside each, are in the directory.
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optax
from flax import nnx

import nitro
from nitro._checkpoint import flat_items
from nitro._run import session_of

EPOCHS, STEPS_PER_EPOCH, ACCUM = 14, 5, 2


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.body = nnx.Linear(6, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.drop(nnx.relu(self.norm(self.body(x)))))


class Interrupted(nitro.Experiment):
    """BatchNorm and Dropout, two groups, a schedule, a scheduled field, accumulation, chunks."""

    smoothing: nitro.Device[float] = 0.1
    accum: int = ACCUM

    def build_data(self) -> Any:
        rng = np.random.default_rng(0)
        x = rng.normal(size=(4 * STEPS_PER_EPOCH * ACCUM, 6)).astype(np.float32)
        fields = {"x": x, "label": rng.integers(0, 3, len(x))}
        return {
            "train": nitro.ArrayLoader(fields, 4, shuffle=True),
            "val": nitro.ArrayLoader({n: a[:9] for n, a in fields.items()}, 4),
        }

    def build_model(self, rngs: nnx.Rngs) -> Any:
        return Net(rngs)

    def forward(self, model: Any, *, x: Any) -> Any:
        return model(x)

    def loss(self, logits: Any, *, label: Any) -> Any:
        targets = optax.smooth_labels(nnx.one_hot(label, 3), self.smoothing)
        return optax.softmax_cross_entropy(logits, targets).mean()

    def param_group(self, path: str) -> str:
        return "head" if path.startswith("head") else "default"

    def learning_rate(self, group: str = "default") -> float:
        return 1e-2 if group == "default" else 3e-2

    def weight_decay(self, group: str) -> float:
        return 1e-2

    def decay_anchor(self, group: str) -> Any:
        return "init" if group == "head" else "zero"

    def schedules(self) -> Any:
        return {
            "learning_rate": lambda total: optax.cosine_decay_schedule(1e-2, total),
            "smoothing": lambda total: optax.linear_schedule(0.1, 0.0, total),
        }


def train(run_dir: Path, on_phase: Callable[[Any], None] = lambda event: None) -> None:
    """Goes on with the run, and writes down what came out if it ends."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", '`resume="auto"` found no record')
    run = nitro.Nitro(
        Interrupted(),
        run_dir=run_dir,
        max_epochs=EPOCHS,
        checkpoint_every_steps=3,
        checkpointer=nitro.TopK(k=2),
        early_stop=nitro.EarlyStop(patience=EPOCHS),
        steps_per_call=2,
        progress=False,
        resume="auto",
    )
    run.on_phase(on_phase)
    run.train()
    if run.epoch == EPOCHS:
        arrays = {
            f"{item}/{name}": np.asarray(array)
            for item, flat in flat_items(session_of(run).state).items()
            for name, array in flat.items()
        }
        np.savez(run_dir / "final.npz", **arrays)
        (run_dir / "history.json").write_text(json.dumps(run.history.rows))


def in_process(
    action: Callable[[Callable[[Any], None]], None], *, kill_after_s: float | None
) -> int:
    """Runs an action in a forked process; kills it so long after its training has begun."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action(lambda event: event.phase.value == "training" and os.write(writer, b"."))
            code = 0
        except BaseException:  # noqa: BLE001 - the process ends here, whatever it was
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    if kill_after_s is not None and os.read(reader, 1):
        time.sleep(kill_after_s)
        os.kill(child, signal.SIGKILL)
    os.close(reader)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def train_to_the_end(run_dir: Path) -> None:
    assert in_process(lambda tell: train(run_dir), kill_after_s=None) == 0


def stop_at_the_end_of_an_epoch(run_dir: Path) -> None:
    def stop(event: Any) -> None:
        if event.phase.value == "evaluating" and event.epoch == 3:
            event.run.request_stop()

    assert in_process(lambda tell: train(run_dir, stop), kill_after_s=None) == 0


def stop_by_sigterm(run_dir: Path) -> None:
    """Sends SIGTERM as the second record of epoch 3 is written: in the middle of epoch 3."""

    def terminate(event: Any) -> None:
        if event.phase.value == "checkpointing" and event.step == 12:
            os.kill(os.getpid(), signal.SIGTERM)

    assert in_process(lambda tell: train(run_dir, terminate), kill_after_s=None) == 0


def kill_again_and_again(directory: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kills runs at random moments until so many were killed; finishes each run."""
    rng = random.Random(seed)
    killed = in_saves = 0
    runs: list[Path] = []
    while killed < kills:
        run_dir = directory / f"killed-{len(runs)}"
        runs.append(run_dir)
        go_on = functools.partial(train, run_dir)
        while killed < kills and not (run_dir / "final.npz").exists():
            code = in_process(go_on, kill_after_s=rng.uniform(0, 0.8))
            assert code in (0, -signal.SIGKILL), code
            killed += code == -signal.SIGKILL
            in_saves += any((run_dir / "checkpoints").glob("*.orbax-checkpoint-tmp*"))
        if not (run_dir / "final.npz").exists():
            train_to_the_end(run_dir)
    return {"killed": killed, "in_saves": in_saves, "runs": [run.name for run in runs]}


def main() -> None:
    directory, kills = Path(sys.argv[1]), int(sys.argv[2])
    train_to_the_end(directory / "straight")
    for name, stop in (("epoch-end", stop_at_the_end_of_an_epoch), ("sigterm", stop_by_sigterm)):
        stop(directory / name)
        assert not (directory / name / "final.npz").exists()
        train_to_the_end(directory / name)
    sys.stdout.write(json.dumps(kill_again_and_again(directory, kills, seed=0)) + "\n")


if __name__ == "__main__":
    main()
