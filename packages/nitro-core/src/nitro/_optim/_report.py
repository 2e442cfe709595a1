"""Says how weights will move: the optimizer's lines of the binding report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ._groups import ParamGroup
from ._manual import ManualOptimizers
from ._optimizer import Optimizer


def describe_optimizer(optimizer: Optimizer | ManualOptimizers, view: Any) -> list[str]:
    """One line for each group, each schedule, and what a chain leaves unused.

    Args:
        optimizer: The optimizer.
        view: The compile view, with the Device fields as arrays.
    """
    if isinstance(optimizer, ManualOptimizers):
        names = sorted({name.partition(".")[0] for name in optimizer.names})
        driven = f"`train_step` drives {', '.join(f'`{name}`' for name in names)}"
        return [driven, *_schedule_lines(optimizer)]
    return [*_group_lines(optimizer, view), *_schedule_lines(optimizer)]


def _group_lines(optimizer: Optimizer, view: Any) -> Iterator[str]:
    joint = [group for group in optimizer.groups if optimizer.clips_alone(group, view)]
    for group in optimizer.groups:
        yield f"group `{group.name}`: {_described(group)}"
        for name in sorted(optimizer.unused(group, view)):
            if name == "learning_rate" or _decays(optimizer, group):
                yield f"group `{group.name}`: its chain does not use `hyper.{name}`"
        if group in joint and len(optimizer.groups) > 1:
            yield (
                f"group `{group.name}`: its optimizer clips the norm of this group alone; "
                "`gradient_clip_norm` clips that of all groups together"
            )
    for group in optimizer.frozen:
        yield f"group `{group.name}`: frozen, {group.num_params:,} parameters"


def _described(group: ParamGroup) -> str:
    num_left_out = len(group.no_decay)
    decay = f"decay {group.weight_decay:g} toward {group.anchor}"
    if num_left_out:
        decay += f" ({num_left_out} of {len(group.leaves)} arrays left out)"
    rate = f"rate {group.learning_rate:g} ({group.ratio:g} of the base)"
    return f"{group.optimizer}, {rate}, {decay}, {group.num_params:,} parameters"


def _decays(optimizer: Optimizer, group: ParamGroup) -> bool:
    targets = ("opt.weight_decay", f"opt.{group.name}.weight_decay")
    return group.weight_decay != 0 or any(target in optimizer.schedules for target in targets)


def _schedule_lines(optimizer: Optimizer | ManualOptimizers) -> Iterator[str]:
    for target, schedule in optimizer.schedules.items():
        what = f"over {len(optimizer.table)} steps" if callable(schedule.value) else "constant"
        yield f"schedule `{schedule.key}` → {target}, {what} ({schedule.source})"
