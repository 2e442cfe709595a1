"""Trains and loads where JAX sees four devices; `test_several_devices` reads what comes out.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python several_devices.py DIRECTORY

In the directory: the run `stopped-alone`, which one device began and this process ends; the
run `begun-among-four`, which it begins; what came out as `<what>.npz`; and `facts.json`.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import nitro
from nitro import ExportSpec
from nitro._run import session_of

SPREADS = ("elsewhere", "replicated", "split")
FORMS = ("flat", "module", "wider", "narrower")


class Net(nnx.Module):
    """Has BatchNorm, Dropout, and weights of two dtypes."""

    def __init__(self, rngs: nnx.Rngs, dtype: Any = jnp.bfloat16) -> None:
        self.body = nnx.Linear(6, 8, param_dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.drop(nnx.relu(self.norm(self.body(x)))))


class Placed(nitro.Experiment):
    """Two epochs of a small classifier; `pretrained` says where `build_model` has it from."""

    pretrained: nitro.GraphConst[str] = ""
    scale: nitro.Device[float] = 1.0

    def build_data(self) -> Any:
        rng = np.random.default_rng(0)
        x = rng.normal(size=(20, 6)).astype(np.float32)
        fields = {"x": x, "label": rng.integers(0, 3, len(x))}
        return {"train": nitro.ArrayLoader(fields, 4, shuffle=True)}

    def build_model(self, rngs: nnx.Rngs) -> Any:
        net = Net(rngs)
        if self.pretrained:
            nnx.update(net, spread(nnx.state(net), self.pretrained))
        return net

    def forward(self, model: Any, *, x: Any) -> Any:
        return model(x)

    def loss(self, logits: Any, *, label: Any) -> Any:
        entropies = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        return self.scale * entropies.mean()

    def decay_anchor(self, group: str) -> Any:
        return "init"

    def weight_decay(self, group: str) -> float:
        return 1e-2

    def export_inputs(self) -> Any:
        return [ExportSpec("x", "float32", (1, 6))]

    def export_outputs(self) -> Any:
        return [ExportSpec("logits")]


def make(run_dir: Path, **options: Any) -> nitro.Nitro:
    options = {"max_epochs": 2, "progress": False, **options}
    return nitro.Nitro(Placed(), run_dir=run_dir, **options)


def begin(run_dir: Path) -> None:
    """Trains to the end of the first call, somewhere before the end."""
    run = make(run_dir)
    run.on_phase(lambda event: event.phase.value == "training" and run.request_stop())
    run.train()


def arrays_of(run: nitro.Nitro) -> dict[str, Any]:
    """Weights and state, RNG keys as their data, bfloat16 as the same numbers in float32."""
    state = session_of(run).state
    held = {**state.params, **state.model_state}
    held |= {f"opt{i}": leaf for i, leaf in enumerate(jax.tree.leaves(state.opt_state))}
    return {name: plain(array) for name, array in held.items()}


def plain(array: Any) -> np.ndarray:
    data = np.asarray(jax.random.key_data(array) if is_key(array) else array)
    return data.astype(np.float32) if data.dtype == jnp.bfloat16 else data


def is_key(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def spread(tree: Any, how: str) -> Any:
    """The same arrays on another device than the first, or over a mesh of all four."""
    mesh = Mesh(np.array(jax.devices()), ("d",))

    def placed(array: Any) -> Any:
        if how == "elsewhere":
            return jax.device_put(array, jax.devices()[2])
        axes = [None if is_key(array) or size % 4 else "d" for size in array.shape]
        cut = how == "split" and "d" in axes
        first = axes.index("d") if cut else 0
        spec = PartitionSpec(*[None] * first, "d") if cut else PartitionSpec()
        return jax.device_put(array, NamedSharding(mesh, spec))

    return jax.tree.map(placed, tree)


def handed_over(form: str) -> Any:
    """Weights that are not the model's own, in one of the forms that a handle takes."""
    if form == "module":
        return Net(nnx.Rngs(5))
    dtype = {"wider": jnp.float32, "narrower": jnp.float16}.get(form, jnp.bfloat16)
    return nnx.to_pure_dict(nnx.state(Net(nnx.Rngs(5), dtype)))


def spread_form(form: str, how: str) -> Any:
    weights = handed_over(form)
    if not isinstance(weights, nnx.Module):
        return spread(weights, how)
    nnx.update(weights, spread(nnx.state(weights), how))
    return weights


def check_weights(directory: Path, compiled: list[str]) -> dict[str, Any]:
    """Starts from spread weights, then trains; says what was away, and what compiled."""
    facts: dict[str, Any] = {}
    for form in FORMS:
        np.savez(directory / f"{form}.npz", **trained(directory, weights=handed_over(form))[1])
        for how in SPREADS:
            name = f"{form}-{how}"
            away, arrays = trained(directory, compiled, weights=spread_form(form, how))
            np.savez(directory / f"{name}.npz", **arrays)
            facts[name] = {"away": away, "compiled": len(compiled)}
    return facts


def trained(
    directory: Path, compiled: list[str] | None = None, **options: Any
) -> tuple[list[str], dict[str, Any]]:
    """Which leaves were not on the first device, and all arrays before and after an epoch."""
    run = make(directory / "scratch", checkpointer=None, logger=None, max_epochs=1, **options)
    state = session_of(run).state
    away = [n for n, a in {**state.params, **state.model_state}.items() if not is_home(a)]
    before = {f"before.{name}": array for name, array in arrays_of(run).items()}
    if compiled is not None:
        compiled.clear()
    run.train()
    return away, {**before, **arrays_of(run)}


def is_home(array: jax.Array) -> bool:
    return array.sharding == jax.sharding.SingleDeviceSharding(jax.devices()[0])


def check_built(directory: Path) -> None:
    """Trains from what `build_model` itself takes from elsewhere."""
    for how in ("", *SPREADS):
        options: dict[str, Any] = {"checkpointer": None, "logger": None, "progress": False}
        run = nitro.Nitro(Placed(pretrained=how), run_dir=directory / "scratch", **options)
        np.savez(directory / f"built-{how}.npz", **arrays_of(run.train()))


def export(directory: Path, weights: Any) -> Mapping[str, Any]:
    """Exports a handle with spread weights, which compares the artifact with `predict`."""
    run = make(directory / "scratch", weights=weights, data={})
    path = nitro.export_model(run, "stablehlo", dir=directory, name="exported", batch_sizes=(4,))
    return {"exported": path.name}


def main() -> None:
    directory = Path(sys.argv[1])
    warnings.simplefilter("error")
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        del duration_secs
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    begin(directory / "begun-among-four")
    resumed = make(directory / "stopped-alone", resume="auto").train()
    np.savez(directory / "resumed.npz", **arrays_of(resumed))
    loaded = make(directory / "scratch", checkpoint=directory / "stopped-alone@latest", data={})
    np.savez(directory / "loaded.npz", **arrays_of(loaded))
    jax.monitoring.register_event_duration_secs_listener(listen)
    facts: dict[str, Any] = {"devices": jax.device_count(), **check_weights(directory, compiled)}
    check_built(directory)
    if "--export" in sys.argv:
        facts |= export(directory, spread_form("flat", "split"))
    (directory / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
