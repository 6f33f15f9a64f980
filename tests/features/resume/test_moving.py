"""Streams that leave a drained endpoint while they run."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import pytest

from kvproxy.cli import main
from kvproxy.features.resume.note import ResumeNote, describe_leg
from kvproxy.features.resume.running import Moved
from kvproxy.proxy.listener.server import Server
from tests.features.resume.gateway import (
    BEST_EFFORT,
    CHAT,
    COMPLETION,
    FILTERS,
    Gateway,
    chat_body,
    completion_body,
    gateway,
    read_events,
    text_of,
    usage_of,
)
from tests.features.resume.test_typed import RESPONSES, RESPONSES_BODY, STREAMED, typed_events, words_of
from tests.features.workers.together import together
from tests.lab.simulator.support import TINY, engine
from tests.operate.admin.support import admin_of
from tests.support.until import until, until_says

#: A token a chunk, as of streams that break, and none behind the 15th.
SINGLY = {"cut_next": 9, "cut_after_chunks": 1000}
STALL = {**SINGLY, "stall_mid_stream_s": 60.0, "stall_mid_stream_after_chunks": 15}
SCHEMA = {"type": "json_object"}


class Client:
    """One streamed request, read on while the endpoint is drained."""

    def __init__(self, both: Gateway, path: str, body: dict[str, Any]) -> None:
        self.begun = asyncio.Event()
        self.text = ""
        self._both = both
        self._task = asyncio.create_task(self._read(path, body))

    async def _read(self, path: str, body: dict[str, Any]) -> None:
        async with self._both.proxy.client.stream("POST", path, json=body) as answer:
            async for piece in answer.aiter_text():
                self.text += piece
                if self.text.count("\n\n") >= 12:
                    self.begun.set()

    async def finish(self) -> str:
        """Return the whole answer."""
        await self._task
        return self.text

    async def leave(self) -> None:
        """Close the connection."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def move(admin: httpx.AsyncClient, endpoint: str = "a") -> dict[str, Any]:
    """Drain the endpoint and move its streams; return the answer."""
    (await admin.post(f"/endpoints/default/{endpoint}/drain")).raise_for_status()
    answer = await admin.post(f"/endpoints/default/{endpoint}/move")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def move_on(both: Gateway, admin: httpx.AsyncClient, client: Client, away: str) -> None:
    """Move the stream off this endpoint to the other one, and wait for new words from there."""
    (await admin.post(f"/endpoints/default/{'b' if away == 'a' else 'a'}/undrain")).raise_for_status()
    before = len(client.text)
    await until_says(1, partial(_count_moved, admin, away))  # a stream between two engines is at neither
    await until(lambda: len(client.text) > before and not in_flight(both, "ab".index(away)))


async def _count_moved(admin: httpx.AsyncClient, away: str) -> int:
    moved: int = (await move(admin, away))["moved"]
    return moved


def in_flight(both: Gateway, number: int = 0) -> int:
    """Return the requests at an engine."""
    return both.proxy.proxy.clusters["default"].endpoints[number].load.in_flight


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat_body()), (COMPLETION, completion_body())])
@pytest.mark.parametrize("grade", ["exact", "text"])
async def test_a_moved_stream_is_that_of_an_undisturbed_run(path: str, body: dict[str, Any], grade: str) -> None:
    """One answer for the client, and the endpoint is free while its engine has not finished."""
    async with gateway(grade) as both, admin_of(both.proxy.proxy) as admin:
        expected = read_events((await both.engines[1].client.post(path, json=body)).text)
        await both.engines[0].faults(**STALL)
        client = Client(both, path, body)
        await client.begun.wait()
        assert await move(admin) == {"id": "a", "cluster": "default", "moved": 1, "staying": {}}
        events = read_events(await client.finish())
        assert text_of(events) == text_of(expected)
        assert usage_of(events) == usage_of(expected)
        assert len({event["id"] for event in events}) == 1
        assert in_flight(both) == in_flight(both, 1) == 0
        assert both.proxy.metric("kvproxy_streams_moved_total", cluster="default") == 1
        assert both.resumed("exact") == 0
        endpoint = both.proxy.proxy.clusters["default"].endpoints[0]
        assert endpoint.health.is_healthy
        assert endpoint.health.failures == 0


