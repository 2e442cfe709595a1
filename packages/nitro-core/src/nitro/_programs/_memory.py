"""The memory plan: what a run will hold, part by part, before its first step."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ._sizes import in_units

CONVOLUTION_SCRATCH = 2.2
"""By how much a CPU program with convolutions outgrows XLA's plan, at most.

Measured with jaxlib 0.12: resident memory grows by 1.7 to 2.2 times the plan above 200 MB.
Below that the factor is larger, and does not matter.
"""

_SCRATCH_FROM_BYTES = 200 * 10**6
_CONVOLUTIONS = frozenset({"conv_general_dilated"})


@dataclass(frozen=True, kw_only=True)
class ProgramMemory:
    """XLA's memory analysis of one program, in bytes.

    Attributes:
        arguments: All arguments.
        outputs: All results, those that take an argument's place included.
        aliased: Results that take the place of a donated argument.
        temporary: What it needs while it runs.
        code: The machine code.
    """

    arguments: int
    outputs: int
    aliased: int
    temporary: int
    code: int

    @property
    def results(self) -> int:
        """What a call leaves behind besides its arguments."""
        return self.outputs - self.aliased


def program_memory(compiled: Any) -> ProgramMemory:
    """XLA's memory analysis; zeros where the platform gives none."""
    stats = compiled.memory_analysis()
    return ProgramMemory(
        arguments=getattr(stats, "argument_size_in_bytes", 0),
        outputs=getattr(stats, "output_size_in_bytes", 0),
        aliased=getattr(stats, "alias_size_in_bytes", 0),
        temporary=getattr(stats, "temp_size_in_bytes", 0),
        code=getattr(stats, "generated_code_size_in_bytes", 0),
    )


def has_convolutions(primitives: frozenset[str]) -> bool:
    """Whether a program needs scratch that XLA's analysis on the CPU leaves out."""
    return bool(primitives & _CONVOLUTIONS)


class Held(enum.Enum):
    """When a part of the plan takes memory."""

    ALWAYS = "always"
    STEP = "in a step"
    EVALUATION = "in an evaluation"
    HOST = "on the host"
    """Not on the device at all, so that it does not count against its limit."""


@dataclass(frozen=True)
class MemoryPart:
    """One line of the plan: how many bytes, and when."""

    size_bytes: int
    held: Held


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What a run will hold at most on its device.

    Steps and evaluations take turns, so the larger of the two counts.

    Attributes:
        parts: The parts by name.
        limit_bytes: The memory that there is.
        device: What has that limit, for messages.
        scratch_factor: By how much the real use may outgrow the plan.
    """

    parts: Mapping[str, MemoryPart]
    limit_bytes: int
    device: str
    scratch_factor: float = 1.0

    @property
    def total_bytes(self) -> int:
        """The largest sum of parts that are held at one time."""
        return self._sum(Held.ALWAYS) + max(self._sum(Held.STEP), self._sum(Held.EVALUATION))

    @property
    def upper_bytes(self) -> int:
        """The total with scratch that the plan cannot see; this is what is checked."""
        if self.total_bytes < _SCRATCH_FROM_BYTES:
            return self.total_bytes
        return round(self.total_bytes * self.scratch_factor)

    @property
    def share(self) -> float:
        """The checked figure as a share of the limit."""
        return self.upper_bytes / self.limit_bytes

    def _sum(self, held: Held) -> int:
        return sum(part.size_bytes for part in self.parts.values() if part.held is held)

    def __str__(self) -> str:
        lines = [
            f"memory plan: {self.share:.1%} of the {in_units(self.limit_bytes)} of {self.device}"
        ]
        lines += [
            f"  {name:<32}{in_units(part.size_bytes):>12}  {part.held.value}"
            for name, part in self.parts.items()
        ]
        lines.append(f"  {'total at one time':<32}{in_units(self.total_bytes):>12}")
        if self.upper_bytes != self.total_bytes:
            lines.append(
                f"  {'with convolution scratch':<32}{in_units(self.upper_bytes):>12}  "
                f"up to {self.scratch_factor:g} times the plan: XLA leaves it out on the CPU"
            )
        return "\n".join(lines)
