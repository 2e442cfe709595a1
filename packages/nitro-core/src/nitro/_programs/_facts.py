"""What is remembered of a trace once its program is compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ._constants import count_constant_bytes
from ._jaxpr import primitives


@dataclass(frozen=True, kw_only=True)
class TraceFacts:
    """What a program is made of, for checks that come later.

    Attributes:
        primitives: The names of its primitives.
        constant_bytes: The bytes of the arrays that are baked into it.
    """

    primitives: frozenset[str]
    constant_bytes: int


def facts_of(jaxpr: Any) -> TraceFacts:
    """The facts of a traced program."""
    return TraceFacts(
        primitives=frozenset(primitives(jaxpr)), constant_bytes=count_constant_bytes(jaxpr)
    )
