"""Convolutions on the CPU: what XLA's switches and other forms of a small kernel change.

    uv run benchmarks/convolutions.py [--contenders onednn,slices] [--batch 64]
        [--rounds 5] [--seconds 100]

The CNN of `train_step.py`: its loss (forward), and the loss with all gradients (backward).
Contenders are compiled once, take turns, and are told as ratios to the plain convolution
under XLA's defaults, the median over the turns: above 1 is faster. `again` is the default a
second time, so what it gives is the noise. `differs` is the furthest
that a gradient is from the default's, as a share of the largest value in that array.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Convolve = Callable[[jax.Array, jax.Array], jax.Array]
NUMBERS = ("NHWC", "HWIO", "NHWC")

SWITCHES: dict[str, dict[str, Any]] = {
    "xnnpack": {"xla_cpu_use_xnnpack": True},
    "xnn_fusion": {"xla_cpu_experimental_xnn_graph_fusion_mode": "XNN_GRAPH_FUSION_MODE_GREEDY"},
    "ynn_fusion": {
        "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"
    },
    "onednn": {"xla_cpu_use_onednn": True},
    "one_thread": {"xla_cpu_multi_thread_eigen": False},
    "vector_256": {"xla_cpu_prefer_vector_width": 256},
    "vector_512": {"xla_cpu_prefer_vector_width": 512},
}


def plain(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """XLA's own convolution, without padding."""
    return lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=NUMBERS)


