"""One call to all engines of a cluster, and caches that count as empty, over the admin listener."""

from __future__ import annotations

import asyncio
import contextlib
import json
from array import array
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.types import Send

from kvproxy.base.types import EndpointId
from kvproxy.operate.admin.cache_status import endpoint_index
from kvproxy.operate.admin.replies import REPEATED
from kvproxy.proxy.listener.server import serve
from tests.operate.admin.support import BASE, admin_of, audited, problems_of, proxy_of
from tests.support.fake_engine import Call, FakeEngine, reply
from tests.support.proxy import RunningProxy, chat, running_proxy

PROMPT = chat("word " * 2000)


def engine(name: str, *, status: int = 200, body: bytes = b'{"paused": true}') -> FakeEngine:
    """Return an engine that answers every call outside the API of clients so."""

    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        if call.path.startswith("/v1/"):
            await reply(send, 200, b"{}")
        else:
            await reply(send, status, body)

    return FakeEngine(name, behave)


def calls_of(engine: FakeEngine) -> list[tuple[str, str, bytes]]:
    """Return the calls that are no requests of clients and none of the proxy's own."""
    return [(one.method, one.path, one.body) for one in engine.calls if one.path in ("/pause", "/weights")]


def held(running: RunningProxy) -> dict[str, int]:
    """Return the blocks that each endpoint is thought to hold."""
    service = running.proxy.kvcache
    assert service is not None
    found = {one.id: endpoint_index(service, "default", one) for one in running.proxy.clusters["default"].endpoints}
    return {str(name): one["approximate_blocks"] for name, one in found.items()}  # type: ignore[misc]


@contextlib.asynccontextmanager
async def both(a: FakeEngine, b: FakeEngine) -> AsyncIterator[tuple[RunningProxy, httpx.AsyncClient]]:
    """Yield a proxy over two engines, and a client of its admin listener."""
    async with (
        serve(a) as one,
        serve(b) as two,
        running_proxy({"a": one, "b": two}, policy="kv_aware") as running,
        admin_of(running.proxy) as client,
    ):
        yield running, client


async def test_every_engine_is_called_once() -> None:
    """With its body as JSON; the answer has each one's, and the audit log a line."""
    a, b = engine("a"), engine("b", body=b"done")
    async with both(a, b) as (_, client):
        with audited() as lines:
            answer = await client.post("/call", json={"path": "/weights", "body": {"version": 2}})
    assert answer.status_code == 200
    assert answer.json() == {
        "cluster": "default",
        "failed": [],
        "engines": {"a": {"ok": True, "answer": {"paused": True}}, "b": {"ok": True, "answer": "done"}},
    }
    assert [calls_of(each) for each in (a, b)] == [[("POST", "/weights", b'{"version":2}')]] * 2
    assert [(line["action"], line["path"], line["engines"], line["failed"]) for line in lines] == [
        ("call", "/weights", 2, 0)
    ]


async def test_engines_that_fail_are_named() -> None:
    """With their status; the others have done it."""
    a, b = engine("a"), engine("b", status=500)
    async with both(a, b) as (_, client):
        answer = await client.post("/call", json={"path": "/pause"})
    assert answer.status_code == 502
    assert answer.json()["failed"] == ["b"]
    assert "500" in answer.json()["engines"]["b"]["error"]
    assert answer.json()["engines"]["a"]["ok"]


async def test_an_engine_that_takes_too_long_fails() -> None:
    """By the time-out of the call."""
    a = FakeEngine("a", _never)
    async with serve(a) as url, running_proxy({"a": url}) as running, admin_of(running.proxy) as client:
        answer = await client.post("/call?timeout_s=1", json={"path": "/pause"})
    assert answer.status_code == 502
    assert "no answer within 1 s" in answer.json()["engines"]["a"]["error"]


async def _never(engine: FakeEngine, call: Call, send: Send) -> None:
    if call.path == "/pause":
        await call.gone.wait()
    else:
        await reply(send, 200, b"{}")


async def test_some_engines_are_called_by_name() -> None:
    """The others are not."""
    a, b = engine("a"), engine("b")
    async with both(a, b) as (_, client):
        await client.post("/call", json={"path": "/pause", "engines": ["b"], "method": "GET"})
    assert calls_of(a) == []
    assert calls_of(b) == [("GET", "/pause", b"")]


async def test_caches_of_engines_that_did_it_are_forgotten() -> None:
    """Of those that failed not."""
    a, b = engine("a"), engine("b", status=500)
    async with both(a, b) as (running, client):
        for _ in range(2):  # the second goes to the other one, by load
            await running.client.post("/v1/chat/completions", json=chat("word " * 2000))
        before = held(running)
        await client.post("/call", json={"path": "/pause"})
        kept = held(running)
        await client.post("/call", json={"path": "/pause", "flush": True})
        after = held(running)
    assert kept == before
    assert sum(before.values())
    assert after == {"a": 0, "b": before["b"]}


async def test_a_flush_calls_no_engine() -> None:
    """The answer names the endpoints whose caches count as empty."""
    a = engine("a")
    async with serve(a) as url, running_proxy({"a": url}, policy="kv_aware") as running:
        await running.client.post("/v1/chat/completions", json=PROMPT)
        assert held(running)["a"]
        before = len(a.calls)
        async with admin_of(running.proxy) as client:
            answer = await client.post("/flush", json={})
        assert answer.json() == {"cluster": "default", "flushed": ["a"]}
        assert held(running) == {"a": 0}
        assert len(a.calls) == before
        service = running.proxy.kvcache
        assert service is not None
        assert service.state.losses.latest_loss("default", EndpointId("a")) is not None


