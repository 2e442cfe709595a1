"""Programs: fingerprints, keys, the store, and the pure functions that it compiles."""

from ._explain import CompileExplanation, explain_compiles
from ._fingerprint import why_not_by_content
from ._hooks import TracedHooks
from ._memory import (
    CONVOLUTION_SCRATCH,
    Held,
    MemoryPart,
    MemoryPlan,
    ProgramMemory,
    has_convolutions,
    program_memory,
)
from ._options import checked_compile_options
from ._pure import run_pure
from ._run_programs import RunPrograms
from ._sizes import in_units, tree_bytes
from ._step import Chunk, StepInputs, StepPlan
from ._store import Program, cache_clear, cache_stats, store

__all__ = [
    "CONVOLUTION_SCRATCH",
    "Chunk",
    "CompileExplanation",
    "Held",
    "MemoryPart",
    "MemoryPlan",
    "Program",
    "ProgramMemory",
    "RunPrograms",
    "StepInputs",
    "StepPlan",
    "TracedHooks",
    "cache_clear",
    "cache_stats",
    "checked_compile_options",
    "explain_compiles",
    "has_convolutions",
    "in_units",
    "program_memory",
    "run_pure",
    "store",
    "tree_bytes",
    "why_not_by_content",
]
