"""Prompts kept for conversations that are expected back, through a whole proxy."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvproxy.app import Proxy
from kvproxy.base.types import EndpointId
from kvproxy.cache.actions.hotness import common_tokens
from kvproxy.cache.actions.strategies import Action
from kvproxy.cache.providers import ActionKind
from kvproxy.cache.service import KvCache
from kvproxy.cluster.routing.work import features_of
from kvproxy.features.exchange.datagrams import Siblings
from kvproxy.features.leases.conversations import FIRST_S
from kvproxy.lab.simulator.engine_io import EngineSettings
from kvproxy.lab.simulator.http_call import HttpCall
from kvproxy.lab.simulator.lmcache_coordinator import CoordinatorSettings
from kvproxy.lab.simulator.sglang_server import SglangApp, create_sglang_app
from kvproxy.lab.simulator.sglang_settings import SglangSettings
from kvproxy.lab.simulator.timing import EngineTiming
from kvproxy.operate.config.load import load_config
from kvproxy.operate.receipts.receipt import Receipt, decode_receipt
from kvproxy.proxy.listener.server import serve
from tests.admin.support import NOON, admin_of, audited
from tests.kvcache.fleet import Place, simulated
from tests.kvcache.support import Fake, controller, engine, long_text, words
from tests.support.clock import FakeClock
from tests.support.until import until

SYSTEM = long_text("s", 1200)
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "bash", "arguments": ""}}],
}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "done"}


class Engine:
    """Answers every chat with a call of a tool, and reuses what it was sent until it forgets."""

    def __init__(self, capacity_blocks: int = 100) -> None:
        self.known: list[list[int]] = []
        self.touched: list[int] = []
        self.ends = "tool_calls"
        self.app: Fake = engine()
        self._capacity_blocks = capacity_blocks
        self.app.routes |= {
            "/v1/chat/completions": self._chat, "/v1/completions": self._touch, "/metrics": self._metrics
        }  # fmt: skip

    def _reuse(self, tokens: list[int]) -> dict[str, Any]:
        cached = max((common_tokens(array("I", tokens), array("I", one)) for one in self.known), default=0) // 16 * 16
        self.known.append(tokens)
        details = {"cached_tokens": cached}
        return {"prompt_tokens": len(tokens), "completion_tokens": 5, "prompt_tokens_details": details}

    def _chat(self, asked: dict[str, Any]) -> dict[str, Any]:
        tokens = words(" ".join(f"<{one['role']}> {one.get('content')}" for one in asked["messages"]))
        choice = {"index": 0, "message": CALL, "finish_reason": self.ends}
        return {"choices": [choice], "usage": self._reuse(tokens)}

    def _touch(self, asked: dict[str, Any]) -> dict[str, Any]:
        assert asked["max_tokens"] == 1
        self.touched.append(len(asked["prompt"]))
        return {"usage": self._reuse(asked["prompt"])}

    def _metrics(self, _: dict[str, Any]) -> bytes:
        sizes = f'block_size="16",num_gpu_blocks="{self._capacity_blocks}"'
        return f"vllm:cache_config_info{{{sizes}}} 1\nvllm:num_requests_running 0\n".encode()


@dataclass
class World:
    """A proxy on a clock that stands still, with what a test asks of it."""

    proxy: Proxy
    client: httpx.AsyncClient
    clock: FakeClock
    model: str = "m"

    @property
    def kv(self) -> KvCache:
        assert self.proxy.kvcache is not None
        return self.proxy.kvcache

    async def ask(self, *turns: dict[str, Any], begins: str = "go", ends: bool = False, **fields: Any) -> None:
        """One request of a session, and all that comes of it."""
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": begins}, *turns]
        headers = {"x-dynamo-session-id": "one", **({"x-dynamo-session-final": "true"} if ends else {})}
        answer = await self.client.post(
            "/v1/chat/completions", json={"model": self.model, "messages": messages, **fields}, headers=headers
        )
        assert answer.status_code == 200, answer.text
        await self.settled()

    async def ask_others(self, one: Engine, count: int = 20) -> None:
        """As many requests of others, who are not expected back."""
        ends, one.ends = one.ends, "stop"
        for number in range(count):
            body = {"model": "m", "messages": [{"role": "user", "content": long_text(f"other{number}-", 1200)}]}
            assert (await self.client.post("/v1/chat/completions", json=body)).status_code == 200
        one.ends = ends
        await self.settled()

    def fill(self, tokens: int = 20_000) -> None:
        """The engine's cache takes so many new tokens."""
        assert self.kv.leasing is not None
        self.kv.leasing._toucher.insertions.note(("default", EndpointId("a")), tokens, self.clock())

    async def settled(self) -> None:
        """Everything that a request or a round brought about is done."""
        await until(lambda: not self.proxy.running)
        await self.kv.actions.jobs.settled()

    async def tick(self, seconds: float) -> None:
        """So much later, between requests."""
        self.clock.advance(seconds)
        assert self.kv.leasing is not None
        self.kv.leasing.tick()
        await self.settled()

    def count(self, name: str, **labels: str) -> float:
        return self.proxy.metrics.registry.get_sample_value(f"kvproxy_{name}", labels) or 0.0

    def results(self) -> dict[str, int]:
        return dict(self.kv.state.leases.results)


