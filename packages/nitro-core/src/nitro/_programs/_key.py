"""What decides a program: labelled parts, each with a digest and words for a person."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jaxlib.version

_CONFIG: Final = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_debug_nans",
    "jax_platforms",
)


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
    """The full key of one program, and what it takes to explain it.

    Attributes:
        role: What kind of program it is.
        owner: The experiment's class name.
        parts: What decides it besides its trace, by label.
        code: What its trace rests on, so that an explanation can go into detail.
        graph: The structural fields' values when it was traced.
        reads: The names of those that the trace read.
        options: Options for XLA.
    """

    role: str
    owner: str
    parts: Mapping[str, KeyPart]
    code: Any
    graph: Mapping[str, KeyPart]
    reads: frozenset[str]
    options: Mapping[str, Any]


def program_digest(
    role: str,
    trace: str,
    parts: Mapping[str, KeyPart],
    trees: Sequence[Any],
    options: Mapping[str, Any],
) -> str:
    """Digests everything that decides a program.

    Args:
        role: What kind of program it is.
        trace: The digest of what was traced.
        parts: What else decides it: the plan, the configuration of JAX.
        trees: The arguments and the results, by shape and dtype.
        options: Options for XLA, and which arguments are donated.
    """
    pieces = [role, trace, arguments_text(trees)]
    pieces += [f"{label}={parts[label].digest}" for label in sorted(parts)]
    pieces += [f"{name}={options[name]!r}" for name in sorted(options)]
    return hashlib.sha256("\n".join(pieces).encode()).hexdigest()


def environment() -> dict[str, KeyPart]:
    """What the platform, JAX and its configuration have to do with a compiled program."""
    values = {name: getattr(jax.config, name, None) for name in _CONFIG}
    values |= {"jax": jax.__version__, "jaxlib": jaxlib.version.__version__}
    values |= {"platform": jax.default_backend()}
    return {name: KeyPart(repr(value), repr(value)) for name, value in values.items()}


def arguments_text(trees: Sequence[Any]) -> str:
    """The names, shapes, dtypes, weak types and places of all leaves."""
    leaves, treedef = jax.tree.flatten(tuple(trees))
    return "\n".join([str(treedef), *map(_leaf_text, leaves)])


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
