"""A service whose engine reuses in steps: what is learned of it, and what it is held against."""

from __future__ import annotations

from kvproxy.cache.clients.engine_metrics import CacheConfig, EngineMetrics
from kvproxy.cache.overlap.facts import RequestFacts, Result
from kvproxy.operate.admin.cache_status import endpoint_index
from tests.cache.support import NOWHERE, A, Service, chat, cluster_of, long_text, running, settings

STEP = 1024
ROUTED_TO_A = {"cluster": "default", "endpoint": "a", "source": "approximate"}


class Hybrid:
    """Endpoint `a`, which reuses in steps of what it was sent."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.held: dict[str, int] = {}

    async def turn(self, tag: str, words: int) -> RequestFacts:
        """One more turn of a chat that is so many words long by now."""
        request = chat(long_text(tag, words))
        facts = await self.service.ask(request)
        prompt = facts.overlaps.prompt_tokens
        held = min(self.held.get(tag, 0), prompt - 1)
        self.held[tag] = prompt
        self.service.kv.placed(facts, A)
        self.service.kv.finished(facts, Result(A, True, prompt_tokens=prompt, cached_tokens=held - held % STEP))
        return facts

    @property
    def step(self) -> int | None:
        known = self.service.kv.overlap.indexes["default"].steps.known.get(A)
        assert (
            known == endpoint_index(self.service.kv, "default", self.service.cluster.endpoints[0])["reuse_step_tokens"]
        )
        return known


async def test_predictions_are_floored_once_the_step_is_learned() -> None:
    """And from then on they come true to the token, however much more the engine holds."""
    async with running(settings(), cluster_of({"a": NOWHERE})) as service:
        engine = Hybrid(service)
        for words in range(500, 3000, 190):
            for tag in "rstu":
                await engine.turn(tag, words)
        assert engine.step == STEP
        assert service.metric("kvproxy_endpoint_reuse_step_tokens", cluster="default", endpoint="a") == STEP
        facts = await engine.turn("r", 3200)
        overlap = facts.overlaps.by_endpoint[A]
        assert overlap.tokens == overlap.held_tokens - overlap.held_tokens % STEP > 0
        assert overlap.tokens < overlap.held_tokens
        wrong = service.metric("kvproxy_kvcache_predictions_total", **ROUTED_TO_A, result="partial")
        for words in range(3300, 4000, 70):
            await engine.turn("r", words)
        assert service.metric("kvproxy_kvcache_predictions_total", **ROUTED_TO_A, result="partial") == wrong


async def test_an_engine_that_tells_long_blocks_is_believed_at_once() -> None:
    """A prompt under one block is never predicted to hit, and is not taken for one that was lost."""
    async with running(settings(), cluster_of({"a": NOWHERE})) as service:
        told = EngineMetrics(cache=CacheConfig(STEP, 1000, 1000 * STEP, True, 1))
        service.kv.scraper.hear("default", str(service.cluster.engines[0].id), told)
        engine = Hybrid(service)
        assert engine.step == STEP
        capacity = service.kv.overlap.indexes["default"].approximate.counts.capacity(A)
        for number in range(40):
            await engine.turn("short", 100 + number)
        facts = await engine.turn("short", 150)
        assert facts.overlaps.by_endpoint[A].tokens == 0 < facts.overlaps.by_endpoint[A].held_tokens
        assert facts.preferred is None
        assert service.kv.overlap.indexes["default"].approximate.counts.capacity(A) == capacity
        assert not service.kv.state.predictions.raised_alarms()


async def test_a_loss_is_still_seen() -> None:
    """Less than whole steps were reused: the prefix leaves the index."""
    async with running(settings(), cluster_of({"a": NOWHERE})) as service:
        service.kv.overlap.indexes["default"].steps.tell_block_size(A, STEP)
        engine = Hybrid(service)
        await engine.turn("x", 900)
        facts = await service.ask(chat(long_text("x", 900), "yes", "go on"))
        assert facts.overlaps.matched_tokens(A) >= STEP
        service.kv.placed(facts, A)
        service.kv.finished(facts, Result(A, True, prompt_tokens=facts.overlaps.prompt_tokens, cached_tokens=0))
        assert service.metric("kvproxy_kvcache_predictions_total", **ROUTED_TO_A, result="miss") == 1


async def test_a_step_is_forgotten_with_its_endpoint() -> None:
    async with running(settings(), cluster_of({"a": NOWHERE})) as service:
        indexes = service.kv.overlap.indexes["default"]
        indexes.steps.tell_block_size(A, STEP)
        indexes.forget_endpoint(A)
        assert indexes.steps.known == {}
