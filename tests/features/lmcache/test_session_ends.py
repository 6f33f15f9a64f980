"""The end of a session frees what was kept for it alone: heat and tokens, so that pins of it are not renewed."""

from __future__ import annotations

import json

from kvproxy.base.types import EndpointId, RequestKind
from kvproxy.cache.overlap.facts import Result
from kvproxy.proxy.request.parse import parse_body
from kvproxy.proxy.request.session import Caller, Session
from tests.cache.support import Service, controller, engine, world
from tests.support.clock import FakeClock

A = EndpointId("a")
STRATEGY = {"enable_pinning": True, "hot_content_threshold": 2, "pin_lease": 300}


async def turn(service: Service, session: str, *contents: str, ends: bool = False) -> None:
    """One served turn of a session, its tokens learned and what comes of it done."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    request = parse_body(RequestKind.CHAT, body, caller=Caller(Session(session), ends=ends))
    assert request is not None
    facts = await service.kv.facts_for(request, body, cluster=service.cluster)
    service.kv.placed(facts, A)
    service.kv.finished(facts, Result(A, True))
    await service.settled()


def long(name: str) -> str:
    return " ".join(f"{name}{number}" for number in range(300))


async def test_pins_of_a_session_that_ended_are_not_renewed(clock: FakeClock) -> None:
    """Those of another one are; the tokens of its last prompt are forgotten."""
    lmcache = controller(lambda _: {})
    async with world({"a": engine()}, lmcache, clock=clock, cache_strategy=STRATEGY) as service:
        for session in ("ends", "stays"):
            for _ in range(2):
                await turn(service, session, long(session), "answer", long(f"{session}-more"))
        assert lmcache.calls["/pin"] == 2
        known = len(service.kv.overlap.tokens.memory)
        await turn(service, "ends", "bye", ends=True)
        assert len(service.kv.overlap.tokens.memory) == known - 1
        assert service.metric("kvproxy_kvcache_sessions_ended_total", result="known") == 1
        clock.advance(250)
        await service.kv._tick()
        await service.settled()
        assert lmcache.calls["/pin"] == 3


async def test_a_forks_beginning_stays(clock: FakeClock) -> None:
    """The root's last prompt is the beginning of its sub-agent's: heat and tokens of that are shared."""
    lmcache = controller(lambda _: {})
    async with world({"a": engine()}, lmcache, clock=clock, cache_strategy=STRATEGY) as service:
        root = (long("root"), "answer", long("root-more"))
        for _ in range(2):
            await turn(service, "root", *root)
        await turn(service, "root/agent", *root, "answer", long("task"))
        memory, hotness = service.kv.overlap.tokens.memory, service.kv.actions.hotness
        known = len(memory)
        await turn(service, "root", "bye", ends=True)
        assert len(memory) == known
        shared = [prefix for prefix in hotness.walk_coldest("a") if hotness.count_recent_uses(prefix, clock()) >= 3]
        assert shared
