"""Two simulated engines behind a proxy whose route resumes streams, and readers of what clients get."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvproxy.lab.simulator.vllm_settings import VllmSettings
from tests.lab.simulator.support import TINY, Running, engine
from tests.support.proxy import RunningProxy, running_proxy
from tests.support.until import until

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
#: Of routes that resume where the number of tokens is unknown.
BEST_EFFORT = {"resume_best_effort": True}
FILTERS = [{"inference_request": {}}, {"router": {}}]


@dataclass
class Gateway:
    """The proxy, asked in turn: the first request goes to the first engine."""

    proxy: RunningProxy
    engines: Sequence[Running]

    async def ask(self, path: str, body: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
        """Return the events' data; every event must be whole, and the stream must end as its API's do."""
        answer = await self.proxy.client.post(path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return read_events(answer.text)

    def refused(self, reason: str) -> float:
        """Return how many streams were not resumed for this reason."""
        return self.proxy.metric("kvproxy_streams_not_resumed_total", cluster="default", reason=reason)

    def resumed(self, grade: str) -> float:
        """Return how many streams went on by this grade."""
        return self.proxy.metric("kvproxy_streams_resumed_total", cluster="default", grade=grade)


@contextlib.asynccontextmanager
async def gateway(
    grade: str, *, engines: int = 2, settings: VllmSettings = TINY, route: dict[str, Any] | None = None, **config: Any
) -> AsyncIterator[Gateway]:
    """Yield engines that answer alike, and the proxy."""
    async with contextlib.AsyncExitStack() as stack:
        running = [await stack.enter_async_context(engine(replace(settings))) for _ in range(engines)]
        urls = {"abc"[number]: one.url for number, one in enumerate(running)}
        routes = [{"resume": grade, **(route or {})}]
        config = {"filters": FILTERS, "routes": routes, "retry": {"min_per_second": 1000}, **config}
        yield Gateway(await stack.enter_async_context(running_proxy(urls, **config)), running)


async def try_model(proxy: RunningProxy, *engines: Running) -> None:
    """Have the proxy try the model, which it does at its first message."""
    messages = [{"role": "user", "content": "Hello."}]
    for _ in engines:
        body = {"model": "tiny", "messages": messages, "stream": True, "max_tokens": 2}
        await proxy.client.post("/v1/messages", json=body)
    await until(lambda: sum(one.app.state.calls[f"POST {CHAT}"] for one in engines) == 2)


def read_events(text: str) -> list[dict[str, Any]]:
    """Return the data of all events but the last, `[DONE]`."""
    assert text.endswith("\n\n"), text[-200:]
    data = [event.partition("data: ")[2] for event in text.removesuffix("\n\n").split("\n\n")]
    assert data[-1] == "[DONE]", text[-200:]
    return [json.loads(one) for one in data[:-1]]


def text_of(events: Sequence[dict[str, Any]]) -> str:
    """Return the text of a chat or a text completion."""
    choices = [choice for event in events for choice in event.get("choices", ())]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def usage_of(events: Sequence[dict[str, Any]]) -> tuple[int, int, int]:
    """Return prompt, completion and total tokens."""
    usage = events[-1]["usage"]
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


def chat_body(**fields: Any) -> dict[str, Any]:
    """Return a greedy streamed chat with a usage."""
    messages = [{"role": "user", "content": "Tell me about the sea and the wind."}]
    return {"model": "tiny", "messages": messages, "stream": True, "temperature": 0, "max_tokens": 60,
            "stream_options": {"include_usage": True}, **fields}  # fmt: skip


def completion_body(**fields: Any) -> dict[str, Any]:
    """Return the same of a text completion."""
    return {"model": "tiny", "prompt": "Once upon a time", "stream": True, "temperature": 0, "max_tokens": 60,
            "stream_options": {"include_usage": True}, **fields}  # fmt: skip
