"""What decides a program: labelled parts, each with a digest and words for a person."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class KeyPart:
    """One thing that decides a program.

    Attributes:
        digest: Equal for equal contents, in every process.
        display: Short words for `explain_compiles`.
    """

    digest: str
    display: str


@dataclass(frozen=True, kw_only=True)
class ProgramKey:
    """The full key of one program.

    Attributes:
        role: What kind of program it is.
        parts: What decides it, by label.
        reads: The structural fields that its trace read, with their values then.
    """

    role: str
    parts: Mapping[str, KeyPart]
    reads: Mapping[str, KeyPart]

    def admits(self, graph: Mapping[str, KeyPart]) -> bool:
        """Whether the fields that the trace read have the same values now."""
        return all(graph[name].digest == part.digest for name, part in self.reads.items())

    @staticmethod
    def base_digest(
        role: str,
        parts: Mapping[str, KeyPart],
        arguments: Sequence[Any],
        compile_options: Mapping[str, Any],
    ) -> str:
        """Digests everything but the structural fields."""
        leaves, treedef = jax.tree.flatten(tuple(arguments))
        pieces = [role, str(treedef), *map(_abstract_text, leaves)]
        pieces += [f"{label}={parts[label].digest}" for label in sorted(parts)]
        pieces += [f"{name}={compile_options[name]!r}" for name in sorted(compile_options)]
        return digest_text("\n".join(pieces))


def abstract_arguments(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments' shapes, dtypes, weak types and shardings."""
    return jax.tree.map(_abstract, tuple(arguments))


def digest_text(text: str) -> str:
    """A short stable digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        leaf.shape,
        leaf.dtype,
        weak_type=getattr(leaf, "weak_type", False),
        sharding=getattr(leaf, "sharding", None) if isinstance(leaf, jax.Array) else None,
    )


def _abstract_text(leaf: Any) -> str:
    return f"{leaf.dtype}{tuple(leaf.shape)}{getattr(leaf, 'weak_type', False)}"
