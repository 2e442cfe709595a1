"""The export hooks that promise something, called and checked."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from nitro._experiment import Experiment, has_hook
from nitro.errors import ExportError

from ._dims import constraint_symbols, is_solvable, size_symbols
from ._program import batch_symbol
from ._spec import ExportSpec

POSTPROCESS = "postprocess"
"""The function that the module of `export_postprocess` must define."""


def checked_inputs(
    experiment: Experiment, constraints: Sequence[str] = ()
) -> tuple[ExportSpec, ...]:
    """The wire inputs, in wire order.

    Raises:
        ExportError: A spec that no program can keep; names the tensor.
    """
    specs = _specs_of(experiment, "export_inputs")
    for spec in specs:
        _require_shape(spec, "input")
        _refuse_source(spec, "input")
    _check_symbols(specs, constraints)
    if has_hook(experiment, "export_preprocess"):
        _check_preprocess(experiment, [spec.name for spec in specs])
    return specs


def checked_outputs(experiment: Experiment, inputs: Sequence[ExportSpec]) -> tuple[ExportSpec, ...]:
    """The promised outputs, not yet compared with what `forward` returns.

    Raises:
        ExportError: A spec that is ambiguous; names the tensor.
    """
    specs = _specs_of(experiment, "export_outputs")
    wires = {spec.name for spec in inputs}
    for spec in specs:
        if spec.name in wires and spec.source is None:
            raise ExportError(
                f"The output `{spec.name}` has the name of a wire input.",
                expected="it to say whether it echoes the input or ships a leaf of `forward`",
                fix=f'write `ExportSpec("{spec.name}", source="{spec.name}")` to echo it',
            )
    return specs


def checked_postprocess(experiment: Experiment) -> str | None:
    """The source of the module that ships beside the program, or None.

    It is parsed and not run.

    Raises:
        ExportError: No text, no Python, or no function `postprocess` in it.
    """
    if not has_hook(experiment, "export_postprocess"):
        return None
    hook = f"{type(experiment).__name__}.export_postprocess"
    text: Any = experiment.export_postprocess()  # pyright: ignore[reportAttributeAccessIssue] - a hook
    if not isinstance(text, str):
        raise ExportError(
            f"`{hook}` returned {type(text).__name__}.",
            expected="the source of a Python module, as text",
            fix="return the text, such as `Path(__file__).with_name(...).read_text()`",
        )
    try:
        body = ast.parse(text).body
    except SyntaxError as error:
        raise ExportError(
            f"The text of `{hook}` is not Python: {error.msg}, on its line {error.lineno}.",
            expected="the source of a Python module",
        ) from error
    if not any(isinstance(node, ast.FunctionDef) and node.name == POSTPROCESS for node in body):
        raise ExportError(
            f"The text of `{hook}` defines no function `{POSTPROCESS}`.",
            expected=f"`def {POSTPROCESS}(outputs):`, which takes and returns a dict of arrays",
        )
    return text


def checked_client_specs(experiment: Experiment, hook: str) -> tuple[ExportSpec, ...]:
    """What `export_client_inputs` or `export_client_outputs` says, empty without the hook.

    Raises:
        ExportError: No `export_postprocess` beside it, or an incomplete spec.
    """
    if not has_hook(experiment, hook):
        return ()
    owner = type(experiment).__name__
    if not has_hook(experiment, "export_postprocess"):
        raise ExportError(
            f"`{owner}` has `{hook}` and no `export_postprocess`.",
            expected="the code between the program and what a client sees",
            fix=f"add `export_postprocess`, or drop `{hook}`: clients see the program's own edge",
        )
    specs = _specs_of(experiment, hook)
    what = "client " + hook.rpartition("_")[2][:-1]
    for spec in specs:
        _require_shape(spec, what)
        _refuse_source(spec, what)
    return specs


def checked_facts(experiment: Experiment) -> dict[str, Any]:
    """What `export_provenance` adds; empty without the hook.

    Raises:
        ExportError: Not a mapping with string keys.
    """
    if not has_hook(experiment, "export_provenance"):
        return {}
    facts: Any = experiment.export_provenance()  # pyright: ignore[reportAttributeAccessIssue] - a hook
    if not isinstance(facts, Mapping) or not all(isinstance(key, str) for key in facts):
        raise ExportError(
            f"`{type(experiment).__name__}.export_provenance` returned {facts!r}.",
            expected="a mapping from names to JSON values",
        )
    return dict(facts)


def _specs_of(experiment: Experiment, hook: str) -> tuple[ExportSpec, ...]:
    owner = type(experiment).__name__
    if not has_hook(experiment, hook):
        raise ExportError(
            f"`{owner}` has no `{hook}` hook.",
            expected="`export_inputs` and `export_outputs`: they promise the program's edge",
            fix=f"add `def {hook}(self): return [ExportSpec(...)]` to the class",
        )
    specs: Any = getattr(experiment, hook)()
    if not isinstance(specs, list | tuple) or not specs:
        raise ExportError(
            f"`{owner}.{hook}` returned {specs!r}.",
            expected="a list of at least one ExportSpec",
        )
    for spec in specs:
        if not isinstance(spec, ExportSpec):
            raise ExportError(
                f"`{owner}.{hook}` returned a list with {spec!r}.", expected="ExportSpec objects"
            )
    names = [spec.name for spec in specs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ExportError(f"`{owner}.{hook}` names `{twice[0]}` twice.", expected="distinct names")
    return tuple(specs)


def _check_preprocess(experiment: Experiment, wires: list[str]) -> None:
    """Refuses a signature that takes another number of inputs, or swaps them."""
    hook: Any = experiment.export_preprocess  # pyright: ignore[reportAttributeAccessIssue] - a hook
    signature = inspect.signature(hook)
    wrong = f"`{type(experiment).__name__}.export_preprocess{signature}`"
    expected = "one argument for each input of `export_inputs`, in that order"
    fix = f"write `def export_preprocess(self, {', '.join(wires)}): ...`"
    listed = ", ".join(f"`{name}`" for name in wires)
    try:
        signature.bind(*wires)
    except TypeError as error:
        raise ExportError(
            f"{wrong} cannot take the {len(wires)} inputs {listed}: {error}.",
            expected=expected,
            fix=fix,
        ) from None
    for position, name in enumerate(list(signature.parameters)[: len(wires)]):
        if name in wires and name != wires[position]:
            raise ExportError(
                f"{wrong} would get the input `{wires[position]}` as `{name}`: the inputs are "
                f"{listed}.",
                expected=expected,
                fix=fix,
            )


def _require_shape(spec: ExportSpec, what: str) -> None:
    missing = [name for name in ("dtype", "shape") if getattr(spec, name) is None]
    if missing:
        raise ExportError(
            f"The {what} `{spec.name}` has no {missing[0]}.",
            expected=f"dtype and shape of every {what}",
            fix=f'write `ExportSpec("{spec.name}", "float32", (1, 64))`',
        )


def _refuse_source(spec: ExportSpec, what: str) -> None:
    if spec.source is not None:
        raise ExportError(
            f"The {what} `{spec.name}` has the source `{spec.source}`.",
            expected="a source on outputs only",
            fix="map wire names to batch fields in `export_preprocess`",
        )


def _check_symbols(specs: Sequence[ExportSpec], constraints: Sequence[str]) -> None:
    """Checks that callers' shapes determine every symbolic size (JX-10, JX-14)."""
    batch = batch_symbol(specs)
    for spec in specs:
        named = spec.shape[spec.batch_axis - 1] if spec.shape else 1
        if isinstance(named, str) and named != batch:
            raise ExportError(
                f"The input `{spec.name}` calls its batch axis `{named}`.",
                expected=f"`{batch}`, as another input does: all have one batch",
            )
    for spec in specs:
        if batch in spec.symbols:
            raise ExportError(
                f"The input `{spec.name}` has `{batch}` in its shape {spec.shape}, which is what "
                "the batch is called.",
                expected=f"`{batch}` at the batch axis only: rows come and go, other sizes stay",
                fix="choose another name for the size, or write a name at the batch axis",
            )
    sizes = [size for spec in specs for size in spec.sizes(1)]
    solved = frozenset[str]().union(*(size_symbols(size) for size in sizes if is_solvable(size)))
    for spec in specs:
        for size in spec.sizes(1):
            unknown = sorted(size_symbols(size) - solved - {batch})
            if unknown:
                raise ExportError(
                    f"The input `{spec.name}` has the size {size!r}, from which `{unknown[0]}` "
                    "cannot be worked out.",
                    expected='a name, or a linear expression of one name, such as "2*k" or "k + 1"',
                    fix=f"give an axis the size `{unknown[0]}` alone, or a name of its own",
                )
    known = solved | {batch}
    for constraint in constraints:
        unknown = sorted(constraint_symbols(constraint) - known)
        if unknown:
            raise ExportError(
                f"The constraint `{constraint}` speaks of `{unknown[0]}`.",
                expected="the symbolic sizes of the inputs: "
                + ", ".join(f"`{name}`" for name in sorted(known)),
                fix=f"the batch is called `{batch}` here; write a name at the batch axis of "
                "`export_inputs` to call it otherwise",
            )
