"""Collections that are listed once and then watched: what both Kubernetes and etcd offer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvproxy.base.errors import BadResponse, KvproxyError

ItemT = TypeVar("ItemT")

#: Items in one collection; more are refused rather than kept.
MAX_ITEMS = 10_000


@dataclass(frozen=True, slots=True)
class Listing(Generic[ItemT]):
    """All there is, by key, as of a version."""

    items: dict[str, ItemT]
    version: str


@dataclass(frozen=True, slots=True)
class Changes(Generic[ItemT]):
    """What came or changed, by key (None: it is gone), and the version after that ("": as before)."""

    items: Mapping[str, ItemT | None]
    version: str = ""


class Watched(Protocol[ItemT]):
    """Raises ClientError or DiscoveryError when it cannot be asked; `watch` raises TooOld, and otherwise ends when the
    service ends it."""

    async def list_all(self) -> Listing[ItemT]: ...
    def watch(self, version: str) -> AsyncGenerator[Changes[ItemT]]: ...


class TooOld(KvproxyError):
    """What changed since that version is no longer kept: everything has to be listed again."""


def check_count(items: int, what: str) -> None:
    """Raise BadResponse for more items than are kept."""
    if items > MAX_ITEMS:
        raise BadResponse(f"more than {MAX_ITEMS} {what}: narrow what is asked for")
