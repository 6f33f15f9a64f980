"""Leases at work: watches answers and returns, has prompts pinned, and verifies what was promised."""

from __future__ import annotations

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.settings.compose import part_of
from kvproxy.cache.actions.hotness import KnownPrefix
from kvproxy.cache.actions.strategies import Action, PressureOf, Served
from kvproxy.cache.clients.tokens import TokenIds
from kvproxy.cache.feature import CacheObserver, CacheParts
from kvproxy.cache.overlap.facts import RequestFacts
from kvproxy.cache.prefix.cache_marks import read_ttl_s
from kvproxy.cache.providers import ActionKind
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.routing.selector import Decision
from kvproxy.cluster.routing.work import prefill_s
from kvproxy.features.leases.feature import LeasePlace, LeaseResult
from kvproxy.features.leases.leases import IdleConversation, Lease, LeaseState, ToolCallDetector, choose_duration
from kvproxy.features.leases.metrics import LeaseMetrics
from kvproxy.proxy.request.exchange import Exchange, Outcome
from kvproxy.proxy.request.observer import RequestObserver


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
        self.book = parts.state.of(LeaseState).book_at(settings.lmcache_endpoint)
        self._renewal_s = settings.cache_strategy.pin_renewal_s
        self._executor = parts.actions.executor
        self._lookups = parts.overlap.lookups
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

    def tokens_known(self, facts: RequestFacts, prefix: KnownPrefix, tokens: TokenIds, endpoint: Endpoint) -> None:
        """Lease this prompt if its conversation is expected back."""
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
                if lease.held and lease.returned_at is None and now - lease.pinned_at >= self._renewal_s:
                    self._pin(lease, "renewal")
        self._take_back()

    def plan(self, served: Served, pressure: PressureOf, taken: set[int], now: float) -> list[Action]:
        """Nothing: leases come by `tokens_known`."""
        return []

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
        return ActionKind.UNPIN in self._lookups.supported

    def _refuse(self, lease: Lease) -> str:
        """Why nothing pins it there; "" if LMCache does."""
        action = Action(ActionKind.PIN, lease.instance, lease.prefix, "")
        pins = ActionKind.PIN in self._lookups.supported and not self._executor.is_disabled(action)
        return "" if pins else "no_pins"

    def _pin(self, lease: Lease, reason: str) -> None:
        self._executor.submit(Action(ActionKind.PIN, lease.instance, lease.prefix, f"lease {reason}", own=True), self)

    def _take_back(self) -> None:
        if not self._counts:
            self.book.released.clear()
        for (instance, _), prefix in list(self.book.released.items()):
            self._executor.submit(Action(ActionKind.UNPIN, instance, prefix, "lease over", own=True), self)

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
        seconds = self._seconds(cluster, outcome, reused)
        self._count_end(lease, result)
        if result in ("kept", "broken"):
            self._metrics.promised_tokens.inc(lease.tokens)
            self._metrics.reused_tokens.inc(reused)
            self._metrics.reused_seconds.inc(seconds)
        return LeaseResult(result, lease.why.value, lease.tokens, reused, round(seconds, 6))

    def _seconds(self, cluster: Cluster, outcome: Outcome, tokens: int) -> float:
        """Return the learned prefill seconds of these tokens at the endpoint that answered; 0: not known."""
        speeds = cluster.speeds
        if speeds is None or speeds.learning or not tokens or outcome.endpoint is None:
            return 0.0
        return prefill_s(tokens, 0, 0.0, speeds.seconds) * speeds.slowness(outcome.endpoint, self._clock())

    def _count_end(self, lease: Lease, result: str) -> None:
        self.book.results[result] += 1
        self._metrics.results.labels(result).inc()
