"""Media are cut out of messages of every API; all else stays as it was sent."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from kvproxy.base.types import Prompt
from kvproxy.cache.media.cut import MediumKind, cut_part, cut_prompt, find_stand_ins, may_hold_media
from kvproxy.cache.media.urls import UrlSignatures
from tests.cache.media.samples import data_uri, picture_part, png

SIGNATURES = UrlSignatures()
PICTURE = png(640, 480)
ENCODED = base64.b64encode(PICTURE).decode()
SOURCE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ENCODED}}


def cut(message: dict[str, Any]) -> tuple[bytes, list[Any]]:
    part = cut_part(json.dumps(message).encode(), SIGNATURES)
    return part, list(find_stand_ins([part], 0))


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": "look"}, *parts]}


@pytest.mark.parametrize(
    "message",
    [
        user(picture_part(PICTURE)),
        user({"type": "input_image", "image_url": data_uri(PICTURE)}),
        user(SOURCE),
        user({"type": "tool_result", "tool_use_id": "t", "content": [SOURCE]}),
        {"type": "function_call_output", "output": [{"type": "input_image", "image_url": data_uri(PICTURE)}]},
    ],
)
def test_one_picture_is_one_medium_in_every_api(message: dict[str, Any]) -> None:
    """The same content has the same key and size, however it was sent."""
    part, [medium] = cut(message)
    _, [reference] = cut(user(picture_part(PICTURE)))
    assert (medium.kind, medium.width, medium.height) == (MediumKind.IMAGE, 640, 480)
    assert medium.key == reference.key
    assert ENCODED.encode() not in part
    assert json.loads(part)


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "input_audio", "input_audio": {"data": "QUJD" * 50, "format": "wav"}}, MediumKind.AUDIO),
        ({"type": "audio_url", "audio_url": {"url": "https://a/b.wav"}}, MediumKind.AUDIO),
        ({"type": "video_url", "video_url": {"url": "https://a/b.mp4"}}, MediumKind.VIDEO),
        ({"type": "file", "file": {"file_data": data_uri(b"%PDF-1.7", "application/pdf")}}, MediumKind.FILE),
        ({"type": "input_file", "file_id": "file-1"}, MediumKind.FILE),
        ({"type": "document", "source": {"type": "url", "url": "https://a/b.pdf"}}, MediumKind.FILE),
    ],
)
def test_audio_video_and_files_are_media_too(part: dict[str, Any], kind: MediumKind) -> None:
    _, [medium] = cut(user(part))
    assert medium.kind is kind


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": 'it says "image" and data:image/png;base64,QUJD'},
        user({"type": "text", "text": "https://a/image.png"}),
        {"role": "assistant", "content": [{"type": "tool_use", "input": {"image": {"url": "https://a"}, "data": "x"}}]},
        user({"type": "image_url", "image_url": None, "uuid": "u"}),
    ],
)
def test_text_and_tool_calls_stay_as_they_were_sent(message: dict[str, Any]) -> None:
    raw = json.dumps(message).encode()
    assert cut_part(raw, SIGNATURES) == raw


@pytest.mark.parametrize("raw", [b'{"type":"image"', b'["image_url"]', b'{"content":[{"type":"image_url","url":{]}]}'])
def test_invalid_messages_stay_as_they_are(raw: bytes) -> None:
    assert cut_part(raw, SIGNATURES) == raw


def test_a_message_is_cut_once() -> None:
    part, _ = cut(user(picture_part(PICTURE), SOURCE))
    assert cut_part(part, SIGNATURES) == part


def test_a_stand_in_is_about_as_long_as_the_text_of_its_tokens() -> None:
    """640 x 480 pixels are 391 patches of 28 x 28."""
    _, [medium] = cut(user(picture_part(PICTURE)))
    assert medium.size == 4 * (640 * 480 // 784)


def test_media_stand_at_their_places_in_the_canonical_bytes() -> None:
    parts = tuple(json.dumps(user(picture_part(png(32, 32, seed=seed)))).encode() for seed in (1, 2))
    prompt, media = cut_prompt(Prompt(b"shape", parts), SIGNATURES)
    canonical = b"\0".join((prompt.shape, *prompt.parts, b""))
    assert [canonical[one.start : one.start + 7] for one in media] == [b"\x7fimage:"] * 2
    assert media[0].key != media[1].key


def test_most_messages_are_passed_by_one_search() -> None:
    assert not may_hold_media(b'{"role":"user","content":[{"type":"text","text":"x"},{"type":"input_text"}]}')


@pytest.mark.parametrize(
    "signed",
    [
        "https://b.s3.amazonaws.com/k.png?X-Amz-Algorithm=A&X-Amz-Signature=s&X-Amz-Expires=60",
        "https://b.s3.amazonaws.com/k.png?AWSAccessKeyId=A&Signature=s&Expires=60",
        "https://storage.googleapis.com/b/k.png?X-Goog-Signature=s&X-Goog-Date=d",
        "https://a.blob.core.windows.net/c/k.png?sv=2024&se=x&sr=b&sp=r&sig=s",
        "https://d.cloudfront.net/k.png?Expires=1&Signature=s&Key-Pair-Id=k&Policy=p",
    ],
)
def test_a_url_counts_without_its_signature(signed: str) -> None:
    assert SIGNATURES.unsigned(signed) == signed.partition("?")[0]


def test_other_parameters_of_a_url_count() -> None:
    assert SIGNATURES.unsigned("https://a/b?id=1&sig=x#top") == "https://a/b?id=1"
    assert UrlSignatures(["Token"]).unsigned("https://a/b?token=x&id=1") == "https://a/b?id=1"
    assert SIGNATURES.unsigned("https://[broken?sig=1") == "https://[broken?sig=1"
