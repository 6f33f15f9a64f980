"""Broken prefixes: for each returning session whose last prompt was not fully reused, the cause and the cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import EndpointId, Prompt
from kvproxy.cache.feature import CacheObserver, CacheParts
from kvproxy.cache.metrics import IndexMetrics
from kvproxy.cache.overlap.facts import RequestFacts, Result
from kvproxy.cache.prefix.session_hashes import PromptText
from kvproxy.cluster.endpoint_metrics import OTHER
from kvproxy.features.hygiene.comparison import ADVICE, Cause, Change, find_change
from kvproxy.features.hygiene.metrics import PrefixBreakMetrics
from kvproxy.features.hygiene.note import NOTE, PrefixBreak
from kvproxy.features.hygiene.parts import digest_part
from kvproxy.features.hygiene.threads import Session, SessionKey, Sessions, Thread

#: Rows and breaks that are kept for people. Tenants are those of the configuration; beyond the bound they share a row.
MAX_ROWS = 512
MAX_LATEST = 100

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


class BreakBook:
    """State of sessions and their breaks. It is bounded, and outlives a reload."""

    def __init__(self) -> None:
        self.sessions = Sessions()
        self.returned = 0  # turns that were compared with the one before
        self.latest: deque[RecentBreak] = deque(maxlen=MAX_LATEST)
        self.reusing: set[Place] = set()  # engines that ever reused anything
        self.dropping: set[Place] = set()  # engines that reused a prompt whose header had changed
        self._totals: dict[tuple[Cause, str, str], BreakTotals] = {}

    @property
    def totals(self) -> list[tuple[tuple[Cause, str, str], BreakTotals]]:
        """By cause, client and tenant, the dearest first."""
        return sorted(self._totals.items(), key=lambda row: -row[1].tokens)

    def add(self, one: RecentBreak) -> None:
        """Count a break."""
        found = one.found
        key = (Cause(found.cause), one.client, one.tenant)
        if key not in self._totals and len(self._totals) >= MAX_ROWS:
            key = (*key[:2], OTHER)
        totals = self._totals.setdefault(key, BreakTotals())
        totals.breaks += 1
        totals.tokens += found.tokens
        totals.seconds += found.seconds or 0.0
        totals.part = found.part
        totals.request_id = one.request_id
        totals.at = one.at
        self.latest.append(one)

    def keep_only(self, present: Collection[Place]) -> None:
        """Forget all endpoints but these."""
        self.reusing.intersection_update(present)
        self.dropping.intersection_update(present)

    def describe(self, now: float) -> dict[str, object]:
        """Return the answer of `/cache/breaks`: the dearest cause first, and the latest breaks."""
        return {
            "returned": self.returned,
            "sessions": len(self.sessions),
            "causes": self.describe_causes(now),
            "latest": [
                {
                    "ago_s": now - one.at,
                    "request_id": one.request_id,
                    "cluster": one.cluster,
                    "client": one.client,
                    "tenant": one.tenant,
                    "cause": one.found.cause,
                    "part": one.found.part,
                    "tokens": one.found.tokens,
                    "seconds": one.found.seconds,
                }
                for one in reversed(self.latest)
            ],
        }

    def describe_causes(self, now: float) -> list[dict[str, object]]:
        """Return its rows, the dearest first."""
        return [
            {
                "cause": cause.value,
                "client": client,
                "tenant": tenant,
                "breaks": row.breaks,
                "tokens": row.tokens,
                "seconds": row.seconds,
                "part": row.part,
                "request_id": row.request_id,
                "ago_s": now - row.at,
                "what": ADVICE[cause][0],
                "fix": ADVICE[cause][1],
            }
            for (cause, client, tenant), row in self.totals
        ]


#: An engine reuses whole blocks, and some templates write the end of a prompt anew: so much is never missed.
_SPARED_TOKENS = 256
_SPARED_SHARE = 0.1
#: Where it is clear that something changed, so much may still be the end of the last block.
_LEAST_TOKENS = 160
_HEADER = b"x-anthropic-billing-header"
_HEADER_WITHIN = 512  # bytes of a system prompt


class PrefixBreaks(CacheObserver):
    """Looks at every request of a session when it is over.

    The engine's count of reused tokens decides: a reused part was not broken, whatever changed. If an engine does not
    report it, only changes by the client count."""

    def __init__(self, parts: CacheParts) -> None:
        self.book = parts.state.of(BreakBook)
        self._clusters = parts.clusters
        self._metrics = parts.metrics.group(PrefixBreakMetrics).prefix_break_tokens
        self._clock = parts.clock

    def learned(self, facts: RequestFacts, result: Result) -> None:
        """Note what the request broke, if anything. Once a request."""
        if facts.text is None or facts.request.session_key is None or result.endpoint is None or not result.prefilled:
            return
        found = self._look(facts, facts.text, (result.tenant, facts.request.session_key), result)
        if found is not None:
            result.notes[NOTE] = found
            self._count(found, facts, result)

    def tick(self) -> None:
        """Forget endpoints that left."""
        self.book.keep_only({(name, one.id) for name, cluster in self._clusters.items() for one in cluster.endpoints})

    def bind_gauges(self, metrics: Metrics) -> None:
        """Bind the gauges to this object."""
        sessions = self.book.sessions
        metrics.group(IndexMetrics).index_bytes.labels("session_parts").set_function(lambda: sessions.held_bytes)

    def _look(self, facts: RequestFacts, text: PromptText, key: SessionKey, result: Result) -> PrefixBreak | None:
        """Compare the prompt with the session's last ones, and keep it as the last of its conversation."""
        keys = facts.keys
        sessions = self.book.sessions
        found = None
        session = sessions.use(key)
        thread = session.continued_by(keys)
        if thread is None:
            thread, found = self._started(session, facts, text, result)
        else:
            cached = result.cached_tokens
            expected = thread.prompt_tokens
            if cached is not None and thread.at <= facts.started_at:  # else the last one was still under way
                self.book.returned += 1
                lost = expected - cached
                if lost > _SPARED_TOKENS and lost > _SPARED_SHARE * expected:
                    found = self._lost(thread, facts, result, expected)
                elif not thread.proved:
                    self._prove(thread, facts, result)
            sessions.go_on(session, thread, keys, facts.cursor.hashes, text)
        thread.endpoint = result.endpoint
        thread.prompt_tokens = result.prompt_tokens or 0
        thread.at = self._clock()
        if facts.request.session_ends:
            sessions.forget(key)
        return found

    def _prove(self, thread: Thread, facts: RequestFacts, result: Result) -> None:
        """Note that the engine reused the thread's last prompt: it keeps prefilled prompts, and drops a header that
        changed."""
        assert result.endpoint is not None
        thread.proved = True
        place = (facts.cluster.name, result.endpoint)
        self.book.reusing.add(place)
        if thread.header and header_of(facts.request.prompt) != thread.header:
            self.book.dropping.add(place)

    def _lost(self, thread: Thread, facts: RequestFacts, result: Result, expected: int) -> PrefixBreak | None:
        """Return a break by the engine: it reused less than expected although the prompt begins with the last one."""
        cached = result.cached_tokens or 0
        endpoint = result.endpoint
        assert endpoint is not None
        lost = expected - expected % self._step(facts, result) - cached
        place = (facts.cluster.name, endpoint)
        if cached:
            self.book.reusing.add(place)
        if lost <= _SPARED_TOKENS or lost <= _SPARED_SHARE * expected:
            return None
        if thread.header and place not in self.book.dropping and header_of(facts.request.prompt) != thread.header:
            return self._cost(Cause.VOLATILE_HEADER, "system block 1", lost, facts, result)
        if place not in self.book.reusing:
            return None  # it may keep nothing at all
        moved = thread.endpoint is not None and thread.endpoint != endpoint
        return self._cost(Cause.MOVED if moved else Cause.EVICTED, "engine", lost, facts, result)

    def _started(
        self, session: Session, facts: RequestFacts, text: PromptText, result: Result
    ) -> tuple[Thread, PrefixBreak | None]:
        """None of the threads goes on: a new one, and what broke another, if anything did."""
        prompt = facts.request.prompt
        sessions = self.book.sessions
        head = sessions.heads.head_of(text)
        thread = Thread.begun(facts.model, facts.keys, facts.hashes, text, head, header=header_of(prompt))
        change = find_change(session, thread, text) if session.threads else None
        replaced = None if change is None or change.cause is Cause.MODEL_SWITCH else change.thread
        sessions.add(session, thread, instead_of=replaced)
        return thread, None if change is None else self._broken(change, facts, result)

    def _broken(self, change: Change, facts: RequestFacts, result: Result) -> PrefixBreak | None:
        self.book.returned += 1
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

    def _count(self, found: PrefixBreak, facts: RequestFacts, result: Result) -> None:
        client = facts.request.client
        self._metrics.labels(found.cause, client).inc(found.tokens)
        name = facts.cluster.name
        self.book.add(RecentBreak(self._clock(), result.request_id, name, client, result.tenant, found))


def header_of(prompt: Prompt) -> int:
    """Return a digest of the billing header that the prompt came with; 0: none. Not every engine leaves it out."""
    shape = prompt.shape
    if shape.startswith(b"system:") and (found := _header_in(shape[:_HEADER_WITHIN])):  # it is the first of the fields
        return found
    return _header_in(prompt.parts[0][:_HEADER_WITHIN]) if prompt.parts else 0


def _header_in(text: bytes) -> int:
    at = text.find(_HEADER)
    return 0 if at < 0 else digest_part(text[at:].partition(b'"')[0].partition(b"\\n")[0])