class WorkerStream:
    """A streamed chat at one of several workers, until its first words came."""

    def __init__(self, worker: httpx.AsyncClient) -> None:
        self.begun = asyncio.Event()
        self.text = ""
        self.task = asyncio.create_task(self._read(worker))

    async def _read(self, worker: httpx.AsyncClient) -> None:
        async with worker.stream("POST", CHAT, json=chat_body()) as answer:
            async for piece in answer.aiter_text():
                self.text += piece
                self.begun.set()


async def test_the_answer_of_several_workers_counts_all_their_streams() -> None:
    """Two move from one worker and one from the other; the sum is the answer, and each stream is whole."""
    async with contextlib.AsyncExitStack() as stack:
        a, b = [await stack.enter_async_context(engine(replace(TINY))) for _ in range(2)]
        expected = text_of(read_events((await b.client.post(CHAT, json=chat_body())).text))
        more: dict[str, Any] = {"filters": FILTERS, "routes": [{"resume": "exact"}]}
        workers = await stack.enter_async_context(together({"a": a.url, "b": b.url}, **more))
        admin = workers.admin
        await a.faults(**{**STALL, "cut_next": 99})
        one, other = workers.clients
        streams = [WorkerStream(client) for client in (*[one] * 4, other, other)]  # every second one is at a
        for stream in streams:
            await stream.begun.wait()
        assert await move(admin) == {"id": "a", "cluster": "default", "moved": 3, "staying": {}}
        for stream in streams:
            await stream.task
            assert text_of(read_events(stream.text)) == expected


async def test_the_command_waits_until_the_endpoint_is_free(capsys: pytest.CaptureFixture[str]) -> None:
    """With `--move` at once, though its engine has not finished."""
    async with gateway("exact") as both, Server(both.proxy.proxy.admin, drain_s=0.2) as admin:
        await both.engines[0].faults(**STALL)
        client = Client(both, CHAT, chat_body())
        await client.begun.wait()
        assert await asyncio.to_thread(main, ["drain", "a", "--move", "--wait", "--url", admin.url]) == 0
        assert capsys.readouterr().out.splitlines()[1:] == ["its streams went on elsewhere", "it has none left"]
        assert read_events(await client.finish())[-1]["usage"]["completion_tokens"] == 60


async def test_a_moved_response_keeps_its_numbers() -> None:
    """By text."""
    body = {**RESPONSES_BODY, **STREAMED}
    async with gateway("text", route=BEST_EFFORT) as both, admin_of(both.proxy.proxy) as admin:
        expected = typed_events((await both.engines[1].client.post(RESPONSES, json=body)).text)
        await both.engines[0].faults(**STALL)
        client = Client(both, RESPONSES, body)
        await client.begun.wait()
        assert (await move(admin))["moved"] == 1
        events = typed_events(await client.finish())
        assert words_of(events) == words_of(expected)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_a_stream_that_cannot_be_moved_is_finished_where_it_is() -> None:
    """The reason is in the answer; nothing is cut."""
    body = chat_body(response_format=SCHEMA)
    async with gateway("exact") as both, admin_of(both.proxy.proxy) as admin:
        await both.engines[0].faults(**STALL)
        client = Client(both, CHAT, body)
        await client.begun.wait()
        answer = await move(admin)
        assert (answer["moved"], answer["staying"]) == (0, {"guided": 1})
        assert in_flight(both) == 1
        await both.engines[0].faults(reset=True)
        events = read_events(await client.finish())
        assert events[-1]["usage"]["completion_tokens"] == 60
        assert both.refused("guided") == 0


