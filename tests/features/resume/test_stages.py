"""Streams of all four APIs that break at every stage, and at every byte: no word is wrong, and none is lost unseen.

Engines die here by a reset, by the death of their core, and by standing still; real ones that are killed or stopped are
in tests/real/resume/test_ways.py."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.features.resume.gateway import (
    BEST_EFFORT,
    CHAT,
    COMPLETION,
    FILTERS,
    chat_body,
    completion_body,
    gateway,
    try_model,
)
from tests.features.resume.test_moving import SINGLY
from tests.features.resume.test_silent import PROBES, fail_probes
from tests.features.resume.test_typed import MESSAGES, MESSAGES_BODY, RESPONSES, RESPONSES_BODY, STREAMED
from tests.lab.simulator.support import engine
from tests.support.loopback import serve
from tests.support.proxy import RunningProxy, running_proxy
from tests.support.until import until

BODIES: dict[str, dict[str, Any]] = {
    CHAT: chat_body(),
    COMPLETION: completion_body(),
    MESSAGES: {**MESSAGES_BODY, **STREAMED},
    RESPONSES: {**RESPONSES_BODY, **STREAMED},
}
WHOLE = ""
#: By API: so many events came, and how the stream ends: whole, or with an error for this reason.
STAGES = {
    CHAT: {0: WHOLE, 1: WHOLE, 20: WHOLE, 60: WHOLE, 61: "finished", 62: "finished"},
    COMPLETION: {0: WHOLE, 1: WHOLE, 20: WHOLE, 59: WHOLE, 60: "finished", 61: "finished"},
    MESSAGES: {0: WHOLE, 1: WHOLE, 2: WHOLE, 20: WHOLE, 62: WHOLE, 63: "finished", 64: "finished"},
    RESPONSES: {0: WHOLE, 2: WHOLE, 4: WHOLE, 20: WHOLE, 64: WHOLE, 65: "finished", 67: "finished"},
}
CASES = [(path, came, ends) for path, stages in STAGES.items() for came, ends in stages.items()]


def words_of(answer: str) -> str:
    """Return the text of a stream, by all APIs."""
    words = ""
    for line in answer.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        delta = event.get("delta")
        if event.get("type") == "response.output_text.delta":
            words += delta
        elif event.get("type") == "content_block_delta":
            words += delta["text"]
        for choice in event.get("choices", ()):
            words += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return words


def check(answer: str, expected: str, ends: str) -> None:
    """Compare with an undisturbed stream: all of its words, or the first of them and an error."""
    last = [line for line in answer.splitlines() if line.startswith("data: {")][-1]
    if ends:
        assert '"error"' in last
        assert words_of(expected).startswith(words_of(answer))
    else:
        assert '"error"' not in answer
        assert words_of(answer) == words_of(expected)


@pytest.mark.parametrize(("path", "came", "ends"), CASES)
@pytest.mark.parametrize("death", ["cut", "error"])
async def test_an_engine_that_dies(death: str, path: str, came: int, ends: str) -> None:
    """By a reset, or by the death of its core."""
    async with gateway("text", route=BEST_EFFORT) as both:
        await try_model(both.proxy, *both.engines)
        expected = await both.engines[1].client.post(path, json=BODIES[path])
        await both.engines[0].faults(**{f"{death}_next": 1, f"{death}_after_chunks": came})
        answer = await both.proxy.client.post(path, json=BODIES[path])
        check(answer.text, expected.text, ends)
        assert not ends or both.refused(ends) == 1


@pytest.mark.parametrize(("path", "came"), [(path, came) for path, came, ends in CASES if not ends])
async def test_an_engine_that_stands_still(path: str, came: int) -> None:
    """A stopped process closes no connection, and its probes fail."""
    async with gateway("text", route=BEST_EFFORT, health=PROBES) as both:
        await try_model(both.proxy, *both.engines)
        expected = await both.engines[1].client.post(path, json=BODIES[path])
        stall = {**SINGLY, "stall_mid_stream_s": 600.0, "stall_mid_stream_after_chunks": came}
        await both.engines[0].faults(**stall)
        async with both.proxy.client.stream("POST", path, json=BODIES[path]) as answer:
            await until(lambda: both.engines[0].app.state.in_flight == 1)
            fail_probes(both)
            check((await answer.aread()).decode(), expected.text, WHOLE)


class Broken(Exception):
    """The stream breaks off here."""


class Cut:
    """Engines whose next stream breaks off after so many bytes, the last of which come one by one; some words of their
    answers are not ASCII here."""

    def __init__(self) -> None:
        self.after: int | None = None

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Return the engine as it is reached."""

        async def cut(scope: Scope, receive: Receive, send: Send) -> None:
            left, self.after = (self.after, None) if scope.get("method") == "POST" else (None, self.after)

            async def read() -> Message:
                message = await receive()
                if "body" in message:
                    message = {
                        **message,
                        "body": _replace(message["body"], {other: word for word, other in WORDS.items()}),
                    }
                return message

            async def write(message: Message) -> None:
                nonlocal left
                if "body" in message:
                    message = {**message, "body": _replace(message["body"], WORDS)}
                    if left is not None:
                        left = await self._write_some(message["body"], left, send)
                        return
                await send(message)

            with contextlib.suppress(Broken):
                await app(scope, read, write)

        return cut

    async def _write_some(self, body: bytes, left: int, send: Send) -> int:
        one_by_one = max(0, min(len(body), left) - SINGLE_BYTES) if len(body) >= left else len(body)
        for piece in (body[:one_by_one], *(bytes([byte]) for byte in body[one_by_one:left])):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if len(body) >= left:
            raise Broken
        return left - len(body)