@contextlib.asynccontextmanager
async def world(
    engine_url: str, *, lmcache: str = "", leases: dict[str, Any] | None = None, kvcache: dict[str, Any] | None = None,
    siblings: Siblings | None = None, clock: FakeClock | None = None, **config: Any,
) -> AsyncIterator[World]:  # fmt: skip
    clock = clock or FakeClock()
    given = {"enabled": True, "min_tokens": 256, "touch": True, **(leases or {})}
    cache = {"lmcache_endpoint": lmcache, "engine_metrics_interval": 0, "leases": given,
             "lookup_routing_timeout": 60, "request_timeout": 60, **(kvcache or {})}  # fmt: skip
    raw = {"endpoints": {"a": engine_url}, "health": {"active": False},
           "filters": ["inference_request", {"kvcache": cache}, "router"], **config}  # fmt: skip
    proxy = Proxy(load_config(raw), clock=clock, wall_clock=lambda: NOON, siblings=siblings)
    async with proxy, serve(proxy, drain_s=0.01, cut_grace_s=0.01) as url, httpx.AsyncClient(base_url=url) as client:
        yield World(proxy, client, clock)


async def test_a_tool_call_pins_the_prompt_until_the_conversation_goes_on(tmp_path: Path) -> None:
    """The promise is verified by the engine's own count: in metrics, receipt, page and status."""
    one, lmcache, path = Engine(), controller(lambda _: {}), tmp_path / "receipts.jsonl"
    async with (
        serve(one.app) as url,
        serve(lmcache) as controller_url,
        world(url, lmcache=controller_url, receipts={"path": str(path)}) as proxy,
    ):
        with audited() as lines:
            await proxy.ask()
        assert lmcache.calls["/pin"] == 1
        assert [line["reason"] for line in lines if line["action"] == "pin"] == ["lease tool_call"]
        proxy.clock.advance(4.0)
        await proxy.ask(CALL, RESULT)
        assert proxy.results() == {"kept": 1}
        assert proxy.count("lease_grants_total", why="tool_call", lever="pin") == 2
        assert proxy.count("lease_results_total", result="kept") == 1
        assert proxy.count("lease_promised_tokens_total") >= proxy.count("lease_reused_tokens_total") > 1100
        assert proxy.count("lease_kept_ratio") == 1
        assert proxy.count("lease_entries", what="waiting") == 1
        async with admin_of(proxy.proxy) as admin:
            shown = (await admin.get("/cache/leases")).json()["promises"]
            live = (await admin.get("/live")).json()["cache"]["promises"]
        [held] = shown["held"]
        assert (held["lever"], held["why"], held["confirmed"]) == ("pin", "tool_call", True)
        assert shown["pauses"][0] | {"seen": 1} == shown["pauses"][0]
        assert (live["prompts"], live["kept"], live["broken"]) == (1, 1, 0)
        assert SYSTEM[:20] not in json.dumps(shown)
    receipts: list[Receipt] = [decode_receipt(line) for line in path.read_bytes().splitlines()]
    assert receipts[0].lease is None
    assert receipts[1].lease is not None
    assert (receipts[1].lease.result, receipts[1].lease.lever) == ("kept", "pin")


