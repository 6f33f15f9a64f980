"""Actions are checked for effect, retried, written down, and switch themselves off."""

from __future__ import annotations

import logging
import random
from dataclasses import replace

import pytest

from kvproxy.base.errors import ClientError, ClientTimeout, InstanceBusy, NotSupported, UnknownInstance
from kvproxy.base.metrics.groups import Metrics
from kvproxy.cache.actions.job_queue import JobQueue
from kvproxy.cache.breakers import OperationBreakers
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cache.store import Action, ActionKind, ActionLocks, Prefix
from kvproxy.features.lmcache.executor import ActionExecutor
from kvproxy.features.lmcache.lookups import LookupClient
from kvproxy.features.lmcache.provider import Effect
from kvproxy.features.lmcache.settings import strategy_of
from tests.cache.support import settings
from tests.features.lmcache.support import hotness, serve
from tests.features.lmcache.test_lookup import Answering
from tests.support.clock import FakeClock

Answer = Effect | ClientError


class Acting(Answering):
    """Answers actions in order, the last one for ever."""

    def __init__(self, *answers: Answer) -> None:
        super().__init__()
        self.answers = list(answers)
        self.calls: list[tuple[ActionKind, str, int]] = []

    async def act(self, kind: ActionKind, instance_id: str, prefix: Prefix, *, source: str = "") -> Effect:
        self.calls.append((kind, instance_id, len(prefix.tokens)))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, ClientError):
            raise answer
        return answer


class Bench:
    """Everything an action goes through."""

    def __init__(self, provider: Acting | None, clock: FakeClock, config: KvCacheSettings | None = None) -> None:
        config = config or settings()
        self.metrics = Metrics()
        breakers = OperationBreakers(config.circuit_breaker, clock=clock, metrics=self.metrics)
        lookups = LookupClient(breakers=breakers, metrics=self.metrics, clock=clock)
        lookups.provider = provider
        self.locks: ActionLocks | None = None
        self.background = JobQueue(metrics=self.metrics)
        self.actions = ActionExecutor(
            dry_run=strategy_of(config).dry_run,
            jobs=self.background,
            lookups=lookups,
            breakers=breakers,
            locks=lambda: self.locks,
            metrics=self.metrics,
            clock=clock,
            rng=random.Random(1),
        )
        self.seen: list[Action] = []  # that had their effect

    async def act(self, action: Action, times: int = 1) -> list[bool]:
        """Whether each was queued."""
        queued = []
        for _ in range(times):
            queued.append(self.actions.submit(action, self.note))
            await self.background.settled()
        return queued

    def note(self, action: Action, now: float) -> None:
        self.seen.append(action)

    def count(self, action: str, result: str) -> float:
        labels = {"action": action, "result": result}
        return self.metrics.registry.get_sample_value("kvproxy_kvcache_actions_total", labels) or 0.0


def action(kind: ActionKind = ActionKind.PIN, instance: str = "a") -> Action:
    return Action(kind, instance, serve(hotness(), 1).prefixes[0], "hot")


async def test_an_action_with_effect_is_told_to_its_strategy(clock: FakeClock) -> None:
    provider = Acting(Effect(512))
    bench = Bench(provider, clock)
    async with bench.background:
        await bench.act(wanted := action())
    assert provider.calls == [(ActionKind.PIN, "a", 512)]
    assert bench.seen == [wanted]
    assert bench.count("pin", "done") == 1


async def test_num_tokens_zero_is_no_success(clock: FakeClock) -> None:
    """A wrong location answers 200 with 0."""
    bench = Bench(Acting(Effect(0)), clock)
    async with bench.background:
        await bench.act(action())
    assert bench.seen == []
    assert bench.count("pin", "no_effect") == 1


async def test_a_controller_that_does_not_say_is_taken_at_its_word(clock: FakeClock) -> None:
    """Before 0.3.5 the answer has no number."""
    bench = Bench(Acting(Effect(None)), clock)
    async with bench.background:
        await bench.act(action())
    assert bench.count("pin", "done") == 1


