"""The checks that every backend must pass."""

from __future__ import annotations

import pytest

import nitro.testing


@pytest.mark.tf
@pytest.mark.slow
def test_backend_passes_the_conformance_kit() -> None:
    assert "dynamic batch" in nitro.testing.check_backend("tf")
