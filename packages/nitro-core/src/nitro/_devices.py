"""Which device a run uses, and how many of them there are."""

from __future__ import annotations

from typing import Any

from nitro.errors import ConfigError


def checked_n_devices(n_devices: Any) -> int:
    """The number of devices, which is 1 for now.

    Raises:
        ConfigError: More than one.
    """
    if n_devices != 1:
        raise ConfigError(
            f"`n_devices` is {n_devices!r}.",
            expected="1: this version trains on one device",
            fix="leave `n_devices` out",
        )
    return 1
