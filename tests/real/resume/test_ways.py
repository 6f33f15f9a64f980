"""Real vLLM engines that die in four ways under streams of all four APIs, as the SDKs of openai and anthropic read
them: no word is wrong, and chats and text completions have them all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest

from kvproxy.base.types import EndpointId
from tests.real.conftest import Saw
from tests.real.engines.place import TINY
from tests.real.pair import Pair
from tests.real.prompts import text
from tests.real.resume.test_resume import kill
from tests.support.proxy import running_proxy
from tests.support.until import until

pytestmark = pytest.mark.real

EACH = 4
TOKENS = 96


class Stream:
    """One answer, as its SDK reports it."""

    def __init__(self, api: str, prompt: str) -> None:
        self.api = api
        self.prompt = prompt
        self.words = ""
        self.pieces = 0
        self.error = ""
        self.ended = False

    def add(self, words: str | None) -> None:
        """Add a piece of the answer."""
        self.words += words or ""
        self.pieces += 1


class Clients:
    """The SDKs of one base URL."""

    def __init__(self, url: str) -> None:
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
        self.anthropic = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=600)

    async def read(self, stream: Stream) -> None:
        """Read to the end, or to the error."""
        try:
            await _READERS[stream.api](self, stream)
        except (openai.OpenAIError, anthropic.AnthropicError, httpx.HTTPError) as error:
            stream.error = type(error).__name__
        stream.ended = True

    async def close(self) -> None:
        await self.openai.close()
        await self.anthropic.close()


_SAMPLING: dict[str, Any] = {"model": TINY.name, "temperature": 0, "stream": True}
_EXTRA = {"ignore_eos": True}


async def _chat(clients: Clients, stream: Stream) -> None:
    asked: Any = [{"role": "user", "content": stream.prompt}]
    events = await clients.openai.chat.completions.create(
        messages=asked, max_tokens=TOKENS, extra_body=_EXTRA, **_SAMPLING
    )
    async for chunk in events:
        for choice in chunk.choices:
            stream.add(choice.delta.content)


async def _completion(clients: Clients, stream: Stream) -> None:
    events = await clients.openai.completions.create(
        prompt=stream.prompt, max_tokens=TOKENS, extra_body=_EXTRA, **_SAMPLING
    )
    async for chunk in events:
        for choice in chunk.choices:
            stream.add(choice.text)


async def _response(clients: Clients, stream: Stream) -> None:
    events = await clients.openai.responses.create(input=stream.prompt, max_output_tokens=TOKENS, **_SAMPLING)
    async for event in events:
        if event.type == "response.output_text.delta":
            stream.add(event.delta)
        elif event.type in ("error", "response.failed"):
            stream.error = event.type


async def _message(clients: Clients, stream: Stream) -> None:
    asked: Any = [{"role": "user", "content": stream.prompt}]
    events = await clients.anthropic.messages.create(
        model=TINY.name, messages=asked, max_tokens=TOKENS, stream=True, extra_body={"temperature": 0}
    )
    async for event in events:
        if event.type == "content_block_delta" and event.delta.type == "text_delta":
            stream.add(event.delta.text)


_READERS: dict[str, Callable[[Clients, Stream], Awaitable[None]]] = {
    "chat": _chat,
    "completion": _completion,
    "response": _response,
    "message": _message,
}


class Line:
    """Connections to an engine, which can be reset."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Join a connection with one to the engine."""
        try:
            back, forth = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:  # the engine is gone
            writer.close()
            return
        self._writers.append(writer)
        await asyncio.gather(_pass_on(reader, forth), _pass_on(back, writer))

    def reset(self) -> None:
        """Reset all connections."""
        for writer in self._writers:
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        self._writers.clear()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def line_to(url: str) -> AsyncIterator[tuple[str, Line]]:
    """Yield an address in front of an engine."""
    line = Line(int(url.rpartition(":")[2]))
    async with await asyncio.start_server(line.accept, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", line


@pytest.mark.parametrize("how", ["core", "server", "stop", "reset"])
async def test_no_word_is_wrong(pair: Pair, saw: Saw, how: str) -> None:
    """Chats and text completions go on; of responses and messages, whose streams have no token ids, some end with an
    error."""
    pair.revive()
    streams = [Stream(api, text(30, seed=f"ways {how} {api} {n}")) for api in _READERS for n in range(EACH)]
    undisturbed = [Stream(stream.api, stream.prompt) for stream in streams]
    config: dict[str, Any] = {
        "filters": [{"inference_request": {}}, {"router": {}}],
        "routes": [{"resume": "text", "resume_best_effort": True}],
        "retry": {"min_per_second": 1000},
        "health": {"active": True, "interval": "1s", "timeout": "5s"},
    }
    async with line_to(pair.a.url) as (url, line), running_proxy({"a": url, "b": pair.b.url}, **config) as proxy:
        through = Clients(proxy.url)
        direct = Clients(pair.b.url)
        await asyncio.gather(*map(direct.read, undisturbed))
        operator = proxy.proxy.clusters["default"].operator
        operator.drain_endpoint(EndpointId("b"))
        done = asyncio.gather(*map(through.read, streams))
        await until(lambda: all(stream.pieces >= 8 or stream.ended for stream in streams), within_s=240)
        running = {api: sum(one.api == api and not one.ended for one in streams) for api in _READERS}
        operator.drain_endpoint(EndpointId("b"), draining=False)
        try:
            _strike(pair, line, how)
            await done
        finally:
            if how == "stop":
                _signal_all(pair, signal.SIGCONT)
        await through.close()
        await direct.close()
    found = {api: _count(api, streams, undisturbed) for api in _READERS}
    each = (
        f"{api} {running[api]} running, {same} whole, {ended} with an error" for api, (same, ended) in found.items()
    )
    saw(f"{how}: {'; '.join(each)}")
    for stream, other in zip(streams, undisturbed, strict=True):
        assert _fits(stream, other), (stream.api, stream.error, stream.words, other.words)
    assert found["chat"] == found["completion"] == (EACH, 0)


def _fits(stream: Stream, other: Stream) -> bool:
    """Return whether no word is wrong. Tokens of responses and messages cannot be counted where an event has several,
    as on busy machines: with `resume_best_effort` such an answer may go on behind its limit."""
    if stream.error:
        return other.words.startswith(stream.words)
    if stream.api in ("response", "message"):
        return stream.words.startswith(other.words)
    return stream.words == other.words


def _strike(pair: Pair, line: Line, how: str) -> None:
    if how == "reset":
        line.reset()
    elif how == "stop":
        _signal_all(pair, signal.SIGSTOP)
    else:
        kill(pair.a, how)


def _signal_all(pair: Pair, number: signal.Signals) -> None:
    os.killpg(pair.a.program.pid, number)


def _count(api: str, streams: list[Stream], undisturbed: list[Stream]) -> tuple[int, int]:
    """Return how many streams of an API are whole, and how many ended with an error."""
    both = [(one, other) for one, other in zip(streams, undisturbed, strict=True) if one.api == api]
    return sum(one.words == other.words for one, other in both), sum(bool(one.error) for one, _ in both)
