"""The names of the signatures."""

from __future__ import annotations

DEFAULT = "serving_default"
"""The signature that clients get who name none."""


def fixed_signature(rows: int) -> str:
    """The signature that takes exactly `rows` rows."""
    return f"serving_b{rows}"
