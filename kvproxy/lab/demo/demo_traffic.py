"""The demo's clients: conversations that grow turn by turn, streamed and not, and what they saw."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import httpx

_SENTENCE = (
    "the engine keeps keys and values of every token it has read so that the next turn of a conversation need not be "
    "computed again when it arrives at the same place with the same beginning and a few new words at its end"
)
_WORDS = _SENTENCE.split()
_ROLES = ("travel agent", "code reviewer", "support desk")
_PAUSE_S = 0.15
_TRICKLE = 3
_TRICKLE_PAUSE_S = 3.0


@dataclass(frozen=True, slots=True)
class DemoReply:
    """One answered request, as its client saw it."""

    turn: int
    endpoint: str
    streamed: bool
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    pause_s: float = 0.0  # the longest within the answer


@dataclass(frozen=True, slots=True)
class Mix:
    """How much traffic: `sessions` conversations of `turns` turns, all of them at the same time."""

    model: str
    sessions: int
    turns: int
    system_words: int = 400
    document_words: int = 1200
    turn_words: int = 100
    reply_tokens: int = 24
    pause_s: float = _PAUSE_S
    seed: int = 7
    completions: bool = True  # every fourth conversation goes to /v1/completions

    @property
    def requests(self) -> int:
        """How many requests that makes."""
        return self.sessions * self.turns


async def run_mix(mix: Mix, client: httpx.AsyncClient, *, on_reply: Callable[[DemoReply], None]) -> list[DemoReply]:
    """Play every conversation. Raises httpx.HTTPError when a request fails."""
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_conversation(mix, number, client, on_reply), name=f"conversation {number}")
            for number in range(mix.sessions)
        ]
    return [reply for task in tasks for reply in task.result()]


@contextlib.asynccontextmanager
async def keep_trickling(mix: Mix, client: httpx.AsyncClient) -> AsyncIterator[None]:
    """While inside, a few conversations at a time, about one request a second in all."""
    slow = replace(mix, pause_s=_TRICKLE_PAUSE_S)
    numbers = itertools.count(mix.sessions)

    async def converse() -> None:
        while True:
            with contextlib.suppress(httpx.HTTPError):  # one that failed is over; the next begins after the same pause
                await _conversation(slow, next(numbers), client, lambda reply: None)
            await asyncio.sleep(_TRICKLE_PAUSE_S)

    tasks = [asyncio.create_task(converse(), name=f"trickle {number}") for number in range(_TRICKLE)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _conversation(
    mix: Mix, number: int, client: httpx.AsyncClient, on_reply: Callable[[DemoReply], None]
) -> list[DemoReply]:
    """One chat about a document of its own; every fourth may go to /v1/completions as one growing text."""
    rng = random.Random(mix.seed * 1000 + number)
    role = _ROLES[number % len(_ROLES)]
    system = f"You are a {role}. " + _text(random.Random(role), mix.system_words)
    document = _text(rng, mix.document_words)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": system},
        {"role": "user", "content": f"My document: {document}"},
    ]
    replies = []
    await asyncio.sleep(rng.random() * mix.pause_s * 4)
    for turn in range(1, mix.turns + 1):
        messages.append({"role": "user", "content": _text(rng, mix.turn_words)})
        completion = mix.completions and number % 4 == 3
        streamed = (number + turn) % 3 != 0
        path, body = _request(mix, messages, completion=completion, streamed=streamed)
        reply, text = await (_streamed if streamed else _whole)(client, path, body, turn)
        messages.append({"role": "assistant", "content": text})
        replies.append(reply)
        on_reply(reply)
        await asyncio.sleep(mix.pause_s * (0.5 + rng.random()))
    return replies


def _request(
    mix: Mix, messages: list[dict[str, Any]], *, completion: bool, streamed: bool
) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"model": mix.model, "max_tokens": mix.reply_tokens, "stream": streamed}
    if streamed:
        body["stream_options"] = {"include_usage": True}
    if completion:
        text = "\n\n".join(message["content"] for message in messages)
        return "/v1/completions", body | {"prompt": text}
    return "/v1/chat/completions", body | {"messages": messages}


async def _streamed(client: httpx.AsyncClient, path: str, body: dict[str, Any], turn: int) -> tuple[DemoReply, str]:
    started = time.perf_counter()
    latest = started
    ttft_s = pause_s = 0.0
    usage: dict[str, Any] = {}
    parts: list[str] = []
    async with client.stream("POST", path, json=body) as response:
        response.raise_for_status()
        async for event in read_events(response):
            now = time.perf_counter()
            if ttft_s:
                pause_s = max(pause_s, now - latest)
            else:
                ttft_s = now - started
            latest = now
            usage = event.get("usage") or usage
            parts += [_text_of(choice) for choice in event.get("choices", [])]
    reply = _reply(response, usage, ttft_s, turn=turn, streamed=True)
    return replace(reply, pause_s=pause_s), "".join(parts)


async def read_events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a streamed answer."""
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


async def _whole(client: httpx.AsyncClient, path: str, body: dict[str, Any], turn: int) -> tuple[DemoReply, str]:
    """Send a request without a stream: the time is that of the whole answer."""
    started = time.perf_counter()
    response = await client.post(path, json=body)
    response.raise_for_status()
    answer = response.json()
    reply = _reply(response, answer["usage"], time.perf_counter() - started, turn=turn, streamed=False)
    return reply, _text_of(answer["choices"][0])


def _reply(response: httpx.Response, usage: dict[str, Any], ttft_s: float, *, turn: int, streamed: bool) -> DemoReply:
    details = usage.get("prompt_tokens_details") or {}
    return DemoReply(
        turn=turn,
        endpoint=response.headers.get("x-kvproxy-endpoint", "?"),
        streamed=streamed,
        ttft_s=ttft_s,
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=details.get("cached_tokens") or 0,
    )


def _text_of(choice: dict[str, Any]) -> str:
    message = choice.get("delta") or choice.get("message") or choice
    return message.get("content") or message.get("text") or ""


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=words))
