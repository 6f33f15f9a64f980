"""Running streams by endpoint: an endpoint that is drained finds those that may go on elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self
from weakref import WeakSet

from kvproxy.base.errors import EngineReportedError
from kvproxy.cluster.endpoint import Endpoint, EndpointObserver
from kvproxy.cluster.feature import ClusterObserver
from kvproxy.cluster.settings import EndpointSettings

_CONFLICT = 409


class Moved(EngineReportedError):
    """The stream leaves an endpoint that an operator drains; the engine is not to blame."""

    reason = "moved"

    def __init__(self) -> None:
        super().__init__("the stream was moved off a drained endpoint", status=_CONFLICT)


class MovableStream(Protocol):
    """A stream that may go on with another engine."""

    model: str

    def move(self) -> str | None:
        """Have another engine go on with the stream. Return why it stays; "": it moves; None: it is over."""
        ...


class RunningStreams(EndpointObserver):
    """Streams of one endpoint."""

    def __init__(self) -> None:
        self._streams: WeakSet[MovableStream] = WeakSet()

    @classmethod
    def of(cls, endpoint: Endpoint) -> Self:
        """Return those of an endpoint."""
        return next(one for one in endpoint.observers if isinstance(one, cls))

    def add(self, stream: MovableStream) -> None:
        """Find the stream here until it is over or `remove` is called."""
        self._streams.add(stream)

    def remove(self, stream: MovableStream) -> None:
        """Find the stream here no more."""
        self._streams.discard(stream)

    def list_streams(self) -> Sequence[MovableStream]:
        """Return those that are here now."""
        return list(self._streams)


class RunningObserver(ClusterObserver):
    """Observer of one cluster."""

    def observe_endpoint(self, endpoint: Endpoint, config: EndpointSettings) -> RunningStreams:
        """Return a place for its streams."""
        return RunningStreams()
