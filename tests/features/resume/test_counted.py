"""Answers with a limit whose events have several tokens each, as those of busy engines."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.features.resume.gateway import BEST_EFFORT, FILTERS, try_model
from tests.features.resume.test_moving import SINGLY
from tests.features.resume.test_typed import (
    MESSAGES,
    MESSAGES_BODY,
    RESPONSES,
    RESPONSES_BODY,
    typed_events,
    words_of,
)
from tests.lab.simulator.support import engine
from tests.support.loopback import serve
from tests.support.proxy import running_proxy

DELTAS = ("response.output_text.delta", "content_block_delta")


def join_pairs(stream: str, came: int) -> str:
    """Return the beginning of a stream up to so many events of text, with two tokens each."""
    made: list[str] = []
    waiting = ""
    joined = 0
    for event in stream.removesuffix("\n\n").split("\n\n"):
        name, _, data = event.partition("\ndata: ")
        if name.removeprefix("event: ") in DELTAS and joined < came:
            found: dict[str, Any] = json.loads(data)
            text = found["delta"] if isinstance(found["delta"], str) else found["delta"]["text"]
            if not waiting:
                waiting = text
                continue
            text = waiting + text
            waiting = ""
            joined += 1
            found["delta"] = text if isinstance(found["delta"], str) else {"type": "text_delta", "text": text}
            event = f"{name}\ndata: {json.dumps(found)}"
        made.append(event)
        if joined == came:
            break
    return "\n\n".join(made) + "\n\n"


class InPairs:
    """An engine whose next stream has two tokens an event, and breaks off."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.breaks = 0  # behind so many events
        self.came = asyncio.Event()  # the client has what came

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self.breaks or scope.get("path") not in (MESSAGES, RESPONSES):
            await self._app(scope, receive, send)
            return
        breaks = self.breaks
        self.breaks = 0
        whole = b""

        async def keep(message: Message) -> None:
            nonlocal whole
            if message["type"] == "http.response.start":
                await send(message)
            whole += message.get("body", b"")

        await self._app(scope, receive, keep)
        await send(
            {"type": "http.response.body", "body": join_pairs(whole.decode(), breaks).encode(), "more_body": True}
        )
        await self.came.wait()


class WithoutTokenizer:
    """An engine behind a gateway that answers 503 to what it does not know."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = Response(status_code=503) if scope.get("path") == "/tokenize" else self._app
        await answer(scope, receive, send)


@pytest.mark.parametrize(("path", "body"), [(MESSAGES, MESSAGES_BODY), (RESPONSES, RESPONSES_BODY)])
@pytest.mark.parametrize(
    ("tokenizer", "temperature", "came"),
    [("there", 0, 20), ("no route", 0, 20), ("gateway", 0, 20), ("there", 0.7, 20), ("there", 0.7, 30)],
)
async def test_the_rest_has_what_the_limit_leaves(
    tokenizer: str, temperature: float, came: int, path: str, body: dict[str, Any]
) -> None:
    """Another engine counts the tokens of the text that came, so that the usage is right, too; one that cannot, or
    whose gateway does not let it, goes on by the number of events. Of a sampled answer whose 60 tokens all came there
    is the end alone."""
    body = {**body, "temperature": temperature}
    expected, events = await ask_in_pairs(path, body, came, tokenizer)
    words = words_of(events)
    assert words.startswith(words_of(expected))
    assert (words == words_of(expected)) is (tokenizer == "there")
    assert usage_of(path, events)["output_tokens"] == 60


async def test_the_usage_is_right_without_a_limit() -> None:
    """Prompt and answer, though the other engine's prompt has a part of the answer. A word is a token here."""
    body = {name: value for name, value in RESPONSES_BODY.items() if name != "max_output_tokens"}
    expected, events = await ask_in_pairs(RESPONSES, {**body, "temperature": 0}, 20)
    usage = usage_of(RESPONSES, events)
    assert usage["input_tokens"] == usage_of(RESPONSES, expected)["input_tokens"]
    assert usage["output_tokens"] == len(words_of(events).split())


def usage_of(path: str, events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the tokens of a message or response."""
    last: dict[str, Any] = events[-2] if path == MESSAGES else events[-1]["response"]
    usage: dict[str, Any] = last["usage"]
    return usage


async def ask_in_pairs(
    path: str, body: dict[str, Any], came: int, tokenizer: str = "there"
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return an undisturbed answer, and one that broke behind so many events of two tokens."""
    body = {**body, "stream": True}
    async with engine() as one, engine() as other:
        in_pairs = InPairs(one.app)
        await one.faults(**SINGLY)
        await other.faults(no_tokenize=tokenizer == "no route")
        expected = typed_events((await other.client.post(path, json=body)).text)
        config = {"filters": FILTERS, "routes": [{"resume": "text", **BEST_EFFORT}]}
        async with (
            serve(in_pairs) as url,
            serve(WithoutTokenizer(other.app) if tokenizer == "gateway" else other.app) as other_url,
            running_proxy({"a": url, "b": other_url}, **config) as proxy,
        ):
            await try_model(proxy, one, other)
            in_pairs.breaks = came
            text = ""
            async with proxy.client.stream("POST", path, json=body) as answer:
                async for piece in answer.aiter_text():
                    text += piece
                    in_pairs.came.set()
        assert not in_pairs.breaks
        return expected, typed_events(text)
