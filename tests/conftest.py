"""What all tests share: a compilation cache of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _own_compilation_cache(pytestconfig: pytest.Config) -> Iterator[None]:
    """Keeps programs beside pytest's own cache, and out of the user's."""
    before = os.environ.get("NITRO_CACHE_DIR")
    os.environ["NITRO_CACHE_DIR"] = str(pytestconfig.cache.mkdir("xla"))
    yield
    if before is None:
        del os.environ["NITRO_CACHE_DIR"]
    else:
        os.environ["NITRO_CACHE_DIR"] = before
