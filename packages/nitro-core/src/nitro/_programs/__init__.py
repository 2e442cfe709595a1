"""Programs: fingerprints, keys, the store, and the pure functions that it compiles."""

from ._explain import CompileExplanation, explain_compiles
from ._fingerprint import why_not_by_content
from ._hooks import TracedHooks
from ._options import checked_compile_options
from ._run_programs import RunPrograms
from ._step import Chunk, StepInputs, StepPlan
from ._store import Program, cache_clear, cache_stats, store

__all__ = [
    "Chunk",
    "CompileExplanation",
    "Program",
    "RunPrograms",
    "StepInputs",
    "StepPlan",
    "TracedHooks",
    "cache_clear",
    "cache_stats",
    "checked_compile_options",
    "explain_compiles",
    "store",
    "why_not_by_content",
]
