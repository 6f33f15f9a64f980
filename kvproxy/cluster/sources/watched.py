"""Collections that are listed once and then watched: what orchestrators and stores of keys offer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvproxy.base.errors import BadResponse, KvproxyError

ItemT = TypeVar("ItemT")

#: Bound on the items of one collection; a larger one is refused.
MAX_ITEMS = 10_000


@dataclass(frozen=True, slots=True)
class Listing(Generic[ItemT]):
    """All there is, by key, as of a version."""

    items: dict[str, ItemT]
    version: str


@dataclass(frozen=True, slots=True)
class Changes(Generic[ItemT]):
    """Added and changed items, by key (None: removed), and the version after that ("": unchanged)."""

    items: Mapping[str, ItemT | None]
    version: str = ""


class Watched(Protocol[ItemT]):
    """Raises ClientError or DiscoveryError when it cannot be reached; `watch` raises TooOld, and otherwise ends when
    the service ends it."""

    async def list_all(self) -> Listing[ItemT]: ...
    def watch(self, version: str) -> AsyncGenerator[Changes[ItemT]]: ...


class TooOld(KvproxyError):
    """Changes since that version are no longer kept: the collection has to be listed again."""


def check_count(items: int, what: str) -> None:
    """Raise BadResponse for more items than are kept."""
    if items > MAX_ITEMS:
        raise BadResponse(f"more than {MAX_ITEMS} {what}: narrow what is asked for")
