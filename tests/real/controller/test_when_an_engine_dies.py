"""Engines that die under load: begun streams break loudly, everything else is served by the other engine."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import psutil
import pytest

from tests.real.conftest import Saw
from tests.real.pair import Pair, until_in_flight
from tests.real.prompts import chat, text
from tests.support.proxy import RunningProxy, running_proxy
from tests.support.until import until

pytestmark = pytest.mark.real

#: Probes often, so that the test need not wait for their verdict.
HEALTH = {"active": True, "interval": "200ms", "timeout": "1s", "unhealthy_threshold": 2, "eject_after": 3}


@dataclass
class Seen:
    """Clients' results: how streams ended, by endpoint, and the statuses of whole answers."""

    streams: Counter[tuple[str, str]] = field(default_factory=Counter)
    whole: Counter[int] = field(default_factory=Counter)
    begun: int = 0


def ending(events: list[str]) -> str:
    """How a stream's last events read: `done` or `error`; `cut` is neither."""
    if any('"error"' in json.loads(event) or event.startswith('{"error"') for event in events if event != "[DONE]"):
        return "error"
    return "done" if events and events[-1] == "[DONE]" else "cut"


async def stream(http: httpx.AsyncClient, model: str, number: int, seen: Seen) -> None:
    """One long stream, from start to whatever end."""
    body = chat(model, text(30, seed=f"death {number}"), stream=True, max_tokens=1500, ignore_eos=True)
    events: list[str] = []
    async with http.stream("POST", "/v1/chat/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                seen.begun += not events
                events.append(line[6:])
        seen.streams[answer.headers["x-kvproxy-endpoint"], ending(events)] += 1


async def whole(http: httpx.AsyncClient, model: str, number: int, seen: Seen, stop: asyncio.Event) -> None:
    """Short questions, one after the other, until told to stop."""
    while not stop.is_set():
        body = chat(model, text(10, seed=f"whole {number} {seen.whole.total()}"), max_tokens=4)
        seen.whole[(await http.post("/v1/chat/completions", json=body, timeout=60)).status_code] += 1


async def under_load(proxy: RunningProxy, pair: Pair, kill: Callable[[], None]) -> Seen:
    """Eight streams and four askers; `kill` is called when all streams have begun."""
    seen, stop = Seen(), asyncio.Event()
    async with asyncio.TaskGroup() as clients:
        streams = [clients.create_task(stream(proxy.client, pair.model.name, n, seen)) for n in range(8)]
        for number in range(4):
            clients.create_task(whole(proxy.client, pair.model.name, number, seen, stop))
        await until(lambda: seen.begun == len(streams), within_s=60)
        kill()
        await asyncio.wait(streams)
        await until(lambda: proxy.metric("kvproxy_endpoint_up", cluster="default", endpoint="b") == 0, within_s=30)
        stop.set()
    return seen


async def served_by_a(proxy: RunningProxy, pair: Pair) -> None:
    """With b known to be out, nothing is tried there any more."""
    failed = proxy.metric("kvproxy_attempt_failures_total", cluster="default", endpoint="b", reason="connect_error")
    for number in range(10):
        answer = await proxy.client.post("/v1/chat/completions", json=chat(pair.model.name, f"after {number}"))
        assert (answer.status_code, answer.headers["x-kvproxy-endpoint"]) == (200, "a")
    assert failed == proxy.metric(
        "kvproxy_attempt_failures_total", cluster="default", endpoint="b", reason="connect_error"
    )


def check(seen: Seen) -> str:
    """Only streams that had begun on b were hurt, every one of them was told, and no asker noticed."""
    assert seen.streams["a", "done"] > 0
    assert seen.streams["b", "error"] > 0
    assert set(seen.streams) <= {("a", "done"), ("b", "error"), ("b", "done")}
    assert set(seen.whole) == {200}
    return (
        f"streams on a: {seen.streams['a', 'done']} whole; on b: {seen.streams['b', 'error']} ended by an error event; "
        f"{seen.whole[200]} short questions meanwhile, all answered"
    )


async def test_an_api_server_dies(pair: Pair, saw: Saw) -> None:
    """kill -9 of one API server; it is out at once, and takes traffic again after it was started again."""
    async with running_proxy(pair.urls, health=HEALTH) as proxy:
        seen = await under_load(proxy, pair, pair.b.program.kill)
        saw(f"API server of b killed; {check(seen)}")
        await served_by_a(proxy, pair)
        await asyncio.to_thread(pair.revive)
        await until(lambda: proxy.metric("kvproxy_endpoint_up", cluster="default", endpoint="b") == 1, within_s=30)
        answers = [
            await proxy.client.post("/v1/chat/completions", json=chat(pair.model.name, f"back {n}")) for n in range(4)
        ]
    assert {answer.headers["x-kvproxy-endpoint"] for answer in answers} == {"a", "b"}
    saw("b started again and takes its share again")


async def test_an_engine_core_dies(pair: Pair, saw: Saw) -> None:
    """kill -9 of the process that computes: the API server lives on for seconds and answers errors of its own."""

    def kill_core() -> None:
        children = psutil.Process(pair.b.program.pid).children()
        (core,) = [each for each in children if "EngineCore" in " ".join(each.cmdline())]
        core.kill()

    async with running_proxy(pair.urls, health=HEALTH) as proxy, httpx.AsyncClient() as http:
        seen = await under_load(proxy, pair, kill_core)
        saw(f"engine core of b killed; {check(seen)}")
        await served_by_a(proxy, pair)
        await until_in_flight(http, pair.a, 0)
