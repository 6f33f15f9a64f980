"""Does it answer, and does `/tokenize` see the prompt as the engine does?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvproxy.doctor.engine import Engine
from kvproxy.doctor.finding import Finding, ok, problem, warning
from kvproxy.doctor.trial import Trial
from kvproxy.errors import ClientError, ClientTimeout, NotSupported, Refused

#: A trial: link, models, metrics, event sources, subscriptions, two or three requests, tokenize, events, replays.
TRIAL_CALLS = 12


@dataclass(frozen=True, slots=True)
class GenerateCheck:
    """A request of one token."""

    engine: Engine

    name = "generate"
    calls = TRIAL_CALLS

    @property
    def where(self) -> str:
        return self.engine.where

    async def find(self) -> Sequence[Finding]:
        await self.engine.model()  # whatever is wrong before a prompt can be sent is told elsewhere
        try:
            trial = await self.engine.trial()
        except ClientError as error:
            return [_failed(self.where, error)]
        form = "chat" if trial.chat else "text completion (it refuses chats)"
        return [ok(self.where, f"answers a {form} of {trial.first.prompt_tokens} tokens")]


def _failed(where: str, error: ClientError) -> Finding:
    status = error.status if isinstance(error, Refused) else 0
    if status in (400, 404, 405):
        fix = "right for an embedding model; otherwise check how the engine was started"
        return warning(where, f"generates nothing: {error}", fix)
    if status == 503:
        return warning(where, f"is too busy for a small prompt: {error}", "try again when it is less busy")
    if isinstance(error, ClientTimeout):
        fix = "it is overloaded or stuck, or its prefill is slow: look at its queue, or raise --timeout"
        return problem(where, f"does not answer a small prompt: {error}", fix)
    return problem(where, f"does not answer a small prompt well: {error}", "read the engine's log")


@dataclass(frozen=True, slots=True)
class TokenizeCheck:
    """`/tokenize` against the prompt as the engine counted it. `needed`: something asks for token ids."""

    engine: Engine
    needed: bool

    name = "tokenize"
    calls = TRIAL_CALLS

    @property
    def where(self) -> str:
        return self.engine.where

    async def find(self) -> Sequence[Finding]:
        return [tokenize_finding(self.where, await self.engine.trial(), needed=self.needed)]


def tokenize_finding(where: str, trial: Trial, *, needed: bool) -> Finding:
    """The verdict on one trial."""
    tokens, make = trial.tokenized, problem if needed else warning
    if isinstance(tokens, NotSupported):
        fix = "set `vllm_endpoint` of the kvcache filter to an engine that has it; without, nothing can be looked up"
        return make(where, "has no /tokenize", fix) if needed else ok(where, "has no /tokenize, which nothing needs")
    if isinstance(tokens, ClientError):
        return make(where, f"/tokenize fails: {tokens}", "read the engine's log; without it nothing can be looked up")
    counted, exact = trial.first.prompt_tokens, trial.first.token_ids
    if len(tokens) == counted and (not exact or exact == tokens):
        return ok(where, f"/tokenize agrees with the engine ({counted} tokens)")
    what = f"/tokenize makes {len(tokens)} tokens of a prompt that the engine counts as {counted}"
    if len(tokens) == counted:
        what = f"/tokenize makes other tokens of a prompt than the engine itself ({counted} tokens)"
    fix = "start the engine with one tokenizer and one chat template for both (`--tokenizer`, `--chat-template`)"
    return make(where, f"{what}: lookups and KV events cannot match", fix)
