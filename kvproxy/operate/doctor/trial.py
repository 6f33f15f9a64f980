"""The only requests that generate, one token each: a prompt sent twice and watched closely, and one to each rank."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

import msgspec

from kvproxy.base.errors import ClientError, Refused
from kvproxy.cache.clients.api import Api
from kvproxy.cache.clients.engine_metrics import EngineMetrics
from kvproxy.cache.clients.vllm import ModelInfo, VllmClient
from kvproxy.cache.overlap.reports import FollowsReports, ReportWatch
from kvproxy.operate.doctor.tools import Tools
from kvproxy.proxy.forward.headers import RANK_HEADER

#: Block size (in tokens) assumed if the metrics do not report one.
_ASSUMED_BLOCK_TOKENS = 128
_MAX_WORDS = 4096
_WORDS = ("the", "of", "and", "to", "in", "is", "it", "you", "that", "he", "was", "for", "on", "are", "with", "as")

#: Engines get prompts of different lengths, so that their counts distinguish them.
_STEP_WORDS = 7

#: Data-parallel ranks tried of one engine: the first ones.
MAX_TRIED = 16
_BEYOND = 1000
_BAD_REQUEST = 400


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """`number` distinguishes the engines; `least_tokens` is the length of prompt that LMCache needs, 0 without LMCache;
    `follows` is how the proxy follows engines' reports of their caches."""

    number: int = 0
    least_tokens: int = 0
    follows: FollowsReports | None = None


@dataclass(frozen=True, slots=True)
class TrialTarget:
    """The engine as a trial needs it; `scrape` reads its metrics, None where it shows none."""

    model: ModelInfo
    api: Api
    vllm: VllmClient
    watches: Sequence[ReportWatch]
    scrape: Callable[[], Awaitable[EngineMetrics | None]]
    tools: Tools


@dataclass(frozen=True, slots=True)
class TrialReply:
    """Prompt figures in one answer."""

    prompt_tokens: int
    cached_tokens: int | None  # None: not reported
    token_ids: tuple[int, ...] = ()  # () if not reported


@dataclass(frozen=True, slots=True)
class Trial:
    """Results of a trial. `tokenized` is the answer of `/tokenize` for the same prompt, or its error."""

    model: str
    chat: bool  # False: the engine has no chat; a text completion was requested
    tokenized: tuple[int, ...] | ClientError
    first: TrialReply
    second: TrialReply
    longer: TrialReply | None = None  # the second try, with a longer prompt, if nothing of the first was reused
    tokenize_s: float = 0.0
    before: EngineMetrics | None = None
    after: EngineMetrics | None = None
    watches: Sequence[ReportWatch] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt's ids as the engine saw them; () when neither answer nor `/tokenize` has them."""
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


def make_prompt(rng: random.Random, *, words: int) -> str:
    """At least `words` tokens that no cache holds: the text begins with a number of its own."""
    nonce = f"{rng.getrandbits(64):016x}"
    return " ".join([nonce, *(_WORDS[i % len(_WORDS)] for i in range(words))])


