"""A copy of a watched collection, kept up to date for as long as it is followed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from random import Random
from typing import Generic

from kvproxy.base.errors import BadResponse, ClientError, DiscoveryError
from kvproxy.base.resilience.retry import full_jitter_s
from kvproxy.base.types import Clock, Sleep
from kvproxy.cluster.sources.watched import ItemT, TooOld, Watched, check_count

#: After a watch of this length the next begins at once.
_STEADY_S = 5.0
#: Watches end after this long, and after a while everything is listed again, to notice a server that sends only
#: keepalives.
_LONGEST_WATCH_S = 120.0
_LIST_AGAIN_S = 300.0
_PAUSE_S = 0.5
_MAX_PAUSE_S = 4.0


class Mirror(Generic[ItemT]):
    """Copy of a collection as of its last update, kept while the connection is lost.

    `trouble` is why it is not followed at present; "" while it is."""

    def __init__(self, collection: Watched[ItemT], *, clock: Clock, rng: Random, sleep: Sleep = asyncio.sleep) -> None:
        self._collection = collection
        self._clock = clock
        self._rng = rng
        self._sleep = sleep
        self._version: str | None = None  # None: list again
        self._items: dict[str, ItemT] = {}
        self.listed = False  # once at least
        self._listed_at = 0.0
        self.trouble = ""

    @property
    def items(self) -> Mapping[str, ItemT]:
        """By key."""
        return self._items

    async def list_all(self) -> None:
        """Learn all there is now. Raises as the collection does."""
        try:
            listing = await self._collection.list_all()
        except TooOld as error:
            raise DiscoveryError("the list changed too often while it was read") from error
        self._items = listing.items
        self._version = listing.version
        self.listed = True
        self._listed_at = self._clock()

    async def follow(self, on_change: Callable[[], Awaitable[None]]) -> None:
        """List what was not listed yet, then watch, and again after every end; for ever. `on_change` is called after
        everything that may have changed the items or the trouble."""
        failures = 0
        while True:
            began = self._clock()
            try:
                if self._version is None or began - self._listed_at >= _LIST_AGAIN_S:
                    await self.list_all()
                    await on_change()
                await self._watch(self._version or "", on_change)
            except TooOld:
                self._version = None
            except (ClientError, DiscoveryError, OSError, ValueError) as error:
                self.trouble = str(error) or type(error).__name__
                if isinstance(error, BadResponse | ValueError):
                    self._version = None
            await on_change()
            failures = 0 if self._clock() - began >= _STEADY_S and not self.trouble else failures + 1
            if failures:
                await self._sleep(full_jitter_s(failures, base_s=_PAUSE_S, max_s=_MAX_PAUSE_S, rng=self._rng))

    async def _watch(self, version: str, on_change: Callable[[], Awaitable[None]]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LONGEST_WATCH_S):
                await self._apply_changes(version, on_change)

    async def _apply_changes(self, version: str, on_change: Callable[[], Awaitable[None]]) -> None:
        async with aclosing(self._collection.watch(version)) as batches:
            async for changes in batches:
                items = {**self._items, **changes.items}
                kept = {key: item for key, item in items.items() if item is not None}
                check_count(len(kept), "items in a watched collection")
                self._items = kept
                self._version = changes.version or self._version
                self.trouble = ""
                await on_change()
