"""Sessions admitted by a whole proxy in front of a simulated engine with little memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvproxy import Proxy
from kvproxy.base.types import EndpointId
from kvproxy.cluster.routing.load import EngineState
from kvproxy.features.residents import habits
from kvproxy.features.residents.cluster_sessions import ClusterSessions, show_status
from kvproxy.features.residents.feature import FEATURE, describe_capability
from kvproxy.features.residents.note import NOTE, SessionTurn
from kvproxy.operate.config.load import check_config
from kvproxy.operate.receipts.receipt import decode_receipt, note_of
from kvproxy.testing import simulated_engines
from tests.support.until import until

CAPACITY = 16_384
SYSTEM = "You are an agent with tools. " * 40


def chat(session: int, turn: int) -> dict[str, Any]:
    """Return the body of a session's turn; each adds some 1,500 tokens."""
    messages = [{"role": "system", "content": SYSTEM}]
    for number in range(turn):
        messages += [
            {"role": "user", "content": f"session {session} turn {number} " + f"data {session} " * 250},
            {"role": "assistant", "content": f"answer {number}"},
        ]
    messages[-1:] = []
    return {"model": "sim", "messages": messages, "max_tokens": 4}


@contextlib.asynccontextmanager
async def proxied(tmp_path: Path, **more: Any) -> AsyncIterator[tuple[Proxy, httpx.AsyncClient, ClusterSessions]]:
    """Serve one engine with little memory."""
    async with simulated_engines(1, capacity_tokens=CAPACITY) as endpoints:
        config = {
            "endpoints": [{"id": "only", "url": next(iter(endpoints.values()))}],
            "receipts": {"path": str(tmp_path / "receipts.jsonl")},
            **more,
        }
        async with Proxy(config) as proxy:
            cluster = next(iter(proxy.clusters.values()))
            cluster.endpoints[0].load.engine = EngineState(0.0, CAPACITY)
            transport = httpx.ASGITransport(app=proxy)
            async with httpx.AsyncClient(transport=transport, base_url="http://proxy", timeout=60) as client:
                yield proxy, client, next(one for one in cluster.observers if isinstance(one, ClusterSessions))