def trained(name: str, version: str, *, path: str = "/model_info") -> FakeEngine:
    """Return an engine that reports these weights; "": none."""

    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        if call.path == path and version:
            await reply(send, 200, json.dumps({"weight_version": version}).encode())
        else:
            await reply(send, 200 if call.path.startswith(("/v1/", "/weights")) else 404, b"{}")

    return FakeEngine(name, behave)


@pytest.mark.parametrize("call", [{}, {"path": "/weights", "flush": True}])
async def test_an_engine_that_reports_other_weights_keeps_its_cache(call: dict[str, Any]) -> None:
    """With a version in the request each engine is asked, as SGLang and vLLM each report it; one that reports none
    counts as empty. Without a version all of them do."""
    engines = {
        "new": trained("new", "step-2"),
        "vllm": trained("vllm", "step-2", path="/weight_info"),
        "old": trained("old", "step-1"),
        "silent": trained("silent", ""),
    }
    target = "/call" if call else "/flush"
    async with contextlib.AsyncExitStack() as stack:
        urls = {name: await stack.enter_async_context(serve(one)) for name, one in engines.items()}
        running = await stack.enter_async_context(running_proxy(urls, policy="round_robin"))
        client = await stack.enter_async_context(admin_of(running.proxy))
        enter_everywhere(running)
        answer = await client.post(target, json={**call, "weight_version": "step-2"})
        assert answer.status_code == 200
        assert {name for name, blocks in held(running).items() if blocks} == {"old"}
        if call:
            assert answer.json()["kept"] == {"old": "step-1"}
        else:
            assert answer.json() == {
                "cluster": "default",
                "flushed": ["new", "vllm", "silent"],
                "kept": {"old": "step-1"},
            }
        await client.post(target, json=call)
        assert not any(held(running).values())


async def test_a_version_without_a_flush_is_refused() -> None:
    """A client would take the caches for empty."""
    async with serve(trained("a", "step-1")) as url, running_proxy({"a": url}, policy="round_robin") as running:
        async with admin_of(running.proxy) as client:
            answer = await client.post("/call", json={"path": "/weights", "weight_version": "step-2"})
        assert (answer.status_code, answer.json()["problems"][0]["where"]) == (422, "weight_version")


async def test_an_answer_of_old_weights_enters_nothing() -> None:
    """Its request began before the flush."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        if call.path.startswith("/v1/chat"):
            begun.set()
            await go_on.wait()
        await reply(send, 200, b"{}")

    async with (
        serve(FakeEngine("a", behave)) as url,
        running_proxy({"a": url}, policy="kv_aware") as running,
        admin_of(running.proxy) as client,
    ):
        asked = asyncio.create_task(running.client.post("/v1/chat/completions", json=PROMPT))
        await begun.wait()
        await client.post("/flush", json={})
        go_on.set()
        assert (await asked).status_code == 200
        assert held(running) == {"a": 0}


def enter_everywhere(running: RunningProxy) -> None:
    """Have every engine hold a prompt."""
    service = running.proxy.kvcache
    assert service is not None
    indexes = service.overlap.indexes["default"]
    for one in running.proxy.clusters["default"].endpoints:
        indexes.enter_prompt(one.id, indexes.approximate.locate(array("Q", range(1, 9))))


async def test_only_one_of_several_processes_calls() -> None:
    """The others forget."""
    a = engine("a")
    async with serve(a) as url, running_proxy({"a": url}, policy="kv_aware") as running:
        await running.client.post("/v1/chat/completions", json=PROMPT)

        async def repeated(scope: Any, receive: Any, send: Any) -> None:
            await running.proxy.admin({**scope, REPEATED: True}, receive, send)

        transport = httpx.ASGITransport(app=repeated)
        async with httpx.AsyncClient(transport=transport, base_url=BASE) as client:
            answer = await client.post("/call", json={"path": "/pause", "flush": True})
        assert answer.status_code == 200
        assert held(running) == {"a": 0}
    assert calls_of(a) == []


@pytest.mark.parametrize(
    ("target", "body", "status", "place"),
    [
        ("/call", {}, 422, "path"),
        ("/call", {"path": "pause"}, 422, "path"),
        ("/call", {"path": "//elsewhere/pause"}, 422, "path"),
        ("/call", {"path": "/a b"}, 422, "path"),
        ("/call", {"path": "/pause", "method": "TRACE"}, 422, "(body)"),
        ("/call", {"path": "/pause", "endpoints": ["a"]}, 422, "(body)"),
        ("/call", {"path": "/pause", "engines": ["c"]}, 404, "engines"),
        ("/call?timeout_s=0", {"path": "/pause"}, 400, "timeout_s"),
        ("/call", {"path": "/pause", "cluster": "other"}, 404, "cluster"),
        ("/flush", {"engines": ["c"]}, 404, "engines"),
        ("/flush", {"flush": True}, 422, "(body)"),
    ],
)
async def test_faults_of_the_body_are_named(target: str, body: dict[str, Any], status: int, place: str) -> None:
    """Nothing is called."""
    async with admin_of(proxy_of()) as client:
        answer = await client.post(target, content=json.dumps(body))
    assert answer.status_code == status
    assert list(problems_of(answer)) == [place]


async def test_it_needs_the_filter() -> None:
    """Whose clients of engines it calls with."""
    async with admin_of(proxy_of(filters=["inference_request", "router"], policy="round_robin")) as client:
        answer = await client.post("/call", json={"path": "/pause"})
    assert answer.status_code == 409
    assert problems_of(answer) == {"filters": ("needs the kvcache filter", "add kvcache to the chain")}
