"""What the keys of `schedules` mean: a rate, a decay or a Device field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nitro._experiment import UNSET, Experiment, Residency, field_names
from nitro.errors import ConfigError, did_you_mean

from ._groups import Groups
from ._hook_calls import call_hook, is_declared

OPT_FIELDS = ("learning_rate", "weight_decay")

_OTHER_NAMES = {
    **dict.fromkeys(("lr", "eta", "rate"), "learning_rate"),
    **dict.fromkeys(("wd", "lambda", "decay"), "weight_decay"),
}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One entry of `schedules`.

    Attributes:
        key: As the user wrote it.
        target: What it binds to: `opt.learning_rate` for all groups, `opt.<group>.<field>`,
            or `device.<field>`.
        value: A constant, or a factory of the horizon.
        source: "keyword" or "experiment".
    """

    key: str
    target: str
    value: Any
    source: str


def read_schedules(experiment: Experiment, given: Any, groups: Groups) -> dict[str, Schedule]:
    """The schedules of a run by what they bind to.

    Args:
        experiment: The experiment.
        given: `Nitro(schedules=...)`, which replaces the experiment's; or `UNSET`.
        groups: The parameter groups, trained and frozen.

    Raises:
        ConfigError: A key that binds to nothing, to two things, or to what another key or
            a hook sets.
    """
    return _bound(experiment, given, _Keys(experiment, groups))


def read_manual_schedules(
    experiment: Experiment, given: Any, fields: Sequence[str]
) -> dict[str, Schedule]:
    """The schedules of a manual `train_step` by what they bind to.

    Args:
        experiment: The experiment.
        given: `Nitro(schedules=...)`, or `UNSET`.
        fields: What can be scheduled, as `<optimizer>.<hyperparameter>`.

    Raises:
        ConfigError: A key that binds to nothing, or to what another key sets.
    """
    return _bound(experiment, given, _ManualKeys(experiment, fields))


def _bound(experiment: Experiment, given: Any, keys: _Keys) -> dict[str, Schedule]:
    source = "experiment" if given is UNSET else "keyword"
    declared = call_hook(experiment, "schedules") if given is UNSET else given
    schedules: dict[str, Schedule] = {}
    for key, value in _flattened(declared).items():
        target = keys.resolve(key)
        if target in schedules:
            raise ConfigError(
                f"The schedules `{schedules[target].key}` and `{key}` are both `{target}`.",
                expected="one schedule for each",
                fix="keep one of the two keys",
            )
        keys.refuse_second_decay(key, target)
        schedules[target] = Schedule(key=key, target=target, value=value, source=source)
    return schedules


def _flattened(declared: Any) -> dict[str, Any]:
    """`{"opt": {"x": ...}}` as `{"opt.x": ...}`."""
    _check_mapping(declared, "`schedules`", "a mapping of keys to numbers or factories")
    flat: dict[str, Any] = {}
    for key, value in declared.items():
        if key not in ("opt", "device"):
            flat[key] = value
            continue
        _check_mapping(
            value,
            f'`schedules["{key}"]`',
            f"a mapping: `{key}` is reserved for the keys `{key}.<name>`",
            f"write `device.{key}` for a Device field of this name",
        )
        flat |= {f"{key}.{name}": item for name, item in value.items()}
    return flat


def _check_mapping(value: Any, what: str, expected: str, fix: str = "") -> None:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        problem = f"{what} is {value!r} ({type(value).__name__})."
        raise ConfigError(problem, expected=expected, fix=fix)


