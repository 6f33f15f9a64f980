"""Pictures that the official clients send through the proxy to simulated engines."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from kvproxy.lab.simulator.kv_event_publisher import PublisherSettings
from kvproxy.proxy.metrics import RequestMetrics
from tests.cache.media.samples import data_uri, picture_part, png
from tests.lab.simulator.support import engine
from tests.real.kvcache import ask, following
from tests.support.decision import predicted_at
from tests.support.proxy import RunningProxy
from tests.support.until import until

FIRST, SECOND = (png(1120, 840, seed=seed, size_bytes=400_000) for seed in (1, 2))
DEBUG = {"x-kvproxy-debug": "1"}
TEXT = " ".join(f"word {number}" for number in range(600))
QUESTION = " ".join(f"question {number}" for number in range(100))

#: Predicted, reused and all tokens of one prompt.
Counted = tuple[int, int, int]
Send = Callable[[RunningProxy, bytes], Awaitable[Counted]]


@pytest.fixture(params=[False, True], ids=["routed", "KV events"])
async def proxy(request: pytest.FixtureRequest) -> AsyncIterator[RunningProxy]:
    settings = PublisherSettings() if request.param else None
    async with engine(kv_events=settings) as running, following(running.url, events=request.param) as (proxy, _):
        yield proxy


async def by_chat(proxy: RunningProxy, picture: bytes) -> Counted:
    import openai  # takes a second

    content: Any = [{"type": "text", "text": TEXT}, picture_part(picture), {"type": "text", "text": QUESTION}]
    async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.with_raw_response.create(
            model="tiny", max_tokens=1, messages=[{"role": "user", "content": content}], extra_headers=DEBUG
        )
    usage: Any = answer.parse().usage
    return predicted_at(answer.headers)[0], usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens


async def by_responses(proxy: RunningProxy, picture: bytes) -> Counted:
    import openai  # takes a second

    content: Any = [
        {"type": "input_text", "text": TEXT},
        {"type": "input_image", "image_url": data_uri(picture), "detail": "auto"},
        {"type": "input_text", "text": QUESTION},
    ]
    item: Any = {"type": "message", "role": "user", "content": content}
    async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.responses.with_raw_response.create(
            model="tiny", max_output_tokens=1, input=[item], extra_headers=DEBUG
        )
    usage: Any = answer.parse().usage
    return predicted_at(answer.headers)[0], usage.input_tokens_details.cached_tokens, usage.input_tokens


async def by_messages(proxy: RunningProxy, picture: bytes) -> Counted:
    import anthropic  # takes two seconds

    source: Any = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(picture).decode()}
    content: Any = [
        {"type": "text", "text": TEXT},
        {"type": "image", "source": source},
        {"type": "text", "text": QUESTION},
    ]
    async with anthropic.AsyncAnthropic(base_url=proxy.url, api_key="none", max_retries=0) as client:
        answer = await client.messages.with_raw_response.create(
            model="tiny", max_tokens=1, messages=[{"role": "user", "content": content}], extra_headers=DEBUG
        )
        usage = (await answer.parse()).usage
    cached = usage.cache_read_input_tokens or 0
    prompt = usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0)
    return predicted_at(answer.headers)[0], cached, prompt


@pytest.mark.parametrize("send", [by_chat, by_responses, by_messages])
async def test_predicted_picture_tokens_are_reused(proxy: RunningProxy, send: Send) -> None:
    """The same picture, and what is in front of another one, within 5 % of the prompt; half a megabyte counts nothing
    by its bytes."""
    for number in range(3):  # what a token of text is in bytes
        text = f"{number} {TEXT}"
        body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": text}]}
        (await proxy.client.post("/v1/chat/completions", json=body)).raise_for_status()
    await send(proxy, FIRST)
    again, other = await send(proxy, FIRST), await send(proxy, SECOND)
    for predicted, cached, prompt in (again, other):
        assert predicted == pytest.approx(cached, abs=0.05 * prompt)
    assert other[1] < again[1] - 1200


def pictured(number: int) -> dict[str, Any]:
    """Return a chat with a picture at a URL, whose size is unknown, behind a system prompt that all have."""
    url = {"type": "image_url", "image_url": {"url": f"https://pictures.example/{number}.png"}}
    texts = [{"type": "text", "text": f"{number} {text}"} for text in (QUESTION, TEXT)]
    content = [texts[0], url, texts[1]]
    return {
        "model": "tiny",
        "max_tokens": 1,
        "messages": [{"role": "system", "content": TEXT}, {"role": "user", "content": content}],
    }


async def test_events_show_what_is_left_of_a_chat_with_a_picture() -> None:
    """Others' prompts evict the blocks of its picture, not those of the text that all begin with: that text alone is
    predicted. Before, what had been routed counted behind it."""
    async with (
        engine(kv_events=PublisherSettings()) as running,
        following(running.url, events=True) as (proxy, kvcache),
    ):
        reported = kvcache.overlap.indexes["default"].followed.reported
        first = await ask(proxy.client, pictured(1))
        await until(lambda: len(reported) > 0)
        again = await ask(proxy.client, pictured(1))
        assert (again.predicted, again.source) == (again.cached_tokens, "precise")
        assert again.cached_tokens > 0.95 * first.prompt_tokens
        before = kvcache.overlap.indexes["default"].precise.counts.removed
        for number in range(2, 6):  # sent to the engine by another proxy
            (await running.client.post("/v1/chat/completions", json=pictured(number))).raise_for_status()
        await until(lambda: kvcache.overlap.indexes["default"].precise.counts.removed > before + 60)
        evicted = await ask(proxy.client, pictured(1))
    assert evicted.cached_tokens < 0.6 * first.prompt_tokens
    assert evicted.predicted == pytest.approx(evicted.cached_tokens, abs=0.05 * first.prompt_tokens)


async def test_a_clients_name_for_a_picture_does_not_reach_the_engine(proxy: RunningProxy) -> None:
    """So that no client is shown what another one called so."""
    import openai  # takes a second

    named: Any = {**picture_part(FIRST), "uuid": "logo"}
    nothing: Any = {"type": "image_url", "image_url": None, "uuid": "logo"}
    async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0) as client:
        for part in (named, named):
            await client.chat.completions.create(
                model="tiny", max_tokens=1, messages=[{"role": "user", "content": [part]}]
            )
        with pytest.raises(openai.BadRequestError, match="no cached item"):
            await client.chat.completions.create(
                model="tiny", max_tokens=1, messages=[{"role": "user", "content": [nothing]}]
            )


async def test_tokens_of_pictures_are_counted_apart(proxy: RunningProxy) -> None:
    """In the metric of their own, as the engine reports them; text alone counts none."""
    for content in (TEXT, [picture_part(FIRST)]):
        body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
        (await proxy.client.post("/v1/chat/completions", json=body)).raise_for_status()
    counted = proxy.proxy.metrics.group(RequestMetrics)
    assert counted.media_tokens.labels("default").value == 1200
    assert counted.prompt_tokens.labels("default").value > 2400
