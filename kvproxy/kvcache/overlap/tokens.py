"""Token ids of prompts: remembered, given by the client, or asked of an engine - each prompt once at a time."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from kvproxy.background_task import cancel_tasks
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
        self,
        settings: KvCacheSettings,
        *,
        memory: TokenMemory,
        engines: Engines,
        breakers: OperationBreakers,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self.memory = memory
        self._enabled = settings.token_cache.enabled
        self._settings = settings
        self._engines = engines
        self._breakers = breakers
        self._clock = clock
        self._tasks: dict[int, asyncio.Task[TokenIds | None]] = {}
        self._outcomes = metrics.kvcache.tokenizes
        self._seconds = metrics.kvcache.tokenize_seconds

    def show(self, metrics: Metrics) -> None:
        """The gauges read it from now on."""
        memory, results = self.memory, ("exact", "prefix", "missed")
        metrics.bounds.queue_depth.labels("kvcache_tokenize").set_function(lambda: len(self._tasks))
        metrics.bounds.queue_limit.labels("kvcache_tokenize").set(self._settings.tokenize.max_concurrent)
        metrics.holdings.token_memory_entries.set_function(lambda: len(memory))
        metrics.holdings.token_memory_bytes.set_function(lambda: memory.held_bytes)
        metrics.holdings.recalls.set_source(
            lambda: [((result,), float(getattr(memory.stats, result))) for result in results]
        )

    def recall(self, facts: RequestFacts) -> None:
        """Put into `facts` what is known of its tokens without a call."""
        request = facts.request
        if not request.prompt.parts:
            return
        if self._enabled:
            known = self.memory.recall(facts.keys)
            if known is not None:
                facts.tokens, facts.tokens_exact, facts.hashed_tokens = known.tokens, known.exact, known.hashed
                rest = sum(map(len, request.prompt.parts[known.parts_known :]))
                unread = 0 if known.exact else request.prompt.unread_bytes
                facts.tokens_bytes = facts.prompt_bytes - rest - unread
                return
        if request.kind is RequestKind.COMPLETION and request.prompt.parts[0].startswith(b"["):
            _take_given(facts)

    def may_ask(self, facts: RequestFacts) -> bool:
        """Whether asking an engine makes sense and is possible at the moment."""
        return (
            len(facts.body) <= MAX_ASKED_BYTES
            and len(self._tasks) < self._settings.tokenize.max_concurrent
            and _text_of(facts.request) is not None
            and self._breakers.admits(OPERATION)
        )

    def ask(self, facts: RequestFacts) -> asyncio.Task[TokenIds | None] | None:
        """The task that tokenizes this prompt, shared by all requests for it meanwhile; None beyond the bound.

        It outlives the request that awaits it: shield the wait, never cancel the task.
        """
        if not facts.keys:
            return None
        key = facts.keys[-1]
        task = self._tasks.get(key)
        if task is None:
            if len(self._tasks) >= self._settings.tokenize.max_concurrent:
                self._outcomes.labels("busy").inc()
                return None
            task = asyncio.create_task(self._fetch(facts), name="kvcache tokenize")
            self._tasks[key] = task
            task.add_done_callback(lambda _: self._tasks.pop(key, None))
        return task

    async def close(self) -> None:
        """Cancel what still runs."""
        await cancel_tasks(self._tasks.values())

    async def _fetch(self, facts: RequestFacts) -> TokenIds | None:
        """The prompt's tokens, remembered; None where no engine could say. Never raises but for cancellation."""
        chosen = self._engines.tokenizer(facts.endpoints)
        if chosen is None:
            self._outcomes.labels("no_engine").inc()
            return None
        client, endpoint = chosen
        started = self._clock()
        try:
            answer = await self._breakers.call(OPERATION, lambda: self._call(client, facts))
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
        self.learned(facts, answer.tokens)
        return answer.tokens

    def learned(self, facts: RequestFacts, tokens: TokenIds) -> None:
        """Remember the tokens of this prompt, hashed for the chat's next turn."""
        if self._enabled:
            hashed = self.memory.remember(facts.keys, tokens)
            facts.indexes.prepare(hashed, model=facts.model, cache_salt=facts.request.cache_salt)

    async def _call(self, client: VllmClient, facts: RequestFacts) -> Tokenized:
        if facts.request.kind is RequestKind.CHAT:
            return await client.chat_tokens(facts.model, facts.body)
        text = _text_of(facts.request)
        assert text is not None
        return await client.tokenize_prompt(facts.model, text)


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


def _take_given(facts: RequestFacts) -> None:
    """Token ids the client sent itself, as one list or a list of one list; of very many the first ones."""
    raw = facts.request.prompt.parts[0]
    whole = len(raw) <= _MAX_GIVEN_BYTES
    known = raw if whole else raw[:_MAX_GIVEN_BYTES].rpartition(b",")[0] + b"]"
    facts.tokens = _given(known)
    facts.tokens_exact = whole and facts.tokens is not None
    facts.tokens_bytes = facts.prompt_bytes if whole else len(known)


def _given(raw: bytes) -> TokenIds | None:
    try:
        if raw[1:64].lstrip().startswith(b"["):
            prompts = _given_prompts.decode(raw)
            return token_array(prompts[0]) if len(prompts) == 1 else None
        return token_array(_given_ids.decode(raw)) or None
    except (msgspec.DecodeError, UnicodeDecodeError, *_UNUSABLE):
        return None
