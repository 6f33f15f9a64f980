"""Transfers: bounded, and believed by what was found."""

from __future__ import annotations

import contextlib
import logging
import random
from array import array
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvproxy.base.types import InferenceRequest
from kvproxy.cache.actions.hotness import KnownPrefix
from kvproxy.features.transfers import transfers as transfers_module
from kvproxy.features.transfers.copy_planner import draw_source, find_holders
from kvproxy.features.transfers.on_demand import CopyObserver
from kvproxy.features.transfers.settings import TransferSettings
from kvproxy.features.transfers.transfers import AT_ONCE, SPEED_AGE_S, Link, Transfers
from kvproxy.lab.simulator.lmcache_chunks import WorkerSettings
from kvproxy.lab.simulator.lmcache_controller import ControllerApp, ControllerSettings
from kvproxy.lab.simulator.lmcache_coordinator import CoordinatorApp, CoordinatorSettings
from kvproxy.operate.config.load import check_config
from tests.cache.support import NOWHERE, B, Fake, Service, chat, cluster_of, engine, long_text, tokenize, world
from tests.support.clock import FakeClock
from tests.support.loopback import serve
from tests.support.until import until

TEXT = long_text("t", 1300)
CHUNKS = 5


def turn(*more: str) -> tuple[InferenceRequest, bytes]:
    return chat(TEXT, *more, user="one session")


