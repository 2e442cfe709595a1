"""Why a request is refused, and what each protocol calls that."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from nitro.errors import NitroError


class Answer(NamedTuple):
    """How the protocols say one kind of refusal.

    Attributes:
        http: The status of an HTTP response.
        grpc: The name of a gRPC status code.
    """

    http: int
    grpc: str


class Kind(Enum):
    """The kinds of refusal."""

    INVALID = Answer(400, "INVALID_ARGUMENT")
    UNAUTHENTICATED = Answer(401, "UNAUTHENTICATED")
    FORBIDDEN = Answer(403, "PERMISSION_DENIED")
    NOT_FOUND = Answer(404, "NOT_FOUND")
    TOO_LARGE = Answer(413, "RESOURCE_EXHAUSTED")
    UNSUPPORTED = Answer(415, "UNIMPLEMENTED")
    OVERLOADED = Answer(429, "RESOURCE_EXHAUSTED")
    INTERNAL = Answer(500, "INTERNAL")
    UNAVAILABLE = Answer(503, "UNAVAILABLE")
    TIMEOUT = Answer(504, "DEADLINE_EXCEEDED")


class RefusedError(NitroError):
    """A request that is not answered with a prediction.

    Attributes:
        kind: Why, as far as a client's code needs to know.
    """

    def __init__(self, kind: Kind, problem: str, *, expected: str = "", fix: str = "") -> None:
        super().__init__(problem, expected=expected, fix=fix)
        self.kind = kind


def as_refusal(error: Exception) -> RefusedError:
    """Any exception as a refusal; what the server did not foresee shows the client no inside."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, NitroError):
        return RefusedError(Kind.INVALID, error.problem, expected=error.expected, fix=error.fix)
    return RefusedError(
        Kind.INTERNAL,
        f"The model failed on this request: {type(error).__name__}.",
        fix="the server's log has the details",
    )