async def test_no_effect_again_and_again_switches_it_off_there(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so once, keeps quiet, and works on elsewhere."""
    provider = Acting(Effect(0))
    bench = Bench(provider, clock)
    async with bench.background:
        assert await bench.act(action(), times=7) == [True] * 5 + [False] * 2
        assert await bench.act(action(instance="b")) == [True]
        assert await bench.act(action(ActionKind.COMPRESS)) == [True]
    assert len(provider.calls) == 7
    assert caplog.text.count("is switched off there") == 1


async def test_a_pin_that_the_service_forgot_is_taken_back(clock: FakeClock) -> None:
    """As after its restart: that is no fault, and not tried for ever."""
    bench = Bench(Acting(Effect(0)), clock)
    async with bench.background:
        assert await bench.act(action(ActionKind.UNPIN), times=6) == [True] * 6
    assert len(bench.seen) == 6
    assert bench.count("unpin", "no_effect") == 6


async def test_an_effect_starts_the_count_over(clock: FakeClock) -> None:
    bench = Bench(Acting(*[Effect(0)] * 4, Effect(5), Effect(0)), clock)
    async with bench.background:
        assert await bench.act(action(), times=9) == [True] * 9


async def test_a_busy_instance_is_tried_again(clock: FakeClock) -> None:
    """The controller's socket to a worker fails while another call uses it."""
    busy = InstanceBusy("current state", status=500)
    provider = Acting(busy, busy, Effect(512))
    bench = Bench(provider, clock)
    async with bench.background:
        await bench.act(action())
    assert len(provider.calls) == 3
    assert bench.count("pin", "done") == 1


async def test_a_worker_that_never_answers_ends_in_time_and_is_counted(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    provider = Acting(ClientTimeout("no answer within 2 s"))
    bench = Bench(provider, clock)
    async with bench.background:
        await bench.act(action())
    assert len(provider.calls) == 3
    assert bench.count("pin", "timeout") == 1
    assert "[kvcache] pin at a: no answer" in caplog.text


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UnknownInstance("who", status=500), "unknown_instance"),
        (NotSupported("no /evict", status=404), "not_supported"),
    ],
)
async def test_a_lasting_failure_is_not_repeated(error: ClientError, reason: str, clock: FakeClock) -> None:
    provider = Acting(error)
    bench = Bench(provider, clock)
    async with bench.background:
        await bench.act(action(ActionKind.EVICT))
    assert len(provider.calls) == 1
    assert bench.count("evict", reason) == 1


async def test_an_open_breaker_queues_nothing(clock: FakeClock) -> None:
    """Each kind has its own: pins that fail do not stop evictions."""
    provider = Acting(UnknownInstance("who", status=500))
    bench = Bench(provider, clock, settings(circuit_breaker={"failure_threshold": 2}))
    async with bench.background:
        assert await bench.act(action(), times=4) == [True, True, False, False]
        assert await bench.act(action(ActionKind.EVICT)) == [True]
    assert len(provider.calls) == 3


async def test_a_breaker_that_opens_between_attempts_ends_the_job(clock: FakeClock) -> None:
    config = settings(circuit_breaker={"failure_threshold": 1})
    bench = Bench(Acting(ClientTimeout("slow")), clock, config)
    async with bench.background:
        await bench.act(action())
    assert bench.count("pin", "breaker_open") == 1


async def test_a_dry_run_decides_and_writes_down_but_sends_nothing(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    provider = Acting(Effect(512))
    bench = Bench(provider, clock, settings(cache_strategy={"dry_run": True}))
    with caplog.at_level(logging.INFO, "kvproxy.audit"):
        async with bench.background:
            await bench.act(action())
    assert provider.calls == []
    assert len(bench.seen) == 1
    assert "result=dry_run" in caplog.text
    assert bench.count("pin", "dry_run") == 1


async def test_every_action_leaves_one_audit_line_of_hashes(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(Acting(Effect(512), Effect(3)), clock)
    with caplog.at_level(logging.INFO, "kvproxy.audit"):
        async with bench.background:
            await bench.act(replace(action(), score=0.43211))
            await bench.act(Action(ActionKind.CLEAR, "b", None, "memory 0.95"))
    lines = [record.getMessage() for record in caplog.records if record.name == "kvproxy.audit"]
    assert len(lines) == 2
    assert lines[0].startswith(
        "cache action=pin instance=a prefix=0000000000000001 tokens=512 reason=hot score=0.432 result=done amount=512"
    )
    assert lines[1].startswith(
        'cache action=clear instance=b prefix=* tokens=0 reason="memory 0.95" result=done amount=3'
    )


async def test_without_a_service_nothing_is_queued(clock: FakeClock) -> None:
    bench = Bench(None, clock)
    async with bench.background:
        assert await bench.act(action()) == [False]


async def test_an_action_switched_off_while_it_waited_is_not_sent(clock: FakeClock) -> None:
    provider = Acting(Effect(0))
    bench = Bench(provider, clock)
    second = Action(ActionKind.PIN, "a", serve(hotness(), 2).prefixes[0], "hot")
    async with bench.background:
        await bench.act(action(), times=4)
        assert bench.actions.submit(action(), bench.note)
        assert bench.actions.submit(second, bench.note)
        await bench.background.settled()
    assert len(provider.calls) == 5


async def test_facts_about_an_instance_go_with_it(clock: FakeClock) -> None:
    """One that comes back is tried again, and instances that come and go leave nothing behind."""
    bench = Bench(Acting(Effect(0)), clock)
    async with bench.background:
        for instance in ("a", "b"):
            await bench.act(action(instance=instance), times=5)
        assert bench.actions.switched_off == [("pin", "a"), ("pin", "b")]
        bench.actions.keep_only({"b"})
        assert bench.actions.switched_off == [("pin", "b")]
        assert await bench.act(action(instance="a")) == [True]
