"""Pictures at simulated engines: what they count, reuse and publish, by the clients that send them."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kvproxy.lab.simulator.media import PLACEHOLDER, MediaLoader, identify_picture, media_keys
from kvproxy.lab.simulator.prompts import Prompts
from kvproxy.lab.simulator.tokenizer import Tokenizer, hash_blocks
from kvproxy.lab.simulator.vllm_errors import VllmError
from tests.cache.media.samples import GIF, IDENTIFIERS, data_uri, picture_part, png
from tests.lab.simulator.support import TINY, engine

SIDE = 280
TOKENS = 100  # of a picture of 280 x 280: one for 28 x 28 pixels
FIRST, SECOND = png(SIDE, SIDE, seed=1), png(SIDE, SIDE, seed=2)
TEXT = "word " * 200


def messages(*pictures: bytes, text: str = TEXT) -> list[Any]:
    parts = [picture_part(one) for one in pictures]
    return [{"role": "user", "content": [{"type": "text", "text": text}, *parts, {"type": "text", "text": "So?"}]}]


async def count(client: httpx.AsyncClient, *pictures: bytes) -> tuple[int, int, Any]:
    """Tokens of the prompt, those reused, and those of media."""
    body = {"model": "tiny", "max_tokens": 1, "messages": messages(*pictures)}
    usage = (await client.post("/v1/chat/completions", json=body)).json()["usage"]
    details = usage["prompt_tokens_details"]
    return usage["prompt_tokens"], details["cached_tokens"], details["multimodal_tokens"]


async def test_a_picture_is_counted_by_its_size_and_reused_as_itself() -> None:
    """Tokens behind another picture are computed again."""
    async with engine() as running:
        text, _, none = await count(running.client)
        whole, _, media = await count(running.client, FIRST)
        again = (await count(running.client, FIRST))[1]
        other = (await count(running.client, SECOND))[1]
    assert (none, media, whole - text) == (None, {"image": TOKENS}, TOKENS)
    assert again > text
    assert text - 48 < other < text


async def test_the_official_clients_send_pictures() -> None:
    """By each API the same picture is one."""
    import openai  # takes a second

    source: Any = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(FIRST).decode()}
    async with engine() as running:
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
            chat = await client.chat.completions.create(model="tiny", messages=messages(FIRST), max_tokens=1)
            parts: Any = [
                {"type": "input_text", "text": TEXT},
                {"type": "input_image", "image_url": data_uri(FIRST), "detail": "auto"},
                {"type": "input_text", "text": "So?"},
            ]
            item: Any = {"type": "message", "role": "user", "content": parts}
            response = await client.responses.create(model="tiny", input=[item], max_output_tokens=1)
        import anthropic  # takes two seconds

        async with anthropic.AsyncAnthropic(base_url=running.url, api_key="none", max_retries=0) as other:
            blocks: Any = [
                {"type": "text", "text": TEXT}, {"type": "image", "source": source}, {"type": "text", "text": "So?"},
            ]  # fmt: skip
            message = await other.messages.create(
                model="tiny", messages=[{"role": "user", "content": blocks}], max_tokens=1
            )
    assert chat.usage is not None
    assert response.usage is not None
    held = (chat.usage.prompt_tokens - 1) // 32 * 32
    assert response.usage.input_tokens_details.cached_tokens == message.usage.cache_read_input_tokens == held


async def test_events_name_the_blocks_of_a_picture_as_vllm_does() -> None:
    """Identifier and offset from the block's start, negative in later ones."""
    prompts = Prompts(Tokenizer(), model="models/tiny-qwen")
    prompt: Any = prompts.encode_chat({"messages": messages(FIRST)})
    [placed] = prompt.media
    assert prompt[placed.start : placed.start + TOKENS] == [PLACEHOLDER] * TOKENS
    first = placed.start // 32
    keys = [media_keys(prompt.media, block, 32) for block in range(first - 1, first + 5)]
    name = identify_picture(FIRST, "models/tiny-qwen", rgb=True)
    offset = placed.start % 32
    assert keys == [(), *(((name, offset - 32 * n),) for n in range(4)), keys[-1]]
    other: Any = prompts.encode_chat({"messages": messages(SECOND)})
    hashes = [hash_blocks(each, 32, media=each.media) for each in (prompt, other)]
    assert hashes[0][first - 1] == hashes[1][first - 1]
    assert hashes[0][first] != hashes[1][first]


