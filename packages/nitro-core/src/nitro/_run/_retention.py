"""Which records a run keeps: checked at setup, and told where that loses something."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from nitro._checkpoint import RecordEntry, RecordWriter, TopK, read_index
from nitro._experiment import Experiment, RunOptions, has_hook, resolve_option
from nitro.errors import ConfigError, warn

from ._stopping import EarlyStop

_ALWAYS_THERE = "val_loss"
"""The metric of a validation without a `metrics` hook."""


def checked_checkpointer(
    experiment: Experiment,
    given: Any,
    *,
    options: RunOptions,
    splits: Mapping[str, Any],
    stopper: Any,
) -> TopK | None:
    """The retention policy of a handle; None for one that writes no records.

    The default one ranks by the metric that an `EarlyStop` watches, so that the best record is
    the one after which the run waited in vain.

    Raises:
        ConfigError: Not a policy, or one that ranks by what is never emitted, or keeps nothing
            of what is written.
    """
    checkpointer, _ = resolve_option(experiment, "checkpointer", given, _default_policy(stopper))
    if checkpointer is None:
        return None
    if not isinstance(checkpointer, TopK):
        raise ConfigError(
            f"`checkpointer` is {checkpointer!r}.",
            expected="a `nitro.TopK(...)`, or None to write no records",
        )
    if checkpointer.metric != _ALWAYS_THERE and not has_hook(experiment, "metrics"):
        raise ConfigError(
            f"`checkpointer` ranks by `{checkpointer.metric}`, but "
            f"`{type(experiment).__name__}` has no `metrics` hook.",
            expected=f"the metric `{_ALWAYS_THERE}`, which needs no hook",
            fix=f"add a `metrics` hook that emits `{checkpointer.metric}`, or drop `metric=`",
        )
    if not checkpointer.keep_latest and "train" in splits:
        _check_ranked_only(options, splits)
    return checkpointer


def _default_policy(stopper: Any) -> TopK:
    if not isinstance(stopper, EarlyStop):
        return TopK()
    return TopK(metric=stopper.metric, mode="max" if stopper.mode == "max" else "min")


def checked_restore_best(given: Any, checkpointer: Any, splits: Mapping[str, Any]) -> bool:
    """Whether a run ends with the weights of its best record.

    Raises:
        ConfigError: Not a boolean, or True where no record will have a score.
    """
    if not isinstance(given, bool):
        raise ConfigError(f"`restore_best` is {given!r}.", expected="True or False")
    if given and (checkpointer is None or ("train" in splits and "val" not in splits)):
        what = "`checkpointer` is None" if checkpointer is None else "there is no split `val`"
        raise ConfigError(
            f"`restore_best=True`, but {what}, so no record will have a score.",
            fix="add what is missing, or leave `restore_best` out",
        )
    return given


def _check_ranked_only(options: RunOptions, splits: Mapping[str, Any]) -> None:
    """Refuses what asks for records without a score where only scored ones are kept."""
    if "val" not in splits:
        what, fix = "there is no split `val`", "add a split `val`"
    elif options.checkpoint_every_steps is not None:
        what = f"`checkpoint_every_steps` is {options.checkpoint_every_steps}"
        fix = "leave `checkpoint_every_steps` out"
    else:
        return
    raise ConfigError(
        f"`TopK(keep_latest=False)` keeps scored records only, and {what}.",
        expected="records that a validation has scored",
        fix=f"leave `keep_latest` out, or {fix}",
    )


def refuse_unranked_record(policy: TopK) -> None:
    """Refuses a record on request that would not be kept.

    Raises:
        ConfigError: The policy keeps scored records only.
    """
    if not policy.keep_latest:
        raise ConfigError(
            "A record on request has no score, and `TopK(keep_latest=False)` keeps only scored "
            "ones.",
            fix="build the handle without `keep_latest=False`",
        )


def tell_retention(records: RecordWriter, splits: Mapping[str, Any]) -> None:
    """Warns at setup of what the policy gives up, of others' records too."""
    policy = records.policy
    entries = read_index(records.directory)
    own = [entry for entry in entries if entry.run == records.run]
    if policy.scope == "dir":
        _tell_at_risk(records, [entry for entry in entries if entry not in own])
    _tell_foreign(records, entries if policy.scope == "dir" else own)
    if policy.metric != _ALWAYS_THERE and "val" not in splits:
        warn(
            f"The checkpointer ranks by `{policy.metric}`, and there is no split `val` that is "
            "scored: only the newest record is kept."
        )
    if not policy.keep_latest:
        warn(
            f"`TopK(keep_latest=False)` writes only what is among the best {policy.k} by "
            f"`{policy.metric}`: a run that is stopped or killed goes on from one of these, and "
            "repeats what came after it."
        )


def _tell_at_risk(records: RecordWriter, others: Sequence[RecordEntry]) -> None:
    """Warns of other runs' records that this run may delete."""
    policy = records.policy
    at_risk = [entry for entry in others if policy.ranks(entry)]
    if at_risk:
        runs = len({entry.run for entry in at_risk})
        warn(
            f'`TopK(scope="dir")` ranks all of `{records.directory}`: training may delete '
            f"{len(at_risk)} records of {runs} other runs, those that are not among the best "
            f"{policy.k} by `{policy.metric}`.\n"
            '  fix: use another `run_dir`, or `scope="run"`, to keep them'
        )


def _tell_foreign(records: RecordWriter, compared: Sequence[RecordEntry]) -> None:
    """Warns of records that another metric or mode ranked."""
    policy = records.policy
    foreign = Counter(
        f"`{entry.metric}` ({entry.mode})"
        for entry in compared
        if entry.score is not None and not policy.ranks(entry)
    )
    if foreign:
        counts = ", ".join(f"{count} by {name}" for name, count in sorted(foreign.items()))
        warn(
            f"Records in `{records.directory}` were ranked otherwise than by `{policy.metric}` "
            f"({policy.mode}): {counts}. They are not compared with new ones, and stay."
        )
