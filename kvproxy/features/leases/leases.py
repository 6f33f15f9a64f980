"""Leases: prompts kept for conversations that are expected back, their budgets, and their results. Decisions and books,
no I/O; the time is an argument."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from kvproxy.base.bounded import BoundedMapping
from kvproxy.base.types import EndpointId
from kvproxy.cache.actions.hotness import KnownPrefix
from kvproxy.features.leases.conversations import HORIZON_S, LOOKED_AT, BySession, Conversations, IdleConversation
from kvproxy.features.leases.settings import LeaseSettings

K = TypeVar("K")

#: Pins that are not taken back now: tried again and again.
MAX_RELEASED = 4096
#: An engine reuses whole blocks, LMCache whole chunks of 256 tokens, and some templates write a prompt's end anew.
_SPARED_TOKENS = 256
_SPARED_SHARE = 0.1
#: A lease that LMCache does not confirm is none.
_CONFIRM_S = 60.0


class LeaseReason(StrEnum):
    """Why a prompt is kept; a metric label."""

    TOOL_CALL = "tool_call"  # its answer calls a tool, whose result comes with the next turn
    CLIENT = "client"  # requested by the client


def choose_duration(of: IdleConversation, settings: LeaseSettings) -> float:
    """Return how long the prompt is kept: never longer than its client requested."""
    return settings.max_duration if of.asked_s is None else min(of.asked_s, settings.max_duration)


@dataclass(slots=True, eq=False)
class Lease:
    """A prompt that is pinned at an endpoint's LMCache instance. `prefix` is as `known` was then: what is learned of it
    later changes neither what was promised nor what is to be taken back."""

    of: IdleConversation
    known: KnownPrefix
    instance: str
    made_at: float
    until: float
    pinned_at: float = 0.0
    held: bool = False  # LMCache has pinned it
    returned_at: float | None = None  # its conversation goes on
    prefix: KnownPrefix = field(init=False)

    def __post_init__(self) -> None:
        self.prefix = copy(self.known)

    @property
    def why(self) -> LeaseReason:
        """The reason for it."""
        return LeaseReason.TOOL_CALL if self.of.calls_tool else LeaseReason.CLIENT

    @property
    def tokens(self) -> int:
        """Promised tokens."""
        return len(self.prefix.tokens)

    @property
    def reusable_tokens(self) -> int:
        """Tokens that an engine reuses at least, if the prompt is there."""
        return self.tokens - max(_SPARED_TOKENS, int(_SPARED_SHARE * self.tokens))

    def describe(self, now: float) -> dict[str, object]:
        """For people."""
        of = self.of
        return {
            "cluster": of.cluster,
            "endpoint": str(of.endpoint),
            "tenant": of.tenant,
            "prefix": self.prefix.name,
            "tokens": self.tokens,
            "why": self.why.value,
            "confirmed": self.held,
            "ends_in_s": self.until - now,
        }


class LeaseBook:
    """Every lease there is and every conversation that is waited for: what outlives a reload. Budgets are never passed:
    `grant` refuses."""

    def __init__(self) -> None:
        self.waiting = Conversations()
        self.leases: dict[int, Lease] = {}  # by key of the prompt; bounded by `max_leases`
        #: Counted pins to be taken back, by instance.
        self.released: BoundedMapping[tuple[str, int], KnownPrefix] = BoundedMapping(MAX_RELEASED)
        self.results: Counter[str] = Counter()  # of leases whose conversation came back
        self.owner: object = None  # the observer that acts on it by now
        self.tenant_tokens: Counter[str] = Counter()  # tokens held for each
        self._endpoints: Counter[tuple[str, EndpointId]] = Counter()
        self._sessions = BySession()

    @property
    def kept_ratio(self) -> float | None:
        """Of the promises that could be verified, the share that was kept."""
        kept = self.results["kept"]
        broken = self.results["broken"]
        return kept / (kept + broken) if kept + broken else None

    def describe(self, settings: LeaseSettings, now: float) -> dict[str, object]:
        """For people, as plain data: hashes, never prompts."""
        return {
            "held": [lease.describe(now) for lease in self.leases.values()],
            "waiting": len(self.waiting),
            "kept_ratio": self.kept_ratio,
            "results": dict(self.results),
            "tenants": [
                {"tenant": tenant, "tokens": tokens, "limit": settings.tenant_budget(tenant)}
                for tenant, tokens in sorted(self.tenant_tokens.items())
            ],
        }

    def note_return(self, keys: Sequence[int], now: float) -> None:
        """Note the return of a conversation whose prompt has these message prefixes."""
        waiting = self.waiting.take_returned(keys)
        lease = None if waiting is None else self.leases.get(waiting.key)
        if lease is not None and now <= lease.until:
            lease.returned_at = now

    def take_returned(self, keys: Sequence[int]) -> Lease | None:
        """Return the lease on what this prompt goes on from, which ends by that."""
        for key in reversed(keys[-LOOKED_AT:]):
            lease = self.leases.get(key)
            if lease is not None and lease.returned_at is not None:
                self.release(lease)
                return lease
        return None

    def grant(self, lease: Lease, settings: LeaseSettings) -> str:
        """Enter it, or return which bound it would pass."""
        tenant = lease.of.tenant
        place = (lease.of.cluster, lease.of.endpoint)
        if lease.of.key in self.leases:
            return "duplicate"
        if lease.tokens < settings.min_tokens:
            return "short"
        if len(self.leases) >= settings.max_leases:
            return "max_leases"
        if self.tenant_tokens[tenant] + lease.tokens > settings.tenant_budget(tenant):
            return "tenant_budget"
        if self._endpoints[place] + lease.tokens > settings.endpoint_tokens:
            return "endpoint_budget"
        self.leases[lease.of.key] = lease
        lease.known.promised_until = lease.until
        self._sessions.add(lease.of)
        self.tenant_tokens[tenant] += lease.tokens
        self._endpoints[place] += lease.tokens
        return ""

    def release(self, lease: Lease) -> None:
        """Release a lease. The caller has to undo a pin of a service that counts."""
        del self.leases[lease.of.key]
        self._sessions.discard(lease.of)
        lease.known.promised_until = lease.until = 0.0
        _subtract(self.tenant_tokens, lease.of.tenant, lease.tokens)
        _subtract(self._endpoints, (lease.of.cluster, lease.of.endpoint), lease.tokens)
        if lease.held:
            self.released[lease.instance, lease.of.key] = lease.prefix

    def end_session(self, session: int) -> list[Lease]:
        """Nothing more comes of the session: what was kept for it, released."""
        self.waiting.end_session(session)
        ended = [self.leases[key] for key in self._sessions.keys_of(session)]
        for lease in ended:
            self.release(lease)
        return ended

    def take_expired(self, now: float) -> list[tuple[Lease, str]]:
        """Leases that end now without a return, and why."""
        self.waiting.forget_late(now)
        ended = [(lease, why) for lease in self.leases.values() if (why := _why_ended(lease, now))]
        for lease, _ in ended:
            self.release(lease)
        return ended


class LeaseState:
    """The book of the LMCache that pins now."""

    def __init__(self) -> None:
        self._book = LeaseBook()
        self._at: str | None = None

    def book_at(self, lmcache: str) -> LeaseBook:
        """Return the book of this LMCache. At a change, the former service ends its own leases; the expected
        conversations are kept."""
        if self._at not in (None, lmcache):
            waiting = self._book.waiting
            self._book = LeaseBook()
            self._book.waiting = waiting
        self._at = lmcache
        return self._book


def _why_ended(lease: Lease, now: float) -> str:
    if lease.returned_at is not None and now - lease.returned_at <= HORIZON_S:
        return ""
    if not lease.held and now - lease.made_at > _CONFIRM_S:
        return "no_effect"
    return "expired" if now >= lease.until else ""


def _subtract(held: Counter[K], name: K, tokens: int) -> None:
    held[name] -= tokens
    if not held[name]:
        del held[name]
