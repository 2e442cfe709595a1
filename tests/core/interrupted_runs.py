"""Trains one experiment in processes that are stopped and killed; `test_resume_bits` reads it.

    python interrupted_runs.py DIRECTORY SOURCE=KILLS...

Imports everything once and forks a process for each attempt, so that an attempt costs a
setup and no start of the interpreter. Prints what happened as JSON; the runs themselves, and
a file `final.npz` beside each, are in the directory, below the name of their source.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

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
    source: str = "arrays"

    def build_data(self) -> Any:
        rng = np.random.default_rng(0)
        x = rng.normal(size=(4 * STEPS_PER_EPOCH * ACCUM, 6)).astype(np.float32)
        fields = {"x": x, "label": rng.integers(0, 3, len(x))}
        return {
            "train": SOURCES[self.source](fields),
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

    def learning_rate(self, group: str | None = None) -> float:
        return 3e-2 if group == "head" else 1e-2

    def weight_decay(self, group: str) -> float:
        return 1e-2

    def decay_anchor(self, group: str) -> Any:
        return "init" if group == "head" else "zero"

    def schedules(self) -> Any:
        return {
            "learning_rate": lambda total: optax.cosine_decay_schedule(1e-2, total),
            "smoothing": lambda total: optax.linear_schedule(0.1, 0.0, total),
        }


class Sized:
    """Gives Grain's loaders, which have none, the length of an epoch."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return STEPS_PER_EPOCH * ACCUM

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


class OneStream:
    """Cuts one endless Grain iterator, which shuffles every epoch anew, into epochs."""

    def __init__(self, dataset: Any) -> None:
        self.iterator = iter(dataset)
        self.get_state, self.set_state = self.iterator.get_state, self.iterator.set_state

    def __len__(self) -> int:
        return STEPS_PER_EPOCH * ACCUM

    def __iter__(self) -> Iterator[Any]:
        done = self.get_state()["next_index"] % len(self)
        return itertools.islice(self.iterator, len(self) - done)


