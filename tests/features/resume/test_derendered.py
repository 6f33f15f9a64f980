"""Chats with tool calls and reasoning whose engine fails: another engine generates the rest and parses it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kvproxy.lab.simulator.vllm_settings import VllmSettings
from tests.features.resume.gateway import CHAT, Gateway, chat_body, gateway, read_events, usage_of
from tests.features.resume.said import Said
from tests.features.resume.test_moving import SINGLY, Client, move_on
from tests.lab.simulator.support import TINY, Running
from tests.operate.admin.support import admin_of
from tests.support.until import until
from tests.support.vllms.scale_out import add_scale_out

CALL = '<tool_call>\n{"name": "search", "arguments": {"words": "ships at sea", "most": 5}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "look", "arguments": {"at": "the wind"}}\n</tool_call>'
SCRIPT = f"<think>\nThe user wants a tale.\n</think>\n\nLet me look.\n{CALL}\n{OTHER}"
SCRIPTED = add_scale_out(TINY, script=SCRIPT)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("search", "look")
]


def said(events: list[dict[str, Any]]) -> Said:
    """Return what the events say."""
    found = Said()
    for event in events:
        for choice in event["choices"]:
            found.add(choice)
    return found


async def warm_up(both: Gateway) -> None:
    """Have the proxy find out that its engines derender; the next chat goes to the first one."""
    for one in both.engines:
        await both.ask(CHAT, body_of())
        await until(partial(_has_answered, one))


def _has_answered(one: Running) -> bool:
    return one.app.state.calls[f"POST {CHAT}/derender"] > 0


def body_of(**fields: Any) -> dict[str, Any]:
    """Return a chat with tools."""
    return chat_body(tools=TOOLS, max_tokens=200, **fields)


@pytest.mark.parametrize("grade", ["exact", "text"])
@pytest.mark.parametrize("chunks", [3, 8, 12, 16, 20, 24, 30, 36, 44, 52, 60])
async def test_the_answer_is_that_of_an_undisturbed_run(grade: str, chunks: int) -> None:
    """Wherever the stream breaks: in reasoning, text, a call's name or its arguments. No part comes twice."""
    async with gateway(grade, settings=SCRIPTED) as both:
        await warm_up(both)
        expected = read_events((await both.engines[1].client.post(CHAT, json=body_of())).text)
        await both.engines[0].faults(cut_next=1, cut_after_chunks=chunks)
        events = await both.ask(CHAT, body_of())
        assert said(expected).calls[0] == {"name": "search", "arguments": '{"words": "ships at sea", "most": 5}'}
        assert said(events).all == said(expected).all
        assert len(set(said(events).names)) == 2
        assert usage_of(events) == usage_of(expected)
        assert len({(event["id"], event["created"], event["object"]) for event in events}) == 1
        assert "token_ids" not in json.dumps(events)
        assert both.resumed("restart" if chunks == 3 else "exact") == 1


@pytest.mark.parametrize("temperature", [0, 1])
async def test_a_stream_that_moves_twice_is_parsed_behind_all_parts(temperature: float) -> None:
    """The engine of the third part gets the tokens and the names of both before."""
    body = body_of(temperature=temperature)
    async with gateway("exact", settings=SCRIPTED) as both, admin_of(both.proxy.proxy) as admin:
        await warm_up(both)
        expected = read_events((await both.engines[1].client.post(CHAT, json=body)).text)
        await both.engines[0].faults(**SINGLY, stall_mid_stream_s=60.0, stall_mid_stream_after_chunks=40)
        await both.engines[1].faults(**SINGLY, stall_mid_stream_s=60.0, stall_mid_stream_after_chunks=20)
        client = Client(both, CHAT, body)
        await client.begun.wait()
        await move_on(both, admin, client, "a")
        await both.engines[0].faults(reset=True)
        await move_on(both, admin, client, "b")
        events = read_events(await client.finish())
        assert said(events).all == said(expected).all
        assert len(set(said(events).names)) == 2
        assert usage_of(events) == usage_of(expected)


async def test_a_client_that_leaves_frees_the_engine() -> None:
    """While tokens are generated; no task goes on."""
    async with gateway("exact", settings=SCRIPTED) as both:
        await warm_up(both)
        await both.engines[0].faults(cut_next=1, cut_after_chunks=20)
        await both.engines[1].faults(**SINGLY, stall_mid_stream_s=60.0, stall_mid_stream_after_chunks=16)
        client = Client(both, CHAT, body_of())
        await until(lambda: client.text.count("\n\n") > 20)
        await client.leave()
        await until(lambda: both.engines[1].app.state.in_flight == 0)
        await until(lambda: not any("derender" in task.get_name() for task in asyncio.all_tasks()))


async def test_another_models_rest_is_not_joined() -> None:
    """Its tokens come out differently, which shows before a chunk of it is sent."""
    async with gateway("exact", settings=SCRIPTED) as both:
        await warm_up(both)
        planner = both.engines[1].app.state.planner
        planner.set_script(SCRIPT.replace("wants a tale", "wants the tale"))
        await both.engines[0].faults(cut_next=1, cut_after_chunks=10)
        events = await both.ask(CHAT, body_of())
        assert events[-1]["error"]["code"] == "resume_mismatch"
        assert both.refused("overlap") == 1
        assert both.proxy.proxy.clusters["default"].endpoints[1].health.is_healthy


async def test_a_grammar_for_calls_would_begin_again() -> None:
    """Some parsers have one for all calls, which only the rendered chat shows."""
    async with gateway("exact", settings=replace(SCRIPTED, guided_calls=True)) as both:
        await warm_up(both)
        await both.engines[0].faults(cut_next=1, cut_after_chunks=20)
        events = await both.ask(CHAT, body_of())
        assert "error" in events[-1]
        assert both.refused("guided") == 1


@pytest.mark.parametrize(
    ("fields", "settings", "reason"),
    [
        ({"stop": ["END"]}, SCRIPTED, "tools"),
        ({}, replace(SCRIPTED, scale_out=False), "tools"),
        ({"include_reasoning": False}, SCRIPTED, "reasoning"),
        ({"tool_choice": "required"}, SCRIPTED, "guided"),
    ],
)
async def test_others_end_with_an_error(fields: dict[str, Any], settings: VllmSettings, reason: str) -> None:
    """Stop strings end a text that derendering does not see; engines without these routes cannot go on."""
    async with gateway("exact", settings=settings) as both:
        for _ in both.engines:
            await both.ask(CHAT, body_of())
        await both.engines[0].faults(cut_next=1, cut_after_chunks=20)
        events = await both.ask(CHAT, body_of(**fields))
        assert "error" in events[-1]
        assert both.refused(reason) == 1


@pytest.mark.parametrize("path", [f"{CHAT}/render", f"{CHAT}/derender", "/inference/v1/generate"])
async def test_an_engine_that_fails_beside_the_stream(path: str) -> None:
    """The client gets an error event, and nothing wrong before it."""
    async with gateway("exact", settings=SCRIPTED) as both:
        await warm_up(both)
        expected = read_events((await both.engines[1].client.post(CHAT, json=body_of())).text)
        await both.engines[1].faults(fail_path=path)
        await both.engines[0].faults(cut_next=1, cut_after_chunks=20)
        events = await both.ask(CHAT, body_of())
        assert "error" in events[-1]
        assert said(expected).content.startswith(said(events[:-1]).content)
        assert said(expected).reasoning.startswith(said(events[:-1]).reasoning)
