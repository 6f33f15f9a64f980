"""Sources of endpoints, as a cluster uses them: polled, or watched."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from kvproxy.cluster.sources.entries import Answer


class Discovery(Protocol):
    """A source that answers with all endpoints at present and with those left out, or raises DiscoveryError or
    OSError."""

    async def endpoints(self) -> Answer: ...


#: Takes all current endpoints (None: not known yet), and an error ("": none).
Tell = Callable[[Answer | None, str], Awaitable[None]]


class WatchedDiscovery(Discovery, Protocol):
    """A source that reports each change of its answer by itself; `follow` runs until it is cancelled."""

    async def follow(self, tell: Tell) -> None: ...
