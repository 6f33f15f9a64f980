"""A cluster and a kvcache service as the proxy has them, with traffic under way, for the decision benchmark.

Chats begin with one system prompt all share. Four bytes make a token, so that tokens and text agree on what is equal;
engines' events are applied as they would come, between the decisions.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter

import msgspec

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import EndpointId, InferenceRequest, Prompt, RequestKind
from kvproxy.cache.indexes.block_events import BlockStored
from kvproxy.cache.overlap.facts import RequestFacts, Result
from kvproxy.cache.overlap.index_state import FollowedEvents
from kvproxy.cache.overlap.reports import EngineReports
from kvproxy.cache.prefix.hashing import token_blocks
from kvproxy.cache.service import KvCache
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.pick import AttemptOutcome, Pick
from kvproxy.cluster.routing.policy import PickRequest
from kvproxy.cluster.routing.selector import Decision
from kvproxy.cluster.settings import ClusterSettings, EndpointSettings, HealthCheckSettings, PolicyName
from kvproxy.proxy.request.parse import parse_body

BYTES_PER_TOKEN = 4
BLOCK_TOKENS = 16
MODEL = "bench"
#: Requests under way for each endpoint: half of them wait for their first token.
IN_FLIGHT = 4
#: Tokens of the system prompt, and of a later turn (an answer and the next question).
SYSTEM_TOKENS, TURN_TOKENS = 512, 384
_INTERVAL_S = 0.02  # between two requests, for eight endpoints
_ROLES = ("system", "user", "assistant")


def tokens_of(prompt: Prompt) -> array[int]:
    """Four bytes each, part by part, and a few for the generation prompt."""
    tokens = array("I")
    for part in prompt.parts:
        tokens.frombytes(part + bytes(-len(part) % BYTES_PER_TOKEN))
    tokens.extend(range(1, 9))
    return tokens


@dataclass(slots=True)
class Chat:
    """A session: its first turn is of about `tokens`; the next one is that with `TURN_TOKENS` more."""

    rng: random.Random
    system: str
    tokens: int
    contents: list[str] = field(default_factory=list)

    def turns(self) -> Iterator[bytes]:
        """Their bodies, as clients send them."""
        self.contents = [self.system, self._text(self.tokens - SYSTEM_TOKENS)]
        while True:
            yield self._body()
            self.contents += [self._text(TURN_TOKENS // 2), self._text(TURN_TOKENS // 2)]

    def _text(self, tokens: int) -> str:
        """Without the bytes of the JSON around it."""
        return self.rng.randbytes(2 * tokens).hex()[: max(1, BYTES_PER_TOKEN * tokens - 36)]

    def _body(self) -> bytes:
        roles = (_ROLES[min(i, 1) + (i > 1 and i % 2 == 0)] for i in range(len(self.contents)))
        messages = [{"role": role, "content": text} for role, text in zip(roles, self.contents, strict=True)]
        return msgspec.json.encode({"model": MODEL, "stream": True, "messages": messages})


@dataclass(slots=True)
class Decided:
    """A request on its way, and what it cost: microseconds until its place was reserved, and afterwards."""

    facts: RequestFacts
    pick: Pick
    reserved_us: float
    settled_us: float = 0.0


class World:
    """`events`: the engines' KV events are followed and prompts' tokens known once they were asked for."""

    def __init__(self, *, endpoints: int, events: bool, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.events = events
        names = [EndpointId(f"e{number}") for number in range(endpoints)]
        settings = ClusterSettings(
            policy=PolicyName.KV_AWARE,
            endpoints=tuple(
                EndpointSettings(id=name, url=f"http://127.0.0.1:{8000 + n}") for n, name in enumerate(names)
            ),
            health=HealthCheckSettings(active=False),
        )
        metrics = Metrics()
        self.cluster = Cluster("bench", settings, metrics=metrics, clock=self.clock, rng=self.rng)
        self.kv = KvCache(
            KvCacheSettings(),
            clusters={"bench": self.cluster},
            reports=EngineReports({"bench": FollowedEvents()} if events else {}),
            metrics=metrics,
            clock=self.clock,
            rng=self.rng,
        )
        self.local = self.kv.overlap.indexes["bench"]
        if events:
            self.local.exact = frozenset(names)
        self.system = self.rng.randbytes(2 * SYSTEM_TOKENS).hex()
        self.spent_us = 0.0  # on all decisions so far
        self._under_way: deque[Decided] = deque()
        self._most = IN_FLIGHT * endpoints
        self._interval_s = _INTERVAL_S * 8 / endpoints

    def clock(self) -> float:
        """Virtual: the engines take no time of this process."""
        return self.now

    def chat(self, tokens: int) -> Iterator[bytes]:
        """Yield the turns of a new session."""
        return Chat(self.rng, self.system, tokens).turns()

    def fill(self, tokens: int) -> None:
        """Traffic of others, as many as are under way at once: whatever was asked before is finished then."""
        for _ in range(self._most + 1):
            self.ask(next(self.chat(tokens)))

    def ask(self, body: bytes) -> Decided:
        """Decide where it goes, just parsed as in the proxy. It is settled some requests later."""
        self.now += self._interval_s
        request = parse_body(RequestKind.CHAT, body)
        assert request is not None
        began = perf_counter()
        facts = self.kv.gather(request, body, cluster=self.cluster)
        decision = self.cluster.decide(_pick_request(request, facts), now=self.now)
        assert isinstance(decision, Decision)
        pick = self.cluster.reserve(decision, self.now)
        self.kv.placed(facts, pick.endpoint.id)
        decided = Decided(facts, pick, 1e6 * (perf_counter() - began))
        self.spent_us += decided.reserved_us
        self._under_way.append(decided)
        if len(self._under_way) > self._most // 2:
            self._answer(self._under_way[-self._most // 2])
        if len(self._under_way) > self._most:
            self._finish(self._under_way.popleft())
        return decided

    def _answer(self, decided: Decided) -> None:
        began = perf_counter()
        decided.pick.first_token(self.now)
        self._settled(decided, 1e6 * (perf_counter() - began))

    def _finish(self, decided: Decided) -> None:
        """Finish a request with the engine's report, which is as predicted."""
        pick, facts, now = decided.pick, decided.facts, self.now
        cached = facts.overlaps.matched_tokens(pick.endpoint.id) // BLOCK_TOKENS * BLOCK_TOKENS
        tokens = tokens_of(facts.request.prompt)
        result = Result(pick.endpoint.id, True, len(tokens), min(cached, len(tokens) - 1))
        began = perf_counter()
        pick.settle(AttemptOutcome.SUCCESS, now)
        pick.observe_reuse(cached, now)
        self.kv.finished(facts, result)
        self._settled(decided, 1e6 * (perf_counter() - began))
        if self.events:
            self._tell(facts, pick.endpoint.id, tokens)

    def _settled(self, decided: Decided, us: float) -> None:
        decided.settled_us += us
        self.spent_us += us

    def _tell(self, facts: RequestFacts, endpoint: EndpointId, tokens: array[int]) -> None:
        """Apply the engine's events and the tokens of `/tokenize` after the response."""
        whole = tokens[: len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS]
        hashes = tuple(token_blocks(whole, BLOCK_TOKENS, 1))
        self.local.precise.apply_events(endpoint, 0, [BlockStored(hashes, None, whole, BLOCK_TOKENS)])
        self.kv.overlap.tokens.remember_tokens(facts, tokens, parts=len(facts.request.prompt.parts))


def _pick_request(request: InferenceRequest, facts: RequestFacts) -> PickRequest:
    """As the router makes it."""
    return PickRequest(
        model=MODEL,
        session_key=request.session_key,
        facts=facts.overlaps,
        streams=request.stream,
        prompt_head=request.prompt.parts[0][:1024],
    )
