"""Takes one batch of each scored split through all that an evaluation does, before training."""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from nitro._experiment import Experiment
from nitro._metrics import flat_scalars
from nitro.errors import ConfigError, did_you_mean

from ._session import Session


def check_one_batch(session: Session) -> None:
    """Evaluates the first batch of each scored split, and looks for the metrics that steer.

    The programs are those of validation, so nothing is compiled that it would not compile.
    Nothing is done where only Nitro's own code would run, nor on a handle that never trains.

    Raises:
        ConfigError: The checkpointer or early stopping names a metric that is not emitted.
        HookError: A hook returned something else than it should.
        Exception: What `metrics` or `finalize_metrics` raised, with a note that names the split.
    """
    setup = session.setup
    finalizes = type(setup.experiment).finalize_metrics is not Experiment.finalize_metrics
    if "train" not in setup.splits or not (finalizes or "metrics" in setup.hooks.routes):
        return
    for split in setup.first:
        if _is_scored(session, split):
            metrics = _evaluated(session, split)
            if split == "val":
                _check_names(session, flat_scalars(metrics))


def _is_scored(session: Session, split: str) -> bool:
    """Whether training evaluates a split, or whoever trains may: without another program."""
    hooks = session.setup.hooks
    if split == "val":
        return True
    if split == "train" or hooks.has_device_metrics or "metrics" not in hooks.routes:
        return False
    wanted = {name for hook in ("forward", "metrics") for name in hooks.routes[hook].required}
    return wanted <= set(session.setup.first[split])


def _evaluated(session: Session, split: str) -> dict[str, Any]:
    try:
        with _random_streams_kept():
            return session.evaluator.evaluate_first(session.state, session.device, split)
    except Exception as error:
        error.add_note(
            f"raised at setup, where the first batch of `{split}` is evaluated before anything is "
            "trained; `Nitro(..., sanity_check=False)` leaves that out"
        )
        raise


@contextmanager
def _random_streams_kept() -> Generator[None]:
    """Puts back the global random streams, from which a hook may draw and a loader may, too."""
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the user's
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002 - the user's


def _check_names(session: Session, emitted: Mapping[str, float]) -> None:
    setup = session.setup
    watched = getattr(setup.stopper, "metric", None)
    if isinstance(watched, str) and watched not in emitted:
        raise ConfigError(
            f"`early_stop` watches `{watched}`, which `{setup.owner}.metrics` does not emit.",
            expected=did_you_mean(watched, emitted),
            fix="name an emitted metric: `early_stop=nitro.EarlyStop(metric=...)`",
        )
    policy = setup.checkpointer
    if policy is None or policy.metric in emitted:
        return
    if setup.sources["checkpointer"] != "default":
        raise ConfigError(
            f"`checkpointer` ranks by `{policy.metric}`, which `{setup.owner}.metrics` does not "
            "emit.",
            expected=did_you_mean(policy.metric, emitted),
            fix="name an emitted metric: `checkpointer=nitro.TopK(metric=...)`",
        )
    if setup.restores_best:
        example = next(iter(emitted), "acc")
        raise ConfigError(
            f"`restore_best=True`, but the default checkpointer ranks by `{policy.metric}`, which "
            f"`{setup.owner}.metrics` does not emit, so no record will have a score.",
            expected="a checkpointer that ranks by " + did_you_mean(policy.metric, emitted),
            fix=f'pass `checkpointer=nitro.TopK(metric="{example}", mode=...)`',
        )
