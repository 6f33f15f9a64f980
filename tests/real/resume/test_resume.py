"""Real vLLM engines that are killed under streams: clients get the text and counts of an undisturbed run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx
import psutil
import pytest

from kvproxy.base.types import EndpointId
from tests.real.conftest import Saw
from tests.real.engines.place import TINY
from tests.real.engines.vllm import Vllm
from tests.real.pair import Pair
from tests.real.prompts import chat, text
from tests.support.proxy import RunningProxy, running_proxy
from tests.support.until import until

pytestmark = pytest.mark.real
CHAT = "/v1/chat/completions"
STREAMS = int(os.environ.get("KVPROXY_RESUME_STREAMS", "100"))
TOKENS = 96


class HasEnd(Protocol):
    """An answer whose end is noted: its usage, or the code of its error."""

    usage: dict[str, Any]
    error: str


@dataclass
class Stream:
    """One answer as its client got it."""

    words: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def counts(self) -> tuple[int, int]:
        """Tokens of prompt and answer."""
        return self.usage.get("prompt_tokens", 0), self.usage.get("completion_tokens", 0)

    @property
    def gap_s(self) -> float:
        """Longest time without a token."""
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


async def read_chunks(http: httpx.AsyncClient, body: dict[str, Any], into: HasEnd) -> AsyncIterator[dict[str, Any]]:
    """Yield the chunks of a stream to its end; its usage, or its error, is noted."""
    async with http.stream("POST", CHAT, json=body, timeout=600) as answer:
        async for line in answer.aiter_lines():
            data = line.removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                into.error = str(chunk["error"].get("code"))
                continue
            into.usage = chunk.get("usage") or into.usage
            yield chunk


async def read(http: httpx.AsyncClient, body: dict[str, Any], into: Stream) -> None:
    """Read one stream to its end."""
    async for chunk in read_chunks(http, body, into):
        for choice in chunk["choices"]:
            if content := choice["delta"].get("content"):
                into.words += content
                into.times.append(time.monotonic())


def bodies(grade: str, how: str) -> list[dict[str, Any]]:
    """Return one chat a stream; tools keep it from going on by token ids."""
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    more: dict[str, Any] = {"tools": [tool]} if grade == "text" else {}
    return [
        chat(TINY.name, text(30, seed=f"{grade} {how} {number}"), max_tokens=TOKENS, stream=True,
             ignore_eos=True, stream_options={"include_usage": True}, **more)
        for number in range(STREAMS)
    ]  # fmt: skip


async def run_all(http: httpx.AsyncClient, asked: list[dict[str, Any]]) -> tuple[list[Stream], asyncio.Task[Any]]:
    """Start all of them."""
    streams = [Stream() for _ in asked]
    task = asyncio.gather(*(read(http, body, stream) for body, stream in zip(asked, streams, strict=True)))
    return streams, asyncio.ensure_future(task)


def kill(server: Vllm, how: str) -> None:
    """End the engine's core under its live API server, or the server."""
    if how == "server":
        server.program.kill()
        return
    children = psutil.Process(server.program.pid).children(recursive=True)
    core = next(
        child for child in children if "EngineCore" in child.name() or "EngineCore" in " ".join(child.cmdline())
    )
    core.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("how", ["core", "server"])
@pytest.mark.parametrize("grade", ["exact", "text"])
async def test_an_engine_is_killed_under_many_streams(pair: Pair, saw: Saw, grade: str, how: str) -> None:
    """No answer differs from that of an undisturbed run without an error; with the exact grade none has one."""
    pair.revive()
    asked = bodies(grade, how)
    limits = httpx.Limits(max_connections=STREAMS + 8, max_keepalive_connections=0)  # engines reset idle ones
    config: dict[str, Any] = {
        "filters": [{"inference_request": {}}, {"router": {}}],
        "routes": [{"resume": grade}],
        "retry": {"min_per_second": 1000},
    }
    async with (
        running_proxy(pair.urls, **config) as proxy,
        httpx.AsyncClient(base_url=proxy.url, limits=limits) as http,
        httpx.AsyncClient(base_url=pair.b.url, limits=limits) as direct,
    ):
        undisturbed, done = await run_all(direct, asked)
        await done
        operator = proxy.proxy.clusters["default"].operator
        operator.drain_endpoint(EndpointId("b"))
        streams, done = await run_all(http, asked)
        await until(lambda: all(len(stream.times) >= 8 for stream in streams), within_s=240)
        operator.drain_endpoint(EndpointId("b"), draining=False)
        kill(pair.a, how)
        await done
        report(saw, proxy, f"{grade}, {how}", streams, undisturbed)
        ended = [stream for stream in streams if not stream.error]
        wrong = [
            (stream.words, other.words, stream.counts, other.counts)
            for stream, other in zip(streams, undisturbed, strict=True)
            if not stream.error and (stream.words, stream.counts) != (other.words, other.counts)
        ]
        assert not wrong, wrong[0]
        assert len(ended) == STREAMS or grade == "text"


def count_resumed(proxy: RunningProxy) -> dict[str, float]:
    """Return how many streams were resumed by grade, and how many were not by reason."""
    return {
        f"{metric}:{label}": value
        for metric in ("kvproxy_streams_resumed", "kvproxy_streams_not_resumed")
        for family in proxy.proxy.metrics.registry.collect()
        if family.name == metric
        for sample in family.samples
        if (label := sample.labels.get("grade") or sample.labels.get("reason"))
        and (value := sample.value)
        and sample.name.endswith("_total")
    }


def report(saw: Saw, proxy: RunningProxy, title: str, streams: list[Stream], undisturbed: list[Stream]) -> None:
    """Print the figures."""
    same = sum(
        not one.error and (one.words, one.counts) == (other.words, other.counts)
        for one, other in zip(streams, undisturbed, strict=True)
    )
    errors = sorted({stream.error for stream in streams if stream.error})
    gaps = sorted(stream.gap_s for stream in streams if not stream.error)
    usual = sorted(stream.gap_s for stream in undisturbed)
    p50, p99 = (gaps[len(gaps) // 2], gaps[int(len(gaps) * 0.99)]) if gaps else (0.0, 0.0)
    saw(
        f"{title}: {same} of {len(streams)} as undisturbed, {len(errors)} kinds of errors {errors}; "
        f"{count_resumed(proxy)}; longest time without a token p50 {p50:.2f} s, p99 {p99:.2f} s "
        f"(undisturbed p50 {usual[len(usual) // 2]:.2f} s)"
    )
