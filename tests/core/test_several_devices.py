"""Records and weights where JAX sees several devices: Nitro works on one, with the same bits."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

HAS_BUNDLE = importlib.util.find_spec("nitro_export_stablehlo") is not None
FORMS = ("flat", "module", "wider", "narrower")
SPREADS = ("elsewhere", "replicated", "split")


def _import_script() -> Any:
    spec = importlib.util.spec_from_file_location(
        "several_devices", Path(__file__).with_name("several_devices.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Four(NamedTuple):
    """What a process with four devices left, and what is left to do in this one."""

    directory: Path
    facts: dict[str, Any]
    script: Any

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        with np.load(self.directory / f"{name}.npz") as arrays:
            return dict(arrays)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Four:
    directory = tmp_path_factory.mktemp("devices")
    script = _import_script()
    script.begin(directory / "stopped-alone")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, script.__file__, str(directory), *["--export"] * HAS_BUNDLE],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads((directory / "facts.json").read_text())
    assert facts["devices"] == 4
    return Four(directory, facts, script)


@pytest.fixture(scope="module")
def straight(four: Four) -> dict[str, np.ndarray]:
    """The arrays of a run that never left this process, with its one device."""
    return four.script.arrays_of(four.script.make(four.directory / "straight").train())


def _check_same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


def test_record_of_one_device_goes_on_among_four(
    four: Four, straight: dict[str, np.ndarray]
) -> None:
    _check_same(four.arrays("resumed"), straight)


def test_record_of_four_devices_goes_on_with_one(
    four: Four, straight: dict[str, np.ndarray]
) -> None:
    run = four.script.make(four.directory / "begun-among-four", resume="auto")
    assert 0 < run.step < 10

    _check_same(four.script.arrays_of(run.train()), straight)


def test_weights_of_a_record_are_read_with_any_number_of_devices(
    four: Four, straight: dict[str, np.ndarray]
) -> None:
    source = f"{four.directory / 'stopped-alone'}@latest"
    here = four.script.make(four.directory / "scratch", checkpoint=source, data={})

    weights = {name: array for name, array in straight.items() if not name.startswith("opt")}
    _check_same(four.arrays("loaded"), weights)
    _check_same(four.script.arrays_of(here), weights)


@pytest.mark.parametrize("how", SPREADS)
@pytest.mark.parametrize("form", FORMS)
def test_weights_come_to_the_first_device(four: Four, form: str, how: str) -> None:
    assert four.facts[f"{form}-{how}"] == {"away": [], "compiled": 0}
    _check_same(four.arrays(f"{form}-{how}"), four.arrays(form))


def test_weights_are_those_that_were_given(four: Four) -> None:
    given = four.script.nnx.to_flat_state(
        four.script.nnx.state(four.script.Net(four.script.nnx.Rngs(5)))
    )
    taken = four.arrays("flat-split")
    for path, variable in given:
        name = ".".join(map(str, path))
        np.testing.assert_array_equal(
            taken[f"before.{name}"], four.script.plain(variable[...]), err_msg=name
        )


@pytest.mark.parametrize("how", SPREADS)
def test_model_built_from_spread_arrays_trains(four: Four, how: str) -> None:
    _check_same(four.arrays(f"built-{how}"), four.arrays("built-"))


@pytest.mark.skipif(not HAS_BUNDLE, reason="needs the backend: `uv sync --all-packages`")
def test_handle_with_spread_weights_is_exported(four: Four) -> None:
    loader: Any = importlib.import_module("nitro_export_stablehlo")
    x = np.random.default_rng(1).normal(size=(4, 6)).astype(np.float32)
    run = four.script.make(
        four.directory / "scratch", weights=four.script.handed_over("flat"), data={}
    )

    logits = loader.load_bundle(four.directory / four.facts["exported"])(x=x)["logits"]

    # Two programs of one model: XLA may fuse them otherwise.
    np.testing.assert_allclose(logits, run.predict({"x": x}), rtol=1e-5, atol=1e-6)
