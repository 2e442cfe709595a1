"""What every test and every doctest of the workspace shares."""

from __future__ import annotations

import importlib.util
from collections import Counter
from typing import Any

import pytest

# It has no doctests, and parts of it run only inside Triton, or without tritonclient in the
# same process, whose messages have the names of kserve's.
collect_ignore = ["packages/nitro-serve/src"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Has files with slow tests run first; skips what needs TensorFlow where there is none."""
    slow = Counter(item.path for item in items if _is_slow(item))
    items.sort(key=lambda item: -slow[item.path])
    if importlib.util.find_spec("tensorflow") is not None:
        return
    skip = pytest.mark.skip(reason="needs TensorFlow: uv sync --group tf")
    for item in items:
        if item.get_closest_marker("tf") is not None:
            item.add_marker(skip)


def _is_slow(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) is not None for name in ("slow", "tf"))


@pytest.fixture(autouse=True)
def _doctest_names(request: pytest.FixtureRequest) -> None:
    """Examples in docstrings may use the usual abbreviations without importing them."""
    if isinstance(request.node, pytest.DoctestItem):
        names: dict[str, Any] = request.getfixturevalue("doctest_namespace")
        for name, module in {"jax": "jax", "jnp": "jax.numpy", "np": "numpy"}.items():
            names[name] = importlib.import_module(module)
