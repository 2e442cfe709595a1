"""Loads an artifact in a process of its own and runs it: `python -I -m nitro.export._check`.

Arguments: the backend's name, the artifact, a folder of `in_<i>.arrays` files. Writes
`out_<i>.arrays` beside each. The process sees no model source.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from nitro._plugins import get_backend
from nitro.export._arrays import read_arrays, write_arrays
from nitro.hooks import SelfVerifying


def main(backend: str, artifact: str, folder: str) -> None:
    """Runs every request in the folder on the loaded artifact."""
    loaded = get_backend(backend).load(Path(artifact))
    if isinstance(loaded, SelfVerifying):
        loaded.verify()
    for request in sorted(Path(folder).glob("in_*.arrays")):
        outputs = loaded(**read_arrays(request))
        answer = request.with_name(request.name.replace("in_", "out_"))
        write_arrays(answer, {name: np.asarray(value) for name, value in outputs.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
