"""An engine's own API besides inference, in vLLM's shape and where it differs in SGLang's: tokenize, render, health,
metrics, models, event sources."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from typing import cast

import httpx
import msgspec

from kvproxy.base.errors import BadResponse, NotSupported, Refused
from kvproxy.base.types import RequestKind
from kvproxy.cache.clients.api import Api
from kvproxy.cache.clients.chat_body import render_body, tokenize_body
from kvproxy.cache.clients.engine_metrics import EngineMetrics, parse_engine_metrics
from kvproxy.cache.clients.event_sources import MAX_SOURCES, KvEventSource, WireSources, sources_from_wire
from kvproxy.cache.clients.sglang import SglangInfo, fetch_info
from kvproxy.cache.clients.tokens import TokenIds, tokens_from_json

#: A million tokens as JSON.
MAX_TOKENS_BYTES = 8 << 20
#: A scrape of one engine is 50 kB and 400 lines, and so much again for each data-parallel rank.
MAX_METRICS_BYTES = 4 << 20
MAX_METRICS_LINES = 50_000
#: Longer texts are read beside the event loop.
_LONG_BYTES = 1 << 17
MAX_SOURCES_BYTES = 1 << 16
#: Returns the body of the chat that an engine makes of a request. Raises ValueError for one that no chat can express.
ChatForm = Callable[[bytes], bytes]
#: Returns the form for requests of a kind to SGLang (True) or vLLM; None: there is none.
FindChatForm = Callable[[RequestKind, bool], ChatForm | None]
#: Paths at which an engine renders requests of a kind (`--enable-scale-out`).
RENDER_PATHS = {
    RequestKind.CHAT: "/v1/chat/completions/render",
    RequestKind.MESSAGES: "/v1/messages/render",
    RequestKind.RESPONSES: "/v1/responses/render",
}
MAX_MODELS = 5000
_FORBIDDEN = 403


class ModelInfo(msgspec.Struct):
    """Row of `/v1/models`. `root` is vLLM's `--model` (the name in LMCache's coordinator)."""

    id: str
    root: str | None = None
    parent: str | None = None  # the base model of a LoRA
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        self.root = self.root or self.id


class _Tokens(msgspec.Struct):
    tokens: msgspec.Raw


class _Rendered(msgspec.Struct):
    token_ids: msgspec.Raw


class _Models(msgspec.Struct):
    data: tuple[ModelInfo, ...]


class _Version(msgspec.Struct):
    version: str


_INVALID = frozenset({400, 422})
_PROMPT_MISSING = re.compile(r"prompt\W.*field required", re.I | re.S)


class VllmClient:
    """One engine. Every method raises ClientError and nothing else; `timeout_s` bounds each call as a whole."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        base_url: str,
        authorization: str | None = None,
        *,
        timeout_s: float = 2.0,
        find_form: FindChatForm | None = None,
    ) -> None:
        self.api = Api(http, base_url, service="vllm", authorization=authorization)
        self._timeout_s = timeout_s
        self._find_form = find_form
        #: Whether the engine renders requests of a kind: False after a refusal, and then never tried again.
        self.renders: dict[RequestKind, bool] = {}
        self._is_sglang: bool | None = None  # None until queried

    async def tokenize_prompt(self, model: str, prompt: str) -> TokenIds:
        """Token ids of a completion prompt; special tokens as the engine's completion endpoint adds them."""
        return await self._tokenize(
            msgspec.json.encode({"model": model, "prompt": prompt} if model else {"prompt": prompt})
        )

    async def tokenize_chat(self, model: str, body: bytes) -> TokenIds:
        """Token ids of a chat request, from its raw JSON body; `model` replaces the body's unless empty.

        Raises ValueError when the body is not a chat request, NotSupported where `/tokenize` takes prompts alone
        (older SGLangs).
        """
        try:
            return await self._tokenize(tokenize_body(model, body))
        except Refused as error:
            if error.status in _INVALID and _PROMPT_MISSING.search(str(error)):
                raise NotSupported(str(error), status=error.status) from error
            raise

    async def render_prompt(self, kind: RequestKind, model: str, body: bytes) -> TokenIds:
        """Token ids of a request by the engine's own renderer: exact for every input, where the engine has it.

        Raises NotSupported where it has not; `renders` then stays False for the kind.
        """
        path = RENDER_PATHS[kind]
        asked = render_body(model, body)
        try:
            answer = await self.api.post(path, asked, _Rendered, timeout_s=self._timeout_s, max_bytes=MAX_TOKENS_BYTES)
        except Refused as error:
            if error.status == _FORBIDDEN:
                self.renders[kind] = False
                raise NotSupported(str(error), status=error.status) from error
            if isinstance(error, NotSupported):
                self.renders[kind] = False
            raise
        self.renders[kind] = True
        return await _tokens(answer.token_ids, path)

    async def prompt_tokens(self, kind: RequestKind, model: str, body: bytes) -> TokenIds:
        """Return the token ids of a request by the best means this engine has: render, else `/tokenize` of its chat.

        Raises ValueError for an invalid request, or one that no chat can express."""
        if self.renders.get(kind) is not False:
            try:
                return await self.render_prompt(kind, model, body)
            except NotSupported:
                pass  # the engine answered without work, and is tried only once
        if kind is not RequestKind.CHAT:
            sglang = kind is RequestKind.MESSAGES and await self.is_sglang()
            form = None if self._find_form is None else self._find_form(kind, sglang)
            if form is None:
                raise ValueError(f"no feature makes chats of {kind} requests")
            body = form(body)
        return await self.tokenize_chat(model, body)

    async def fetch_metrics(self, *, timeout_s: float | None = None) -> EngineMetrics:
        """One scrape of `/metrics`; costs the engine tens of milliseconds, so never per request."""
        text = await self.fetch_exposition(timeout_s=timeout_s)
        if len(text) > _LONG_BYTES:
            return await asyncio.to_thread(parse_engine_metrics, text)
        return parse_engine_metrics(text)

    async def fetch_exposition(self, *, timeout_s: float | None = None) -> bytes:
        """Return the text of one scrape."""
        timeout_s = timeout_s or self._timeout_s
        text = await self.api.call("GET", "/metrics", timeout_s=timeout_s, max_bytes=MAX_METRICS_BYTES)
        if text.count(b"\n") > MAX_METRICS_LINES:
            raise BadResponse(f"vllm /metrics: more than {MAX_METRICS_LINES} lines")
        return text

    async def kv_event_sources(self) -> tuple[KvEventSource, ...]:
        """Return the streams of KV events, one per data-parallel rank; NotSupported if the engine cannot report
        them."""
        shape = cast("type[WireSources]", WireSources)
        path = "/kv_event_sources"
        try:
            answer = await self.api.get(path, shape, timeout_s=self._timeout_s, max_bytes=MAX_SOURCES_BYTES)
        except NotSupported:
            return (await self.sglang_info()).event_sources(host=self.api.base_url.host)
        if len(answer) > MAX_SOURCES:
            raise BadResponse(f"vllm {path}: more than {MAX_SOURCES} streams")
        return sources_from_wire(answer, host=self.api.base_url.host)

    async def sglang_info(self) -> SglangInfo:
        """Return what SGLang reports of itself; NotSupported for every other engine."""
        try:
            info = await fetch_info(self.api, timeout_s=self._timeout_s)
        except NotSupported:
            self._is_sglang = False
            raise
        self._is_sglang = True
        return info

    async def list_models(self) -> tuple[ModelInfo, ...]:
        """Models and LoRA adapters the engine serves. Answers even when the engine core is dead: not a health check."""
        models = (await self.api.get("/v1/models", _Models, timeout_s=self._timeout_s)).data
        if len(models) > MAX_MODELS:
            raise BadResponse(f"vllm /v1/models: more than {MAX_MODELS} models")
        return models

    async def fetch_version(self) -> str:
        """Return the engine's version, such as `0.32.0`."""
        return (await self.api.get("/version", _Version, timeout_s=self._timeout_s)).version

    async def is_sglang(self) -> bool:
        """Return whether the engine is SGLang; it is asked once."""
        if self._is_sglang is None:
            with contextlib.suppress(NotSupported):
                await self.sglang_info()
        return self._is_sglang is True

    async def _tokenize(self, body: bytes) -> TokenIds:
        path = "/tokenize"
        answer = await self.api.post(path, body, _Tokens, timeout_s=self._timeout_s, max_bytes=MAX_TOKENS_BYTES)
        return await _tokens(answer.tokens, path)


async def _tokens(raw: msgspec.Raw, path: str) -> TokenIds:
    try:
        return await tokens_from_json(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadResponse(f"vllm {path}: not a list of token ids") from error