def count_words(plan: TrialPlan, metrics: EngineMetrics | None, max_model_len: int | None) -> int:
    """Two blocks and what the plan needs, as far as the model's context allows."""
    cache = metrics.cache if metrics is not None else None
    block = (cache.block_tokens if cache is not None else None) or _ASSUMED_BLOCK_TOKENS
    wanted = max(2 * block, plan.least_tokens) + 16 + plan.number * _STEP_WORDS
    return min(wanted, _MAX_WORDS, max((max_model_len or _MAX_WORDS * 2) // 2, 1))


async def run_trial(target: TrialTarget, plan: TrialPlan) -> Trial:
    """Raise ClientError when the engine does not answer the prompt."""
    tools = target.tools
    timeouts = target.tools.timeouts
    before = await target.scrape()
    text = make_prompt(tools.rng, words=count_words(plan, before, target.model.max_model_len))
    with ExitStack() as watching:
        for watch in target.watches:
            watching.enter_context(closing(watch))
            await watch.connect(within_s=timeouts.exchange_s)
        chat, first = await _send_first(target, text)
        second = await _send(target, text, chat=chat)
        started = tools.clock()
        tokenized = await _tokenize(target, text, chat=chat)
        tokenize_s = tools.clock() - started
        tokens = first.token_ids or (() if isinstance(tokenized, ClientError) else tokenized)
        for watch in target.watches:
            if not await watch.find_prompt(tokens, within_s=timeouts.late_s) and tokens:
                await _watch_again(target, watch, len(tokens), chat=chat)
            await watch.ask_rest(within_s=timeouts.event_s)
    longer = await _try_longer(target, first.prompt_tokens, chat=chat) if second.cached_tokens == 0 else None
    after = await target.scrape()
    return Trial(target.model.id, chat, tokenized, first, second, longer, tokenize_s, before, after, target.watches)


async def _try_longer(target: TrialTarget, tokens: int, *, chat: bool) -> TrialReply | None:
    """Hybrid models reuse in long steps, and nothing of a prompt shorter than one."""
    words = min(_MAX_WORDS, (target.model.max_model_len or 2 * _MAX_WORDS) // 2)
    if words < 2 * tokens:
        return None
    text = make_prompt(target.tools.rng, words=words)
    await _send(target, text, chat=chat)
    return await _send(target, text, chat=chat)


async def _watch_again(target: TrialTarget, watch: ReportWatch, words: int, *, chat: bool) -> None:
    """Try again with another prompt: a publisher that has not yet registered a subscription drops its events."""
    text = make_prompt(target.tools.rng, words=words // 2)
    ids = (await _send(target, text, chat=chat)).token_ids
    tokens = ids or await _tokenize(target, text, chat=chat)
    if not isinstance(tokens, ClientError):
        await watch.find_prompt(tokens, within_s=target.tools.timeouts.event_s)


async def _send_first(target: TrialTarget, text: str) -> tuple[bool, TrialReply]:
    """Return a chat; where the engine refuses one (a base model has no template), a text completion."""
    try:
        return True, await _send(target, text, chat=True)
    except Refused as error:
        if error.status not in (400, 404, 405):
            raise
        refusal = error
    try:
        return False, await _send(target, text, chat=False)
    except Refused:
        raise refusal from None


async def send_small(target: TrialTarget, *, chat: bool | None = None) -> bool:
    """Send a few words, as a chat if the engine takes one, or as requested; returns whether it was a chat. Raises
    ClientError."""
    text = make_prompt(target.tools.rng, words=_STEP_WORDS)
    if chat is None:
        return (await _send_first(target, text))[0]
    await _send(target, text, chat=chat)
    return chat


async def send_priority(target: TrialTarget, *, chat: bool) -> None:
    """One more request, with a `priority`. Raises ClientError when the engine does not answer it."""
    await _send(target, make_prompt(target.tools.rng, words=_STEP_WORDS), chat=chat, priority=1)


async def _send(target: TrialTarget, text: str, *, chat: bool, **fields: int) -> TrialReply:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    options = {"model": target.model.id, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    body = {**options, **_prompt(text, chat=chat), **fields}
    answer = await target.api.post(path, body, _Answer, timeout_s=target.tools.timeouts.exchange_s)
    ids = answer.prompt_token_ids or next((one.prompt_token_ids for one in answer.choices), None) or ()
    details = answer.usage.prompt_tokens_details
    return TrialReply(answer.usage.prompt_tokens, None if details is None else details.cached_tokens, tuple(ids))


async def _tokenize(target: TrialTarget, text: str, *, chat: bool) -> tuple[int, ...] | ClientError:
    try:
        if chat:
            body = msgspec.json.encode(_prompt(text, chat=True))
            return tuple(await target.vllm.tokenize_chat(target.model.id, body))
        return tuple(await target.vllm.tokenize_prompt(target.model.id, text))
    except ClientError as error:
        return error


def _prompt(text: str, *, chat: bool) -> dict[str, str | Sequence[dict[str, str]]]:
    return {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}


@dataclass(frozen=True, slots=True)
class RankAnswers:
    """Ranks of an engine. `taken`: the engine's number of each rank; `reads`: True if it refuses a rank that it
    lacks."""

    taken: dict[int, int]
    refused: tuple[int, ...]
    reads: bool


async def try_ranks(target: TrialTarget, ranks: Sequence[int]) -> RankAnswers:
    """Raise ClientError when the engine does not answer without a rank either."""
    chat = await send_small(target)
    tried = sorted(ranks)[:MAX_TRIED]
    # it may count its own ranks from 0
    first = tried[0] if tried[0] and not await _takes(target, tried[0], chat=chat) else 0
    taken = {}
    refused = []
    for rank in tried:
        if await _takes(target, rank - first, chat=chat):
            taken[rank] = rank - first
        else:
            refused.append(rank)
    return RankAnswers(taken, tuple(refused), not await _takes(target, tried[-1] + _BEYOND, chat=chat))


def asking_for(target: TrialTarget, number: int) -> TrialTarget:
    """Return the same engine, by the rank of this number."""
    return replace(target, api=target.api.with_header(RANK_HEADER.decode(), str(number)))


async def _takes(target: TrialTarget, number: int, *, chat: bool) -> bool:
    try:
        await send_small(asking_for(target, number), chat=chat)
    except Refused as error:
        if error.status != _BAD_REQUEST:
            raise
        return False
    return True