async def test_a_pin_at_another_instance_confirms_nothing() -> None:
    """That of an earlier lease on the same prompt, which ended meanwhile: it is taken back."""
    one, lmcache = Engine(), controller(lambda _: {})
    async with serve(one.app) as url, serve(lmcache) as at, world(url, lmcache=at) as proxy:
        await proxy.ask()
        assert proxy.kv.leasing is not None
        [held] = proxy.kv.leasing.book.leases.values()
        held.held = False
        proxy.kv.leasing.done(Action(ActionKind.PIN, "b", held.prefix, ""), proxy.clock())
        assert not held.held
        assert list(proxy.kv.leasing.book.released) == [("b", held.of.key)]


async def test_a_hot_prompt_under_lease_is_pinned_for_both() -> None:
    """Neither waits for the other's: pins are counted, and each is taken back when its own reason ends."""
    one, lmcache = Engine(), controller(lambda _: {})
    hot = {"cache_strategy": {"enable_pinning": True, "hot_content_threshold": 1}}
    async with serve(one.app) as url, serve(lmcache) as at, world(url, lmcache=at, kvcache=hot) as proxy:
        await proxy.ask()
        assert lmcache.calls["/pin"] == 2
        assert proxy.kv.actions.pin is not None
        assert len(proxy.kv.actions.pin.leases(proxy.clock())) == 1
        assert [lease.held for lease in proxy.kv.state.leases.leases.values()] == [True]


class Elsewhere:
    """Another process, which does all that it is asked to leave to it."""

    def __init__(self) -> None:
        self.told: list[Action] = []

    async def claim(self, what: str, ttl_s: float) -> bool:
        return False

    def acted(self, action: Action) -> None:
        self.told.append(action)


async def test_a_lease_is_one_process_own() -> None:
    """Others would take its pin for one of their hot prefixes, and take it back as cold."""
    one, lmcache, others = Engine(), controller(lambda _: {}), Elsewhere()
    async with serve(one.app) as url, serve(lmcache) as at, world(url, lmcache=at) as proxy:
        proxy.kv.actions.executor.claims = others
        await proxy.ask()
        assert lmcache.calls["/pin"] == 1
        [held] = proxy.kv.state.leases.leases.values()
        assert held.held
        assert others.told == []


class Fleet:
    """Processes of one machine that decide as one, in front of one engine and one LMCache."""

    def __init__(self, folder: Path, engine_url: str, lmcache: str, **leases: Any) -> None:
        self.clock = FakeClock()
        self._made = itertools.count()
        self._folder, self._urls, self._leases = folder, (engine_url, lmcache), leases

    @contextlib.asynccontextmanager
    async def process(self) -> AsyncIterator[World]:
        """One more, that has joined."""
        engine_url, lmcache = self._urls
        siblings, beat = Siblings(self._folder, next(self._made), 3), {"heartbeat": "100ms"}
        async with world(
            engine_url, lmcache=lmcache, leases=self._leases, siblings=siblings, clock=self.clock, sync=beat
        ) as made:
            await until(lambda: self._has_joined(made))
            yield made

    @contextlib.asynccontextmanager
    async def pair(self) -> AsyncIterator[tuple[World, World]]:
        """Two that hear each other."""
        async with self.process() as one, self.process() as two:
            await until(lambda: self._has_joined(one, others=1) and self._has_joined(two, others=1))
            yield one, two

    def _has_joined(self, made: World, others: int = 0) -> bool:
        self.clock.advance(0.01)
        sync = made.proxy.sync
        assert sync is not None
        return not sync.peers.newcomer.holds_back and len(sync.peers.living) >= others


