"""Clusters of vLLM and SGLang: the engine that goes on decides how its request is made."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvproxy.lab.simulator.sglang_server import SglangApp
from kvproxy.lab.simulator.sglang_settings import SglangSettings
from kvproxy.lab.simulator.vllm_server import VllmApp
from tests.features.resume.gateway import BEST_EFFORT, CHAT, FILTERS
from tests.features.resume.test_typed import MESSAGES, MESSAGES_BODY, STREAMED, typed_events, words_of
from tests.lab.simulator.support import FAST, TINY
from tests.support.loopback import serve
from tests.support.proxy import running_proxy
from tests.support.until import until

BLOCKS = [{"type": "text", "text": "Be short."}, {"type": "text", "text": "Be kind."}]
#: Chats as each engine makes them of these two blocks.
SYSTEM = {"vllm": "Be short.Be kind.", "sglang": "Be short.\nBe kind."}


class Engine:
    """A simulated engine, and the chats that it was sent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.chats: list[dict[str, Any]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        whole = b""

        async def read() -> Message:
            nonlocal whole
            message = await receive()
            whole += message.get("body", b"")
            if scope["path"] == CHAT and message["type"] == "http.request" and not message["more_body"]:
                self.chats.append(msgspec.json.decode(whole))
            return message

        await self._app(scope, read if scope["type"] == "http" else receive, send)


@contextlib.asynccontextmanager
async def running_engine(kind: str) -> AsyncIterator[tuple[Engine, httpx.AsyncClient]]:
    """Yield an engine and its client. The SGLang is of an older version, whose `/server_info` has another name."""
    sglang = SglangApp(SglangSettings(model="tiny", engine=FAST, health_step_s=0.01, old_names=True))
    app = sglang if kind == "sglang" else VllmApp(TINY)
    recorded = Engine(app)
    async with app, serve(recorded) as url, httpx.AsyncClient(base_url=url) as client:
        yield recorded, client


@pytest.mark.parametrize(("breaks", "goes_on"), [("vllm", "sglang"), ("sglang", "vllm"), ("sglang", "sglang")])
async def test_the_rest_of_a_message_is_a_chat_of_the_engine_that_goes_on(breaks: str, goes_on: str) -> None:
    """Each makes another chat of the same message, and the kind of an engine is not known before it goes on."""
    body = {**MESSAGES_BODY, **STREAMED, "system": BLOCKS}
    config = {"filters": FILTERS, "routes": [{"resume": "text", **BEST_EFFORT}]}
    async with (
        running_engine(breaks) as (_, first),
        running_engine(goes_on) as (other, second),
        running_proxy({"a": str(first.base_url), "b": str(second.base_url)}, **config) as proxy,
    ):
        await first.post("/sim/faults", json={"cut_next": 1, "cut_after_chunks": 40})
        events = typed_events((await proxy.client.post(MESSAGES, json=body)).text)
        assert words_of(events)
        await until(lambda: any("continue_final_message" in chat for chat in other.chats))
        (chat,) = (chat for chat in other.chats if "continue_final_message" in chat)
        assert chat["messages"][0] == {"role": "system", "content": SYSTEM[goes_on]}
        assert words_of(events).startswith(chat["messages"][-1]["content"])