class _Keys:
    """The names that a run can schedule."""

    def __init__(self, experiment: Experiment, groups: Groups | None) -> None:
        self._experiment = experiment
        self._owner = type(experiment).__name__
        self._groups = {g.name: g for g in groups.trained} if groups else {}
        self._frozen = {g.name for g in groups.frozen} if groups else set[str]()
        self._device = field_names(experiment, Residency.DEVICE)

    def resolve(self, key: str) -> str:
        """What a key binds to."""
        namespace, _, name = key.partition(".")
        if namespace == "device" and name:
            return f"device.{self._device_field(key, name)}"
        if namespace == "opt" and name:
            return f"opt.{self._opt_field(key, name)}"
        if key in OPT_FIELDS and key in self._device:
            raise ConfigError(
                f"The schedule `{key}` may be the optimizer's or the Device field "
                f"`{self._owner}.{key}`.",
                expected=f"`opt.{key}` for the optimizer, or `device.{key}` for the field",
            )
        if key in OPT_FIELDS:
            return f"opt.{key}"
        if key in self._device:
            return f"device.{key}"
        raise self._unknown(key, key, [*OPT_FIELDS, *self._device])

    def refuse_second_decay(self, key: str, target: str) -> None:
        """Refuses a scheduled decay where the `weight_decay` hook sets it too."""
        if not target.endswith(".weight_decay") or not target.startswith("opt."):
            return
        if not is_declared(self._experiment, "weight_decay"):
            return
        group = self._groups.get(target.removeprefix("opt.").removesuffix(".weight_decay"))
        if group is not None and group.weight_decay == 0:
            return
        raise ConfigError(
            f"The schedule `{key}` and `{self._owner}.weight_decay` both set the decay"
            + (f" of the group `{group.name}`." if group else "."),
            expected="one of the two: a scheduled decay is absolute",
            fix="drop the hook" + (" for this group" if group else "") + ", or the schedule",
        )

    def _device_field(self, key: str, name: str) -> str:
        if name in self._device:
            return name
        raise self._unknown(key, name, self._device)

    def _opt_field(self, key: str, name: str) -> str:
        group, dot, field = name.rpartition(".")
        if field not in OPT_FIELDS:
            raise self._unknown(key, field, OPT_FIELDS)
        if dot and group in self._frozen:
            raise ConfigError(
                f"The schedule `{key}` names the group `{group}`, which is frozen: its "
                "`learning_rate` is None.",
                expected="a group that trains: " + ", ".join(f"`{name}`" for name in self._groups),
                fix=f'drop the schedule, or return a rate for `learning_rate("{group}")`',
            )
        if dot and group not in self._groups:
            raise ConfigError(
                f"The schedule `{key}` names the group `{group}`, which there is not.",
                expected=did_you_mean(group, self._groups),
                fix="`opt.<group>.<field>` has one level; `param_group` says which groups there are",
            )
        return name

    def _unknown(self, key: str, name: str, valid: Sequence[str]) -> ConfigError:
        field = self._experiment.fields().get(name)
        if field is not None and field.residency is not Residency.DEVICE:
            return ConfigError(
                f"The schedule `{key}` names the field `{self._owner}.{name}`, which is "
                f"{'structural' if field.residency is Residency.GRAPH_CONST else 'host-only'}: "
                "no step can change it.",
                expected="a Device field, which is a traced input",
                fix=f"mark it `{name}: Device[...]`",
            )
        if name == "gradient_clip_norm":
            fix = "the clip is one number for the whole run: `Nitro(..., gradient_clip_norm=1.0)`"
        elif name in _OTHER_NAMES:
            fix = f"write `{_OTHER_NAMES[name]}`"
        else:
            fix = (
                "other constants of an optimizer move only as Device fields, which "
                "`optimizer(self, group, hyper)` reads"
            )
        return ConfigError(
            f"The schedule `{key}` matches nothing.", expected=did_you_mean(name, valid), fix=fix
        )


class _ManualKeys(_Keys):
    """The names that a run with a manual `train_step` can schedule."""

    def __init__(self, experiment: Experiment, fields: Sequence[str]) -> None:
        super().__init__(experiment, None)
        self._fields = fields

    def resolve(self, key: str) -> str:
        """What a key binds to: one hyperparameter of one optimizer, or a Device field."""
        name = key.removeprefix("opt.")
        if name in self._fields:
            return f"opt.{name}"
        if key.startswith("device.") or key in self._device:
            return super().resolve(key)
        raise ConfigError(
            f"The schedule `{key}` matches nothing.",
            expected=did_you_mean(name, [*self._fields, *self._device]),
            fix="a schedulable hyperparameter lies in the optimizer's state: "
            "`optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)`",
        )
