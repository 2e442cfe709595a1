"""What decides a program: labelled parts, each with a digest and words for a person."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax


@dataclass(frozen=True)
class KeyPart:
    """One thing that decides a program.

    Attributes:
        digest: Equal for equal contents, in every process.
        display: Short words for `explain_compiles`.
        closure: For code, what it rests on, so that an explanation can go into detail.
    """

    digest: str
    display: str
    closure: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class ProgramKey:
    """The full key of one program, and what it takes to explain it.

    Attributes:
        role: What kind of program it is.
        owner: The experiment's class name.
        parts: What decides it, by label.
        graph: The structural fields' values when it was traced.
        reads: The names of those that the trace read; the others do not decide it.
        options: Options for XLA.
    """

    role: str
    owner: str
    parts: Mapping[str, KeyPart]
    graph: Mapping[str, KeyPart]
    reads: frozenset[str]
    options: Mapping[str, Any]

    def admits(self, graph: Mapping[str, KeyPart]) -> bool:
        """Whether the fields that the trace read have the same values now.

        A trace that reads the same values takes the same path, so it reads nothing else.
        """
        return all(
            name in graph and graph[name].digest == self.graph[name].digest for name in self.reads
        )


def base_digest(
    role: str,
    parts: Mapping[str, KeyPart],
    arguments: Sequence[Any],
    options: Mapping[str, Any],
) -> str:
    """Digests everything that decides a program but the structural fields."""
    leaves, treedef = jax.tree.flatten(tuple(arguments))
    pieces = [role, str(treedef), *map(_leaf_text, leaves)]
    pieces += [f"{label}={parts[label].digest}" for label in sorted(parts)]
    pieces += [f"{name}={options[name]!r}" for name in sorted(options)]
    return hashlib.sha256("\n".join(pieces).encode()).hexdigest()


def abstract_arguments(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments' shapes, dtypes, weak types and shardings."""
    return jax.tree.map(_abstract, tuple(arguments))


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        leaf.shape,
        leaf.dtype,
        weak_type=getattr(leaf, "weak_type", False),
        sharding=getattr(leaf, "sharding", None) if isinstance(leaf, jax.Array) else None,
    )


def _leaf_text(leaf: Any) -> str:
    weak = getattr(leaf, "weak_type", False)
    return f"{leaf.dtype}{tuple(leaf.shape)}{weak}{getattr(leaf, 'sharding', None)}"
