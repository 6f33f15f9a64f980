"""Token ids of prompts: kept from earlier, given by the client, or requested from an engine, each prompt once at a
time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from kvproxy.base.background_task import cancel_tasks
from kvproxy.base.errors import BreakerOpen, ClientError, NotSupported, WrongTokens
from kvproxy.base.json_scan import run_in_turns
from kvproxy.base.metrics.bounds import BoundMetrics
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, InferenceRequest, RequestKind
from kvproxy.cache.breakers import OperationBreakers
from kvproxy.cache.clients.chat_body import count_text_parts, with_leading_parts
from kvproxy.cache.clients.tokens import TokenIds, token_array
from kvproxy.cache.clients.vllm import VllmClient
from kvproxy.cache.engines import Engines
from kvproxy.cache.metrics import HoldingMetrics, KvCacheMetrics
from kvproxy.cache.overlap.facts import RequestFacts
from kvproxy.cache.prefix.token_memory import TokenMemory
from kvproxy.cache.settings import KvCacheSettings, has_store

log = logging.getLogger("kvproxy.kvcache")

#: Operations by kind of request: an engine's result for one kind proves nothing for the others.
_OPERATIONS = {
    RequestKind.CHAT: "tokenize",
    RequestKind.COMPLETION: "tokenize",
    RequestKind.MESSAGES: "tokenize_messages",
    RequestKind.RESPONSES: "tokenize_responses",
}
#: Longer bodies are not tokenized, and more tokens than these are not kept: both take milliseconds a MiB at every step.
MAX_ASKED_BYTES = 1024 * 1024
MAX_TOKENS = 262_144
#: Different prompts tokenized at once; further ones are routed without.
MAX_TOKENIZING = 64
#: Of token ids that a client sends itself as many bytes are read.
_MAX_GIVEN_BYTES = 512 * 1024
#: Objects in a body: to decode more takes some milliseconds.
_MAX_OBJECTS = 16_384
_given_ids = msgspec.json.Decoder(list[int])
_given_prompts = msgspec.json.Decoder(list[list[int]])
#: Model, keys, bytes and tokens of a prompt.
LearnCount = Callable[[str, Sequence[int], int, int], None]
#: Errors of prompts that no engine can tokenize: a refused body, one that no chat can express, an unknown encoding.
_UNUSABLE = (ValueError, OverflowError, msgspec.DecodeError)


class AskedTokens(NamedTuple):
    """Token ids of a prompt or, not `whole`, of its messages in front of the first that is not of text alone."""

    ids: TokenIds
    stands_for_bytes: int
    whole: bool


class TokenSource:
    """Singleflight around the engines' tokenizers, and the token memory it fills. Its tasks end with `close`."""

    def __init__(
        self,
        settings: KvCacheSettings,
        *,
        memory: TokenMemory,
        learn_count: LearnCount,
        engines: Engines,
        breakers: OperationBreakers,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self.memory = memory
        self._learn_count = learn_count
        self._enabled = settings.token_cache.enabled
        self._looks_up = has_store(settings)
        self._engines = engines
        self._breakers = breakers
        self._clock = clock
        self._tasks: dict[int, asyncio.Task[AskedTokens | None]] = {}
        self._pace = asyncio.Lock()
        self._outcomes = metrics.group(KvCacheMetrics).tokenizes
        self._seconds = metrics.group(KvCacheMetrics).tokenize_seconds

    def bind_gauges(self, metrics: Metrics) -> None:
        memory = self.memory
        results = ("exact", "prefix", "missed")
        metrics.group(BoundMetrics).show_queue("kvcache_tokenize", lambda: len(self._tasks), limit=MAX_TOKENIZING)
        metrics.group(HoldingMetrics).token_memory_entries.set_function(lambda: len(memory))
        metrics.group(HoldingMetrics).token_memory_bytes.set_function(lambda: memory.held_bytes)
        metrics.group(HoldingMetrics).recalls.set_source(
            lambda: [((result,), float(getattr(memory.stats, result))) for result in results]
        )

    def recall_tokens(self, facts: RequestFacts) -> None:
        """Put its known tokens into `facts` without a call."""
        request = facts.request
        if not request.prompt.parts:
            return
        if self._enabled:
            known = self.memory.recall(facts.keys)
            if known is not None:
                facts.tokens = known.tokens
                facts.tokens_exact = known.exact
                facts.hashed_tokens = known.hashed
                rest = sum(map(len, request.prompt.parts[known.parts_known :]))
                unread = 0 if known.exact else request.prompt.unread_bytes
                facts.tokens_bytes = facts.prompt_bytes - rest - unread
                if facts.media:  # all in front of the first
                    known_parts = request.prompt.parts[: known.parts_known]
                    facts.tokens_bytes = sum(map(len, known_parts), len(request.prompt.shape))
                return
        if request.kind is RequestKind.COMPLETION and request.prompt.parts[0].startswith(b"["):
            _take_given(facts)

    def may_ask(self, facts: RequestFacts) -> bool:
        """Return True if an engine can be queried now, and it makes sense."""
        return (
            (facts.text_bytes if facts.media else len(facts.body)) <= MAX_ASKED_BYTES
            and len(self._tasks) < MAX_TOKENIZING
            and _is_askable(facts.request)
            and self._breakers.admits(_OPERATIONS[facts.request.kind])
        )

    def start_tokenizing(self, facts: RequestFacts) -> asyncio.Task[AskedTokens | None] | None:
        """Return the task that tokenizes this prompt, shared by all requests for it meanwhile; None beyond the bound.

        It outlives the request that awaits it: shield the wait, never cancel the task.
        """
        if not facts.keys:
            return None
        key = facts.keys[-1]
        task = self._tasks.get(key)
        if task is None:
            if len(self._tasks) >= MAX_TOKENIZING:
                self._outcomes.labels("busy").inc()
                return None
            task = asyncio.create_task(self._fetch(facts), name="kvcache tokenize")
            self._tasks[key] = task
            task.add_done_callback(lambda _: self._tasks.pop(key, None))
        return task

    def note_count(self, facts: RequestFacts, prompt_tokens: int | None) -> None:
        """Note the serving engine's count of the prompt: tokens of another number are not its own."""
        facts.counted_tokens = prompt_tokens
        if facts.tokens is None or not facts.tokens_exact or prompt_tokens in (None, len(facts.tokens)):
            return
        self._outcomes.labels(WrongTokens.reason).inc()
        self.memory.forget(facts.keys)
        facts.tokens = None
        facts.tokens_exact = False
        facts.hashed_tokens = None

    async def close(self) -> None:
        """Cancel what still runs."""
        await cancel_tasks(self._tasks.values())

    async def _fetch(self, facts: RequestFacts) -> AskedTokens | None:
        """Fetch the prompt's tokens and keep them; None if no engine could tokenize it. Never raises but for
        cancellation."""
        chosen = self._engines.find_tokenizer(facts.endpoints)
        if chosen is None:
            self._outcomes.labels("no_engine").inc()
            return None
        client, endpoint = chosen
        request = facts.request
        started = self._clock()
        try:
            parts, body = await self._what_to_ask(facts)
            whole = parts == len(request.prompt.parts)
            if not whole and (known := self.memory.tokens_of(facts.keys[parts - 1])) is not None:
                return self._beginning(facts, known, parts=parts)
            counted = facts.counted_tokens if whole else None
            operation = _OPERATIONS[request.kind]
            tokens = await self._breakers.call(operation, lambda: _call(client, facts, body, counted=counted))
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
        if len(tokens) > MAX_TOKENS:
            self._outcomes.labels("unusable").inc()
            return None
        self._outcomes.labels("ok").inc()
        if facts.counted_tokens is None:
            self._learn_count(facts.model, facts.keys[:parts], _bytes_of(facts, parts), len(tokens))
        self.remember_tokens(facts, tokens, parts=parts)
        if whole:
            return AskedTokens(tokens, facts.prompt_bytes, True)
        return self._beginning(facts, tokens, parts=parts)

    def _beginning(self, facts: RequestFacts, tokens: TokenIds, *, parts: int) -> AskedTokens:
        """Return what these tokens of its leading messages are to a prompt."""
        return AskedTokens(self.memory.beginning(tokens), _bytes_of(facts, parts), False)

    def remember_tokens(self, facts: RequestFacts, tokens: TokenIds, *, parts: int) -> None:
        """Keep the tokens of the first messages of this prompt, hashed for the chat's next turn, if it recalls
        them."""
        if self._enabled and (self._looks_up or facts.indexes.followed.any):
            hashed = self.memory.remember(facts.keys[:parts], tokens)
            facts.indexes.hash_ahead(hashed, model=facts.model, cache_salt=facts.request.cache_salt)

    async def _what_to_ask(self, facts: RequestFacts) -> tuple[int, bytes]:
        """How many messages of the prompt, and the body that has just these. Raises ValueError where there are none."""
        request = facts.request
        body = facts.body
        messages = request.prompt.parts
        if request.kind is RequestKind.COMPLETION:
            return len(messages), body
        if body.count(b"{") > _MAX_OBJECTS:
            raise ValueError("more objects than are looked into")
        parts = count_text_parts(messages)
        if not parts:
            raise ValueError("no message of text alone")
        if parts < len(messages):
            body = await run_in_turns(with_leading_parts(request.kind, body, messages[:parts]), self._pace)
        return parts, body


def _bytes_of(facts: RequestFacts, parts: int) -> int:
    """Return the bytes of the first messages of a prompt."""
    return facts.prompt_bytes - sum(map(len, facts.request.prompt.parts[parts:]))


async def _call(client: VllmClient, facts: RequestFacts, body: bytes, *, counted: int | None) -> TokenIds:
    """Raise WrongTokens for another number than the engine `counted` when it served the prompt."""
    request = facts.request
    if request.kind is RequestKind.COMPLETION:
        tokens = await client.tokenize_prompt(facts.model, msgspec.json.decode(request.prompt.parts[0], type=str))
    else:
        tokens = await client.prompt_tokens(request.kind, facts.model, body)
    if counted not in (None, len(tokens)):
        raise WrongTokens(f"{len(tokens)} tokens of a prompt that the engine counted as {counted}")
    return tokens


def _is_askable(request: InferenceRequest) -> bool:
    """Return True if its body holds the whole prompt, in text."""
    parts = request.prompt.parts
    if not parts or request.kind is RequestKind.EMBEDDINGS:
        return False
    if request.kind is RequestKind.COMPLETION:
        return parts[0].startswith(b'"')
    return request.continues is None  # else only an engine has its history


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
    except _UNUSABLE:
        return None
