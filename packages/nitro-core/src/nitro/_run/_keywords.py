"""Refuses keywords of `Nitro` that are none, with the one that was meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, ParamSpec

from nitro._experiment import Experiment, foreign_keyword
from nitro.errors import ConfigError, did_you_mean

_P = ParamSpec("_P")


def known_keywords(init: Callable[_P, None]) -> Callable[_P, None]:
    """Wraps the constructor of the handle, so that an unknown keyword is no bare TypeError."""
    names = [
        p.name for p in inspect.signature(init).parameters.values() if p.kind is p.KEYWORD_ONLY
    ]

    @functools.wraps(init)
    def checked(*args: _P.args, **keywords: _P.kwargs) -> None:
        for name in keywords:
            if name not in names and name != "experiment":
                experiment = keywords.get("experiment", args[-1] if args else None)
                raise _unknown(name, experiment, names)
        init(*args, **keywords)

    return checked


def _unknown(name: str, experiment: Any, names: Collection[str]) -> ConfigError:
    problem = f"`Nitro` has no option `{name}`."
    owner = type(experiment).__name__
    if isinstance(experiment, Experiment) and name in experiment.fields():
        return ConfigError(
            f"{problem[:-1]}: it is a field of `{owner}`.",
            expected="fields where the experiment is made",
            fix=f"write `Nitro({owner}({name}=...), ...)`",
        )
    foreign = foreign_keyword(name)
    if foreign is not None:
        return ConfigError(problem, expected=foreign)
    return ConfigError(problem, expected=did_you_mean(name, names))
