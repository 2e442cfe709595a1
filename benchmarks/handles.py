"""What a handle costs before its first step: the first, the second and the twentieth of one experiment.

    uv run benchmarks/handles.py [--workloads mlp,deep] [--handles 20]

For each workload: milliseconds from `Nitro(...)` to the end of the first step, the part of it that is
spent in tracing, and, interleaved, one bare trace of the same step in a context of its own with the
hash of its jaxpr. The handles sweep a Device field; compiles after the first are counted. Then the
candidates for the canonical form of a program, beside each other.
"""

import argparse
import contextlib
import hashlib
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.monitoring
import numpy as np
from flax import nnx
from train_step import cross_entropy, deep, mlp

import nitro
from nitro._programs import _run_programs, _tracing
from nitro._programs._identity import digest_trace
from nitro._run import session_of

MODELS = {"mlp": mlp, "deep": deep}
_COMPILES: list[str] = []


class Images(nitro.Experiment):
    """Random images, one step."""

    model: nitro.GraphConst[str] = "mlp"
    smoothing: nitro.Device[float] = 0.1

    def build_data(self) -> Any:
        rng = np.random.default_rng(0)
        img = rng.normal(size=(32, 784)).astype(np.float32)
        fields = {"img": img, "label": rng.integers(0, 10, 32)}
        return {"train": nitro.ArrayLoader(fields, 32)}

    def build_model(self, rngs: nnx.Rngs) -> Any:
        return MODELS[self.model](rngs)

    def forward(self, model: Any, *, img: Any) -> Any:
        return model(img)

    def loss(self, logits: Any, *, label: Any) -> Any:
        return cross_entropy(logits, label, self.smoothing)


@contextlib.contextmanager
def traced_steps() -> Generator[list[tuple[float, Any, Any]]]:
    """Collects the seconds, makers and arguments of the steps that are traced."""
    found: list[tuple[float, Any, Any]] = []
    trace = _run_programs.trace_step

    def timed(make: Any, arguments: Any) -> Any:
        started = time.perf_counter()
        step = trace(make, arguments)
        found.append((time.perf_counter() - started, make, arguments))
        return step

    _run_programs.trace_step = timed
    try:
        yield found
    finally:
        _run_programs.trace_step = trace


def handle_ms(model: str, smoothing: float) -> tuple[float, Any]:
    """The time of one handle, and the step that it traced."""
    options = {"logger": None, "checkpointer": None, "progress": False}
    folder = tempfile.mkdtemp()
    with traced_steps() as steps:
        started = time.perf_counter()
        run = nitro.Nitro(Images(model=model, smoothing=smoothing), run_dir=folder, **options)
        run.train()
        jax.block_until_ready(session_of(run).state.params)
        return 1e3 * (time.perf_counter() - started), steps[0]


def bare_ms(step: Any) -> float:
    """One bare trace of the step, with the hash of its jaxpr."""
    _, make, arguments = step
    started = time.perf_counter()
    with _tracing.TraceScope().entered():
        jaxpr = jax.jit(make(set())).trace(*arguments).jaxpr
    digest_trace(jaxpr, bytes)
    return 1e3 * (time.perf_counter() - started)


def candidates_ms(step: Any) -> dict[str, float]:
    """The canonical forms that were considered, after the trace."""
    _, make, arguments = step

    def bytecode(traced: Any) -> None:
        out = io.BytesIO()
        traced.lower().compiler_ir().operation.write_bytecode(out)
        hashlib.sha256(out.getvalue())

    forms: dict[str, Callable[[Any], object]] = {
        "trace": lambda _: jax.jit(make(set())).trace(*arguments),
        "canonical jaxpr": lambda traced: digest_trace(traced.jaxpr, bytes),
        "jaxpr printed by JAX": lambda traced: hashlib.sha256(str(traced.jaxpr).encode()),
        "lowered, bytecode": bytecode,
        "lowered, text": lambda traced: hashlib.sha256(traced.lower().as_text().encode()),
    }
    laps: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(3):
        for name, form in forms.items():
            # Afresh for each: JAX keeps what it has lowered.
            with _tracing.TraceScope().entered():
                traced = jax.jit(make(set())).trace(*arguments)
                started = time.perf_counter()
                form(traced)
                laps[name].append(time.perf_counter() - started)
    return {name: 1e3 * min(seconds) for name, seconds in laps.items()}


def report(model: str, handles: int) -> dict[str, Any]:
    """The figures of one workload."""
    nitro.cache_clear()
    rows: list[tuple[float, float, float]] = []
    compiles, step = 0, None
    for index in range(handles):
        taken, step = handle_ms(model, 0.01 * index)
        rows.append((taken, 1e3 * step[0], bare_ms(step)))
        compiles = compiles or len(_COMPILES)
    second = statistics.median(row[0] for row in rows[1:])
    bare = statistics.median(row[2] for row in rows[1:])
    return {
        "workload": model,
        "handles_ms": {n: round(rows[n - 1][0]) for n in (1, 2, handles)},
        "tracing_ms": {n: round(rows[n - 1][1]) for n in (1, 2, handles)},
        "bare_trace_and_hash_ms": round(bare),
        "again_to_bare": round(second / bare, 2),
        "compiles_after_first": len(_COMPILES) - compiles,
        "candidates_ms": {n: round(ms, 1) for n, ms in candidates_ms(step).items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default="mlp,deep")
    parser.add_argument("--handles", type=int, default=20)
    options = parser.parse_args()
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: (
            _COMPILES.append(event)
            if event == "/jax/core/compile/backend_compile_duration"
            else None
        )
    )
    for model in options.workloads.split(","):
        print(json.dumps(report(model, options.handles)), flush=True)


if __name__ == "__main__":
    main()
