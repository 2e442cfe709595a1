"""What it costs to look whether a step has left the weights finite, by ratio in one run.

    uv run benchmarks/finite_check.py [--laps 20] [--steps 108]

The 40-layer MLP of `train_step.py`, whose 80 small arrays are the worst case: a step with the
check against one without, in turns, in CPU time of the process.
"""

import argparse
import statistics
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from train_step import deep

import nitro
from nitro._programs import _step
from nitro._run import session_of
from nitro._run._steps import StepRunner

BATCH = 64


class Images(nitro.Experiment):
    steps: int = 108

    def build_data(self):
        rng, rows = np.random.default_rng(0), self.steps * BATCH
        img = rng.normal(size=(rows, 784)).astype(np.float32)
        arrays = {"img": img, "label": rng.integers(0, 10, rows)}
        return {"train": nitro.ArrayLoader(arrays, BATCH, shuffle=True)}

    def build_model(self, rngs: nnx.Rngs):
        return deep(rngs)

    def forward(self, model, *, img):
        return model(img)

    def loss(self, logits, *, label):
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()


def make_runner(steps: int) -> StepRunner:
    options: dict[str, Any] = {"progress": False, "logger": None, "checkpointer": None}
    run = nitro.Nitro(Images(steps=steps), run_dir=tempfile.mkdtemp(), **options)
    session = session_of(run)
    assert session.setup.optimizer is not None
    return StepRunner(session, session.setup.optimizer)


def lap(runner: StepRunner) -> float:
    """The CPU time of one epoch, in seconds."""
    session = runner._session
    session.epoch = session.step = session.steps_in_epoch = 0
    started = time.process_time()
    for call in runner.run_epoch():
        jax.block_until_ready(call.scalars)
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--laps", type=int, default=20)
    parser.add_argument("--steps", type=int, default=108)
    args = parser.parse_args()
    checked = make_runner(args.steps)
    nitro.cache_clear()
    _step._is_finite = lambda params, loss: jnp.isfinite(loss)
    plain = make_runner(args.steps)
    pairs = [(lap(checked), lap(plain)) for _ in range(args.laps)]
    ratios = [with_check / without for with_check, without in pairs]
    print(f"with the check: {statistics.median(ratios):.3f} times the CPU time of a step without")


if __name__ == "__main__":
    main()
