"""Whether what a live handle holds is still what a new one would compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flax import nnx

from nitro._code import Words, as_defined_now, moved_words
from nitro._experiment import Experiment, read_routes

from ._hooks import TracedHooks

_Retrace = Callable[[TracedHooks], str]


class DriftWatch:
    """Looks at code and values cheaply, and traces again before it tells anything.

    Args:
        hooks: The hooks of the handle.
        roles: The kinds of programs that it may trace.
        read: Reads what a kind of program rests on now, for these hooks.
    """

    def __init__(
        self, hooks: TracedHooks, roles: Iterable[str], read: Callable[[str, TracedHooks], Words]
    ) -> None:
        self._hooks = hooks
        self._read = read
        self._first = {role: read(role, hooks).without_values() for role in roles}
        self._looked = {role: words.digest for role, words in self._first.items()}
        self._traces: dict[str, list[tuple[str, _Retrace]]] = {role: [] for role in self._first}
        self._told: set[str] = set()

    def add(self, role: str, digest: str, retrace: _Retrace) -> None:
        """Watches a program from now on.

        Args:
            role: What kind of program it is.
            digest: What identifies its trace.
            retrace: Traces it again, with these hooks; returns the digest.
        """
        self._traces[role].append((digest, retrace))

    def look(self) -> list[str]:
        """What moved since the handle was built and was not told before, a line each."""
        lines: dict[str, None] = {}
        hooks = _hooks_as_now(self._hooks)
        for role, first in self._first.items():
            words = self._read(role, hooks)
            if words.digest == self._looked[role]:
                continue
            self._looked[role] = words.digest
            if words.digest == first.digest:
                continue
            moved = moved_words(first, words)
            traces = self._traces[role]
            if not traces:
                # Nothing was traced that could be compared, and what came along says nothing.
                moved = [
                    line for line in moved if ": added, " not in line and ": removed, " not in line
                ]
            elif not self._computes_otherwise(traces, hooks):
                continue
            lines |= dict.fromkeys(moved)
        new = [line for line in lines if line not in self._told]
        self._told.update(new)
        return new

    def _computes_otherwise(self, traces: list[tuple[str, _Retrace]], hooks: TracedHooks) -> bool:
        try:
            hooks = _with_model_as_now(hooks, self._hooks.layout.train_modules)
            return any(retrace(hooks) != digest for digest, retrace in traces)
        except Exception:  # noqa: BLE001 - code that cannot be traced any more has moved
            return True


def _hooks_as_now(hooks: TracedHooks) -> TracedHooks:
    """The hooks and the model's classes as they are now, if a cell or module has run again."""
    layout = dataclasses.replace(
        hooks.layout,
        train_modules=_redefined(hooks.layout.train_modules),
        eval_modules=_redefined(hooks.layout.eval_modules),
    )
    hooks = dataclasses.replace(hooks, layout=layout)
    cls: Any = type(hooks.experiment)
    now: Any = as_defined_now(cls)
    if now is cls or not issubclass(now, Experiment):
        return hooks
    experiment: Any = object.__new__(now)
    experiment.__dict__.update(vars(hooks.experiment))
    return dataclasses.replace(hooks, experiment=experiment, routes=read_routes(now))


def _redefined(modules: Mapping[str, Any]) -> dict[str, Any]:
    return {
        path: {**settings, "class": as_defined_now(settings["class"])}
        for path, settings in modules.items()
    }


def _with_model_as_now(hooks: TracedHooks, before: Mapping[str, Any]) -> TracedHooks:
    """The hooks with a model of today's classes, made without values, if any was redefined."""
    modules = hooks.layout.train_modules
    if all(modules[path]["class"] is before[path]["class"] for path in modules):
        return hooks
    experiment: Any = hooks.experiment
    model: Any = nnx.eval_shape(lambda: experiment.build_model(nnx.Rngs(0)))
    model.eval()
    in_eval = nnx.split(model, nnx.Param, ...)[0]
    model.train()
    in_train = nnx.split(model, nnx.Param, ...)[0]
    layout = dataclasses.replace(hooks.layout, train=in_train, eval=in_eval)
    return dataclasses.replace(hooks, layout=layout)