def tokens_of(*contents: str) -> list[int]:
    """As the fake engines make them."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]
    found: list[int] = tokenize({"messages": messages})["tokens"]
    return found


@contextlib.asynccontextmanager
async def prepared(
    app: CoordinatorApp | ControllerApp | Fake, clock: FakeClock, **changes: Any
) -> AsyncIterator[tuple[Service, Transfers]]:
    """Yield a service with transfers, by this LMCache."""
    given = {"on_demand": True, **changes.pop("transfers", {})}
    async with serve(app) as url:
        more = {
            "lmcache_endpoint": url,
            "provider": "controller" if isinstance(app, ControllerApp) else "coordinator",
            "transfers": given,
            **changes,
        }
        async with world({"a": engine(), "b": engine()}, clock=clock, **more) as service:
            await until(lambda: service.kv.overlap.store.possible)
            copies = service.kv.observers.find(CopyObserver)
            assert copies is not None
            yield service, copies.on_demand._transfers


async def copy(service: Service, transfers: Transfers, source: str = "") -> bool:
    """Copy the prompt to `b` to the end; returns whether it was begun."""
    tokens = array("I", tokens_of(TEXT))
    prefix = KnownPrefix(1, "m", "", deque(), 1, tokens)
    target = service.cluster.find_endpoint(B)
    assert target is not None
    begun = transfers.begin(target, prefix, CHUNKS * 256, source, "placed", None)
    await service.settled()
    return begun


def coordinator(clock: FakeClock, **changes: Any) -> CoordinatorApp:
    """With the prompt in the store that both instances read, and in no memory."""
    settings = CoordinatorSettings(**{"instances": ("a", "b"), "shared_chunks": 64, **changes})
    app = CoordinatorApp(settings, clock=clock)
    app.admit("a", tokens_of(TEXT), model_name="m")
    server = app.directory.get("a")
    assert server is not None
    server.remove(list(server.known.values()))
    return app


def in_memory(app: CoordinatorApp) -> dict[str, int]:
    """Chunks by instance."""
    return {server.instance_id: len(server.store) for server in app.directory.servers()}


def refused(service: Service, reason: str) -> float:
    return service.metric("kvproxy_kvcache_transfers_refused_total", reason=reason)


def done(service: Service, result: str = "done") -> float:
    return service.metric("kvproxy_kvcache_actions_total", action="transfer", result=result)


async def test_a_prompt_is_copied_from_the_shared_store(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    """Into the memory of one instance, once; counted, written down with what was found, and known to the next turn."""
    caplog.set_level(logging.INFO, "kvproxy.audit")
    app = coordinator(clock)
    async with prepared(app, clock) as (service, transfers):
        assert await copy(service, transfers)
        assert in_memory(app) == {"a": 0, "b": CHUNKS}
        assert done(service) == 1
        assert service.metric("kvproxy_kvcache_transferred_tokens_total", endpoint="b") == CHUNKS * 256
        facts = await service.ask(turn("yes", "more"))
        assert facts.overlaps.by_endpoint[B].tokens == CHUNKS * 256
        assert transfers.link.running == 0
    line = next(one for one in caplog.messages if "action=transfer" in one)
    assert "instance=b" in line
    assert "result=done amount=1280" in line
    assert "source=shared" in line
    assert "t0" not in line


async def test_a_busy_link_refuses(clock: FakeClock) -> None:
    """Nothing is asked for, and the refusal counts by its reason."""
    app = coordinator(clock)
    async with prepared(app, clock) as (service, transfers):
        for _ in range(AT_ONCE):
            transfers.link.begin(1)
        assert not await copy(service, transfers)
        assert refused(service, "busy") == 1
    assert app.calls["POST /cache/prefetches"] == 0


async def test_a_stale_placement_is_no_success(clock: FakeClock) -> None:
    """The directory has it in the store, and a prefetch finds nothing: nothing is believed, and it counts as such."""
    app = coordinator(clock)
    app.directory.readable = lambda *_: False  # type: ignore[method-assign] # the files are gone
    async with prepared(app, clock) as (service, transfers):
        await copy(service, transfers)
        assert (done(service, "no_effect"), done(service)) == (1, 0)
        assert transfers.link.tokens_per_s == 0.0
        assert service.metric("kvproxy_kvcache_transferred_tokens_total", endpoint="a") == 0
        assert transfers.link.running == 0


async def test_half_of_it_counts_for_half(clock: FakeClock) -> None:
    """The blocks that were found are those that are trusted."""
    app = coordinator(clock)
    known = iter(range(3))
    readable = app.directory.readable
    app.directory.readable = lambda *of: readable(*of) and next(known, None) is not None  # type: ignore[method-assign]
    async with prepared(app, clock) as (service, transfers):
        await copy(service, transfers)
        assert done(service) == 1
        moved = sum(service.metric("kvproxy_kvcache_transferred_tokens_total", endpoint=name) for name in "ab")
        assert moved == 3 * 256


async def test_a_coordinator_that_is_lost_meanwhile(clock: FakeClock) -> None:
    """The prefetch was taken, and its end is never told: one attempt, no success, and the link is free again."""
    app = Fake({})
    placement = {"instance_id": "a", "tier": "l2", "backend": "fs_native", "shared": True}
    results = [{"key": {"chunk_hash_hex": f"{number:064x}"}, "placements": [placement]} for number in range(CHUNKS)]
    app.routes |= {
        "/directory/stats": lambda _: {"num_keys": 5, "num_placements": 5, "l1_keys_by_instance": {}},
        "/instances": lambda _: {"instances": []},
        "/directory/lookup": lambda _: {"chunks": CHUNKS, "results": results},
        "/cache/prefetches": lambda _: {"instance_id": "a", "request_id": "r", "chunks": CHUNKS, "status": "submitted"},
        **{f"/cache/prefetches/{name}/r": lambda _: (502, {"detail": "gone"}) for name in "ab"},
    }
    async with prepared(app, clock) as (service, transfers):
        await copy(service, transfers)
        assert app.calls["/cache/prefetches"] == 1
        assert done(service) == 0
        assert transfers.link.running == 0
        assert service.metric("kvproxy_kvcache_transfer_seconds_count", result="refused") == 1


async def test_a_prefetch_that_does_not_end_is_given_up(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `max_wait`, with one attempt."""
    app = coordinator(clock, prefetch_s=3600.0)
    monkeypatch.setattr(transfers_module, "TIMEOUT_S", 0.1)
    async with prepared(app, clock, transfers={"max_wait": "1s"}) as (service, transfers):
        await copy(service, transfers)
        assert done(service, "timeout") == 1
        assert transfers.link.running == 0
    assert app.calls["POST /cache/prefetches"] == 1


