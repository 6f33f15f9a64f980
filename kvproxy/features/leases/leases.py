"""Conversations that are expected back, and leases: prompts kept for them, their budgets, and their results. The book
decides without I/O, at a time that is an argument; `Leasing` observes requests for it, and pins."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from kvproxy.base.bounded import BoundedMapping
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.settings.compose import part_of
from kvproxy.base.types import EndpointId
from kvproxy.cache.actions.hotness import KnownPrefix
from kvproxy.cache.clients.tokens import TokenIds
from kvproxy.cache.feature import CacheObserver, CacheParts
from kvproxy.cache.overlap.facts import RequestFacts
from kvproxy.cache.prefix.cache_marks import read_ttl_s
from kvproxy.cache.store import Action, ActionKind
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.routing.selector import Decision
from kvproxy.cluster.routing.work import prefill_s
from kvproxy.features.leases.metrics import LeaseMetrics
from kvproxy.features.leases.note import LeaseResult
from kvproxy.features.leases.settings import LeasePlace, LeaseSettings
from kvproxy.proxy.request.exchange import Exchange, Outcome
from kvproxy.proxy.request.observer import RequestObserver

#: Answers whose next turns are expected; the longest waiting are dropped first.
MAX_WAITING = 16_384
#: A conversation that did not go on for this long is no longer expected; no lease is longer.
HORIZON_S = 3600.0
#: Tokens under lease at one endpoint.
ENDPOINT_TOKENS = 500_000
#: Message prefixes by which the first and last turns of a conversation differ, at most.
LOOKED_AT = 17


@dataclass(frozen=True, slots=True)
class IdleConversation:
    """A conversation between an answer and its next turn, known by the key of its last prompt."""

    key: int
    ended_at: float
    endpoint: EndpointId
    cluster: str
    tenant: str = ""
    session: int = 0  # 0: it names none
    calls_tool: bool = True
    asked_s: float | None = None  # that its client wants the prompt to be kept


class BySession:
    """Keys of each session; those without one are left out."""

    def __init__(self) -> None:
        self._keys: dict[int, set[int]] = {}

    def add(self, of: IdleConversation) -> None:
        """One more."""
        if of.session:
            self._keys.setdefault(of.session, set()).add(of.key)

    def discard(self, of: IdleConversation) -> None:
        """One less, if it is there."""
        keys = self._keys.get(of.session, set())
        keys.discard(of.key)
        if not keys:
            self._keys.pop(of.session, None)

    def keys_of(self, session: int) -> Collection[int]:
        """As they are now."""
        return tuple(self._keys.get(session, ()))


class Conversations:
    """Conversations that may go on, by key, the longest waiting first."""

    def __init__(self) -> None:
        self._waiting: dict[int, IdleConversation] = {}
        self._sessions = BySession()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: int) -> bool:
        return key in self._waiting

    def get(self, key: int) -> IdleConversation | None:
        """Return the one whose last prompt has this key."""
        return self._waiting.get(key)

    def add(self, waiting: IdleConversation) -> None:
        """Add a conversation after its answer."""
        self._take(waiting.key)
        self._waiting[waiting.key] = waiting
        self._sessions.add(waiting)
        if len(self._waiting) > MAX_WAITING:
            self._take(next(iter(self._waiting)))

    def take_returned(self, keys: Sequence[int]) -> IdleConversation | None:
        """Return the one that a prompt with these message prefixes goes on from."""
        return next((found for key in reversed(keys[-LOOKED_AT:]) if (found := self._take(key)) is not None), None)

    def forget_late(self, now: float) -> None:
        """Forget conversations that wait for too long and are not expected back."""
        for first in self._late(now):
            self._take(first.key)

    def end_session(self, session: int) -> None:
        """Nothing more comes of it."""
        for key in self._sessions.keys_of(session):
            self._take(key)

    def _late(self, now: float) -> Iterator[IdleConversation]:
        while self._waiting:
            first = next(iter(self._waiting.values()))
            if now - first.ended_at <= HORIZON_S:
                return
            yield first

    def _take(self, key: int) -> IdleConversation | None:
        found = self._waiting.pop(key, None)
        if found is not None:
            self._sessions.discard(found)
        return found


_finished = re.compile(rb'"(?:finish|stop)_reason"\s?:\s?"tool_(?:calls|use)"').search
_item = re.compile(rb'"type"\s?:\s?"(?:function_call|custom_tool_call|local_shell_call|computer_call)"').search


class ToolCallDetector:
    """Detector for one answer. The searched texts cannot be in generated text, whose quotes are escaped; one split by
    the network goes unseen. Items of Responses count at once: their end gives no other reason than that they are
    complete."""

    __slots__ = ("found",)

    def __init__(self) -> None:
        self.found = False

    def read_piece(self, piece: bytes) -> None:
        """Read a piece of the answer."""
        if (b'"tool_' in piece and _finished(piece)) or (b'_call"' in piece and _item(piece)):
            self.found = True


K = TypeVar("K")

#: Pins that are not taken back now: tried again and again.
MAX_RELEASED = 4096
#: Leases at once.
MAX_LEASES = 1000
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

    def __init__(self, *, most: int = MAX_LEASES) -> None:
        self._most = most
        self.waiting = Conversations()
        self.leases: dict[int, Lease] = {}  # by key of the prompt; at most `most`
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
                {"tenant": tenant, "tokens": tokens, "limit": settings.tenant_tokens}
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
        if len(self.leases) >= self._most:
            return "max_leases"
        if self.tenant_tokens[tenant] + lease.tokens > settings.tenant_tokens:
            return "tenant_budget"
        if self._endpoints[place] + lease.tokens > ENDPOINT_TOKENS:
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


class LeaseWatch(RequestObserver):
    """Follows one request: as a return, and as an answer that may call a tool."""

    __slots__ = ("_call", "_facts", "_leasing")

    def __init__(self, leasing: Leasing, facts: RequestFacts) -> None:
        self._leasing = leasing
        self._facts = facts
        self._call = ToolCallDetector()

    def body_piece(self, exchange: Exchange, piece: bytes) -> None:
        self._call.read_piece(piece)

    def placed(self, exchange: Exchange, decision: Decision[Endpoint], now: float) -> None:
        self._leasing.book.note_return(self._facts.keys, now)

    def finished(self, exchange: Exchange, now: float) -> None:
        outcome = exchange.outcome
        kept = self._leasing.finished(self._facts, outcome, exchange.tenant, calls_tool=self._call.found)
        if kept is not None:
            outcome.notes["lease"] = kept


class Leasing(CacheObserver):
    """Pins go through the executor as every action at LMCache. `book` outlives it."""

    def __init__(self, parts: CacheParts) -> None:
        settings = parts.settings
        self.settings = part_of(settings, LeasePlace).leases
        self._store = parts.overlap.store
        self.book = parts.state.of(LeaseState).book_at(self._store.address)
        self._metrics = parts.metrics.group(LeaseMetrics)
        self._clock = parts.clock

    def bind_gauges(self, metrics: Metrics) -> None:
        """Bind the gauges to this object, which alone acts on the book."""
        book = self.book
        group = metrics.group(LeaseMetrics)
        book.owner = self
        group.kept_ratio.set_source(lambda: () if book.kept_ratio is None else [((), book.kept_ratio)])
        group.held_tokens.set_source(
            lambda: [((tenant,), float(tokens)) for tenant, tokens in book.tenant_tokens.items()]
        )
        group.entries.set_source(
            lambda: [(("leases",), float(len(book.leases))), (("waiting",), float(len(book.waiting)))]
        )

    def watch(self, facts: RequestFacts) -> LeaseWatch:
        """Make the observer of the request with these facts."""
        return LeaseWatch(self, facts)

    def finished(self, facts: RequestFacts, outcome: Outcome, tenant: str, *, calls_tool: bool) -> LeaseResult | None:
        """Verify the request's lease and expect the conversation's next turn; returns the lease's result, if any."""
        lease = self.book.take_returned(facts.keys)
        endpoint = outcome.endpoint
        if endpoint is None or not outcome.prefilled:
            if lease is not None:
                self._count_end(lease, "unverified")
            return None
        kept = None if lease is None else self._verify(lease, facts.cluster, outcome)
        asked_s = facts.request.retention_s or read_ttl_s(facts.request.prompt)
        session = facts.names.session
        if facts.request.session_ends:
            self._end_session(session)
        elif facts.keys and (calls_tool or asked_s is not None):
            cluster = facts.cluster.name
            self.book.waiting.add(
                IdleConversation(facts.keys[-1], self._clock(), endpoint, cluster, tenant, session, calls_tool, asked_s)
            )
        return kept

    def tokens_known(
        self, facts: RequestFacts, used: Sequence[KnownPrefix], tokens: TokenIds, endpoint: Endpoint
    ) -> None:
        """Lease this prompt if its conversation is expected back."""
        prefix = used[-1]
        waiting = self.book.waiting.get(prefix.key)
        if waiting is None:
            return
        until = waiting.ended_at + choose_duration(waiting, self.settings)
        lease = Lease(waiting, prefix, endpoint.instance_id, self._clock(), until)
        refusal = self._refuse(lease) or self.book.grant(lease, self.settings)
        if refusal:
            self._metrics.refusals.labels(refusal).inc()
            return
        self._metrics.grants.labels(lease.why.value).inc()
        self._pin(lease, lease.why.value)

    def tick(self) -> None:
        """Between requests: ends, renewals, and pins to be taken back."""
        if self.book.owner is not self:
            return  # the service that follows on this one sees to it
        now = self._clock()
        for lease, result in self.book.take_expired(now):
            self._count_end(lease, result)
        if not self._counts:
            for lease in self.book.leases.values():
                if lease.held and lease.returned_at is None and now - lease.pinned_at >= self._store.pin_renewal_s:
                    self._pin(lease, "renewal")
        self._take_back()

    def done(self, action: Action, now: float) -> None:
        """Note a pin that had its effect, or one that was taken back."""
        at = action.instance_id
        prefix = action.prefix
        assert prefix is not None
        lease = self.book.leases.get(prefix.key)
        if action.kind is ActionKind.UNPIN:
            self.book.released.pop((at, prefix.key), None)
        elif lease is not None and lease.instance == at:
            lease.held = True
            lease.pinned_at = now
        else:
            self.book.released[at, prefix.key] = prefix  # it ended meanwhile

    def close(self) -> None:
        """Leases have been switched off, or the proxy ends."""
        if self.book.owner is not self:
            return
        for lease in list(self.book.leases.values()):
            self.book.release(lease)
            self._count_end(lease, "expired")
        self._take_back()
        for gauge in (self._metrics.kept_ratio, self._metrics.held_tokens, self._metrics.entries):
            gauge.set_source(tuple)

    @property
    def _counts(self) -> bool:
        """True if pins are counted, and stay until they are taken back."""
        return ActionKind.UNPIN in self._store.supported

    def _refuse(self, lease: Lease) -> str:
        """Why nothing pins it there; "" if LMCache does."""
        action = Action(ActionKind.PIN, lease.instance, lease.prefix, "")
        return "" if self._store.can_do(action) else "no_pins"

    def _pin(self, lease: Lease, reason: str) -> None:
        action = Action(ActionKind.PIN, lease.instance, lease.prefix, f"lease {reason}", own=True)
        self._store.submit(action, self.done)

    def _take_back(self) -> None:
        if not self._counts:
            self.book.released.clear()
        for (instance, _), prefix in list(self.book.released.items()):
            self._store.submit(Action(ActionKind.UNPIN, instance, prefix, "lease over", own=True), self.done)

    def _end_session(self, session: int) -> None:
        for lease in self.book.end_session(session):
            self._count_end(lease, "session_ended")
        self._take_back()

    def _verify(self, lease: Lease, cluster: Cluster, outcome: Outcome) -> LeaseResult:
        """Compare what the engine reused with what was promised."""
        reused = outcome.cached_tokens
        if not lease.held:
            result = "early"
        elif reused is None:
            result = "unverified"
        elif reused >= lease.reusable_tokens:  # elsewhere too: from a store that several engines read
            result = "kept"
        else:
            result = "broken" if outcome.endpoint == lease.of.endpoint else "elsewhere"
        reused = min(reused or 0, lease.tokens)
        seconds = _find_seconds(cluster, outcome, reused, self._clock())
        self._count_end(lease, result)
        if result in ("kept", "broken"):
            self._metrics.promised_tokens.inc(lease.tokens)
            self._metrics.reused_tokens.inc(reused)
            self._metrics.reused_seconds.inc(seconds)
        return LeaseResult(result, lease.why.value, lease.tokens, reused, round(seconds, 6))

    def _count_end(self, lease: Lease, result: str) -> None:
        self.book.results[result] += 1
        self._metrics.results.labels(result).inc()


def _find_seconds(cluster: Cluster, outcome: Outcome, tokens: int, now: float) -> float:
    """Return the learned prefill seconds of these tokens at the endpoint that answered; 0: not known."""
    speeds = cluster.speeds
    if speeds is None or speeds.learning or not tokens or outcome.endpoint is None:
        return 0.0
    return prefill_s(tokens, 0, 0.0, speeds.seconds) * speeds.slowness(outcome.endpoint, now)
