"""The length of prompts that no filter looks up in caches."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from typing import Any

import pytest
from starlette.types import Send

from kvproxy.base.types import RequestKind
from kvproxy.cluster.routing.policy import NO_FACTS
from kvproxy.proxy.request.parse import parse_body
from kvproxy.proxy.request.prompt_length import estimate_length
from kvproxy.proxy.request.repeats import EarlierBodies
from kvproxy.proxy.request.session import NO_CALLER
from tests.support.fake_engine import Call, FakeEngine, event, start_stream
from tests.support.loopback import serve
from tests.support.proxy import chat, running_proxy

LACKING = {
    "a list without it": {"policy": "least_request", "filters": ["request_id", "inference_request", "router"]},
    "a policy that makes no use of it": {"policy": "round_robin"},
    "switched off": {"policy": "kv_aware", "filters": {"kvcache": {"enabled": False}}},
}


def picture(width: int, height: int) -> str:
    """Return a PNG of these pixels as a data URI of 600 kB."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head)) + bytes(450_000)
    return "data:image/png;base64," + base64.b64encode(png).decode()


def length_of(content: Any, model: str = "m") -> int:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": content}]}).encode()
    return estimate_length(parse_body(RequestKind.CHAT, body)).prompt_tokens


def test_text_counts_by_its_bytes() -> None:
    """Four a token, as before any engine has counted."""
    assert length_of("word " * 400) == pytest.approx(500, rel=0.05)


def test_a_picture_counts_as_its_tokens() -> None:
    """By the model's family, and not by the bytes of its file."""
    parts = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": picture(1288, 952)}}]
    assert length_of(parts, "Qwen2.5-VL-7B") == pytest.approx(46 * 34, abs=60)


@pytest.mark.parametrize(
    "last", ["word " * 90, [{"type": "image_url", "image_url": {"url": picture(1288, 952)}}]], ids=["text", "picture"]
)
def test_only_new_messages_are_searched_for_media(last: Any) -> None:
    """A longer chat that goes on from one without media has the length of the whole all the same."""
    said = [{"role": "user", "content": "word " * 2000} for _ in range(4)]
    earlier = EarlierBodies()
    for messages in (said, [*said, {"role": "user", "content": last}]):
        body = json.dumps({"model": "m", "messages": messages}).encode()
        request, repeats = earlier.decode(RequestKind.CHAT, body, NO_CALLER)
        assert estimate_length(request, repeats) == estimate_length(request)
    assert repeats is not None
    assert repeats.plain_messages == len(said)
    assert (repeats.beginning is not None and repeats.beginning.plain) is isinstance(last, str)


def test_an_unread_body_has_no_length() -> None:
    """Nor any other fact."""
    assert estimate_length(None) is NO_FACTS


@pytest.mark.parametrize("config", LACKING.values(), ids=LACKING)
async def test_the_length_reaches_the_load_of_the_engine(config: dict[str, Any]) -> None:
    """Whatever becomes of `kvcache`; no speed and no saving is learned from the request."""
    seen: list[float] = []

    async def stream(engine: FakeEngine, call: Call, send: Send) -> None:
        seen.append(proxy.metric("kvproxy_pending_prompt_tokens", cluster="default", endpoint="a"))
        await start_stream(send)
        await event(send, b'{"choices":[{"delta":{"content":"x"}}]}')
        usage = b'{"prompt_tokens":500,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":480}}'
        await event(send, b'{"choices":[],"usage":%s}' % usage)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async with serve(FakeEngine("a", stream)) as url, running_proxy({"a": url}, **config) as proxy:
        for _ in range(3):
            body = chat("word " * 400, stream=True)
            answer = await proxy.client.post("/v1/chat/completions", json=body, headers={"x-kvproxy-debug": "1"})
            assert answer.status_code == 200
        decision = answer.headers.get("x-kvproxy-decision", "")
        saved = proxy.metric("kvproxy_saved_prefill_seconds_total", model="m", tenant="")
        speeds = proxy.proxy.clusters["default"].policies.speeds
        samples = 0 if speeds is None else speeds.estimates(0.0).samples
    assert seen == [pytest.approx(500, rel=0.1)] * 3
    assert saved == 0.0
    assert "prompt_tokens=5" in decision
    assert "matched" not in decision
    assert samples == 0
