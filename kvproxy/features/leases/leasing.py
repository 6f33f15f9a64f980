"""Leases at work: watches answers and returns, has prompts pinned or touched, and verifies what was promised."""

from __future__ import annotations

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock
from kvproxy.cache.actions.executor import ActionExecutor
from kvproxy.cache.actions.hotness import KnownPrefix
from kvproxy.cache.actions.strategies import Action, PressureOf, Served
from kvproxy.cache.overlap.facts import RequestFacts, Result
from kvproxy.cache.overlap.lookup import LookupClient
from kvproxy.cache.prefix.cache_marks import read_ttl_s
from kvproxy.cache.providers import ActionKind
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.routing.selector import Decision
from kvproxy.features.leases.conversations import Waiting, choose_duration
from kvproxy.features.leases.gaps import PendingCall, pause_kind
from kvproxy.features.leases.leases import Lease, LeaseBook, Lever, Why
from kvproxy.features.leases.metrics import LeaseMetrics
from kvproxy.features.leases.session_holds import SessionHolds
from kvproxy.features.leases.touching import Toucher
from kvproxy.proxy.request.exchange import Exchange, LeaseResult
from kvproxy.proxy.request.observer import RequestObserver


class LeaseWatch(RequestObserver):
    """Follows one request: as a return, and as an answer that may call a tool."""

    __slots__ = ("_call", "_facts", "_leasing", "result")

    def __init__(self, leasing: Leasing, facts: RequestFacts) -> None:
        self._leasing = leasing
        self._facts = facts
        self._call = PendingCall()
        self.result: LeaseResult | None = None  # what became of the lease that it came back to

    def body_piece(self, exchange: Exchange, piece: bytes) -> None:
        self._call.read_piece(piece)

    def placed(self, exchange: Exchange, decision: Decision[Endpoint], now: float) -> None:
        self._leasing.book.note_return(self._facts.keys, now)

    def end(self, result: Result) -> None:
        """The request is over; the service calls this, before what is done about its prompt."""
        self.result = self._leasing.finished(self._facts, result, self._call.tool)