def keys_of(one: World) -> set[int]:
    return set(one.kv.state.leases.leases)


async def test_a_conversation_may_come_back_to_another_process(tmp_path: Path) -> None:
    """That one verifies the promise; the lease ends where it is kept, and all have learned how long the pause was."""
    engine, lmcache = Engine(), controller(lambda _: {})
    async with serve(engine.app) as url, serve(lmcache) as at, Fleet(tmp_path, url, at).pair() as (one, two):
        await one.ask()
        await until(lambda: [lease.held for lease in two.kv.state.leases.leases.values()] == [True])
        [key] = keys_of(one)
        assert keys_of(two) == {key}
        assert two.kv.state.leases.tenant_tokens == one.kv.state.leases.tenant_tokens
        await two.ask(CALL, RESULT)
        assert two.results() == {"kept": 1}
        await until(lambda: len(keys_of(two) - {key}) == 1 and keys_of(one) == keys_of(two))
        assert one.results() == {}
        assert len(one.kv.state.leases.waiting) == len(two.kv.state.leases.waiting) == 1
        for each in (one, two):
            assert [pause["seen"] for pause in each.kv.state.leases.gaps.describe()][:1] == [1]
        assert lmcache.calls["/pin"] == 2
        await one.tick(FIRST_S + 1)
        await two.tick(0.0)
        assert (one.results(), two.results()) == ({}, {"kept": 1, "expired": 1})


async def test_budgets_of_leases_hold_over_all_processes(tmp_path: Path) -> None:
    """A tenant gets no second one by another process."""
    engine, lmcache = Engine(), controller(lambda _: {})
    async with (
        serve(engine.app) as url,
        serve(lmcache) as at,
        Fleet(tmp_path, url, at, tenant_tokens=2000).pair() as (one, two),
    ):
        await one.ask()
        await until(lambda: keys_of(two) == keys_of(one) != set())
        await two.ask(begins="something else")
        assert two.count("lease_refusals_total", reason="tenant_budget") == 1
        assert lmcache.calls["/pin"] == 1


async def test_a_session_that_ends_elsewhere_ends_its_leases(tmp_path: Path) -> None:
    """Nothing more is waited for, in any process."""
    engine, lmcache = Engine(), controller(lambda _: {})
    async with serve(engine.app) as url, serve(lmcache) as at, Fleet(tmp_path, url, at).pair() as (one, two):
        await one.ask()
        await until(lambda: keys_of(two) == keys_of(one) != set())
        await two.ask(begins="something else", ends=True)
        await until(lambda: not keys_of(one) and not keys_of(two))
        await until(lambda: not len(one.kv.state.leases.waiting))
        assert (one.results(), two.results()) == ({}, {"session_ended": 1})


async def test_a_new_process_knows_of_leases_and_outlives_their_keeper(tmp_path: Path) -> None:
    """It hears of them when it joins; those of one that dies without a word end with their time, as no result here."""
    engine, lmcache = Engine(), controller(lambda _: {})
    async with serve(engine.app) as url, serve(lmcache) as at:
        fleet = Fleet(tmp_path, url, at)
        async with fleet.process() as one:
            await one.ask()
            async with fleet.process() as two:
                await until(lambda: keys_of(two) == keys_of(one) != set())
                assert len(two.kv.state.leases.waiting) == 1
                one.kv.state.leases.news = None  # it dies without a word
                await two.tick(FIRST_S + 1)
                assert (keys_of(two), two.results()) == (set(), {})
                assert not two.kv.state.leases.tenant_tokens
                assert keys_of(one)


async def test_a_broken_promise_is_said_to_be_broken() -> None:
    """The engine reused next to nothing of what was pinned."""
    one, lmcache = Engine(), controller(lambda _: {})
    async with serve(one.app) as url, serve(lmcache) as at, world(url, lmcache=at) as proxy:
        await proxy.ask()
        one.known.clear()
        await proxy.ask(CALL, RESULT)
        assert proxy.results() == {"broken": 1}
        assert proxy.count("lease_kept_ratio") == 0


