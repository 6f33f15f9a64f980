"""Bounds on what a client may hold or make the listener wait for."""

from __future__ import annotations

from dataclasses import dataclass

from kvproxy.config.schema import LimitSettings
from kvproxy.listener.linger import SILENCE_S


@dataclass(frozen=True, slots=True)
class ListenerLimits:
    """Times in seconds; 0 is none."""

    max_connections: int = 10_000
    """Served at once; a further one gets 503, and with many further ones nothing at all."""
    max_head_bytes: int = 64 * 1024
    """Request line and header fields; more gets 431."""
    max_headers: int = 256
    """Header fields; more gets 431."""
    head_timeout_s: float = 20.0
    """From a request's first byte (or the connection's start) to the end of its head; then 408."""
    keep_alive_s: float = 75.0
    """A connection without a request is closed after this long (longer than clients keep theirs)."""
    stall_timeout_s: float = 120.0
    """A client that takes no byte of its response for this long is gone."""
    linger_s: float = SILENCE_S
    """A client that has its last answer and sends no byte of an unread body for this long is gone; never 0."""

    @classmethod
    def from_config(cls, limits: LimitSettings) -> ListenerLimits:
        """What the configuration says of the public listener."""
        return cls(
            max_connections=limits.connections,
            max_head_bytes=limits.head,
            max_headers=limits.headers,
            head_timeout_s=limits.head_timeout,
            keep_alive_s=limits.keep_alive,
            stall_timeout_s=limits.stall_timeout,
        )
