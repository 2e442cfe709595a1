"""Work on exported modules that every backend of StableHLO needs; knows no file format."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import chlo, sdy, stablehlo

_ILLEGAL = re.compile(r"failed to legalize operation '(?:vhlo\.)?([\w.]+?)(?:_v\d+)?'")
_CALLED = re.compile(r'call_target_name = #vhlo\.string_v1<"([^"]*)">')


def make_context() -> Any:
    """An MLIR context that knows the dialects of JAX's exports."""
    context = ir.Context()
    for dialect in (stablehlo, chlo, sdy):
        dialect.register_dialect(context)
    return context


def strip_attributes(module: Any, prefixes: Sequence[str]) -> None:
    """Removes attributes from all operations, arguments and results, in place.

    Args:
        module: The module; its context is the current one.
        prefixes: How the names of what goes begin, such as `"sdy."`: sharding rules mean
            nothing on one device, and `"jax."` holds names that no other reader needs.
    """
    dropped = tuple(prefixes)

    def strip(op: Any) -> Any:
        attributes = op.operation.attributes
        for name in [n for n in map(_name, attributes) if n.startswith(dropped)]:
            del attributes[name]
        for key in ("arg_attrs", "res_attrs"):
            if key in attributes:
                kept = [
                    ir.DictAttr.get(
                        {
                            item.name: item.attr
                            for item in entry
                            if not item.name.startswith(dropped)
                        }
                    )
                    for entry in map(ir.DictAttr, ir.ArrayAttr(attributes[key]))
                ]
                attributes[key] = ir.ArrayAttr.get(kept)
        return ir.WalkResult.ADVANCE

    module.operation.walk(strip)


def custom_call_targets(module: Any) -> tuple[str, ...]:
    """The targets of all custom calls of a StableHLO module, sorted."""
    targets = set[str]()

    def collect(op: Any) -> Any:
        if op.operation.name == "stablehlo.custom_call":
            targets.add(ir.StringAttr(op.operation.attributes["call_target_name"]).value)
        return ir.WalkResult.ADVANCE

    module.operation.walk(collect)
    return tuple(sorted(targets))


def serialize_portable(module: Any, version: str) -> bytes:
    """Serializes a module for readers of StableHLO `version` or newer.

    The module is in another dialect afterwards.

    Raises:
        ValueError: `version` has no form for an operation; says for which.
    """
    with _diagnostics(module.context) as messages:
        try:
            return stablehlo.serialize_portable_artifact(module, version)
        except ValueError as error:
            raise ValueError(_reason(messages)) from error


@contextmanager
def _diagnostics(context: Any) -> Generator[list[str]]:
    """Collects what MLIR would otherwise print to standard error.

    Not to be used around reading: jaxlib 0.12 emits errors there from where no Python may
    run, and crashes.
    """
    messages = list[str]()

    def keep(diagnostic: Any) -> bool:
        messages.append(str(diagnostic.message))
        return True

    handler = context.attach_diagnostic_handler(keep)
    try:
        yield messages
    finally:
        handler.detach()


def _name(item: Any) -> str:
    """Iterating over attributes gives their names in some jaxlib versions."""
    return item if isinstance(item, str) else item.name


def _reason(messages: Sequence[str]) -> str:
    for message in messages:
        found = _ILLEGAL.search(message)
        if found:
            target = _CALLED.search(message)
            called = f" (target `{target[1]}`)" if target else ""
            return f"it has no form for the operation `{found[1]}`{called} used here"
    return "; ".join(messages) or "the serializer gives no reason"
