"""Interface of a service beside the engines that stores KV: one feature brings it, and others act through it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, Self

from kvproxy.base.types import LowerTokens, Tier
from kvproxy.cache.actions.hotness import KnownPrefix
from kvproxy.cache.clients.tokens import TokenIds
from kvproxy.cache.overlap.facts import RequestFacts
from kvproxy.cache.overlap.merge import HolderOverlap
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
class Action:
    """Something to be done at one instance. `prefix` None: to all it holds in a location. `source`: of a transfer, the
    instance that it comes from; "": what the target itself reads."""

    kind: ActionKind
    instance_id: str
    prefix: KnownPrefix | None
    reason: str
    score: float | None = None  # from 0, to be kept, to 1, to go first
    source: str = ""
    timeout_s: float | None = None  # after which it is worth nothing; None: as other background work
    own: bool = False  # of this process alone: not claimed or counted by another one


#: Called with an action that had its effect, by whichever proxy, and the time.
OnDone = Callable[[Action, float], None]
#: Called at the end of an action, dropped ones included: outcome (a metric label), amount, and seconds it took.
OnOver = Callable[[str, int | None, float], None]


class ActionLocks(Protocol):
    """Where several proxies act on the same engines: which of them does what."""

    async def claim(self, what: str, ttl_s: float) -> bool:
        """Claim an action for this process and return True; no other one may claim it within `ttl_s`, in which it must
        be done."""
        ...

    def acted(self, action: Action) -> None:
        """Record an action that had its effect."""
        ...


@dataclass(slots=True)
class HotPin:
    """Tokens that are not evicted at one instance until the pin lapses."""

    prefix: KnownPrefix
    tokens: int
    pinned_at: float


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


#: Holders of a prompt.
FindHolders = Callable[[Prefix], Sequence[Holder]]


@dataclass(frozen=True, slots=True)
class TierMemory:
    """Memory use of one instance, or of a store that EVERY_INSTANCE reads, as reported by the service."""

    instance_id: str
    tier: Tier
    used_bytes: int
    capacity_bytes: int  # 0: none declared
    share: float | None  # of the capacity that is used


class KvStore:
    """The store as the core and other features use it. This one stands for none; a feature puts its own into
    `OverlapSources.store` while its observer is made. An async context manager around its tasks."""

    def __init__(self, *, address: str = "", pin_renewal_s: float = math.inf) -> None:
        self.address = address  # its URL: what was done at another one is no longer in effect
        self.pin_renewal_s = pin_renewal_s  # age at which a pin that should stay is renewed
        self.memory: Sequence[TierMemory] = ()  # as last read
        self.find_more: FindHolders | None = None  # holders that a feature knows of, before the store does
        self.adopted: dict[ActionKind, OnDone] = {}  # of features, for actions that other proxies did
        self.locks: ActionLocks | None = None  # None: no other proxy acts

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    @property
    def source(self) -> FactSource | None:
        """Name of its lookups as a source of facts."""
        return None

    @property
    def possible(self) -> bool:
        """True if lookups can be made now."""
        return False

    @property
    def supported(self) -> frozenset[ActionKind]:
        """Actions that it supports at present."""
        return frozenset()

    @property
    def copies(self) -> bool:
        """True if a transfer may come from another instance."""
        return False

    def is_wanted(self, facts: RequestFacts) -> bool:
        """Return True if a lookup is worth a wait. Not called where no feature looks prompts up."""
        return False

    async def look_up(self, facts: RequestFacts) -> Sequence[HolderOverlap]:
        """Return the holders that are known within the rest of the routing deadline. Never raises."""
        return ()

    def add_holders(self, facts: RequestFacts, find: FindHolders) -> None:
        """Add the holders of its prompt that a feature finds, before a lookup's answer about the same endpoints."""

    async def read_memory(self) -> None:
        """Read the used memory by instance and tier. Never raises ClientError."""

    def can_do(self, action: Action) -> bool:
        """Return True if it supports this kind of action, and that was not switched off at the instance."""
        return False

    def submit(self, action: Action, on_done: OnDone, on_over: OnOver | None = None) -> bool:
        """Queue it, unless it is switched off, its breaker is open, or it waits or runs already. `on_done` is called
        once it had its effect."""
        return False

    def adopt_action(self, action: Action, now: float) -> None:
        """Another proxy did this, at this time."""
        on_done = self.adopted.get(action.kind)
        if on_done is not None:
            on_done(action, now)

    def list_pins(self, now: float) -> Mapping[tuple[str, int], HotPin]:
        """Return the pins of hot prefixes that stand, by instance and prefix key."""
        return {}