async def test_an_answer_that_waits_for_nobody_is_not_kept() -> None:
    """Unless its client asks for it; the lease then ends with what it asked for."""
    one, lmcache = Engine(), controller(lambda _: {})
    one.ends = "stop"
    async with serve(one.app) as url, serve(lmcache) as at, world(url, lmcache=at) as proxy:
        await proxy.ask()
        assert lmcache.calls["/pin"] == 0
        await proxy.ask({"role": "user", "content": "and"}, prompt_cache_retention="in_memory")
        assert lmcache.calls["/pin"] == 1
        await proxy.tick(241)
        assert lmcache.calls["/pin"] == 2  # the controller's pins lapse
        await proxy.tick(60)
        assert proxy.results() == {"expired": 1}


async def test_the_coordinators_pins_are_taken_back() -> None:
    """They have no end of their own: at a return, at the end of the session, and when the proxy ends."""
    async with simulated(names=("a",), controller=None, coordinator=CoordinatorSettings()) as place:
        async with world(place.engines["a"], lmcache=place.lmcache) as proxy:
            proxy.model = "tiny"
            await until(lambda: proxy.kv.overlap.lookups.provider is not None)
            await proxy.ask(prompt_cache_retention="1h")
            assert (pins(place, "POST"), pins(place, "DELETE")) == (1, 0)
            await proxy.ask(
                {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}, prompt_cache_retention="1h"
            )
            assert proxy.results() == {"kept": 1}
            await proxy.tick(5)
            assert (pins(place, "POST"), pins(place, "DELETE")) == (2, 1)
            await proxy.ask({"role": "user", "content": "bye"}, ends=True)
            assert proxy.results() == {"kept": 1, "session_ended": 1}
            assert pins(place, "DELETE") == 2
            await proxy.ask(prompt_cache_retention="1h")
        assert (pins(place, "POST"), pins(place, "DELETE")) == (3, 3)


def pins(place: Place, method: str) -> int:
    """How often the coordinator was asked to pin, or to take one back."""
    return int(place.calls[f"{method} /cache/pins"])


def learned(proxy: World, *, token_s: float = 0.001) -> None:
    """The cluster knows how fast its engine is, which takes 0.1 s for any request besides."""
    speeds = proxy.proxy.clusters["default"].speeds
    assert speeds is not None
    for tokens in (100, 1000, 4000) * 20:
        work = features_of(tokens, 0)
        speeds.observe(EndpointId("a"), work, 0.1 + tokens * token_s, proxy.clock())


async def test_without_a_pin_the_prompt_is_touched_before_it_would_be_evicted() -> None:
    """Not before half of the engine's memory took new tokens, by its tokens alone, and no longer once its conversation
    goes on."""
    one = Engine(capacity_blocks=1360)
    async with serve(one.app) as url, world(url) as proxy:
        learned(proxy)
        await proxy.kv.scraper.scrape_all()
        await proxy.ask()
        await proxy.ask_others(one, 5)
        assert proxy.count("lease_grants_total", why="tool_call", lever="touch") == 1
        await proxy.tick(10)
        assert one.touched == []
        with audited() as lines:
            fill_to(proxy, 0.9)
            await proxy.tick(10)
        assert len(one.touched) == 1
        assert (lines[0]["action"], lines[0]["result"], lines[0]["tokens"]) == ("touch", "done", one.touched[0])
        assert proxy.count("kvcache_actions_total", action="touch", result="done") == 1
        await proxy.ask(CALL, RESULT)
        assert proxy.results() == {"kept": 1}


