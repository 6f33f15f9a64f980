"""Common interface of LMCache's two services: the holders of a prompt, and actions on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvproxy.base.types import LowerTokens, Tier
from kvproxy.cache.clients.tokens import TokenIds
from kvproxy.cluster.routing.policy import FactSource


class ActionKind(StrEnum):
    """Actions on a prefix; a metric label and the name of a breaker."""

    PIN = "pin"
    UNPIN = "unpin"
    COMPRESS = "compress"
    DECOMPRESS = "decompress"
    EVICT = "evict"
    CLEAR = "clear"
    TRANSFER = "transfer"


@dataclass(frozen=True, slots=True)
class Prefix:
    """Tokens under the scope their cache entries live in."""

    tokens: TokenIds
    model: str
    cache_salt: str = ""


#: Content of a store that all of them read, whoever put it there.
EVERY_INSTANCE = ""


@dataclass(frozen=True, slots=True)
class Holder:
    """One instance and how much of the prompt it can load; `contiguous` when the number is surely a prefix."""

    instance_id: str  # or EVERY_INSTANCE
    tokens: int
    contiguous: bool
    lower: LowerTokens = ()  # the same by tier; (): host memory


@dataclass(frozen=True, slots=True)
class Effect:
    """Result of an action; success is `amount > 0`. None: not reported. Of a transfer: leading tokens."""

    amount: int | None


@dataclass(frozen=True, slots=True)
class TierMemory:
    """Memory use of one instance, or of a store that EVERY_INSTANCE reads, as reported by the service."""

    instance_id: str
    tier: Tier
    used_bytes: int
    capacity_bytes: int  # 0: none declared
    share: float | None  # of the capacity that is used


class Provider(Protocol):
    """One LMCache service. Every method raises ClientError and nothing else."""

    @property
    def source(self) -> FactSource: ...
    @property
    def supports(self) -> frozenset[ActionKind]: ...
    @property
    def copies(self) -> bool:
        """True if a transfer may come from another instance."""
        ...

    async def lookup(self, prefix: Prefix) -> Sequence[Holder]:
        """Holders of the prompt, in the service's order."""
        ...

    async def act(self, kind: ActionKind, instance_id: str, prefix: Prefix, *, source: str = "") -> Effect:
        """Do it at one instance; NotSupported where the service has no such call. A transfer comes from the instance
        `source`; "": from whatever the instance itself reads."""
        ...

    async def instances(self) -> frozenset[str]:
        """Ids of the registered instances."""
        ...

    async def indexed_chunks(self) -> int:
        """Chunks in the service's index, over all instances."""
        ...

    async def memory(self) -> Sequence[TierMemory]:
        """Return the used memory by instance and tier; empty if the service does not report it. Called repeatedly:
        `copies` is as of the last call."""
        ...
