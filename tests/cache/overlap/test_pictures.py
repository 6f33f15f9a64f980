"""Prompts with pictures: what is counted, learned and matched."""

from __future__ import annotations

from typing import Any

import pytest

from kvproxy.base.types import RequestKind
from kvproxy.cache.overlap.facts import RequestFacts, Result
from tests.cache.media.samples import data_uri, picture_part, png
from tests.cache.support import A, Service, engine, long_text, parsed, world

#: Words of the tests' engines are tokens; each is about this long.
TEXT = long_text("word", 600)
PICTURE_TOKENS = 1360
SCREENSHOT = png(1280, 960, size_bytes=600_000)


def body(*parts: dict[str, Any], text: str = TEXT, question: str = "What is this?") -> dict[str, Any]:
    content = [{"type": "text", "text": text}, *parts, {"type": "text", "text": question}]
    return {"model": "m", "messages": [{"role": "user", "content": content}]}


async def served(service: Service, asked: dict[str, Any], *, tokens: int, media: int | None, cached: int = 0) -> None:
    """Serve a request at engine A, which counts `tokens`."""
    facts = await service.ask(parsed(RequestKind.CHAT, asked))
    service.kv.placed(facts, A)
    service.kv.finished(facts, Result(A, True, prompt_tokens=tokens, cached_tokens=cached, media_tokens=media))


async def asked(service: Service, asked: dict[str, Any]) -> RequestFacts:
    return await service.ask(parsed(RequestKind.CHAT, asked))


async def test_a_picture_counts_as_its_tokens_and_not_its_bytes() -> None:
    """800 KB of base64 are about 1,200 tokens by the size of the picture, before any engine counted it."""
    async with world({"a": engine()}) as service:
        without = await asked(service, body())
        facts = await asked(service, body(picture_part(SCREENSHOT)))
    assert facts.overlaps.prompt_tokens - without.overlaps.prompt_tokens == pytest.approx(1200, abs=40)


@pytest.mark.parametrize("media", [PICTURE_TOKENS, None])
async def test_pictures_do_not_move_bytes_a_token_of_text(media: int | None) -> None:
    """Every second request has a screenshot; text prompts count as if there were none."""
    async with world({"a": engine()}) as service:
        for number in range(50):
            text = long_text(f"n{number:02}-", 600)
            await served(service, body(text=text), tokens=1000, media=None)
            shot = picture_part(png(1280, 960, seed=number, size_bytes=600_000))
            await served(service, body(shot, text=text), tokens=1000 + PICTURE_TOKENS, media=media)
        facts = await asked(service, body(text=long_text("new-", 600)))
        pictured = await asked(service, body(picture_part(SCREENSHOT), text=long_text("oth-", 600)))
    assert facts.overlaps.prompt_tokens == pytest.approx(1000, rel=0.05)
    assert pictured.overlaps.prompt_tokens == pytest.approx(1000 + PICTURE_TOKENS, rel=0.05)


async def test_a_picture_does_not_empty_an_engines_index() -> None:
    """Twenty chats of an engine with room for them stay known after one screenshot of a megabyte."""
    async with world({"a": engine()}) as service:
        index = service.kv.overlap.indexes["default"].approximate
        index.set_capacity(A, 1600)
        for number in range(20):
            await served(service, body(text=long_text(f"chat{number}-", 1500)), tokens=4000, media=None)
        before = [facts.overlaps.by_endpoint[A].tokens for facts in [await _first(service)]]
        await served(service, body(picture_part(png(1280, 960, size_bytes=1_000_000))), tokens=2400, media=1360)
        after = [facts.overlaps.by_endpoint[A].tokens for facts in [await _first(service)]]
    assert after[0] == pytest.approx(before[0], rel=0.05)


async def _first(service: Service) -> RequestFacts:
    return await asked(service, body(text=long_text("chat0-", 1500)))


@pytest.mark.parametrize("known", [True, False])
async def test_the_same_picture_is_reused_and_another_is_not(known: bool) -> None:
    """The text in front of another picture is all that is matched."""
    async with world({"a": engine()}) as service:
        media = PICTURE_TOKENS if known else None
        for number in range(20):
            await served(service, body(text=long_text(f"n{number:02}-")), tokens=1000, media=None)
        await served(service, body(picture_part(SCREENSHOT)), tokens=2360, media=media)
        again = await asked(service, body(picture_part(SCREENSHOT)))
        other = await asked(service, body(picture_part(png(1280, 960, seed=5, size_bytes=600_000))))
    assert again.overlaps.prompt_tokens == pytest.approx(2360, rel=0.05)
    assert again.overlaps.by_endpoint[A].tokens <= again.overlaps.prompt_tokens
    assert again.overlaps.by_endpoint[A].tokens == pytest.approx(2360, rel=0.05)
    assert other.overlaps.by_endpoint[A].tokens == pytest.approx(1000, rel=0.1)


async def test_one_picture_is_one_by_every_api() -> None:
    """Messages, Responses and long bodies that are read in steps name it alike."""
    large = png(1280, 960, size_bytes=2_500_000)
    source = {"type": "base64", "media_type": "image/png", "data": data_uri(large).partition(",")[2]}
    async with world({"a": engine()}) as service:
        chat = await asked(service, body(picture_part(large)))
        messages = await service.ask(parsed(RequestKind.MESSAGES, body({"type": "image", "source": source})))
        items = [{"role": "user", "content": [{"type": "input_image", "image_url": data_uri(large)}]}]
        responses = await service.ask(parsed(RequestKind.RESPONSES, {"model": "m", "input": items}))
    keys = {one.media[0].key for one in (chat, messages, responses)}
    assert len(keys) == 1
    assert chat.prompt_bytes < 20_000
