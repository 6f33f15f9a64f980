"""Prompts kept for conversations that are expected back, through a whole proxy."""

from __future__ import annotations

import contextlib
import json
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kvproxy.app import Proxy
from kvproxy.cache.actions.hotness import common_tokens
from kvproxy.cache.service import KvCache
from kvproxy.cache.store import Action, ActionKind
from kvproxy.features.leases.leases import LeaseBook, Leasing
from kvproxy.features.leases.note import LeaseResult
from kvproxy.lab.simulator.lmcache_coordinator import CoordinatorSettings
from kvproxy.operate.config.load import check_config, load_config
from kvproxy.operate.receipts.receipt import Receipt, decode_receipt, note_of
from kvproxy.proxy.listener.server import serve
from tests.cache.fleet import Place, simulated
from tests.cache.support import Fake, controller, engine, long_text, words
from tests.operate.admin.support import NOON, admin_of, audited
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

    def __init__(self) -> None:
        self.known: list[list[int]] = []
        self.ends = "tool_calls"
        self.app: Fake = engine()
        self.app.routes |= {"/v1/chat/completions": self._chat}

    def _reuse(self, tokens: list[int]) -> dict[str, Any]:
        cached = max((common_tokens(array("I", tokens), array("I", one)) for one in self.known), default=0) // 16 * 16
        self.known.append(tokens)
        details = {"cached_tokens": cached}
        return {"prompt_tokens": len(tokens), "completion_tokens": 5, "prompt_tokens_details": details}

    def _chat(self, asked: dict[str, Any]) -> dict[str, Any]:
        tokens = words(" ".join(f"<{one['role']}> {one.get('content')}" for one in asked["messages"]))
        choice = {"index": 0, "message": CALL, "finish_reason": self.ends}
        return {"choices": [choice], "usage": self._reuse(tokens)}


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

    @property
    def leasing(self) -> Leasing:
        found = self.kv.observers.by_feature["leases"]
        assert isinstance(found, Leasing)
        return found

    @property
    def book(self) -> LeaseBook:
        return self.leasing.book

    async def ask(self, *turns: dict[str, Any], begins: str = "go", ends: bool = False, **fields: Any) -> None:
        """One request of a session, and all that comes of it."""
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": begins}, *turns]
        headers = {"x-dynamo-session-id": "one", **({"x-dynamo-session-final": "true"} if ends else {})}
        answer = await self.client.post(
            "/v1/chat/completions", json={"model": self.model, "messages": messages, **fields}, headers=headers
        )
        assert answer.status_code == 200, answer.text
        await self.settled()

    async def settled(self) -> None:
        """Everything that a request or a round brought about is done."""
        await until(lambda: not self.proxy.generations.current.running)
        await self.kv.actions.jobs.settled()

    async def tick(self, seconds: float) -> None:
        """So much later, between requests."""
        self.clock.advance(seconds)
        self.leasing.tick()
        await self.settled()

    def count(self, name: str, **labels: str) -> float:
        return self.proxy.metrics.registry.get_sample_value(f"kvproxy_{name}", labels) or 0.0

    def results(self) -> dict[str, int]:
        return dict(self.book.results)


