"""Paths of this machine's file system, which is where Nitro reads and writes."""

from __future__ import annotations

import os
import re
from pathlib import Path

from .errors import ConfigError

# A `Path` has made one slash of the two. A single letter is a drive of Windows.
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+):/+(.*)", re.DOTALL)


def local_path(path: str | os.PathLike[str], *, name: str) -> Path:
    """A path as given, unless it is the address of another file system.

    Args:
        path: What the user gave.
        name: What the user calls it, such as `run_dir`.

    Raises:
        ConfigError: An address such as `gs://bucket/run`, which would become a folder `gs:`.
    """
    address = _ADDRESS.fullmatch(os.fspath(path))
    if address is not None:
        scheme, rest = address.groups()
        if scheme.lower() == "file":
            fix = f"leave the scheme out: `/{rest}`"
        else:
            fix = f"write to a local folder such as `{_local_name(rest)}` and copy it afterwards, "
            fix += "or mount the bucket and give the mount's path"
        raise ConfigError(
            f"`{name}` is the address `{scheme}://{rest}`.",
            expected="a path of this machine's file system: Nitro reads and writes no other",
            fix=fix,
        )
    return Path(path)


def _local_name(rest: str) -> str:
    """The address without its bucket, as a folder here."""
    inside = [part for part in rest.split("/")[1:] if part not in ("", ".", "..")]
    return "/".join(inside) or "runs"
