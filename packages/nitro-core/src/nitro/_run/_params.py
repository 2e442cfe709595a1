"""The parameters of a run by dotted name, and which of them train."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nitro._trees import describe_array


class Params(Mapping[str, np.ndarray]):
    """Parameters by dotted name: copies on the host, as they were when they were asked for.

    Attributes:
        frozen: The names of those in groups that are frozen.
    """

    def __init__(self, arrays: Mapping[str, Any], *, frozen: frozenset[str]) -> None:
        # Views of JAX arrays on the CPU would change with the next step: it reuses the buffers.
        self._arrays = {name: np.array(array) for name, array in arrays.items()}
        self.frozen = frozen

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    @property
    def num_trained(self) -> int:
        """How many numbers training moves; all of them where nothing is frozen."""
        return sum(array.size for name, array in self.items() if name not in self.frozen)

    @property
    def num_frozen(self) -> int:
        """How many numbers training leaves alone."""
        return sum(array.size for name, array in self.items() if name in self.frozen)

    def __repr__(self) -> str:
        lines = [
            f"  {name}: {describe_array(array)}" + (", frozen" if name in self.frozen else "")
            for name, array in self.items()
        ]
        return "\n".join([f"Params({count_words(self.num_trained, self.num_frozen)})", *lines])


def count_words(num_trained: int, num_frozen: int) -> str:
    """`1,570 parameters, 1,304 of them frozen`."""
    text = f"{num_trained + num_frozen:,} parameters"
    return f"{text}, {num_frozen:,} of them frozen" if num_frozen else text