async def test_a_session_without_room_waits_until_another_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its receipt has the wait, and turns of the residents go on meanwhile."""
    monkeypatch.setattr(habits, "_LEAST_LIMIT_S", habits.HORIZON_S)  # none is idle for too long
    async with proxied(tmp_path) as (proxy, client, sessions):
        queue = next(iter(proxy.clusters.values())).queue
        assert queue is not None
        rule = sessions.rule
        rule.habits.growth_tokens = 0.0
        for turn in range(1, 7):
            assert (await client.post("/v1/chat/completions", json=chat(1, turn))).status_code == 200
        second = asyncio.create_task(client.post("/v1/chat/completions", json=chat(2, 4)))
        await until(lambda: len(rule.line.waits) == 1)
        shown = FEATURE.describe_live(proxy)["sessions"]
        assert shown["default"]["waiting"] == 1  # type: ignore[index]
        (waits,) = shown["default"]["waits"]  # type: ignore[index]
        assert (waits["begins"], waits["endpoint"], waits["tokens"] > 4000) == (True, "only", True)
        waits["waited_s"] = 17.2
        line = "sessions waiting for KV memory: 1, for up to 17 s (1 hold it)"
        assert line in str(show_status({"sessions": shown}).blocks)
        described = describe_capability(proxy.config, proxy.clusters.values())
        assert described.reason == "1 resident now, 1 wait for room"
        assert (await client.post("/v1/chat/completions", json=chat(1, 7))).status_code == 200
        third = asyncio.create_task(client.post("/v1/chat/completions", json=chat(3, 5)))
        await until(lambda: len(rule.line.waits) == 2)
        third.cancel()
        await asyncio.gather(third, return_exceptions=True)
        assert len(rule.line.waits) == 1
        rule.forget(EndpointId("only"))
        queue.on_load_decrease()
        assert (await second).status_code == 200
    receipts = [decode_receipt(line) for line in (tmp_path / "receipts.jsonl").read_bytes().splitlines()]
    notes = [note for one in receipts if (note := note_of(one, NOTE, SessionTurn)) is not None]
    assert [note.turn for note in notes if not note.room_wait_s] == [2, 3, 4, 5, 6, 7]
    waited = next(note for note in notes if note.room_wait_s)
    assert (waited.turn, waited.resident) == (1, True)
    explained = [line for one in receipts for line in FEATURE.explain(one)]
    assert any("which waited" in line and "is kept for the next turn" in line for line in explained)


async def test_switched_off_no_session_waits(tmp_path: Path) -> None:
    """Nothing is counted, and the capability says so."""
    async with proxied(tmp_path, admit_sessions=False) as (proxy, client, sessions):
        for turn in range(1, 7):
            await client.post("/v1/chat/completions", json=chat(1, turn))
        answer = await client.post("/v1/chat/completions", json=chat(2, 5))
        assert answer.status_code == 200
        assert sessions.admission is None
        assert len(sessions.rule.known) == 0
        assert FEATURE.describe_live(proxy) == {"sessions": {}}
        row = describe_capability(proxy.config, proxy.clusters.values())
        assert (row.state, row.reason) == ("off", "`admit_sessions: false`")


async def test_the_rule_has_the_speeds_that_the_policy_learns(tmp_path: Path) -> None:
    """By these it judges what memory saves."""
    async with proxied(tmp_path) as (proxy, _, sessions):
        assert sessions.rule.speeds is proxy.clusters["default"].policies.own.policy.speeds is not None


async def test_the_last_request_of_a_session_leaves_no_resident(tmp_path: Path) -> None:
    """Where its client names it."""
    async with proxied(tmp_path) as (_, client, sessions):
        for turn in (1, 2):
            await client.post("/v1/chat/completions", json=chat(1, turn))
        assert len(sessions.rule.sets[EndpointId("only")].sessions) == 1
        final = {"x-dynamo-session-id": "s", "x-dynamo-session-final": "true"}
        assert (await client.post("/v1/chat/completions", json=chat(1, 3), headers=final)).status_code == 200
        assert not sessions.rule.sets[EndpointId("only")].sessions


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
async def test_answers_show_whether_a_session_goes_on(tmp_path: Path, path: str, stream: bool) -> None:
    """Those of every API, whole or streamed: they call no tool."""
    async with proxied(tmp_path) as (_, client, sessions):
        body = {**chat(1, 2), "stream": stream}
        if path == "responses":
            body = {"model": "sim", "input": body["messages"], "max_output_tokens": 16, "stream": stream}
        answer = await client.post(f"/v1/{path}", json=body)
        assert answer.status_code == 200
        assert [one.calls_tool for one in sessions.rule.known.paused] == [False]


async def test_sessions_are_those_that_clients_name(tmp_path: Path) -> None:
    """By a header of theirs, for each model and tenant; an end user is none, since it may have several at a time."""
    async with proxied(tmp_path) as (_, client, sessions):
        first = {"x-claude-code-session-id": "s"}
        child = first | {"x-claude-code-agent-id": "a"}
        for turn in (1, 2):
            await client.post("/v1/chat/completions", json=chat(1, turn), headers=first)
        await client.post("/v1/chat/completions", json=chat(1, 3), headers=child)
        await client.post("/v1/chat/completions", json=chat(2, 2), headers=first)
        residents = list(sessions.rule.sets[EndpointId("only")].sessions)
        assert sorted(one.turns for one in residents) == [1, 3]
        names = {one.name for one in residents}
        assert {one.parent for one in residents} - {0} < names
        await client.post("/v1/chat/completions", json=chat(3, 2) | {"user": "u"})
        assert len(sessions.rule.known._by_name) == 2


async def test_metrics_and_live_show_residents(tmp_path: Path) -> None:
    """By endpoint, with the tokens of their contexts; workers share them."""
    async with proxied(tmp_path) as (proxy, client, sessions):
        sessions.rule.habits.growth_tokens = 0.0
        for turn in (1, 2):
            await client.post("/v1/chat/completions", json=chat(1, turn))
        value = proxy.metrics.registry.get_sample_value
        labels = {"cluster": "default", "endpoint": "only"}
        assert value("kvproxy_resident_sessions", labels) == 1
        tokens = value("kvproxy_resident_context_tokens", labels)
        assert tokens is not None
        assert 1500 < tokens < 8000
        assert value("kvproxy_resident_limit_tokens", labels) == round(0.9 * CAPACITY)
        assert value("kvproxy_sessions_entries", {"cluster": "default", "kind": "known"}) == 1
        assert value("kvproxy_sessions_entries", {"cluster": "default", "kind": "waiting"}) == 0
        assert value("kvproxy_sessions_gave_way_total", {"cluster": "default"}) is None  # none gave way
        assert value("kvproxy_sessions_expected_wait_seconds", {"cluster": "default"}) == 0
        shown = FEATURE.describe_live(proxy)["sessions"]
        only = shown["default"]["endpoints"]["only"]  # type: ignore[index]
        assert (only["residents"], only["memory_tokens"], only["limit_tokens"]) == (1, CAPACITY, round(0.9 * CAPACITY))
        cluster = next(iter(proxy.clusters.values()))
        cluster.endpoints[0].load.engine = None
        assert value("kvproxy_resident_limit_tokens", labels) is None
        merged = FEATURE.merge_rules()["/live"]["sessions"]([shown, shown])
        assert merged["default"]["endpoints"]["only"]["residents"] == merged["default"]["residents"] == 1
        assert merged["default"]["memory_known"]


def test_the_capability_names_what_it_lacks() -> None:
    """A queue, or engines that report their memory."""
    checked, _ = check_config({"endpoints": ["http://127.0.0.1:1"]})
    assert describe_capability(checked, None).reason == "the default; no effect while all sessions fit"
    assert "no engine reports" in describe_capability(checked, []).reason
    unread, _ = check_config(
        {"endpoints": ["http://127.0.0.1:1"], "filters": {"kvcache": {"engine_metrics_interval": 0}}}
    )
    assert "no effect: the engines' KV memory is not read" in describe_capability(unread, None).reason
    off, _ = check_config({"endpoints": ["http://127.0.0.1:1"], "policy": "round_robin"})
    assert describe_capability(off, None).reason == "the router queue is off"
    assert json.dumps(show_status({}).blocks) == "[]"


def test_the_status_names_the_wait_of_a_new_session() -> None:
    """Where nothing waits there is no line."""
    one = {"waiting": 2, "residents": 3, "expected_wait_s": 12.3, "waits": [{"waited_s": 4.0}]}
    assert "a new one would wait 12 s" in str(show_status({"sessions": {"c": one}}).blocks)
    assert not show_status({"sessions": {"c": one | {"waiting": 0}}}).blocks