async def test_a_prompt_of_few_bytes_is_kept_without_a_service_beside_the_engine() -> None:
    """Its bytes are fewer than an index alone would look closer at; its tokens are enough."""
    one = Engine(capacity_blocks=1360)
    async with serve(one.app) as url, world(url) as proxy:
        learned(proxy)
        await proxy.kv.scraper.scrape_all()
        body = {"model": "m", "messages": [{"role": "user", "content": "a b c d " * 200}]}
        assert (await proxy.client.post("/v1/chat/completions", json=body)).status_code == 200
        await proxy.settled()
        assert proxy.count("lease_grants_total", why="tool_call", lever="touch") == 1


async def test_a_lease_that_ended_is_not_touched() -> None:
    """The touch had to wait its turn; the prompt may be computed for nothing then."""
    one = Engine(capacity_blocks=1360)
    async with serve(one.app) as url, world(url) as proxy:
        learned(proxy)
        await proxy.kv.scraper.scrape_all()
        await proxy.ask()
        assert proxy.kv.leasing is not None
        proxy.clock.advance(20)
        proxy.fill()
        proxy.kv.leasing.tick()
        assert proxy.kv.actions.jobs.running
        [lease] = proxy.kv.state.leases.leases.values()
        proxy.kv.leasing.book.release(lease)
        await proxy.settled()
        assert one.touched == []


@pytest.mark.parametrize(("token_s", "result"), [(0.0, {"not_worth": 1}), (0.001, {})])
async def test_a_touch_has_to_save_more_than_it_costs(token_s: float, result: dict[str, int]) -> None:
    """An engine that computes the prompt in no time keeps nothing for it."""
    one = Engine(capacity_blocks=1360)
    async with serve(one.app) as url, world(url) as proxy:
        learned(proxy, token_s=token_s)
        await proxy.kv.scraper.scrape_all()
        await proxy.ask()
        proxy.fill()
        await proxy.tick(20)
        assert proxy.results() == result
        assert len(one.touched) == (0 if result else 1)


@pytest.mark.parametrize("known", [True, False])
async def test_what_cannot_be_priced_is_not_touched(known: bool) -> None:
    """No lease without the engine's speed and the size of its cache."""
    one = Engine(capacity_blocks=1360)
    async with serve(one.app) as url, world(url) as proxy:
        if known:
            learned(proxy)
        else:
            await proxy.kv.scraper.scrape_all()
        await proxy.ask()
        assert proxy.count("lease_refusals_total", reason="unpriced") == 1
        assert not proxy.kv.state.leases.leases


async def test_switched_off_by_a_reload_nothing_stays_pinned() -> None:
    """What the coordinator was told to keep is taken back by the service that ends."""
    async with (
        simulated(names=("a",), controller=None, coordinator=CoordinatorSettings()) as place,
        world(place.engines["a"], lmcache=place.lmcache) as proxy,
    ):
        proxy.model = "tiny"
        await until(lambda: proxy.kv.overlap.lookups.provider is not None)
        await proxy.ask(prompt_cache_retention="1h")
        raw = {"endpoints": {"a": place.engines["a"]}, "health": {"active": False}}
        assert proxy.count("lease_entries", what="leases") == 1
        await proxy.proxy.reload(load_config(raw))
        await until(lambda: proxy.proxy.replaced)
        assert pins(place, "DELETE") == 1
        shown = {one.name for one in proxy.proxy.metrics.registry.collect() if one.samples}
        assert not shown & {"kvproxy_lease_entries", "kvproxy_lease_held_tokens", "kvproxy_lease_kept_ratio"}


async def test_at_another_lmcache_nothing_is_held_yet() -> None:
    """What the first one was told to keep is taken back there, and not at the next one."""
    settings = CoordinatorSettings()
    async with (
        simulated(names=("a",), controller=None, coordinator=settings) as place,
        simulated(names=("a",), controller=None, coordinator=settings) as other,
        world(place.engines["a"], lmcache=place.lmcache) as proxy,
    ):
        proxy.model = "tiny"
        await until(lambda: proxy.kv.overlap.lookups.provider is not None)
        await proxy.ask(prompt_cache_retention="1h")
        cache = {"lmcache_endpoint": other.lmcache, "leases": {"enabled": True}}
        raw = {"endpoints": {"a": place.engines["a"]}, "health": {"active": False},
               "filters": ["inference_request", {"kvcache": cache}, "router"]}  # fmt: skip
        await proxy.proxy.reload(load_config(raw))
        await until(lambda: proxy.proxy.replaced)
        assert not proxy.kv.state.leases.leases
        await proxy.tick(10_000)
        assert (pins(place, "DELETE"), pins(other, "DELETE")) == (1, 0)


