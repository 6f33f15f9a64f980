"""Bounds on request bodies: why one is refused, and how much of all of them is held at once."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from kvproxy.metrics.catalog import Metrics
from kvproxy.request.error_reply import local_reply


class BodyRefused(Exception):
    """The client's body is not taken; `status`, `reason` (a closed set) and the text are the answer."""

    status = 400
    reason = ""
    unread = True  # more of it may be on its way


class BodyTooLarge(BodyRefused):
    """The body is longer than the limit; at most that much of it was held."""

    status = 413
    reason = "body_too_large"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The request body is larger than {limit_bytes} bytes.")


class BodyTooSlow(BodyRefused):
    """The body did not arrive in time."""

    status = 408
    reason = "body_timeout"

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"The request body did not arrive within {timeout_s:g} seconds.")


class BodiesFull(BodyRefused):
    """The bodies of all requests together are at their bound."""

    status = 503
    reason = "bodies_full"

    def __init__(self) -> None:
        super().__init__("Too much is being uploaded at once; try again later.")


class BodyUnchecked(BodyRefused):
    """The body may hold what clients must not say to engines, and cannot be read; the text says why."""

    reason = "body_unchecked"
    unread = False

    def __init__(self, message: str, *, encoded: bool) -> None:
        super().__init__(message)
        self.status = 415 if encoded else 400


class HeldBodies:
    """Counts the bytes of all bodies held, from each byte's arrival until its request is over."""

    __slots__ = ("held_bytes", "limit_bytes")

    def __init__(self, limit_bytes: int, *, metrics: Metrics | None = None) -> None:
        self.held_bytes = 0
        self.limit_bytes = limit_bytes
        if metrics is not None:
            metrics.bounds.bodies_held.set_function(lambda: self.held_bytes)
            metrics.bounds.bodies_limit.set(limit_bytes)

    def take(self, size_bytes: int) -> None:
        """Hold that much more; raises BodiesFull, and holds no more, when it would be too much."""
        if self.held_bytes + size_bytes > self.limit_bytes:
            raise BodiesFull
        self.held_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """That much of what was taken is held no longer."""
        self.held_bytes -= size_bytes


async def refuse_body(error: BodyRefused, scope: Scope, receive: Receive, send: Send, *, metrics: Metrics) -> None:
    """The answer to a client whose body is not taken; the rest of it is not read."""
    if isinstance(error, BodyTooLarge):
        metrics.bounds.body_refused.inc()
    elif isinstance(error, BodiesFull):
        metrics.bounds.bodies_full.inc()
    await local_reply(
        scope,
        send,
        status=error.status,
        reason=error.reason,
        message=str(error),
        metrics=metrics,
        headers=[(b"retry-after", b"1")] if error.status == 503 else None,
        unread=receive if error.unread else None,
    )
