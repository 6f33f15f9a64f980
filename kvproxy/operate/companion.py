"""Long-lived parts of features beside a proxy, and processes that serve as one with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from kvproxy.base.resilience.retry import RetryBudget
from kvproxy.cache.service import KvCache
from kvproxy.cluster.cluster import Cluster
from kvproxy.proxy.filters.chain import ChargedLimits


@dataclass(frozen=True, slots=True)
class Siblings:
    """Processes of one machine that serve as one, and which of them this is. They meet in `folder`."""

    folder: Path
    number: int
    count: int


class Serving(Protocol):
    """Parts that one configuration serves with."""

    @property
    def clusters(self) -> Mapping[str, Cluster]: ...
    @property
    def kvcaches(self) -> Mapping[str, KvCache]:
        """By name of the filter."""
        ...

    @property
    def limits(self) -> Mapping[str, ChargedLimits]:
        """By name of the filter."""
        ...

    @property
    def budgets(self) -> Mapping[str, RetryBudget]: ...


class Companion:
    """A part beside the proxy, entered once the first configuration serves, left at the end."""

    @property
    def joining(self) -> bool:
        """True while clients are better served later, such as during a transfer of state."""
        return False

    def follow(self, serving: Serving) -> None:
        """Follow this configuration: before it is entered, and after each reload."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...