async def test_a_service_that_drains_leaves_leases_to_the_next() -> None:
    """Else each of them would touch, and end, what both know of."""
    one, lmcache = Engine(), controller(lambda _: {})
    async with serve(one.app) as url, serve(lmcache) as at, world(url, lmcache=at) as proxy:
        await proxy.ask()
        before = proxy.kv.leasing
        assert before is not None
        cache = {"lmcache_endpoint": at, "leases": {"enabled": True}}
        raw = {"endpoints": {"a": url}, "filters": ["inference_request", {"kvcache": cache}, "router"]}
        await proxy.proxy.reload(load_config(raw))
        proxy.clock.advance(10_000)
        before.tick()
        assert len(before.book.leases) == 1
        await proxy.tick(0)
        assert not before.book.leases


async def test_what_waits_to_be_computed_goes_before_a_touch() -> None:
    """The lease stays; the next round asks again."""
    one = Engine(capacity_blocks=1360)
    async with serve(one.app) as url, world(url) as proxy:
        learned(proxy)
        await proxy.kv.scraper.scrape_all()
        await proxy.ask()
        load = proxy.proxy.clusters["default"].endpoints[0].load
        reservation = load.reserve(1000, 0, proxy.clock())
        fill_to(proxy, 0.6)
        await proxy.tick(20)
        assert (one.touched, proxy.results()) == ([], {})
        load.release(reservation, proxy.clock())
        await proxy.tick(1)
        assert len(one.touched) == 1


async def test_a_touch_comes_in_time_however_many_requests_wait() -> None:
    """From four fifths of the cache on it goes before them."""
    one = Engine(capacity_blocks=1360)
    async with serve(one.app) as url, world(url) as proxy:
        learned(proxy)
        await proxy.kv.scraper.scrape_all()
        await proxy.ask()
        proxy.proxy.clusters["default"].endpoints[0].load.reserve(1000, 0, proxy.clock())
        fill_to(proxy, 0.9)
        await proxy.tick(20)
        assert len(one.touched) == 1


async def test_what_cannot_be_kept_any_more_is_not_promised() -> None:
    """The engine took as much as its cache holds between two rounds: the prompt is gone, and the lease with it."""
    one = Engine(capacity_blocks=1360)
    async with serve(one.app) as url, world(url) as proxy:
        learned(proxy)
        await proxy.kv.scraper.scrape_all()
        await proxy.ask()
        fill_to(proxy, 1.0)
        await proxy.tick(20)
        assert (one.touched, proxy.results()) == ([], {"too_late": 1})
        await proxy.ask(CALL, RESULT)
        assert proxy.results() == {"too_late": 1}
        assert proxy.count("lease_promised_tokens_total") == 0


def fill_to(proxy: World, share: float) -> None:
    """Others' new tokens until the cache took so much of its size since the prompt's last use."""
    assert proxy.kv.leasing is not None
    [lease] = proxy.kv.state.leases.leases.values()
    toucher, place = proxy.kv.leasing._toucher, ("default", EndpointId("a"))
    capacity = toucher.capacity_of(proxy.proxy.clusters["default"].endpoints[0])
    assert capacity is not None
    toucher.insertions.note(place, lease.filled + int(share * capacity) + 1 - toucher.insertions.total(place), 0.0)