class Leasing:
    """Pins go through the executor as every action at LMCache; touches through the same queue. `book` outlives it."""

    def __init__(
        self,
        settings: KvCacheSettings,
        *,
        book: LeaseBook,
        executor: ActionExecutor,
        lookups: LookupClient,
        toucher: Toucher,
        holds: SessionHolds,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self.book = book
        self._settings = settings.leases
        self._renewal_s = settings.cache_strategy.pin_renewal
        self._executor = executor
        self._lookups = lookups
        self._toucher = toucher
        self._holds = holds
        self._metrics = metrics.group(LeaseMetrics)
        self._clock = clock

    def show(self, metrics: Metrics) -> None:
        """The gauges read it from now on."""
        book = self.book
        group = metrics.group(LeaseMetrics)
        book.owner = self
        group.kept_ratio.set_source(lambda: () if book.kept_ratio is None else [((), book.kept_ratio)])
        group.held_tokens.set_source(
            lambda: [((tenant,), float(tokens)) for tenant, tokens in book.tenant_tokens.items()]
        )
        group.entries.set_source(
            lambda: [
                (("leases",), float(len(book.leases))),
                (("waiting",), float(len(book.waiting))),
                (("pauses",), float(len(book.gaps))),
                (("sessions",), float(len(book.to_close))),
            ]
        )

    def watch(self, facts: RequestFacts) -> LeaseWatch:
        """Return what follows the request with these facts."""
        return LeaseWatch(self, facts)

    def finished(self, facts: RequestFacts, result: Result, tool: str | None) -> LeaseResult | None:
        """A request is over: what it reports of the lease it came under, if any. Its conversation is waited for."""
        now = self._clock()
        endpoint = result.endpoint
        lease = self.book.take_returned(facts.keys)
        if endpoint is None or not result.prefilled:
            if lease is not None:
                self._count_end(lease, "unverified")
            return None
        if result.prompt_tokens is not None:
            computed = result.prompt_tokens - (result.cached_tokens or 0) + (result.completion_tokens or 0)
            self._toucher.insertions.note((facts.cluster.name, endpoint), computed, now)
        kept = None if lease is None else self._verify(lease, facts.cluster, result)
        if facts.request.session_ends:
            self._end_session(facts.names.session)
        elif facts.keys:
            self.book.expect(
                Waiting(
                    facts.keys[-1],
                    pause_kind(facts.request.client, tool),
                    now,
                    endpoint,
                    facts.cluster.name,
                    result.tenant,
                    facts.names.session,
                    _asked_s(facts),
                )
            )
        return kept

    def hold(self, prefix: KnownPrefix, endpoint: Endpoint) -> None:
        """The tokens of a prompt that was answered there are known: a lease on it, if it is worth one."""
        waiting = self.book.waiting.get(prefix.key)
        now = self._clock()
        if waiting is None:
            return
        duration_s = choose_duration(waiting, self.book.gaps, self._settings)
        if duration_s is None:
            return
        lease, refusal = self._make(waiting, prefix, endpoint, duration_s, now)
        if not refusal:
            capacity = None if lease.lever is Lever.PIN else self._toucher.capacity_of(endpoint)  # its own memory
            refusal = self.book.grant(lease, self._settings, capacity_tokens=capacity)
        if refusal:
            self._metrics.refusals.labels(refusal).inc()
            return
        self._metrics.grants.labels(lease.why.value, lease.lever.value).inc()
        if lease.lever is Lever.PIN:
            self._pin(lease, lease.why.value)
        elif lease.lever is Lever.SESSION:
            self._holds.hold(lease, endpoint)

    def tick(self) -> None:
        """Between requests: ends, renewals, touches, and pins to be taken back."""
        if self.book.owner is not self:
            return  # the service that follows on this one sees to it
        now = self._clock()
        for lease, result in self.book.take_expired(now):
            self._count_end(lease, result)
        for lease in [one for one in self.book.leases.values() if one.returned_at is None and one.told_tokens is None]:
            if lease.lever is Lever.PIN:
                if lease.held and not self._counts and now - lease.used_at >= self._renewal_s:
                    self._pin(lease, "renewal")
            elif lease.lever is Lever.TOUCH and (why := self._toucher.consider(lease, now)):
                self.book.release(lease)
                self._count_end(lease, why)
        self._take_back()
        self._holds.tick()
        self._toucher.keep_only_present()

    def plan(self, served: Served, pressure: PressureOf, taken: set[int], now: float) -> list[Action]:
        """Nothing: leases come by `hold`."""
        return []

    def done(self, action: Action, now: float) -> None:
        """A pin had its effect, or one was taken back."""
        at = action.instance_id
        prefix = action.prefix
        assert prefix is not None
        if action.kind is ActionKind.UNPIN:
            self.book.released.pop((at, prefix.key), None)
        elif (lease := self.book.leases.get(prefix.key)) and (lease.instance, lease.told_tokens) == (at, None):
            self.book.confirm(lease, now)
        else:
            self.book.released[at, prefix.key] = prefix  # it ended meanwhile

    def release_all(self) -> None:
        """Leases have been switched off, or the proxy ends."""
        for lease in list(self.book.leases.values()):
            self.book.release(lease, told=lease.told_tokens is not None)
            if lease.told_tokens is None:
                self._count_end(lease, "expired")
        self._take_back()
        for gauge in (self._metrics.kept_ratio, self._metrics.held_tokens, self._metrics.entries):
            gauge.set_source(tuple)

    @property
    def _counts(self) -> bool:
        """Whether pins are counted, and stay until they are taken back."""
        return ActionKind.UNPIN in self._lookups.supported

    def _make(
        self, of: Waiting, prefix: KnownPrefix, endpoint: Endpoint, duration_s: float, now: float
    ) -> tuple[Lease, str]:
        """By the best lever there is, and why by none."""
        action = Action(ActionKind.PIN, endpoint.instance_id, prefix, "")
        lever = Lever.PIN
        refusal = ""
        if ActionKind.PIN not in self._lookups.supported or self._executor.is_disabled(action):
            lever = Lever.SESSION if self._holds.can_hold(endpoint, len(prefix.tokens)) else Lever.TOUCH
            refusal = self._toucher.why_not(endpoint, len(prefix.tokens)) if lever is Lever.TOUCH else ""
        why = Why.TOOL_CALL if of.kind[1] else Why.CLIENT
        until = of.ended_at + duration_s
        held = lever is Lever.TOUCH  # the engine has just used it
        filled = self._toucher.insertions.total((of.cluster, endpoint.id))
        return Lease(of, prefix, endpoint.instance_id, lever, why, now, until, now, held, filled=filled), refusal

    def _pin(self, lease: Lease, reason: str) -> None:
        self._executor.submit(Action(ActionKind.PIN, lease.instance, lease.prefix, f"lease {reason}", own=True), self)

    def _take_back(self) -> None:
        if not self._counts:
            self.book.released.clear()
        for (instance, _), prefix in list(self.book.released.items()):
            self._executor.submit(Action(ActionKind.UNPIN, instance, prefix, "lease over", own=True), self)
        self._holds.close_ended()

    def _end_session(self, session: int) -> None:
        for lease in self.book.end_session(session):
            self._count_end(lease, "session_ended")
        self._take_back()

    def _verify(self, lease: Lease, cluster: Cluster, finished: Result) -> LeaseResult:
        """Return what the engine reused of what was promised."""
        reused = finished.cached_tokens
        there = finished.endpoint == lease.of.endpoint
        seconds = 0.0
        if not lease.held:
            result = "early"
        elif reused is None:
            result = "unverified"
        elif reused >= lease.reusable_tokens:  # elsewhere too: from a store that several engines read
            result = "kept"
        else:
            result = "broken" if there else "elsewhere"
        reused = min(reused or 0, lease.tokens)
        endpoint = None if finished.endpoint is None else cluster.find_endpoint(finished.endpoint)
        if endpoint is not None and reused:
            seconds = self._toucher.seconds(endpoint, reused, 0) or 0.0
        self._count_end(lease, result)
        if result in ("kept", "broken"):
            self._metrics.promised_tokens.inc(lease.tokens)
            self._metrics.reused_tokens.inc(reused)
            self._metrics.reused_seconds.inc(seconds)
        return LeaseResult(result, lease.why.value, lease.lever.value, lease.tokens, reused, round(seconds, 6))

    def _count_end(self, lease: Lease, result: str) -> None:
        self.book.results[result] += 1
        self._metrics.results.labels(result).inc()


def _asked_s(facts: RequestFacts) -> float | None:
    """How long the client asks for this prompt to be kept."""
    return facts.request.retention_s or read_ttl_s(facts.request.prompt)