async def test_a_picture_is_known_by_the_name_a_client_gave_it() -> None:
    """Without its content too, once it was sent; that is what a proxy guards."""
    named = {**picture_part(FIRST), "uuid": "mine"}
    loader = MediaLoader("m")
    with pytest.raises(ValueError, match="no cached item"):
        loader.load({"type": "image_url", "image_url": None, "uuid": "mine"})
    medium = loader.load(named)
    assert medium is not None
    assert medium.identifier == "mine"
    assert loader.load({"type": "image_url", "image_url": None, "uuid": "mine"}) == medium


def test_other_media_have_tokens_too() -> None:
    """By their address or their bytes, whatever the part calls them."""
    loader = MediaLoader("m")
    parts: list[dict[str, Any]] = [
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "https://x/v.mp4"}},
        {"type": "input_image", "image_url": "https://x/i.png"},
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,AAAA"}},
    ]
    media = [loader.load(part) for part in parts]
    assert len({one.identifier for one in media if one}) == 4
    assert [one.tokens for one in media if one] == [256] * 4
    assert loader.load({"type": "text", "text": "x"}) is None


def test_placeholders_of_sglang_name_their_picture() -> None:
    """Four ids of 62 bits in turn."""
    prompt: Any = Prompts(Tokenizer(), wide_media=True).encode_chat({"messages": messages(FIRST)})
    [placed] = prompt.media
    ids = prompt[placed.start : placed.start + TOKENS]
    assert len(set(ids)) == 4
    assert ids[:4] == ids[4:8]
    assert max(ids) > 2**32


@pytest.mark.parametrize("text", ["\ue000medium\ue000", "plain"])
def test_a_model_of_text_alone_refuses_pictures(text: str) -> None:
    """As does one whose text has the mark of a medium in it."""
    prompts = Prompts(Tokenizer(), model="m" if text != "plain" else None)
    with pytest.raises(VllmError):
        prompts.encode_chat({"messages": messages(FIRST, text=text)})


async def test_an_engine_without_vision_says_so() -> None:
    """400, in vLLM's words."""
    settings = replace(TINY, multimodal=False)
    async with engine(settings) as running:
        reply = await running.client.post("/v1/chat/completions", json={"messages": messages(FIRST)})
    assert reply.status_code == 400
    assert "not a multimodal model" in reply.json()["error"]["message"]


@pytest.mark.parametrize(("raw", "rgb", "identifier"), IDENTIFIERS)
def test_identifiers_are_vllms(raw: bytes, rgb: bool, identifier: str) -> None:
    """As its own hasher made them."""
    assert identify_picture(raw, "m/x", rgb=rgb) == identifier
    medium = MediaLoader("m/x").load(picture_part(raw))
    assert medium is not None
    assert medium.identifier == identifier


JPEG = bytes.fromhex("ffd8ffe000040000ffc0000b080118011801012200ffd9")


@pytest.mark.parametrize(
    ("raw", "tokens"), [(GIF, 1), (JPEG, 100), (b"\xff\xd8\xff", 256), (b"GIF89a", 256), (b"BM", 256)]
)
def test_pictures_are_counted_by_their_size_if_it_can_be_read(raw: bytes, tokens: int) -> None:
    """By the first bytes of usual formats."""
    medium = MediaLoader("m").load(picture_part(raw))
    assert medium is not None
    assert medium.tokens == tokens
