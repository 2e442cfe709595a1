"""A run's model as an export sees it; the only place where the export looks into a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nitro._experiment import Experiment
from nitro._programs import TracedHooks
from nitro._run import Phase, Session
from nitro._trees import Flat

from ._provenance import collect_provenance

Batch = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class FrozenModel:
    """What an export is made of, valid until the run trains on, which takes these buffers.

    Attributes:
        hooks: The traced hooks of the experiment.
        params: The trained weights, by dotted name.
        model_state: The other variables of the model, RNG state included, by dotted name.
        device: The values of the Device fields.
        first: A batch that setup looked at, whose rows may become golden inputs; or empty.
        facts: Where the weights come from, as JSON values.
        patch: `git diff --binary HEAD` of a dirty source tree, or None.
        predict: What `Nitro.predict` gives for a batch, with these weights.
        check_constants: Refuses a trace that holds large arrays.
    """

    hooks: TracedHooks
    params: Flat
    model_state: Flat
    device: Flat
    first: Batch
    facts: Mapping[str, Any]
    patch: bytes | None
    predict: Callable[[Batch], Any]
    check_constants: Callable[..., None]

    @property
    def experiment(self) -> Experiment:
        """The user's declaration."""
        return self.hooks.experiment

    @property
    def owner(self) -> str:
        """The experiment's class name, for messages."""
        return type(self.experiment).__name__


def freeze(session: Session) -> FrozenModel:
    """The model of a run as it is now."""
    state, device, setup = session.state, dict(session.device), session.setup
    facts, patch = collect_provenance(session)

    def predict(batch: Batch) -> Any:
        with session.in_phase(Phase.PREDICTING):
            return session.evaluator.predict(state, device, batch)

    return FrozenModel(
        hooks=setup.hooks,
        params=dict(state.params),
        model_state=dict(state.model_state),
        device=device,
        first=next(iter(setup.first.values()), {}),
        facts=facts,
        patch=patch,
        predict=predict,
        check_constants=setup.programs.check_constants,
    )
