"""What an entry point pays to see whether code moved: an experiment whose traced code has 20 functions.

    uv run benchmarks/recheck.py [--calls 200]

`train`, `validate`, `evaluate`, `predict` and `export_model` re-check the functions, globals and
constants that their programs were traced from. Prints the milliseconds of one re-check where
nothing moved, and its share of a whole `predict` of one row.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

import nitro
from nitro._run import session_of

_HELPERS = "\n".join(
    f"SCALE_{i} = 1.0 + {i} / 100\n"
    f"def helper_{i}(x):\n"
    f"    return {f'helper_{i - 1}' if i else 'jnp.tanh'}(x) * SCALE_{i}\n"
    for i in range(18)
)
exec(_HELPERS)


class Chain(nitro.Experiment):
    """`forward` and `loss`, and eighteen helpers below them."""

    def build_data(self) -> Any:
        x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
        return {"train": nitro.ArrayLoader({"x": x, "y": x[:, 0]}, 8)}

    def build_model(self, rngs: nnx.Rngs) -> Any:
        return nnx.Linear(8, 1, rngs=rngs)

    def forward(self, model: Any, *, x: Any) -> Any:
        return helper_17(model(x))[:, 0]  # noqa: F821 - made above

    def loss(self, outputs: Any, *, y: Any) -> Any:
        return jnp.square(outputs - y).mean()


def median_ms(call: Callable[[], Any], calls: int) -> float:
    """The median time of a call, in milliseconds."""
    seconds: list[float] = []
    for _ in range(calls):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=200)
    calls = parser.parse_args().calls
    run = nitro.Nitro(
        Chain(), run_dir=tempfile.mkdtemp(), checkpointer=None, logger=None, progress=False
    ).train()
    row = {"x": np.zeros((1, 8), np.float32)}
    run.predict(row)
    recheck, predict = (
        median_ms(session_of(run).report_drift, calls),
        median_ms(lambda: run.predict(row), calls),
    )
    print(json.dumps({"recheck_ms": recheck, "predict_ms": predict, "share": recheck / predict}))


if __name__ == "__main__":
    main()
