"""What every test and every doctest of the workspace shares."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs TensorFlow where it is not installed."""
    if importlib.util.find_spec("tensorflow") is not None:
        return
    skip = pytest.mark.skip(reason="needs TensorFlow: uv sync --group tf")
    for item in items:
        if item.get_closest_marker("tf") is not None:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _doctest_names(request: pytest.FixtureRequest) -> None:
    """Examples in docstrings may use the usual abbreviations without importing them."""
    if isinstance(request.node, pytest.DoctestItem):
        names: dict[str, Any] = request.getfixturevalue("doctest_namespace")
        for name, module in {"jax": "jax", "jnp": "jax.numpy", "np": "numpy"}.items():
            names[name] = importlib.import_module(module)
