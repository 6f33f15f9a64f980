"""Token ids of prompts: remembered, given by the client, or asked of an engine - each prompt once at a time."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from kvproxy.clients.tokens import TokenIds, token_array
from kvproxy.clients.vllm import Tokenized, VllmClient
from kvproxy.config.kvcache_schema import KvCacheSettings
from kvproxy.errors import BreakerOpen, ClientError, NotSupported
from kvproxy.kvcache.breakers import OperationBreakers
from kvproxy.kvcache.engines import Engines
from kvproxy.kvcache.overlap.facts import RequestFacts
from kvproxy.metrics.catalog import Metrics
from kvproxy.prefix.tokens.token_memory import TokenMemory
from kvproxy.types import Clock, InferenceRequest, RequestKind

log = logging.getLogger("kvproxy.kvcache")

OPERATION = "tokenize"
#: Longer bodies are not tokenized, and more tokens than these are not kept: both take milliseconds a MiB at every step.
MAX_ASKED_BYTES = 1024 * 1024
MAX_TOKENS = 262_144
#: Of token ids that a client sends itself as many bytes are read.
_MAX_GIVEN_BYTES = 512 * 1024
_given_ids = msgspec.json.Decoder(list[int])
_given_prompts = msgspec.json.Decoder(list[list[int]])
#: What cannot be tokenized by any engine: a body it refuses, an encoding we cannot read.
_UNUSABLE = (ValueError, OverflowError)


class TokenSource:
    """Singleflight around `/tokenize`, and the token memory it fills. Its tasks end with `close`."""

    def __init__(
        self, settings: KvCacheSettings, *, engines: Engines, guard: OperationBreakers, metrics: Metrics, clock: Clock
    ) -> None:
        cache = settings.token_cache
        limits = {"max_entries": cache.max_size} if cache.max_size else {}
        self.memory = TokenMemory(clock=clock, max_bytes=cache.max_bytes, ttl_s=cache.ttl, **limits)
        self._enabled = cache.enabled
        self._settings = settings
        self._engines = engines
        self._guard = guard
        self._clock = clock
        self._tasks: dict[int, asyncio.Task[TokenIds | None]] = {}
        self._outcomes = metrics.kvcache.tokenizes
        self._seconds = metrics.kvcache.tokenize_seconds
        metrics.bounds.queue_depth.labels("kvcache_tokenize").set_function(lambda: len(self._tasks))
        metrics.bounds.queue_limit.labels("kvcache_tokenize").set(settings.tokenize.max_concurrent)

    def recall(self, gathered: RequestFacts) -> None:
        """Put into `gathered` what is known of its tokens without asking anybody."""
        request = gathered.request
        if not request.prompt.parts:
            return
        if self._enabled:
            known = self.memory.recall(gathered.keys)
            if known is not None:
                gathered.tokens, gathered.tokens_exact, gathered.hashed = known.tokens, known.exact, known.hashed
                rest = sum(map(len, request.prompt.parts[known.parts_known :]))
                unread = 0 if known.exact else request.prompt.unread_bytes
                gathered.tokens_bytes = gathered.prompt_bytes - rest - unread
                return
        if request.kind is RequestKind.COMPLETION and request.prompt.parts[0].startswith(b"["):
            _take_given(gathered)

    def may_ask(self, gathered: RequestFacts) -> bool:
        """Whether asking an engine makes sense and is possible at the moment."""
        return (
            len(gathered.body) <= MAX_ASKED_BYTES
            and len(self._tasks) < self._settings.tokenize.max_concurrent
            and _text_of(gathered.request) is not None
            and self._guard.admits(OPERATION)
        )

    def ask(self, gathered: RequestFacts) -> asyncio.Task[TokenIds | None] | None:
        """The task that tokenizes this prompt, shared by all who ask meanwhile; None beyond the bound.

        It outlives whoever awaits it: shield the wait, never cancel the task.
        """
        if not gathered.keys:
            return None
        key = gathered.keys[-1]
        task = self._tasks.get(key)
        if task is None:
            if len(self._tasks) >= self._settings.tokenize.max_concurrent:
                self._outcomes.labels("busy").inc()
                return None
            task = asyncio.create_task(self._fetch(gathered), name="kvcache tokenize")
            self._tasks[key] = task
            task.add_done_callback(lambda _: self._tasks.pop(key, None))
        return task

    async def close(self) -> None:
        """Cancel what still runs."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, gathered: RequestFacts) -> TokenIds | None:
        """The prompt's tokens, remembered; None when nobody could say. Never raises but for cancellation."""
        chosen = self._engines.tokenizer(gathered.endpoints)
        if chosen is None:
            self._outcomes.labels("no_engine").inc()
            return None
        client, endpoint = chosen
        started = self._clock()
        try:
            answer = await self._guard.call(OPERATION, lambda: self._call(client, gathered))
        except BreakerOpen:
            self._outcomes.labels("breaker_open").inc()
            return None
        except (ClientError, *_UNUSABLE) as error:
            if isinstance(error, NotSupported) and endpoint is not None:
                self._engines.cannot_tokenize(endpoint)
            self._outcomes.labels(error.reason if isinstance(error, ClientError) else "unusable").inc()
            log.debug("[kvcache] tokenize: %s", error)
            return None
        self._seconds.observe(self._clock() - started)
        if len(answer.tokens) > MAX_TOKENS:
            self._outcomes.labels("unusable").inc()
            return None
        self._outcomes.labels("ok").inc()
        self.learned(gathered, answer.tokens)
        return answer.tokens

    def learned(self, gathered: RequestFacts, tokens: TokenIds) -> None:
        """Remember the tokens of this prompt, hashed for the chat's next turn."""
        if self._enabled:
            hashed = self.memory.remember(gathered.keys, tokens)
            gathered.local.prepare(hashed, model=gathered.model, cache_salt=gathered.request.cache_salt)

    async def _call(self, client: VllmClient, gathered: RequestFacts) -> Tokenized:
        if gathered.request.kind is RequestKind.CHAT:
            return await client.chat_tokens(gathered.model, gathered.body)
        text = _text_of(gathered.request)
        assert text is not None
        return await client.tokenize_prompt(gathered.model, text)


def _text_of(request: InferenceRequest) -> str | None:
    """What to tokenize: a completion's prompt, or "" for a chat (whose whole body is sent); None: cannot be."""
    if not request.prompt.parts:
        return None
    if request.kind is RequestKind.CHAT:
        return ""
    if request.kind is not RequestKind.COMPLETION or not request.prompt.parts[0].startswith(b'"'):
        return None
    try:
        return msgspec.json.decode(request.prompt.parts[0], type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _take_given(gathered: RequestFacts) -> None:
    """Token ids the client sent itself, as one list or a list of one list; of very many the first ones."""
    raw = gathered.request.prompt.parts[0]
    whole = len(raw) <= _MAX_GIVEN_BYTES
    known = raw if whole else raw[:_MAX_GIVEN_BYTES].rpartition(b",")[0] + b"]"
    gathered.tokens = _given(known)
    gathered.tokens_exact = whole and gathered.tokens is not None
    gathered.tokens_bytes = gathered.prompt_bytes if whole else len(known)


def _given(raw: bytes) -> TokenIds | None:
    try:
        if raw[1:64].lstrip().startswith(b"["):
            prompts = _given_prompts.decode(raw)
            return token_array(prompts[0]) if len(prompts) == 1 else None
        return token_array(_given_ids.decode(raw)) or None
    except (msgspec.DecodeError, UnicodeDecodeError, *_UNUSABLE):
        return None
