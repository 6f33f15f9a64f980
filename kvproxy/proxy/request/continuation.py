"""Continuation of a stream whose engine failed in the middle of it, as the forwarder uses it."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import NamedTuple, Protocol

from kvproxy.base.errors import UpstreamError
from kvproxy.base.upstream.response import UpstreamResponse
from kvproxy.cluster.pick import Pick


class AsksEngines(Protocol):
    """One request, as another part of it is sent: with its head, and the credential of the endpoint."""

    def ask(self, pick: Pick, target: bytes, body: bytes) -> Coroutine[None, None, tuple[UpstreamResponse, int, bytes]]:
        """Return the engine's answer to a JSON object: the response, its status and the first piece. Raises
        UpstreamError."""
        ...


class SplitsLeg(Protocol):
    """Sends the request for the rest of a stream as several."""

    def split(
        self, request: AsksEngines, pick: Pick
    ) -> Coroutine[None, None, tuple[UpstreamResponse, int, bytes]] | None:
        """Return the answer, as if of one request; None: it is sent as it is."""
        ...


class Leg(NamedTuple):
    """Request for the rest of a stream: its target and its body, a JSON object."""

    target: bytes
    body: bytes
    moved: bool = False  # from an engine that did not fail: no retry
    parts: SplitsLeg | None = None  # None: it is sent as it is


class Continuation(Protocol):
    """Follows one stream on its way to the client, and may have another engine go on with it. Set on the exchange
    before the request is routed."""

    #: Member with its comma, written in front of those of the client's body; b"": none.
    member: bytes
    #: Found in the last piece: the stream ends here and is to go on elsewhere.
    failure: UpstreamError | None
    #: The engine's own end of such a stream, for the client if no other engine goes on.
    withheld: bytes

    def follow(self, pick: Pick, response: UpstreamResponse, *, target: bytes, body: bytes | None) -> bool:
        """Return whether it follows this answer, the first or one that goes on with it. `target` and `body` are those
        of the request; the body is None if it was streamed."""
        ...

    def next_piece(self, piece: bytes) -> bytes:
        """Return what goes down now, whole events alone."""
        ...

    def finish(self, rest: bytes) -> bytes:
        """Return the last of an answer that is complete."""
        ...

    def next_leg(self, error: UpstreamError, *, debug: bool) -> Leg | None:
        """Return the request for the rest; None if this stream cannot go on. `debug`: the client asked how it was
        served."""
        ...

    def refuse(self, reason: str) -> None:
        """Note why the leg is not sent after all, such as an exhausted retry budget."""
        ...
