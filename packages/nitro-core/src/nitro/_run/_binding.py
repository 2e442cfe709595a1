"""The binding report: what a handle was configured with, and from where."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nitro._data import RowLoader
from nitro._experiment import Residency, locate
from nitro._journal import Report, Section
from nitro._optim import describe_optimizer

from ._params import count_words
from ._restore import loggable
from ._setup import Setup

if TYPE_CHECKING:
    from ._session import Session

_LONGEST_VALUE = 60


def binding_report(session: Session) -> Report:
    """Weights, options with their sources, fields, splits, hooks, optimizer, memory plan."""
    setup = session.setup
    sizes = {name: array.size for name, array in session.state.params.items()}
    num_frozen = sum(size for name, size in sizes.items() if name in setup.frozen)
    count = count_words(sum(sizes.values()) - num_frozen, num_frozen)
    num_bytes = sum(p.nbytes for p in session.state.params.values())
    weights = f"{setup.source.display}; {count}, {num_bytes / 2**20:.3g} MiB"
    memory = session.memory
    optimizer = setup.optimizer
    return Report.of(
        f"{setup.owner} ({locate(type(setup.experiment))})"
        + (f", preset `{setup.preset}`" if setup.preset else ""),
        [
            Section(title="weights", lines=(weights, *_fit(setup), *_parts_in_evaluation(setup))),
            Section(title="options", lines=tuple(_options(setup))),
            Section(title="fields", lines=tuple(_fields(session))),
            Section(title="data", lines=tuple(_splits(setup))),
            Section(title="hooks", lines=tuple(_hooks(setup))),
            Section(
                title="optimizer",
                lines=()
                if optimizer is None
                else tuple(describe_optimizer(optimizer, setup.hooks.view(session.device))),
            ),
            Section(title="memory", lines=() if memory is None else tuple(str(memory).split("\n"))),
            Section(title="notes", lines=tuple(setup.notes)),
        ],
    )


def summary_report(session: Session, state: str) -> Report:
    """Where a handle stands, then the binding report.

    Args:
        session: The session.
        state: The handle in a line.
    """
    binding = binding_report(session)
    _, *sections = binding.sections
    return Report.of(state, [Section(title="state", lines=tuple(_state(session))), *sections])


def _fit(setup: Setup) -> list[str]:
    return [] if setup.fit is None else setup.fit.lines()


def _parts_in_evaluation(setup: Setup) -> Iterator[str]:
    parts = setup.hooks.layout.parts_in_evaluation
    if parts and "train" in setup.splits:
        names = ", ".join(f"`{part}`" for part in parts)
        yield f"in evaluation mode while training, as `build_model` left them: {names}"


def _state(session: Session) -> Iterator[str]:
    history = session.history
    if session.stop_reason is not None:
        yield f"training ended: {session.stop_reason}"
    if len(history):
        yield "last epoch: " + _metrics(history[-1])
    if history.has_best:
        yield f"best epoch by {history.metric} ({history.mode}): " + _metrics(history.best)
    record = session.best_record()
    if record is not None:
        yield f"best record: {record}"


def _metrics(row: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.items()
        if not getattr(value, "shape", ())
    )


def _options(setup: Setup) -> Iterator[str]:
    for name, source in setup.options.sources.items():
        yield f"{name} = {_shortened(getattr(setup.options, name))} ({source})"
    parts = {
        "logger": type(setup.logger).__name__ if not setup.logs_nothing else None,
        "checkpointer": setup.checkpointer,
        "early_stop": setup.stopper,
    }
    for name, value in parts.items():
        yield f"{name} = {_shortened(value)} ({setup.sources.get(name, 'default')})"


def _fields(session: Session) -> Iterator[str]:
    fields = session.setup.experiment.fields()
    values = {**session.config(), **session.device_config()}
    # One that is a run option as well is listed there, with the value that counts.
    options = session.setup.options.sources
    for name, field in fields.items():
        if name in options:
            continue
        marker = "" if field.residency is Residency.HOST else f" ({field.residency.value})"
        derived = ", derived" if name in session.setup.derived else ""
        yield f"{name} = {_shortened(values[name])}{marker}{derived}"


def _splits(setup: Setup) -> Iterator[str]:
    for name, source in setup.splits.items():
        yield f"split `{name}`: {_split(source)}"


def _split(source: Any) -> str:
    if not isinstance(source, RowLoader):
        return f"{len(source)} batches ({type(source).__name__}), drawn ahead in a thread"
    text = f"{len(source)} batches of {source.batch_size}, {source.num_samples} samples"
    dropped = source.num_dropped
    return text + (f"; {dropped} dropped with the ragged last batch" if dropped else "")


def _hooks(setup: Setup) -> Iterator[str]:
    batch = next(iter(setup.first.values()), None)
    for route in setup.hooks.routes.values():
        unmatched = () if batch is None else tuple(n for n in route.optional if n not in batch)
        fields = [
            *route.required,
            *(f"{n} (optional)" for n in route.optional if n not in unmatched),
        ]
        fields += [f"{name} (no such field: takes its default)" for name in unmatched]
        yield f"{route.hook}: {', '.join(fields) or 'no fields'}{' and all' * route.takes_all}"


def _shortened(value: Any) -> str:
    text = str(value) if isinstance(value, str) else str(loggable(value))
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."
