"""Which prompts are kept for conversations that are expected back, for how long and within which budgets, and what came
of it. Decisions and books, no I/O; the time is an argument."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, TypeVar

from kvproxy.base.bounded import BoundedMapping
from kvproxy.base.types import EndpointId
from kvproxy.cache.action_settings import LeaseSettings
from kvproxy.cache.actions.hotness import KnownPrefix
from kvproxy.features.leases.conversations import LOOKED_AT, BySession, Conversations, Waiting
from kvproxy.features.leases.gaps import HORIZON_S, Gaps

K = TypeVar("K")

#: Pins, and SGLang's sessions, that are not taken back now: tried again and again.
MAX_RELEASED = 4096
#: Leases of other processes that are known here.
MAX_ELSEWHERE = 16_384
#: An engine reuses whole blocks, LMCache whole chunks of 256 tokens, and some templates write a prompt's end anew.
_SPARED_TOKENS = 256
_SPARED_SHARE = 0.1
#: A lease that no engine confirms is none.
_CONFIRM_S = 60.0


class Lever(StrEnum):
    """What keeps a prompt; a metric label."""

    PIN = "pin"  # of LMCache
    SESSION = "session"  # of SGLang, which refers to it
    TOUCH = "touch"  # asked for again before the engine would evict it


class Why(StrEnum):
    """Why a prompt is kept; a metric label."""

    TOOL_CALL = "tool_call"  # its answer calls a tool, whose result comes with the next turn
    CLIENT = "client"  # asked for it


@dataclass(slots=True, eq=False)
class Lease:
    """A prompt that is kept at an endpoint. `prefix` is as `known` was then: what is learned of it later changes
    neither what was promised nor what is to be taken back."""

    of: Waiting
    known: KnownPrefix
    instance: str
    lever: Lever
    why: Why
    made_at: float
    until: float
    used_at: float  # when the engine used it last, or was told to keep it
    held: bool = False  # the engine did as it was told
    returned_at: float | None = None  # its conversation goes on
    filled: int = 0  # tokens that the endpoint's cache had taken in all at its last use
    session: str = ""  # of SGLang, that refers to it
    told_tokens: int | None = None  # another process promised so many, and keeps them
    prefix: KnownPrefix = field(init=False)

    def __post_init__(self) -> None:
        self.prefix = copy(self.known)

    @property
    def tokens(self) -> int:
        """What is promised."""
        return len(self.prefix.tokens) if self.told_tokens is None else self.told_tokens

    @property
    def reusable_tokens(self) -> int:
        """What an engine reuses of it at least, if it is there."""
        return self.tokens - max(_SPARED_TOKENS, int(_SPARED_SHARE * self.tokens))

    def describe(self, now: float) -> dict[str, object]:
        """For people."""
        of = self.of
        prefix = self.prefix.name
        return {
            "cluster": of.cluster,
            "endpoint": str(of.endpoint),
            "tenant": of.tenant,
            "prefix": prefix,
            "tokens": self.tokens,
            "lever": self.lever.value,
            "why": self.why.value,
            "confirmed": self.held,
            "ends_in_s": self.until - now,
        }


class LeaseNews(Protocol):
    """Hears what happens here, for other processes that keep the same book."""

    def waits(self, waiting: Waiting) -> None: ...
    def returned(self, key: int) -> None: ...
    def leased(self, lease: Lease) -> None: ...  # or more is known of it
    def over(self, key: int) -> None: ...


class LeaseBook:
    """Every lease there is and every conversation that is waited for, those of other processes that are heard of among
    them: what outlives a reload. Budgets are never passed: `grant` refuses."""

    def __init__(self) -> None:
        self.gaps = Gaps()
        self.waiting = Conversations()
        self.leases: dict[int, Lease] = {}  # by key of the prompt; bounded by `max_leases`
        #: Counted pins to be taken back, by instance.
        self.released: BoundedMapping[tuple[str, int], KnownPrefix] = BoundedMapping(MAX_RELEASED)
        #: SGLang's sessions to be closed, with the cluster and the endpoint of each.
        self.to_close: BoundedMapping[str, tuple[str, EndpointId]] = BoundedMapping(MAX_RELEASED)
        self.results: Counter[str] = Counter()  # of leases whose conversation came back
        self.owner: object = None  # the service that acts on it by now
        self.news: LeaseNews | None = None  # None: there are no other processes
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
            "pauses": self.gaps.describe(),
        }

    def expect(self, waiting: Waiting) -> None:
        """An answer is over, and its conversation may go on."""
        self.waiting.add(waiting)
        if self.news is not None:
            self.news.waits(waiting)

    def note_return(self, keys: Sequence[int], now: float, *, told: bool = False) -> None:
        """A prompt with these message prefixes is on its way (`told`: elsewhere): a conversation may go on, and its
        pause is counted."""
        waiting = self.waiting.take_returned(keys)
        if waiting is None:
            return
        self.gaps.count(waiting.kind, now - waiting.ended_at)
        lease = self.leases.get(waiting.key)
        if lease is not None and now <= lease.until:
            lease.returned_at = now
        if self.news is not None and not told:
            self.news.returned(waiting.key)

    def take_returned(self, keys: Sequence[int]) -> Lease | None:
        """Return the lease on what this prompt goes on from, which ends by that."""
        for key in reversed(keys[-LOOKED_AT:]):
            lease = self.leases.get(key)
            if lease is not None and lease.returned_at is not None:
                self.release(lease)
                return lease
        return None

    def grant(self, lease: Lease, settings: LeaseSettings, *, capacity_tokens: int | None = None) -> str:
        """Enter it, or say which bound it would pass. An engine's own memory, of `capacity_tokens`, is never held by
        more than half."""
        tenant = lease.of.tenant
        place = (lease.of.cluster, lease.of.endpoint)
        most = settings.endpoint_tokens if capacity_tokens is None else capacity_tokens // 2
        if lease.of.key in self.leases:
            return "duplicate"
        if lease.tokens < settings.min_tokens:
            return "short"
        if len(self.leases) >= settings.max_leases:
            return "max_leases"
        if self.tenant_tokens[tenant] + lease.tokens > settings.tenant_budget(tenant):
            return "tenant_budget"
        if self._endpoints[place] + lease.tokens > min(most, settings.endpoint_tokens):
            return "endpoint_budget"
        self._enter(lease)
        if self.news is not None:
            self.news.leased(lease)
        return ""

    def adopt(self, lease: Lease) -> None:
        """Another process keeps it, or had it confirmed. It counts here, and is verified where its conversation comes
        back; it ends by a word or by its time."""
        known = self.leases.get(lease.of.key)
        if known is None and len(self.leases) < MAX_ELSEWHERE:
            self._enter(lease)
        elif known is not None and known.told_tokens is not None:
            known.held = lease.held

    def confirm(self, lease: Lease, now: float) -> None:
        """The engine did as it was told."""
        lease.held = True
        lease.used_at = now
        if self.news is not None and self.leases.get(lease.of.key) is lease:
            self.news.leased(lease)

    def _enter(self, lease: Lease) -> None:
        self.leases[lease.of.key] = lease
        lease.known.promised_until = lease.until
        self._sessions.add(lease.of)
        self.tenant_tokens[lease.of.tenant] += lease.tokens
        self._endpoints[lease.of.cluster, lease.of.endpoint] += lease.tokens

    def release(self, lease: Lease, *, told: bool = False) -> None:
        """It ends (`told`: by another process's word). A pin of a service that counts is to be taken back."""
        del self.leases[lease.of.key]
        if self.news is not None and not told:
            self.news.over(lease.of.key)
        self._sessions.discard(lease.of)
        lease.known.promised_until = lease.until = 0.0
        _subtract(self.tenant_tokens, lease.of.tenant, lease.tokens)
        _subtract(self._endpoints, (lease.of.cluster, lease.of.endpoint), lease.tokens)
        if lease.lever is Lever.PIN and lease.held and lease.told_tokens is None:
            self.released[lease.instance, lease.of.key] = lease.prefix
        elif lease.session:
            self.to_close[lease.session] = (lease.of.cluster, lease.of.endpoint)

    def end_session(self, session: int) -> list[Lease]:
        """Nothing more comes of the session: what was kept for it, released."""
        self.waiting.end_session(session)
        ended = [self.leases[key] for key in self._sessions.keys_of(session)]
        for lease in ended:
            self.release(lease)
        return ended

    def take_expired(self, now: float) -> list[tuple[Lease, str]]:
        """Leases that end now without a return, and why. Conversations that did not go on count among the pauses."""
        for waiting in self.waiting.take_late(now):
            self.gaps.count(waiting.kind, None)
        ended = [(lease, why) for lease in self.leases.values() if (why := _why_ended(lease, now))]
        for lease, _ in ended:
            self.release(lease, told=lease.told_tokens is not None)
        return [(lease, why) for lease, why in ended if lease.told_tokens is None]


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
