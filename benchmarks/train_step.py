"""Steps per second of Nitro's training against hand-written JAX, in one run, by ratio.

    uv run benchmarks/train_step.py [--mnist PATH] [--workloads mlp32,cnn64]
        [--keras PYTHON] [--torch PYTHON]

Contenders for each workload, all with the same optimizer, data and batch order:

- `xla`: the bare limit: a whole epoch in one scan over device-resident data.
- `hand`: the best hand-written loop: jitted pure step, donated state, NumPy batches.
- `nnx_loop`: the usual NNX loop: `nnx.jit` and `nnx.Optimizer`.
- `nitro`: Nitro with its defaults: a log line per step, history; validation and progress off.
- `nitro_schedule`: the same with a scheduled learning rate.
- `nitro_saved`: validation on a tenth of the data and a checkpoint after each epoch, by default;
  the second line of ratios.
- `keras` (JAX backend), `torch`, `lightning`: in the interpreters that are given.

Without MNIST the images are random; the ratios mean the same.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import nitro

MNIST = Path(__file__).parents[2] / "shared" / "data" / "mnist.npz"
SMOOTHING = 0.1


@dataclass(frozen=True)
class Workload:
    """One model at one batch size; `steps` is the length of a lap."""

    make_model: Callable[[nnx.Rngs], nnx.Module]
    batch: int
    steps: int
    image_shape: tuple[int, ...]


class CNN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 32, (3, 3), padding="VALID", rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, (3, 3), padding="VALID", rngs=rngs)
        self.dense1 = nnx.Linear(12 * 12 * 64, 128, rngs=rngs)
        self.dense2 = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.conv2(nnx.relu(self.conv1(x))))
        x = nnx.max_pool(x, (2, 2), (2, 2))
        return self.dense2(nnx.relu(self.dense1(x.reshape(x.shape[0], -1))))


def mlp(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Sequential(nnx.Linear(784, 128, rngs=rngs), nnx.relu, nnx.Linear(128, 10, rngs=rngs))


def deep(rngs: nnx.Rngs) -> nnx.Module:
    layers: list[Any] = [nnx.Linear(784, 64, rngs=rngs), nnx.relu]
    for _ in range(38):
        layers += [nnx.Linear(64, 64, rngs=rngs), nnx.relu]
    return nnx.Sequential(*layers, nnx.Linear(64, 10, rngs=rngs))


WORKLOADS = {
    "mlp32": Workload(mlp, 32, 1536, (784,)),
    "mlp256": Workload(mlp, 256, 192, (784,)),
    "cnn64": Workload(CNN, 64, 16, (28, 28, 1)),
    "deep64": Workload(deep, 64, 512, (784,)),
}


def load_images(path: Path, workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """As many samples as one lap takes, float32 images and int32 labels."""
    size = workload.steps * workload.batch
    if path.exists():
        with np.load(path) as data:
            rows = np.arange(size) % len(data["train_img"])
            img, label = data["train_img"][rows], data["train_label"][rows]
    else:
        generator = np.random.default_rng(0)
        img, label = generator.integers(0, 256, (size, 784)), generator.integers(0, 10, size)
    return (img / 255).astype(np.float32).reshape(-1, *workload.image_shape), label.astype(np.int32)


def cross_entropy(logits: Any, label: Any, smoothing: Any = SMOOTHING) -> Any:
    targets = optax.smooth_labels(jax.nn.one_hot(label, 10), smoothing)
    return optax.softmax_cross_entropy(logits, targets).mean()


def order(lap: int, workload: Workload) -> np.ndarray:
    size = workload.steps * workload.batch
    rows = np.random.default_rng([0, lap]).permutation(size)
    return rows.reshape(workload.steps, workload.batch).astype(np.int32)


Lap = Callable[[int], None]


def pure_step(workload: Workload) -> tuple[Any, Callable[..., Any]]:
    """The state and the pure step that the hand-written contenders share."""
    graph, params = nnx.split(workload.make_model(nnx.Rngs(0)), nnx.Param)
    leaves, treedef = jax.tree.flatten(params)
    optimizer = optax.radam(1e-3)

    def step(carry: Any, batch: Any) -> Any:
        leaves, opt_state = carry

        def loss_of(leaves: Any) -> Any:
            model = nnx.merge(graph, jax.tree.unflatten(treedef, leaves), copy=True)
            return cross_entropy(model(batch[0]), batch[1])

        loss, grads = jax.value_and_grad(loss_of)(leaves)
        updates, opt_state = optimizer.update(grads, opt_state, leaves)
        return (optax.apply_updates(leaves, updates), opt_state), loss

    return (leaves, optimizer.init(leaves)), step


def xla(workload: Workload, img: np.ndarray, label: np.ndarray) -> Lap:
    carry, step = pure_step(workload)
    data = jnp.asarray(img), jnp.asarray(label)

    def epoch(carry: Any, data: Any, rows: Any) -> Any:
        return jax.lax.scan(lambda c, r: step(c, (data[0][r], data[1][r])), carry, rows)

    program = jax.jit(epoch, donate_argnums=0)

    def lap(index: int) -> None:
        nonlocal carry
        carry, losses = program(carry, data, order(index, workload))
        np.asarray(losses)
        jax.block_until_ready(carry)

    return lap


def hand(workload: Workload, img: np.ndarray, label: np.ndarray) -> Lap:
    carry, step = pure_step(workload)
    program = jax.jit(step, donate_argnums=0)

    def lap(index: int) -> None:
        nonlocal carry
        losses = []
        for rows in order(index, workload):
            carry, loss = program(carry, (img[rows], label[rows]))
            losses.append(loss)
        jax.block_until_ready(carry)

    return lap


def nnx_loop(workload: Workload, img: np.ndarray, label: np.ndarray) -> Lap:
    model = workload.make_model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.radam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: cross_entropy(m(x), y))(model)
        optimizer.update(model, grads)
        return loss

    def lap(index: int) -> None:
        loss = None
        for rows in order(index, workload):
            loss = step(model, optimizer, img[rows], label[rows])
        jax.block_until_ready((loss, nnx.state(model)))

    return lap


class Classifier(nitro.Experiment):
    """The workload as an experiment, with Nitro's default optimizer."""

    workload: nitro.GraphConst[str]
    smoothing: nitro.Device[float] = SMOOTHING
    arrays: Any = None
    validates: bool = False

    def build_data(self):
        workload = WORKLOADS[self.workload]
        splits = {"train": TimedLoader(self.arrays, workload.batch, shuffle=True)}
        if self.validates:
            tenth = {name: array[: len(array) // 10] for name, array in self.arrays.items()}
            splits["val"] = nitro.ArrayLoader(tenth, workload.batch)
        return splits

    def build_model(self, rngs):
        return WORKLOADS[self.workload].make_model(rngs)

    def forward(self, model, *, img):
        return model(img)

    def loss(self, logits, *, label):
        return cross_entropy(logits, label, self.smoothing)


class TimedLoader(nitro.ArrayLoader):
    """Notes the time at which each epoch starts."""

    def order(self, epoch: int) -> np.ndarray:
        STARTS.append(time.perf_counter())
        return super().order(epoch)


STARTS: list[float] = []


def nitro_laps(
    name: str, img: np.ndarray, label: np.ndarray, laps: int, *, saves: bool = False, **options: Any
) -> Any:
    """Seconds of each epoch of a fresh run, the first two left out."""
    STARTS.clear()
    if not saves:
        options["checkpointer"] = None
    run = nitro.Nitro(
        Classifier(workload=name, arrays={"img": img, "label": label}, validates=saves),
        run_dir=tempfile.mkdtemp(),
        progress=False,
        max_epochs=laps + 2,
        **options,
    )
    run.train()
    starts = [*STARTS, time.perf_counter()]
    return [b - a for a, b in itertools.pairwise(starts)][2:]


def reference_laps(lap: Lap, first: int, laps: int) -> list[float]:
    """Seconds of each lap."""
    seconds: list[float] = []
    for index in range(first, first + laps):
        begin = time.perf_counter()
        lap(index)
        seconds.append(time.perf_counter() - begin)
    return seconds


def compare(name: str, mnist: Path, rounds: int, laps: int) -> dict[str, float]:
    """Median steps per second of each contender, measured in turns."""
    workload = WORKLOADS[name]
    img, label = load_images(mnist, workload)
    # XLA's CPU convolutions are some 20 times slower in a loop: a scan is no limit for them.
    contenders = (hand, nnx_loop) if name == "cnn64" else (xla, hand, nnx_loop)
    references = {f.__name__: f(workload, img, label) for f in contenders}
    runs: dict[str, dict[str, Any]] = {
        "nitro": {},
        "nitro_schedule": {
            "schedules": {
                "learning_rate": lambda horizon: optax.cosine_decay_schedule(1e-3, horizon)
            }
        },
        "nitro_saved": {"saves": True},
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*references, *runs)}
    for lap in references.values():
        reference_laps(lap, 0, 2)
    for turn in range(rounds):
        for contender, lap in references.items():
            seconds[contender] += reference_laps(lap, 2 + turn * laps, laps)
        for contender, options in runs.items():
            seconds[contender] += nitro_laps(name, img, label, laps, **options)
    return {c: workload.steps / statistics.median(laps) for c, laps in seconds.items()}


def measure_peer(python: str, peer: str, workload: str, laps: int) -> dict[str, float]:
    """Steps per second of a peer, in the interpreter that has it."""
    script = Path(__file__).with_name("peers.py")
    command = [python, str(script), peer, workload, "--laps", str(laps)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mnist", type=Path, default=Path(os.environ.get("NITRO_MNIST", MNIST)))
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--keras", metavar="PYTHON", help="an interpreter that has Keras")
    parser.add_argument("--torch", metavar="PYTHON", help="one that has PyTorch and Lightning")
    arguments = parser.parse_args()
    peers = {"keras": arguments.keras, "torch": arguments.torch, "lightning": arguments.torch}
    print(f"jax {jax.__version__}, {os.cpu_count()} cores, {jax.default_backend()}")
    for name in arguments.workloads.split(","):
        rates = compare(name, arguments.mnist, arguments.rounds, arguments.laps)
        for peer, python in peers.items():
            if python is not None:
                rates |= measure_peer(python, peer, name, arguments.laps)
        print(json.dumps({"workload": name, **{k: round(v, 1) for k, v in rates.items()}}))
        for own in ("nitro", "nitro_saved"):
            ratios = ", ".join(f"{rates[own] / rate:.2f} of {c}" for c, rate in rates.items())
            print(f"  {own}: {ratios}", flush=True)


if __name__ == "__main__":
    main()
