"""The binding report: what a handle was configured with, and from where."""

from __future__ import annotations

from typing import Any

from nitro._optim import describe_optimizer
from nitro._programs import MemoryPlan
from nitro.data import ArrayLoader

from ._setup import Setup


def binding_report(setup: Setup, memory: MemoryPlan | None) -> str:
    """Lists options with their sources, splits, hooks, optimizer, memory plan, the weights' origin."""
    lines = [f"{setup.owner}: weights {setup.source.display}"]
    for name, source in setup.options.sources.items():
        lines.append(f"  {name} = {getattr(setup.options, name)} ({source})")
    lines += [f"  split `{name}`: {_split(source)}" for name, source in setup.splits.items()]
    for route in setup.hooks.routes.values():
        fields = ", ".join(route.required + tuple(f"{n} (optional)" for n in route.optional))
        lines.append(f"  {route.hook}: {fields or 'no fields'}{' and all' * route.takes_all}")
    if setup.optimizer is not None:
        lines += [f"  {line}" for line in describe_optimizer(setup.optimizer)]
    if memory is not None:
        lines += [f"  {line}" for line in str(memory).splitlines()]
    return "\n".join(lines + setup.notes)


def _split(source: Any) -> str:
    if not isinstance(source, ArrayLoader):
        return f"{len(source)} batches ({type(source).__name__})"
    text = f"{len(source)} batches of {source.batch_size}, {source.num_samples} samples"
    dropped = source.num_dropped
    return text + (f"; {dropped} dropped with the ragged last batch" if dropped else "")
