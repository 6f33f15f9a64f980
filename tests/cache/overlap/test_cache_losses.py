"""Engines that lose what they held: noticed, counted, and nothing of it believed any more."""

from __future__ import annotations

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import EndpointId
from kvproxy.cache.feedback.trust import RECENT_S, CacheLosses, Loss, LossReason
from kvproxy.cache.indexes.block_events import BlockStored
from kvproxy.cluster.endpoint import Condition
from kvproxy.operate.admin.cache_status import endpoint_index, engine_status
from tests.cache.support import A, B, Fake, Service, chat, long_text, tokens, world
from tests.support.clock import FakeClock

TURN = long_text("w")


class Engine(Fake):
    """One whose metrics a test changes."""

    def __init__(self) -> None:
        self.awake, self.discards, self.queries, self.answers = 1, True, 1000, True
        super().__init__({"/metrics": self._metrics})

    def _metrics(self, asked: object) -> object:
        lines = (
            f'vllm:engine_sleep_state{{engine="0",model_name="m",sleep_state="awake"}} {self.awake}',
            f'vllm:engine_sleep_state{{engine="0",model_name="m",sleep_state="discard_all"}} '
            f"{int(not self.awake and self.discards)}",
            f"vllm:prefix_cache_queries_total {self.queries}",
            "vllm:prefix_cache_hits_total 10",
        )
        return "\n".join(lines).encode() if self.answers else (500, {})


def test_the_latest_loss_and_its_age(clock: FakeClock) -> None:
    """Counted by reason; only of endpoints there are."""
    metrics = Metrics()
    losses = CacheLosses(metrics, clock=clock)
    assert (losses.latest_loss("c", A), losses.recent_reason("c", A), losses.recent_reason("c", None)) == (None, "", "")
    losses.note_loss("c", A, LossReason.RESTARTED)
    losses.note_loss("c", A, LossReason.CLEARED)
    clock.advance(RECENT_S)
    assert losses.latest_loss("c", A) == Loss(LossReason.CLEARED, RECENT_S)
    assert (losses.recent_reason("c", A), losses.recent_reason("c", B)) == ("cleared", "")
    clock.advance(1.0)
    assert losses.recent_reason("c", A) == ""
    labels = {"cluster": "c", "endpoint": "a", "reason": "cleared"}
    assert metrics.registry.get_sample_value("kvproxy_engine_cache_losses_total", labels) == 1.0
    losses.keep_only([("c", B)])
    assert losses.latest_loss("c", A) is None
    assert metrics.registry.get_sample_value("kvproxy_engine_cache_losses_total", labels) is None


async def scrape(service: Service) -> None:
    await service.kv.scraper.scrape_all()


def loss_of(service: Service, endpoint: EndpointId) -> LossReason | None:
    loss = service.kv.state.losses.latest_loss("default", endpoint)
    return None if loss is None else loss.reason


def losses(service: Service) -> float:
    """Of the first endpoint, as counted."""
    name, labels = "kvproxy_engine_cache_losses_total", {"cluster": "default", "endpoint": "a", "reason": "asleep"}
    return service.metric(name, **labels)


async def test_an_engine_that_sleeps_is_left_out_and_holds_nothing() -> None:
    """Until its metrics say that it is awake; it begins with an empty cache then."""
    one, other = Engine(), Engine()
    async with world({"a": one, "b": other}) as service:
        await scrape(service)
        await service.serve(chat(TURN), A)
        service.kv.overlap.indexes["default"].precise.apply_events(A, 0, [BlockStored((1,), None, tokens(16), 16)])
        one.awake = 0
        await scrape(service)
        endpoint = service.cluster.endpoints[0]
        assert endpoint.condition(0.0) is Condition.ASLEEP
        assert (await service.ask(chat(TURN))).preferred is None
        assert service.kv.overlap.indexes["default"].precise.count_rows(A) == 0
        assert loss_of(service, A) is LossReason.ASLEEP
        status = endpoint_index(service.kv, "default", endpoint)["last_loss"]
        assert isinstance(status, dict)
        assert status["reason"] == "asleep"
        told = engine_status(service.kv, endpoint)
        assert told is not None
        assert (told["asleep"], told["kind"]) == (True, "vLLM")
        one.awake = 1
        await scrape(service)
        assert endpoint.condition(0.0) is Condition.UP


async def test_a_pause_loses_nothing() -> None:
    """vLLM's level 0 stops the scheduler alone. What sleeps deeper afterwards loses its cache then."""
    one, other = Engine(), Engine()
    one.discards = False
    async with world({"a": one, "b": other}) as service:
        await scrape(service)
        service.kv.overlap.indexes["default"].precise.apply_events(A, 0, [BlockStored((1,), None, tokens(16), 16)])
        one.awake = 0
        await scrape(service)
        assert service.cluster.endpoints[0].condition(0.0) is Condition.ASLEEP
        assert service.kv.overlap.indexes["default"].precise.count_rows(A) == 1
        assert loss_of(service, A) is None
        one.discards = True
        for _ in range(2):
            await scrape(service)
            assert service.kv.overlap.indexes["default"].precise.count_rows(A) == 0
        assert loss_of(service, A) is LossReason.ASLEEP
        assert losses(service) == 1  # however often it says so
        one.awake = 1
        await scrape(service)
        one.awake = 0
        await scrape(service)
        assert losses(service) == 2


async def test_a_word_that_is_too_old_keeps_no_engine_out() -> None:
    """An engine that cannot be asked any more is the business of probes and breakers."""
    clock, one = FakeClock(0.0), Engine()
    async with world({"a": one}, clock=clock) as service:
        one.awake = 0
        await scrape(service)
        one.answers = False
        await scrape(service)
        [endpoint] = service.cluster.endpoints
        assert endpoint.asleep
        clock.advance(service.kv.scraper.signals.max_age_s + 1.0)
        await scrape(service)
        assert not endpoint.asleep


async def test_an_engine_whose_counters_began_again_has_restarted() -> None:
    """SGLang does not say when its process began."""
    one = Engine()
    async with world({"a": one}) as service:
        await scrape(service)
        await service.serve(chat(TURN), A)
        one.queries = 5
        await scrape(service)
        assert (await service.ask(chat(TURN))).preferred is None
        assert loss_of(service, A) is LossReason.RESTARTED


async def test_an_engine_that_forgot_is_noticed_by_its_answers() -> None:
    """It reuses nothing of what it was sent just now."""
    async with world({"a": Engine()}) as service:
        for _ in range(30):
            await service.serve(chat(TURN), A, cached=0)
        assert loss_of(service, A) is LossReason.FORGOT
