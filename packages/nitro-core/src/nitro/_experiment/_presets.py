"""Named partial field values that a class declares, and how a keyword finds its place."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from nitro.errors import ConfigError, ExperimentError, did_you_mean

from ._overrides import check_names
from ._source import locate

if TYPE_CHECKING:
    from ._declaration import Experiment


def preset_values(
    experiment: type[Experiment], preset: str, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """The values of a preset with overrides on top, by field.

    Raises:
        ConfigError: No such preset; lists those that there are.
        ExperimentError: `presets` declares something else than fields by preset.
    """
    owner = experiment.__name__
    presets: Any = experiment.presets()
    where = f"`{owner}.presets` ({locate(experiment, 'presets')})"
    if not isinstance(presets, Mapping):
        raise ExperimentError(
            f"{where} returned {type(presets).__name__}.",
            expected='a mapping such as {"small": {"width": 64}}',
        )
    if preset not in presets:
        raise ConfigError(
            f"`{owner}` has no preset {preset!r}.",
            expected=did_you_mean(str(preset), presets) if presets else "a class with presets",
            fix="" if presets else f"declare them: `@classmethod def presets(cls)` in `{owner}`",
        )
    values = presets[preset]
    if not isinstance(values, Mapping):
        raise ExperimentError(
            f"{where} has {type(values).__name__} for the preset `{preset}`.",
            expected=f'a mapping of fields to values, such as {{"{preset}": {{"width": 64}}}}',
        )
    try:
        check_names(owner, experiment.__nitro_entries__, values)
    except ExperimentError as error:
        problem = f"The preset `{preset}` of {where} names no field: {error.problem}"
        raise ExperimentError(problem, expected=error.expected) from error
    # A group that is given whole leaves nothing of the preset's values inside it.
    kept = {
        name: value
        for name, value in values.items()
        if not any(name == given or name.startswith(f"{given}.") for given in overrides)
    }
    return {**kept, **overrides}


def preset_keywords(
    experiment: Any, preset: str, keywords: Mapping[str, Any], options: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parts the keywords of `Nitro.from_preset` into the handle's and the recipe's.

    A name that is both is the handle's.

    Args:
        experiment: The experiment class.
        preset: The preset's name.
        keywords: What the user gave besides.
        options: The names that the handle takes.

    Returns:
        The options of the handle, and the field values.

    Raises:
        ExperimentError: What is given is no experiment class.
        ConfigError: A name that is neither, with both lists; a second preset; or `data`.
    """
    if not isinstance(experiment, type) or not hasattr(experiment, "__nitro_entries__"):
        raise ExperimentError(
            f"`Nitro.from_preset` got {experiment!r} ({type(experiment).__name__}).",
            expected="a subclass of `nitro.Experiment`, then the name of one of its presets",
        )
    if "preset" in keywords:
        raise ConfigError(
            f"`Nitro.from_preset` got two presets, {preset!r} and {keywords['preset']!r}.",
            expected="one: a preset that extends another merges it in `presets`",
        )
    fields = experiment.fields()
    for name in keywords:
        if name not in options and name not in {*fields, *experiment.__nitro_entries__}:
            raise ConfigError(
                f"`{name}` is neither an option of `Nitro` nor a field of `{experiment.__name__}`.",
                expected=f"an option, {did_you_mean(name, options)}; or a field, "
                f"{did_you_mean(name, fields)}",
            )
    chosen = {name: value for name, value in keywords.items() if name in options}
    values = {name: value for name, value in keywords.items() if name not in options}
    if "data" in chosen:
        overrides = "".join(f", {name}={value!r}" for name, value in values.items())
        others = "".join(f", {name}=..." for name in chosen if name != "data")
        raise ConfigError(
            "`Nitro.from_preset` got `data`, which was built for another experiment.",
            expected="the data that the new experiment builds",
            fix=f"write `Nitro({experiment.__name__}.from_preset({preset!r}{overrides}), "
            f"data=...{others})`",
        )
    return chosen, values