async def test_a_dry_run_moves_nothing(clock: FakeClock) -> None:
    app = coordinator(clock)
    async with prepared(app, clock, cache_strategy={"dry_run": True}) as (service, transfers):
        await copy(service, transfers)
        assert done(service, "dry_run") == 1
    assert app.calls["POST /cache/prefetches"] == 0


@pytest.mark.parametrize("p2p", [True, False])
async def test_a_controller_copies_from_the_instance_that_holds_it(p2p: bool, clock: FakeClock) -> None:
    """Its lookup goes on naming the source alone, so what was copied is remembered here."""
    workers = tuple(WorkerSettings(name, p2p=p2p) for name in "ab")
    app = ControllerApp(ControllerSettings(workers), clock=clock)
    app.workers["a"].admit(tokens_of(TEXT))
    async with prepared(app, clock) as (service, transfers):
        await copy(service, transfers, "a")
        assert done(service) == (1 if p2p else 0)
        assert done(service, "not_supported") == (0 if p2p else 1)
        facts = await service.ask(turn("yes", "more"))
        assert facts.overlaps.matched_tokens(B) == (CHUNKS * 256 if p2p else 0)
    assert app.workers["a"].keys == CHUNKS


async def test_off_by_default(clock: FakeClock) -> None:
    async with world({"a": engine()}, clock=clock) as service:
        assert service.kv.observers.find(CopyObserver) is None


def test_it_needs_a_service_that_moves_kv() -> None:
    filters = ["inference_request", {"kvcache": {"transfers": {"on_demand": True}}}, "router"]
    config, problems = check_config({"endpoints": [NOWHERE], "filters": filters})
    assert config is None
    assert any("needs lmcache_endpoint" in problem.message for problem in problems)


def test_a_setting_that_is_gone_is_a_warning_with_the_reason() -> None:
    filters = ["inference_request", {"kvcache": {"transfers": {"ahead": False}}}, "router"]
    config, (gone, *_) = check_config({"endpoints": [NOWHERE], "filters": filters})
    assert config is not None
    assert (gone.severity, gone.path) == ("warning", "filters[1].kvcache.transfers.ahead")
    assert "leave it out: turns took 1.04" in gone.hint


def test_a_link_is_bounded(clock: FakeClock) -> None:
    """At once, in tokens a second, and by what it is worth; a speed that is old is tried again."""
    link = Link(TransferSettings(tokens_per_second=1000), clock=clock)
    assert link.why_refused(600, 1.0) == ""
    link.begin(600)
    assert link.why_refused(600, 1.0) == "budget"
    clock.advance(0.5)
    assert link.why_refused(600, 1.0) == ""
    link.begin(600)
    clock.advance(10.0)
    assert link.why_refused(1, 1.0) == "busy"
    link.end(600, 1.0)
    assert link.why_refused(700, 1.0) == "slow"
    assert link.why_refused(500, 1.0) == ""
    clock.advance(SPEED_AGE_S + 1.0)
    assert link.why_refused(700, 1.0) == ""
    link.end(0, 1.0)
    assert link.why_refused(50_000, 1.0) == ""  # more than the budget ever is: once it is full


def test_a_source_is_one_of_the_longest_and_rather_an_idle_one() -> None:
    """Within a step of the longest; weight 1 / (1 + waiting)."""
    cluster = cluster_of(dict.fromkeys("abc", NOWHERE))
    a, b, c = cluster.endpoints
    for _ in range(3):
        b.load.reserve(100, 0, 0.0)
    holders = find_holders((a, b, c), {a.id: 1024, b.id: 1100, c.id: 512}, 256)
    assert holders == [a, b]
    rng = random.Random(1)
    chosen = [draw_source(holders, rng) for _ in range(2000)]
    assert 0.75 < chosen.count(a) / 2000 < 0.85
    assert find_holders((a, b, c), {}, 256) == []