def rows_of(fields: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    return [{name: array[i] for name, array in fields.items()} for i in range(len(fields["x"]))]


def grain_dataset(fields: dict[str, np.ndarray]) -> Any:
    return importlib.import_module("grain").MapDataset.source(rows_of(fields)).seed(3).shuffle()


def grain_loader(fields: dict[str, np.ndarray]) -> Any:
    grain = importlib.import_module("grain")
    rows = rows_of(fields)
    return grain.DataLoader(
        data_source=rows,
        sampler=grain.samplers.IndexSampler(
            num_records=len(rows),
            num_epochs=1,
            shard_options=grain.sharding.NoSharding(),
            shuffle=True,
            seed=3,
        ),
        operations=[grain.transforms.Batch(4, drop_remainder=True)],
    )


SOURCES: dict[str, Callable[[dict[str, np.ndarray]], Any]] = {
    "arrays": lambda fields: nitro.ArrayLoader(fields, 4, shuffle=True),
    "grain-map": lambda fields: grain_dataset(fields).batch(4),
    "grain-iter": lambda fields: Sized(grain_dataset(fields).batch(4).to_iter_dataset()),
    "grain-loader": lambda fields: Sized(grain_loader(fields)),
    "grain-stream": lambda fields: OneStream(
        grain_dataset(fields).repeat().batch(4).to_iter_dataset()
    ),
}


def train(run_dir: Path, on_phase: Callable[[Any], None] = lambda event: None) -> None:
    """Goes on with the run, and writes down what came out if it ends."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", '`resume="auto"` found no record')
    run = nitro.Nitro(
        Interrupted(source=run_dir.parent.name),
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
        arrays: dict[str, Any] = {
            f"{item}/{name}": np.asarray(array)
            for item, flat in flat_items(session_of(run).state).items()
            for name, array in flat.items()
        }
        (run_dir / "history.json").write_text(json.dumps(run.history.rows))
        np.savez(run_dir / "written.npz", **arrays)
        (run_dir / "written.npz").rename(run_dir / "final.npz")


class Child(NamedTuple):
    """A forked process that trains.

    Attributes:
        pid: Its number.
        reader: The end of a pipe, into which it writes as its training begins.
    """

    pid: int
    reader: int

    def has_begun(self) -> bool:
        """Whether its training has begun; waits for that, or for its end."""
        return bool(os.read(self.reader, 1))

    def exit_code(self) -> int:
        """How it ended; a signal as a negative number."""
        os.close(self.reader)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def is_stopped(self) -> bool:
        """Stops it where it is; False if it has ended."""
        os.kill(self.pid, signal.SIGSTOP)
        options = os.WEXITED | os.WSTOPPED | os.WNOWAIT
        result = os.waitid(os.P_PID, self.pid, options)
        return result is not None and result.si_code == os.CLD_STOPPED

    def kill_when(self, is_time: Callable[[], bool]) -> None:
        """Kills it at a moment of which something is true; nothing if it ends before."""
        while not self.has_ended():
            time.sleep(0.0005)
            # Looked at again while it stands still: until then it may have gone on.
            if is_time() and self.is_stopped():
                os.kill(self.pid, signal.SIGKILL if is_time() else signal.SIGCONT)

    def has_ended(self) -> bool:
        """Whether it has ended."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def started(run_dir: Path, on_phase: Callable[[Any], None] = lambda event: None) -> Child:
    """Forks a process that goes on with a run."""
    reader, writer = os.pipe()

    def tell(event: Any) -> None:
        if event.phase.value == "training":
            os.write(writer, b".")
        on_phase(event)

    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            train(run_dir, tell)
            code = 0
        except SystemExit as end:
            code = int(str(end.code))
        except BaseException:  # noqa: BLE001 - the process ends here, whatever it was
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    return Child(pid, reader)


def train_to_the_end(run_dir: Path) -> None:
    assert started(run_dir).exit_code() == 0
    assert (run_dir / "final.npz").exists()


def stop_at_the_end_of_an_epoch(run_dir: Path) -> None:
    def stop(event: Any) -> None:
        if event.phase.value == "evaluating" and event.epoch == 3:
            event.run.request_stop()

    assert started(run_dir, stop).exit_code() == 0


def stop_by_sigterm(run_dir: Path) -> None:
    """Sends SIGTERM as the second record of epoch 3 is written: in the middle of epoch 3."""

    def terminate(event: Any) -> None:
        if event.phase.value == "checkpointing" and event.step == 12:
            os.kill(os.getpid(), signal.SIGTERM)

    assert started(run_dir, terminate).exit_code() == 128 + signal.SIGTERM


def is_saving(run_dir: Path) -> bool:
    return any((run_dir / "checkpoints").glob("*.orbax-checkpoint-tmp*"))


def is_between_saves(run_dir: Path) -> bool:
    return (run_dir / "checkpoints" / "index.json").exists() and not is_saving(run_dir)


def has_last_record(run_dir: Path) -> bool:
    """Whether the run is over but for its farewell."""
    names = {path.name for path in (run_dir / "checkpoints").glob(f"epoch{EPOCHS:04}-*")}
    return any("tmp" not in name for name in names)


def killed_once(run_dir: Path, when: str, wait_s: float) -> dict[str, Any]:
    """Goes on with a run and kills it; says how it ended, and where."""
    child = started(run_dir)
    is_time: dict[str, Callable[[], bool]] = {
        "save": lambda: is_saving(run_dir),
        "between": lambda: is_between_saves(run_dir),
        "any": lambda: True,
    }
    if child.has_begun():
        time.sleep(wait_s)
        child.kill_when(lambda: is_time[when]() and not has_last_record(run_dir))
    code = child.exit_code()
    assert code in (0, -signal.SIGKILL), code
    return {
        "run": run_dir.name,
        "when": when,
        "by_signal": -code,
        "has_finished": (run_dir / "final.npz").exists(),
        "in_save": is_saving(run_dir),
        "has_records": (run_dir / "checkpoints" / "index.json").exists(),
    }


def kill_again_and_again(directory: Path, kills: int, seed: int) -> list[dict[str, Any]]:
    """Kills runs, inside saves, between them and anywhere, so many times; finishes each run."""
    rng = random.Random(seed)
    killed: list[dict[str, Any]] = []
    numbers = itertools.count()
    whens = itertools.cycle(["any", "save", "between", "any"])
    while len(killed) < kills:
        run_dir = directory / f"killed-{next(numbers)}"
        while len(killed) < kills and not (run_dir / "final.npz").exists():
            fate = killed_once(run_dir, next(whens), rng.uniform(0, 0.5))
            killed += [fate] if fate["by_signal"] else []
        if not (run_dir / "final.npz").exists():
            train_to_the_end(run_dir)
    return killed


def interrupt_runs_of(directory: Path, kills: int) -> list[dict[str, Any]]:
    train_to_the_end(directory / "straight")
    for name, stop in (("epoch-end", stop_at_the_end_of_an_epoch), ("sigterm", stop_by_sigterm)):
        stop(directory / name)
        assert not (directory / name / "final.npz").exists()
        train_to_the_end(directory / name)
    return kill_again_and_again(directory, kills, seed=0)


def main() -> None:
    directory = Path(sys.argv[1])
    kills = dict(argument.split("=") for argument in sys.argv[2:])
    killed = {source: interrupt_runs_of(directory / source, int(n)) for source, n in kills.items()}
    sys.stdout.write(json.dumps(killed) + "\n")


if __name__ == "__main__":
    main()
