"""Programs: fingerprints, keys, the store, and the pure functions that it compiles."""

from ._hooks import TracedHooks
from ._run_programs import RunPrograms
from ._step import StepPlan
from ._store import cache_clear, cache_stats, store

__all__ = ["RunPrograms", "StepPlan", "TracedHooks", "cache_clear", "cache_stats", "store"]