@contextlib.asynccontextmanager
async def world(
    engine_url: str, *, lmcache: str = "", leases: dict[str, Any] | None = None, kvcache: dict[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[World]:  # fmt: skip
    clock = FakeClock()
    given = {"enabled": True, "min_tokens": 256, **(leases or {})}
    cache = {"lmcache_endpoint": lmcache, "engine_metrics_interval": 0, "leases": given,
             "lookup_routing_timeout": 60, "request_timeout": 60, **(kvcache or {})}  # fmt: skip
    raw = {"endpoints": {"a": engine_url}, "health": {"active": False},
           "filters": ["inference_request", {"kvcache": cache}, "router"], **config}  # fmt: skip
    proxy = Proxy(load_config(raw), clock=clock, wall_clock=lambda: NOON)
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
        assert proxy.count("lease_grants_total", why="tool_call") == 2
        assert proxy.count("lease_results_total", result="kept") == 1
        assert proxy.count("lease_promised_tokens_total") >= proxy.count("lease_reused_tokens_total") > 1100
        assert proxy.count("lease_kept_ratio") == 1
        assert proxy.count("lease_entries", what="waiting") == 1
        async with admin_of(proxy.proxy) as admin:
            shown = (await admin.get("/cache/leases")).json()["promises"]
            live = (await admin.get("/live")).json()["cache"]["promises"]
        [held] = shown["held"]
        assert (held["why"], held["confirmed"]) == ("tool_call", True)
        assert (live["prompts"], live["kept"], live["broken"]) == (1, 1, 0)
        assert SYSTEM[:20] not in json.dumps(shown)
    receipts: list[Receipt] = [decode_receipt(line) for line in path.read_bytes().splitlines()]
    leases = [note_of(receipt, "lease", LeaseResult) for receipt in receipts[:2]]
    assert leases[0] is None
    assert leases[1] is not None
    assert (leases[1].result, leases[1].why) == ("kept", "tool_call")


async def test_a_pin_at_another_instance_confirms_nothing() -> None:
    """That of an earlier lease on the same prompt, which ended meanwhile: it is taken back."""
    one, lmcache = Engine(), controller(lambda _: {})
    async with serve(one.app) as url, serve(lmcache) as at, world(url, lmcache=at) as proxy:
        await proxy.ask()
        [held] = proxy.book.leases.values()
        held.held = False
        proxy.leasing.done(Action(ActionKind.PIN, "b", held.prefix, ""), proxy.clock())
        assert not held.held
        assert list(proxy.book.released) == [("b", held.of.key)]


async def test_a_hot_prompt_under_lease_is_pinned_for_both() -> None:
    """Neither waits for the other's: pins are counted, and each is taken back when its own reason ends."""
    one, lmcache = Engine(), controller(lambda _: {})
    hot = {"cache_strategy": {"enable_pinning": True, "hot_content_threshold": 1}}
    async with serve(one.app) as url, serve(lmcache) as at, world(url, lmcache=at, kvcache=hot) as proxy:
        await proxy.ask()
        assert lmcache.calls["/pin"] == 2
        assert len(proxy.kv.overlap.store.list_pins(proxy.clock())) == 1
        assert [lease.held for lease in proxy.book.leases.values()] == [True]


class RemoteLoad:
    """Another process, which does all that it is asked to leave to it."""

    def __init__(self) -> None:
        self.told: list[Action] = []

    async def claim(self, what: str, ttl_s: float) -> bool:
        return False

    def acted(self, action: Action) -> None:
        self.told.append(action)


async def test_a_lease_is_one_process_own() -> None:
    """Others would take its pin for one of their hot prefixes, and take it back as cold."""
    one, lmcache, others = Engine(), controller(lambda _: {}), RemoteLoad()
    async with serve(one.app) as url, serve(lmcache) as at, world(url, lmcache=at) as proxy:
        proxy.kv.overlap.store.locks = others
        await proxy.ask()
        assert lmcache.calls["/pin"] == 1
        [held] = proxy.book.leases.values()
        assert held.held
        assert others.told == []


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
            await until(lambda: proxy.kv.overlap.store.source is not None)
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


def test_leases_need_lmcache() -> None:
    raw = {
        "endpoints": ["http://127.0.0.1:9"],
        "filters": ["inference_request", {"kvcache": {"leases": {"enabled": True}}}, "router"],
    }
    config, problems = check_config(raw)
    assert config is None
    [path] = [one.path for one in problems if "needs lmcache_endpoint, which pins" in one.message]
    assert path.endswith("kvcache.leases.enabled")
    assert path.count("kvcache") == 1


async def test_switched_off_by_a_reload_nothing_stays_pinned() -> None:
    """Pins of the coordinator are taken back by the service that ends."""
    async with (
        simulated(names=("a",), controller=None, coordinator=CoordinatorSettings()) as place,
        world(place.engines["a"], lmcache=place.lmcache) as proxy,
    ):
        proxy.model = "tiny"
        await until(lambda: proxy.kv.overlap.store.source is not None)
        await proxy.ask(prompt_cache_retention="1h")
        raw = {"endpoints": {"a": place.engines["a"]}, "health": {"active": False}}
        assert proxy.count("lease_entries", what="leases") == 1
        await proxy.proxy.reload(load_config(raw))
        await until(lambda: proxy.proxy.generations.ended)
        assert pins(place, "DELETE") == 1
        shown = {one.name for one in proxy.proxy.metrics.registry.collect() if one.samples}
        assert not shown & {"kvproxy_lease_entries", "kvproxy_lease_held_tokens", "kvproxy_lease_kept_ratio"}


async def test_at_another_lmcache_nothing_is_held_yet() -> None:
    """Pins of the first one are taken back there, and not at the next one."""
    settings = CoordinatorSettings()
    async with (
        simulated(names=("a",), controller=None, coordinator=settings) as place,
        simulated(names=("a",), controller=None, coordinator=settings) as other,
        world(place.engines["a"], lmcache=place.lmcache) as proxy,
    ):
        proxy.model = "tiny"
        await until(lambda: proxy.kv.overlap.store.source is not None)
        await proxy.ask(prompt_cache_retention="1h")
        cache = {"lmcache_endpoint": other.lmcache, "leases": {"enabled": True}}
        raw = {"endpoints": {"a": place.engines["a"]}, "health": {"active": False},
               "filters": ["inference_request", {"kvcache": cache}, "router"]}  # fmt: skip
        await proxy.proxy.reload(load_config(raw))
        await until(lambda: proxy.proxy.generations.ended)
        assert not proxy.book.leases
        await proxy.tick(10_000)
        assert (pins(place, "DELETE"), pins(other, "DELETE")) == (1, 0)


async def test_a_service_that_drains_leaves_leases_to_the_next() -> None:
    """Else each of them would renew, and end, what both know of."""
    one, lmcache = Engine(), controller(lambda _: {})
    async with serve(one.app) as url, serve(lmcache) as at, world(url, lmcache=at) as proxy:
        await proxy.ask()
        before = proxy.leasing
        cache = {"lmcache_endpoint": at, "leases": {"enabled": True}}
        raw = {"endpoints": {"a": url}, "filters": ["inference_request", {"kvcache": cache}, "router"]}
        await proxy.proxy.reload(load_config(raw))
        proxy.clock.advance(10_000)
        before.tick()
        assert len(before.book.leases) == 1
        await proxy.tick(0)
        assert not before.book.leases