def _replace(body: bytes, words: Mapping[bytes, bytes]) -> bytes:
    for word, other in words.items():
        body = body.replace(word, other)
    return body


#: Words of the answer, and others in their place.
WORDS = {
    b" see": " sée".encode(),
    b" friend": " 🌊friend".encode(),
    b" real": " 🌊real".encode(),
    b" king": " ö海".encode(),
}
SINGLE_BYTES = 8


@contextlib.asynccontextmanager
async def cut_gateway() -> AsyncIterator[tuple[RunningProxy, Cut, str]]:
    """Yield a proxy before two such engines, and the address of one."""
    cut = Cut()
    async with engine() as one, engine() as other, serve(cut.wrap(one.app)) as a, serve(cut.wrap(other.app)) as b:
        for each in (one, other):
            await each.faults(**{**SINGLY, "cut_next": 1_000_000})
        routes = [{"resume": "text", **BEST_EFFORT}]
        config = {"filters": FILTERS, "routes": routes, "retry": {"min_per_second": 1_000_000}}
        async with running_proxy({"a": a, "b": b}, breaker={"failure_threshold": 1_000_000}, **config) as proxy:
            yield proxy, cut, b


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_that_breaks_within_an_event(path: str) -> None:
    """Within a character, a line, an event, and between the last word and the end: in a sample of all places."""
    async with cut_gateway() as (proxy, cut, url), httpx.AsyncClient(base_url=url) as direct:
        expected = (await direct.post(path, json=BODIES[path])).content
        await proxy.client.post(MESSAGES, json=BODIES[MESSAGES])
        for place in list_places(expected):
            cut.after = place
            answer = await proxy.client.post(path, json=BODIES[path])
            came = place == len(expected) and path in (MESSAGES, RESPONSES)  # other streams have token ids, too
            check(answer.text, expected.decode(), "finished" if '"error"' in answer.text and not came else WHOLE)
            assert cut.after is None


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_a_stream_that_breaks_within_its_first_event(path: str) -> None:
    """A client who asked for the prompt's token ids gets these from the next engine."""
    body = {**BODIES[path], "return_token_ids": True}
    async with cut_gateway() as (proxy, cut, url), httpx.AsyncClient(base_url=url) as direct:
        expected = (await direct.post(path, json=body)).text
        cut.after = 100
        answer = await proxy.client.post(path, json=body)
        check(answer.text, expected, WHOLE)
        assert cut.after is None
        prompts = re.compile(r'"prompt_token_ids":(\[[^]]*\])').findall
        assert prompts(answer.text) == prompts(expected) != []


def list_places(stream: bytes) -> Sequence[int]:
    """Return places within a character of four bytes, and around it; and from the last words to the end."""
    middle = stream.index("🌊".encode())
    return [
        *range(middle - 2, middle + 6),
        *range(middle + 6, middle + 400, 19),
        *range(len(stream) - 3000, len(stream), 97),
        len(stream),
    ]
