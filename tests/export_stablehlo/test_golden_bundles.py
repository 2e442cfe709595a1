"""Bundles of every format number there ever was can be loaded, verified and differentiated."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from nitro_export_stablehlo import load_bundle

GOLDEN = Path(__file__).parents[1] / "golden"
FORMATS = sorted(path.name for path in GOLDEN.glob("bundle-format-*"))


@pytest.fixture(params=FORMATS)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return shutil.copytree(GOLDEN / request.param, tmp_path / "golden")


def test_there_is_a_golden_bundle() -> None:
    assert "bundle-format-1" in FORMATS


def test_old_bundle_gives_what_numpy_gives(golden: Path) -> None:
    expected = np.load(golden / "expected.npz")

    outputs = load_bundle(golden / "golden")(raw=expected["raw"])

    np.testing.assert_allclose(outputs["scores"], expected["scores"], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(outputs["sent"], expected["raw"])


def test_old_bundle_can_be_verified(golden: Path, warm_python: Any) -> None:
    done = warm_python.run("-m", "nitro_export_stablehlo", "verify", golden / "golden", check=False)

    assert done.returncode == 0, done.stdout + done.stderr


def test_old_bundle_can_be_differentiated(golden: Path) -> None:
    raw = np.load(golden / "expected.npz")["raw"][:4]
    bundle = load_bundle(golden / "golden")

    def total(outputs):
        return jnp.sum(outputs["scores"])

    gradient = bundle.grad(total)({"layers.3.bias": bundle.weights["layers.3.bias"]}, {"raw": raw})

    # Each row adds one to each score.
    np.testing.assert_allclose(gradient["layers.3.bias"], [4, 4], rtol=1e-6)
