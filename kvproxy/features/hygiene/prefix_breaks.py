"""What breaks prefixes: for each session that returns and was not reused as far as its last prompt went, why and what
it cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, EndpointId, Prompt
from kvproxy.cache.metrics import HoldingMetrics
from kvproxy.cache.overlap.facts import RequestFacts, Result
from kvproxy.cache.prefix.session_hashes import PromptText
from kvproxy.cluster.endpoint_metrics import OTHER
from kvproxy.features.hygiene.causes import Cause, PrefixBreak
from kvproxy.features.hygiene.comparison import Change, find_change
from kvproxy.features.hygiene.metrics import PrefixBreakMetrics
from kvproxy.features.hygiene.parts import digest_part
from kvproxy.features.hygiene.threads import Session, Sessions, Thread

#: An engine reuses whole blocks, and some templates write the end of a prompt anew: so much is never missed.
_SPARED_TOKENS = 256
_SPARED_SHARE = 0.1
#: Where it is clear that something changed, so much may still be the end of the last block.
_LEAST_TOKENS = 160
#: Rows and breaks that are kept for people. Tenants are those of the configuration; beyond the bound they share a row.
MAX_ROWS = 512
MAX_LATEST = 100

_HEADER = b"x-anthropic-billing-header"
_HEADER_WITHIN = 512  # bytes of a system prompt

Place = tuple[str, EndpointId]


@dataclass(slots=True)
class BreakTotals:
    """Of one cause, client and tenant."""

    breaks: int = 0
    tokens: int = 0
    seconds: float = 0.0
    part: str = ""  # of the latest
    request_id: str = ""
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class RecentBreak:
    """One of the latest."""

    at: float
    request_id: str
    cluster: str
    client: str
    tenant: str
    found: PrefixBreak


class PrefixBreaks:
    """Looks at every request of a session when it is over. What it keeps is bounded: `Sessions`, and rows.

    The engine's count of reused tokens decides: what it reused was not broken, whatever changed. Where an engine does
    not report it, only changes count that the client made.
    """

    def __init__(self, metrics: Metrics, *, clock: Clock) -> None:
        self.sessions = Sessions()
        self.returned = 0  # turns that were compared with the one before
        self.latest: deque[RecentBreak] = deque(maxlen=MAX_LATEST)
        self._totals: dict[tuple[Cause, str, str], BreakTotals] = {}
        self._metrics = metrics.group(PrefixBreakMetrics).prefix_break_tokens
        self._clock = clock
        self._reusing: set[Place] = set()  # engines that ever reused anything
        self._dropping: set[Place] = set()  # engines that reused a prompt whose header had changed

    @property
    def totals(self) -> list[tuple[tuple[Cause, str, str], BreakTotals]]:
        """By cause, client and tenant, the dearest first."""
        return sorted(self._totals.items(), key=lambda row: -row[1].tokens)

    def finished(self, facts: RequestFacts, result: Result) -> PrefixBreak | None:
        """The request is over; what it broke. Once a request."""
        request = facts.request
        text = facts.text
        endpoint = result.endpoint
        if text is None or (name := request.session_key) is None or endpoint is None or not result.prefilled:
            return None
        keys = facts.keys
        key = (result.tenant, name)
        sessions = self.sessions
        found = None
        session = sessions.use(key)
        thread = session.continued_by(keys)
        if thread is None:
            thread, found = self._started(session, facts, text, result)
        else:
            cached = result.cached_tokens
            expected = thread.prompt_tokens
            if cached is not None and thread.at <= facts.started_at:  # else the last one was still under way
                self.returned += 1
                lost = expected - cached
                if lost > _SPARED_TOKENS and lost > _SPARED_SHARE * expected:
                    found = self._lost(thread, facts, result, expected)
                elif not thread.proved:
                    self._prove(thread, facts, endpoint)
            sessions.go_on(session, thread, keys, facts.cursor.hashes, text)
        thread.endpoint = endpoint
        thread.prompt_tokens = result.prompt_tokens or 0
        thread.at = self._clock()
        if found is not None:
            self._count(found, facts, result, thread.at)
        if request.session_ends:
            sessions.forget(key)
        return found

    def keep_only(self, present: Collection[Place]) -> None:
        """Forget all endpoints but these."""
        self._reusing.intersection_update(present)
        self._dropping.intersection_update(present)

    def show(self, metrics: Metrics) -> None:
        """The gauges read it from now on."""
        metrics.group(HoldingMetrics).index_bytes.labels("session_parts").set_function(lambda: self.sessions.held_bytes)

    def _prove(self, thread: Thread, facts: RequestFacts, endpoint: EndpointId) -> None:
        """The engine reused the thread's last prompt: it keeps what it prefills, and drops a header that changed."""
        thread.proved = True
        place = (facts.cluster.name, endpoint)
        self._reusing.add(place)
        if thread.header and header_of(facts.request.prompt) != thread.header:
            self._dropping.add(place)

    def _lost(self, thread: Thread, facts: RequestFacts, result: Result, expected: int) -> PrefixBreak | None:
        """Return the engine reused less than expected, although the prompt begins with the last one."""
        cached = result.cached_tokens or 0
        endpoint = result.endpoint
        assert endpoint is not None
        lost = expected - expected % self._step(facts, result) - cached
        place = (facts.cluster.name, endpoint)
        if cached:
            self._reusing.add(place)
        if lost <= _SPARED_TOKENS or lost <= _SPARED_SHARE * expected:
            return None
        if thread.header and place not in self._dropping and header_of(facts.request.prompt) != thread.header:
            return self._cost(Cause.VOLATILE_HEADER, "system block 1", lost, facts, result)
        if place not in self._reusing:
            return None  # it may keep nothing at all
        moved = thread.endpoint is not None and thread.endpoint != endpoint
        return self._cost(Cause.MOVED if moved else Cause.EVICTED, "engine", lost, facts, result)

    def _started(
        self, session: Session, facts: RequestFacts, text: PromptText, result: Result
    ) -> tuple[Thread, PrefixBreak | None]:
        """None of the threads goes on: a new one, and what broke another, if anything did."""
        prompt = facts.request.prompt
        sessions = self.sessions
        head = sessions.heads.head_of(text)
        thread = Thread.begun(facts.model, facts.keys, facts.hashes, text, head, header=header_of(prompt))
        change = find_change(session, thread, text) if session.threads else None
        replaced = None if change is None or change.cause is Cause.MODEL_SWITCH else change.thread
        sessions.add(session, thread, instead_of=replaced)
        return thread, None if change is None else self._broken(change, facts, result)

    def _broken(self, change: Change, facts: RequestFacts, result: Result) -> PrefixBreak | None:
        self.returned += 1
        prompt_tokens = result.prompt_tokens
        expected = change.thread.prompt_tokens
        if prompt_tokens and expected and result.cached_tokens is not None:
            lost = min(expected, prompt_tokens) - result.cached_tokens
        else:
            tokens = prompt_tokens or facts.overlaps.prompt_tokens
            lost = int(change.again_bytes * tokens / max(1, facts.prompt_bytes))
        if lost <= max(_LEAST_TOKENS, self._step(facts, result) - 1):
            return None
        return self._cost(change.cause, change.part, lost, facts, result)

    @staticmethod
    def _step(facts: RequestFacts, result: Result) -> int:
        """Return the step in tokens in which the engine reuses."""
        return 1 if result.endpoint is None else facts.indexes.steps.known.get(result.endpoint, 1)

    def _cost(self, cause: Cause, part: str, tokens: int, facts: RequestFacts, result: Result) -> PrefixBreak:
        """With what these tokens took behind those that were reused; the rest attends to all of them either way."""
        speeds = facts.cluster.speeds
        endpoint = result.endpoint
        seconds = None
        if speeds is not None and endpoint is not None and not speeds.learning:
            _, token_s, attention_s, _ = speeds.seconds
            own_s = tokens * (token_s + attention_s * ((result.cached_tokens or 0) + 0.5 * tokens))
            seconds = own_s * speeds.slowness(endpoint, self._clock())
        return PrefixBreak(cause, part, tokens, seconds)

    def _count(self, found: PrefixBreak, facts: RequestFacts, result: Result, now: float) -> None:
        client = facts.request.client
        cause = Cause(found.cause)
        key = (cause, client, result.tenant)
        if key not in self._totals and len(self._totals) >= MAX_ROWS:
            key = (cause, client, OTHER)
        totals = self._totals.setdefault(key, BreakTotals())
        totals.breaks += 1
        totals.tokens += found.tokens
        totals.seconds += found.seconds or 0.0
        totals.part = found.part
        totals.request_id = result.request_id
        totals.at = now
        self._metrics.labels(cause.value, client).inc(found.tokens)
        self.latest.append(RecentBreak(now, result.request_id, facts.cluster.name, client, result.tenant, found))


def header_of(prompt: Prompt) -> int:
    """Return a digest of the billing header that the prompt came with; 0: none. Not every engine leaves it out."""
    shape = prompt.shape
    if shape.startswith(b"system:") and (found := _header_in(shape[:_HEADER_WITHIN])):  # it is the first of the fields
        return found
    return _header_in(prompt.parts[0][:_HEADER_WITHIN]) if prompt.parts else 0


def _header_in(text: bytes) -> int:
    at = text.find(_HEADER)
    return 0 if at < 0 else digest_part(text[at:].partition(b'"')[0].partition(b"\\n")[0])