async def test_a_stream_with_nowhere_to_go_stays() -> None:
    """Cut off, it would be lost."""
    async with gateway("exact", engines=1) as one, admin_of(one.proxy.proxy) as admin:
        await one.engines[0].faults(**STALL)
        client = Client(one, CHAT, chat_body())
        await client.begun.wait()
        assert (await move(admin))["staying"] == {"no_endpoint": 1}
        await one.engines[0].faults(reset=True)
        assert text_of(read_events(await client.finish()))


async def test_streams_of_routes_without_the_feature_stay() -> None:
    """They are not even listed."""
    async with gateway("off") as both, admin_of(both.proxy.proxy) as admin:
        await both.engines[0].faults(**STALL)
        client = Client(both, CHAT, chat_body())
        await client.begun.wait()
        answer = await move(admin)
        assert (answer["moved"], answer["staying"]) == (0, {})
        await both.engines[0].faults(reset=True)
        assert text_of(read_events(await client.finish()))


async def test_only_a_drained_endpoint_is_left() -> None:
    """Its streams might be placed on it again."""
    async with gateway("exact") as both, admin_of(both.proxy.proxy) as admin:
        answer = await admin.post("/endpoints/default/a/move")
        assert answer.status_code == 409
        assert "is not drained" in answer.text
        assert (await admin.post("/endpoints/default/c/move")).status_code == 404


async def test_moves_take_nothing_from_retries() -> None:
    """A stream moves as often as engines are updated; then its engine may still fail."""
    once = {"attempts": 2, "min_per_second": 1000}
    async with gateway("exact", retry=once) as both, admin_of(both.proxy.proxy) as admin:
        expected = read_events((await both.engines[1].client.post(CHAT, json=chat_body())).text)
        for one in both.engines:
            await one.faults(**{**STALL, "stall_mid_stream_after_chunks": 12})
        client = Client(both, CHAT, chat_body())
        await client.begun.wait()
        await move_on(both, admin, client, "a")
        await move_on(both, admin, client, "b")
        await both.engines[1].faults(cut_after_chunks=14)
        await move_on(both, admin, client, "a")
        await admin.post("/endpoints/default/a/undrain")
        await both.engines[0].faults(reset=True)
        await both.engines[1].faults(reset=True)
        events = read_events(await client.finish())
        assert text_of(events) == text_of(expected)
        assert usage_of(events) == usage_of(expected)
        assert both.resumed("exact") == 1


async def test_a_client_that_leaves_during_a_move_leaves_nothing() -> None:
    """No reservation, on either side, and no stream that could be moved again."""
    async with gateway("exact") as both, admin_of(both.proxy.proxy) as admin:
        await both.engines[0].faults(**STALL)
        await both.engines[1].faults(stall_head_s=600.0)
        client = Client(both, CHAT, chat_body())
        await client.begun.wait()
        assert (await move(admin))["moved"] == 1
        await until(lambda: in_flight(both, 1))
        await client.leave()
        await until(lambda: not in_flight(both, 1))
        assert in_flight(both) == 0
        assert (await move(admin, "b"))["staying"] == {}


async def test_a_move_is_in_the_receipt() -> None:
    """With the place and the time without a token."""
    async with gateway("exact") as both, admin_of(both.proxy.proxy) as admin:
        await both.engines[0].faults(**STALL)
        client = Client(both, CHAT, chat_body())
        await client.begun.wait()
        await move(admin)
        await client.finish()
        outcome = next(iter(both.proxy.proxy.recent.latest())).outcome
        note = outcome.notes["resume"]
        assert isinstance(note, ResumeNote)
        assert (note.legs[0].error, note.legs[0].grade) == (Moved.reason, "exact")
        assert describe_leg(note.legs[0]).startswith("the stream was moved off a after ")
        assert (outcome.endpoint, outcome.end) == ("b", "completed")
        assert outcome.prompt_tokens == 30