@contextlib.asynccontextmanager
async def sglang_world(**changes: Any) -> AsyncIterator[tuple[SglangApp, World]]:
    """A proxy that has read a simulated SGLang of 16,000 tokens."""
    engine = EngineSettings(1000, 16, token_outputs=True, timing=EngineTiming(time_scale=0.001))
    settings = SglangSettings(model="m", engine=engine, default_output_tokens=4, **changes)
    app = create_sglang_app(settings, rng=random.Random(1))
    async with app, serve(app, drain_s=0.01, cut_grace_s=0.01) as url, world(url, leases={"touch": False}) as proxy:
        await proxy.kv.scraper.scrape_all()
        await proxy.kv.actions.jobs.settled()
        yield app, proxy


async def press(proxy: World) -> None:
    """Prompts of others: three times what the engine has room for."""
    for number in range(15):
        body = {"model": "m", "messages": [{"role": "user", "content": long_text(f"other{number}-", 1200)}]}
        assert (await proxy.client.post("/v1/chat/completions", json=body)).status_code == 200
    await proxy.settled()


async def test_sglang_keeps_what_a_session_refers_to() -> None:
    """The prompt survives pressure, the promise is verified, and its session closed once the conversation goes on."""
    async with sglang_world(enable_session_radix_cache=True) as (app, proxy):
        with audited() as lines:
            await proxy.ask(prompt_cache_retention="1h")
        assert proxy.count("lease_grants_total", why="client", lever="session") == 1
        [line] = [line for line in lines if line["action"] == "hold"]
        assert (line["result"], line["reason"]) == ("done", "lease client")
        assert line["session"].startswith("kvproxy-")
        await press(proxy)
        assert app.calls["POST /close_session"] == 0
        await proxy.ask({"role": "assistant", "content": "so"}, {"role": "user", "content": "on"})
        assert proxy.results() == {"kept": 1}
        await proxy.tick(1)
        assert app.calls["POST /close_session"] == 1
        assert not proxy.kv.state.leases.to_close


@pytest.mark.parametrize("changes", [{}, {"enable_session_radix_cache": True, "dp_size": 2}])
async def test_an_sglang_that_keeps_no_sessions_gets_none(changes: dict[str, Any]) -> None:
    """Without the flag, and where it would choose the rank itself."""
    async with sglang_world(**changes) as (_, proxy):
        await proxy.ask(prompt_cache_retention="1h")
        assert proxy.count("lease_refusals_total", reason="no_lever") == 1
        assert not proxy.kv.state.leases.leases


async def test_never_more_than_half_of_an_sglang_is_referred_to() -> None:
    async with sglang_world(enable_session_radix_cache=True) as (_, proxy):
        for number in range(4):
            body = {"model": "m", "messages": [{"role": "user", "content": long_text(f"{number}", 1000)}]}
            await proxy.client.post("/v1/chat/completions", json={**body, "prompt_cache_retention": "1h"})
            await proxy.settled()
        held = [one.tokens for one in proxy.kv.state.leases.leases.values()]
        assert 0 < sum(held) <= 8000
        assert proxy.count("lease_refusals_total", reason="endpoint_budget") == 4 - len(held)


async def test_a_session_that_cannot_be_closed_is_closed_later() -> None:
    """Also at the end of a lease that no return ended, and at the proxy's own."""
    async with sglang_world(enable_session_radix_cache=True) as (app, proxy):
        await proxy.ask(prompt_cache_retention="1h")
        answer, refused = app.answer_call, []

        async def refuse(call: HttpCall) -> None:
            if call.path == "/close_session":
                refused.append(call.path)
                await call.send_reply(503)
            else:
                await answer(call)

        app.answer_call = refuse  # type: ignore[method-assign]
        await proxy.ask(ends=True)
        assert refused
        assert len(proxy.kv.state.leases.to_close) == 1
        app.answer_call = answer  # type: ignore[method-assign]
        await proxy.ask(prompt_cache_retention="1h")
        await proxy.tick(1)
        assert not proxy.kv.state.leases.to_close
        assert app.calls["POST /close_session"] == 1
    assert app.calls["POST /close_session"] == 2