def patches(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A matrix product behind `conv_general_dilated_patches`."""
    height, width, channels, features = kernel.shape
    rows = lax.conv_general_dilated_patches(
        x, (height, width), (1, 1), "VALID", dimension_numbers=NUMBERS
    )
    # Patches have the channel outside of the place in the kernel.
    matrix = kernel.transpose(2, 0, 1, 3).reshape(channels * height * width, features)
    return rows @ matrix


def slices(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """One matrix product over the shifted images side by side."""
    height, width, _, features = kernel.shape
    return jnp.concatenate(shifted(x, height, width), -1) @ kernel.reshape(-1, features)


def shifts(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A matrix product for each place in the kernel, added up."""
    height, width, channels, features = kernel.shape
    parts = shifted(x, height, width)
    matrices = kernel.reshape(-1, channels, features)
    return sum((part @ matrix for part, matrix in zip(parts, matrices, strict=True)), jnp.zeros(()))


def shifted(x: jax.Array, height: int, width: int) -> list[jax.Array]:
    rows, columns = x.shape[1] - height + 1, x.shape[2] - width + 1
    return [x[:, i : i + rows, j : j + columns] for i in range(height) for j in range(width)]


@jax.custom_vjp
def matmul_gradient(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """XLA's own convolution, whose kernel gets its gradient from matrix products."""
    return plain(x, kernel)


def _forward(x: jax.Array, kernel: jax.Array) -> Any:
    return plain(x, kernel), (x, kernel)


def _backward(kept: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = kept
    height, width = kernel.shape[:2]
    (to_x,) = jax.linear_transpose(lambda x: plain(x, kernel), x)(cotangent)
    columns = [jnp.einsum("nhwc,nhwf->cf", part, cotangent) for part in shifted(x, height, width)]
    return to_x, jnp.stack(columns).reshape(kernel.shape)


matmul_gradient.defvjp(_forward, _backward)


def window(x: jax.Array) -> jax.Array:
    """The largest of each 2 x 2 pixels, as `nnx.max_pool` takes it."""
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def maximum(x: jax.Array) -> jax.Array:
    """The same without a window, whose gradient XLA's CPU back end computes slowly."""
    rows = jnp.maximum(x[:, ::2], x[:, 1::2])
    return jnp.maximum(rows[:, :, ::2], rows[:, :, 1::2])


FORMS: dict[str, tuple[Convolve, Callable[[jax.Array], jax.Array]]] = {
    "again": (plain, window),
    "patches": (patches, window),
    "slices": (slices, window),
    "shifts": (shifts, window),
    "matmul_gradient": (matmul_gradient, window),
    "pool_by_maximum": (plain, maximum),
}


def make_params() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = {
        "conv1": (3, 3, 1, 32),
        "conv2": (3, 3, 32, 64),
        "dense1": (12 * 12 * 64, 128),
        "dense2": (128, 10),
    }
    return {
        name: jnp.asarray(rng.normal(0, np.prod(shape[:-1]) ** -0.5, shape), jnp.float32)
        for name, shape in shapes.items()
    }


def make_loss(
    convolve: Convolve, pool: Callable[[jax.Array], jax.Array]
) -> Callable[..., jax.Array]:
    """The loss of the CNN with this form of its convolutions and its pooling."""

    def loss(params: dict[str, jax.Array], x: jax.Array, label: jax.Array) -> jax.Array:
        x = jax.nn.relu(convolve(jax.nn.relu(convolve(x, params["conv1"])), params["conv2"]))
        x = pool(x)
        x = jax.nn.relu(x.reshape(x.shape[0], -1) @ params["dense1"]) @ params["dense2"]
        return -(jax.nn.log_softmax(x) * jax.nn.one_hot(label, 10)).sum(-1).mean()

    return loss


def compile_all(
    arguments: tuple[Any, ...], chosen: list[str], *, backward: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """The compiled contenders by name, and why others cannot be compiled."""
    contenders: dict[str, Any] = {"default": (FORMS["again"], {})}
    contenders |= {name: (FORMS["again"], options) for name, options in SWITCHES.items()}
    contenders |= {name: (form, {}) for name, form in FORMS.items()}
    compiled, refused = {}, {}
    for name, (form, options) in contenders.items():
        if chosen and name not in ("default", *chosen):
            continue
        loss = make_loss(*form)
        function = jax.value_and_grad(loss) if backward else loss
        try:
            compiled[name] = jax.jit(function).lower(*arguments).compile(options)
            jax.block_until_ready(compiled[name](*arguments))
        except Exception as error:  # noqa: BLE001 - other versions have other switches
            refused[name] = str(error).splitlines()[0][:100]
    return compiled, refused


def differs(got: Any, wanted: Any) -> float:
    """The furthest that an array is from the wanted one, as a share of its largest value."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)


def measure(
    arguments: tuple[Any, ...], chosen: list[str], rounds: int, seconds: float, *, backward: bool
) -> None:
    """Prints a line for each contender."""
    compiled, refused = compile_all(arguments, chosen, backward=backward)
    taken: dict[str, list[float]] = {name: [] for name in compiled}
    started = time.perf_counter()
    for _ in range(rounds):
        for name, program in compiled.items():
            begin = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            taken[name].append(time.perf_counter() - begin)
        if time.perf_counter() - started > seconds:
            break
    wanted = compiled["default"](*arguments)
    what = "backward" if backward else "forward"
    for name, program in compiled.items():
        ratios = [d / t for d, t in zip(taken["default"], taken[name], strict=True)]
        line = {
            "pass": what,
            "contender": name,
            "ratio": round(statistics.median(ratios), 2),
            "ms": round(1e3 * min(taken[name]), 1),
            "turns": len(ratios),
            "differs": float(f"{differs(program(*arguments), wanted):.1e}"),
        }
        print(json.dumps(line), flush=True)
    for name, why in refused.items():
        print(json.dumps({"pass": what, "contender": name, "refused": why}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contenders", default="", help="names with commas; all by default")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=100, help="the longest, for each pass")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(arguments.batch, 28, 28, 1)), jnp.float32)
    label = jnp.asarray(rng.integers(0, 10, arguments.batch))
    print(f"jax {jax.__version__}, {os.cpu_count()} cores, batch {arguments.batch}")
    for backward in (False, True):
        given = (make_params(), x, label)
        chosen = list(filter(None, arguments.contenders.split(",")))
        measure(given, chosen, arguments.rounds, arguments.seconds, backward=backward)


if __name__ == "__main__":
    main()
