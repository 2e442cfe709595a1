"""Who may load and unload models."""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from ._refusals import Kind, RefusedError


@dataclass(frozen=True, kw_only=True)
class Control:
    """Guards what changes the server.

    Attributes:
        is_on: Whether clients may load and unload at all.
        token: What they must send, as `Authorization: Bearer ...`; None for nothing.
    """

    is_on: bool = False
    token: str | None = None

    def check(self, authorization: str | None) -> None:
        """Lets a request pass, or refuses it.

        Args:
            authorization: The header, or the gRPC metadata, of that name.

        Raises:
            RefusedError: Control is off, or the token is missing or wrong.
        """
        if not self.is_on:
            raise RefusedError(
                Kind.FORBIDDEN,
                "Models cannot be loaded or unloaded here.",
                expected="a server that was started with --control",
            )
        if self.token is None:
            return
        given = (authorization or "").removeprefix("Bearer ").encode()
        # In constant time, so that a guess learns nothing from how long it takes.
        if not hmac.compare_digest(given, self.token.encode()):
            raise RefusedError(
                Kind.UNAUTHENTICATED,
                "The token is missing or wrong.",
                expected="the header `Authorization: Bearer <token>`",
            )
