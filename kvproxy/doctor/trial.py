"""One small prompt, sent twice to an engine and watched closely: the only requests that generate, one token each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from kvproxy.clients.engine_metrics import EngineMetrics
from kvproxy.doctor.listening import Heard, Streams, streams
from kvproxy.errors import ClientError, Refused

if TYPE_CHECKING:
    from kvproxy.doctor.engine import Engine

#: Blocks of an engine whose metrics do not tell.
_ASSUMED_BLOCK_TOKENS = 128
_MAX_WORDS = 4096
_WORDS = ("the", "of", "and", "to", "in", "is", "it", "you", "that", "he", "was", "for", "on", "are", "with", "as")

#: Engines get prompts of different lengths, so that what they counted tells them apart.
_STEP_WORDS = 7


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """`number` tells the engines apart; `least_tokens` is what somebody besides the engine needs of a prompt."""

    number: int = 0
    least_tokens: int = 0
    events: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """What one answer says of its prompt."""

    prompt_tokens: int
    cached_tokens: int | None  # None: the engine does not say
    token_ids: tuple[int, ...] = ()  # () where the engine does not tell


@dataclass(frozen=True, slots=True)
class Trial:
    """What happened. `tokenized` is what `/tokenize` says of the same prompt, or why it does not."""

    model: str
    chat: bool  # False: the engine has no chat; a text completion was asked for
    tokenized: tuple[int, ...] | ClientError
    first: Reply
    second: Reply
    tokenize_s: float = 0.0
    before: EngineMetrics | None = None
    after: EngineMetrics | None = None
    heard: tuple[Heard, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt's ids as the engine saw them; () when neither answer nor `/tokenize` tells."""
        if self.first.token_ids:
            return self.first.token_ids
        return () if isinstance(self.tokenized, ClientError) else self.tokenized


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    prompt_token_ids: list[int] | None = None


class _Answer(msgspec.Struct):
    usage: _Usage
    choices: list[_Choice] = []
    prompt_token_ids: list[int] | None = None


def prompt_text(rng: random.Random, *, words: int) -> str:
    """At least `words` tokens that nobody has cached: it begins with a number of its own."""
    nonce = f"{rng.getrandbits(64):016x}"
    return " ".join([nonce, *(_WORDS[i % len(_WORDS)] for i in range(words))])


def words_for(plan: TrialPlan, metrics: EngineMetrics | None, max_model_len: int | None) -> int:
    """Two blocks and what the plan needs, as far as the model's context allows."""
    cache = metrics.cache if metrics is not None else None
    block = (cache.block_tokens if cache is not None else None) or _ASSUMED_BLOCK_TOKENS
    wanted = max(2 * block, plan.least_tokens) + 16 + plan.number * _STEP_WORDS
    return min(wanted, _MAX_WORDS, max((max_model_len or _MAX_WORDS * 2) // 2, 1))


async def run_trial(engine: Engine, plan: TrialPlan) -> Trial:
    """Raises ClientError when the engine does not answer the prompt."""
    model = await engine.model()
    before = await engine.metrics_now()
    text = prompt_text(engine.tools.rng, words=words_for(plan, before, model.max_model_len))
    patience, tools = engine.tools.patience, engine.tools
    async with streams(tools.zmq, clock=tools.clock, wall_clock=tools.wall_clock) as listening:
        if plan.events:
            await listening.connect(await engine.sources_or_none(), within_s=patience.exchange_s)
        chat, first = await _first(engine, model.id, text)
        second = await _send(engine, model.id, text, chat=chat)
        started = tools.clock()
        tokenized = await _tokenize(engine, model.id, text, chat=chat)
        tokenize_s = tools.clock() - started
        tokens = first.token_ids or (() if isinstance(tokenized, ClientError) else tokenized)
        await listening.listen(tokens, within_s=patience.late_s)
        if listening.silent and tokens:
            await _listen_again(engine, listening, model.id, len(tokens), chat=chat)
        await listening.ask_replays(within_s=patience.event_s)
        heard = tuple(listening.heard)
    after = await engine.metrics_now()
    return Trial(model.id, chat, tokenized, first, second, tokenize_s, before, after, heard)


async def _listen_again(engine: Engine, listening: Streams, model: str, words: int, *, chat: bool) -> None:
    """A publisher that has not yet taken note of a subscription drops what it publishes: once more, with another
    prompt."""
    text = prompt_text(engine.tools.rng, words=words // 2)
    ids = (await _send(engine, model, text, chat=chat)).token_ids
    tokens = ids or await _tokenize(engine, model, text, chat=chat)
    if not isinstance(tokens, ClientError):
        await listening.listen(tokens, within_s=engine.tools.patience.event_s)


async def _first(engine: Engine, model: str, text: str) -> tuple[bool, Reply]:
    """A chat; where the engine refuses one (a base model has no template), a text completion."""
    try:
        return True, await _send(engine, model, text, chat=True)
    except Refused as error:
        if error.status not in (400, 404, 405):
            raise
        refusal = error
    try:
        return False, await _send(engine, model, text, chat=False)
    except Refused:
        raise refusal from None


async def _send(engine: Engine, model: str, text: str, *, chat: bool) -> Reply:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = {"model": model, "max_tokens": 1, "temperature": 0, "return_token_ids": True, **_prompt(text, chat=chat)}
    answer = await engine.api.post(path, body, _Answer, timeout_s=engine.tools.patience.exchange_s)
    ids = answer.prompt_token_ids or next((one.prompt_token_ids for one in answer.choices), None) or ()
    details = answer.usage.prompt_tokens_details
    return Reply(answer.usage.prompt_tokens, None if details is None else details.cached_tokens, tuple(ids))


async def _tokenize(engine: Engine, model: str, text: str, *, chat: bool) -> tuple[int, ...] | ClientError:
    try:
        if chat:
            body = msgspec.json.encode(_prompt(text, chat=True))
            return tuple((await engine.vllm.tokenize_chat(model, body)).tokens)
        return tuple((await engine.vllm.tokenize_prompt(model, text)).tokens)
    except ClientError as error:
        return error


def _prompt(text: str, *, chat: bool) -> dict[str, str | Sequence[dict[str, str]]]:
    return {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
