"""Common interface of LMCache's two services: the holders of a prompt, and actions on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvproxy.cache.store import ActionKind, Holder, Prefix, TierMemory
from kvproxy.cluster.routing.policy import FactSource

CONTROLLER = FactSource("lmcache_controller")
COORDINATOR = FactSource("lmcache_coordinator")


@dataclass(frozen=True, slots=True)
class Effect:
    """Result of an action; success is `amount > 0`. None: not reported. Of a transfer: leading tokens."""

    amount: int | None


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
