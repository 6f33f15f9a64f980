"""Engines tokenize messages as the chat they are."""

from __future__ import annotations

import httpx

from kvproxy.base.types import RequestKind
from kvproxy.cache.clients.vllm import VllmClient
from kvproxy.features.other_apis.feature import FEATURE
from tests.cache.clients.support import Upstream, captured
from tests.cache.clients.test_vllm import CHAT


async def test_each_kind_is_probed_on_its_own() -> None:
    """An engine that renders chats may be too old to render messages: then these are tokenized as the chat they are,
    which depends on whether it is SGLang: asked once, under both names of its info."""

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/tokenize":
            return captured("tok_msgs")
        if request.url.path == "/v1/chat/completions/render":
            return captured("chat_render", status=200)
        return httpx.Response(404, json={"detail": "Not Found"})

    upstream = Upstream(handler)
    vllm = VllmClient(upstream.http, "http://engine-a:8000", find_form=FEATURE.find_chat_form)
    for _ in range(2):
        for kind in (RequestKind.CHAT, RequestKind.MESSAGES):
            assert len(await vllm.prompt_tokens(kind, "tiny", CHAT)) == 18
    assert [request.url.path for request in upstream.requests] == [
        *("/v1/chat/completions/render", "/v1/messages/render", "/server_info", "/get_server_info", "/tokenize"),
        *("/v1/chat/completions/render", "/tokenize"),
    ]
