"""Programs: what identifies them, the store, and the pure functions that it compiles."""

from ._draws import find_draws, where_drawn
from ._explain import explain_compiles
from ._hooks import TracedHooks
from ._jaxpr import bodies, jaxprs, matmul_flops
from ._loss import LossTerm
from ._memory import (
    CONVOLUTION_SCRATCH,
    Held,
    MemoryPart,
    MemoryPlan,
    has_convolutions,
    program_memory,
)
from ._options import checked_compile_options
from ._pure import run_pure
from ._run_programs import RunPrograms, StepRecord
from ._sizes import in_units, tree_bytes
from ._step import Chunk, StepChecks, StepInputs, StepPlan
from ._store import Program, cache_clear, cache_stats
from ._tracing import TraceScope

__all__ = [
    "CONVOLUTION_SCRATCH",
    "Chunk",
    "Held",
    "LossTerm",
    "MemoryPart",
    "MemoryPlan",
    "Program",
    "RunPrograms",
    "StepChecks",
    "StepInputs",
    "StepPlan",
    "StepRecord",
    "TraceScope",
    "TracedHooks",
    "bodies",
    "cache_clear",
    "cache_stats",
    "checked_compile_options",
    "explain_compiles",
    "find_draws",
    "has_convolutions",
    "in_units",
    "jaxprs",
    "matmul_flops",
    "program_memory",
    "run_pure",
    "tree_bytes",
    "where_drawn",
]
