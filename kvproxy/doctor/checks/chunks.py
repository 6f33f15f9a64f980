"""Are prompts long enough for LMCache's chunks?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvproxy.config.kvcache_schema import Provider as ProviderName
from kvproxy.doctor.checks.lookup import LOOKUP_CALLS
from kvproxy.doctor.engine import Engine
from kvproxy.doctor.exposition import PromptLengths, prompt_lengths
from kvproxy.doctor.finding import Finding, ok, problem, warning
from kvproxy.doctor.lmcache import LmCache
from kvproxy.errors import ClientError

#: Fewer prompts say nothing: visits like this one are among them.
_ENOUGH_PROMPTS = 300
_SMALLER = "start LMCache with a smaller chunk size"
_WITHOUT = (
    "if this is its usual traffic, take `lmcache_endpoint` out of the kvcache filter: it gains nothing from lookups"
)


@dataclass(frozen=True, slots=True)
class ChunksCheck:
    """One engine's prompts, by its own histogram, and its longest possible one, against one chunk."""

    engine: Engine
    lmcache: LmCache

    name = "chunk size"
    calls = LOOKUP_CALLS

    @property
    def where(self) -> str:
        return self.engine.where

    async def find(self) -> Sequence[Finding]:
        longest = (await self.engine.model()).max_model_len
        found = await self.lmcache.found(self.engine)
        asked = len((await self.engine.trial()).tokens)
        try:
            lengths = prompt_lengths(await self.engine.exposition())
        except ClientError:
            lengths = PromptLengths(0, ())
        fixed = await self.lmcache.kind() is ProviderName.CONTROLLER
        if not found.chunks and asked:
            return [_too_large(self.where, asked, longest, fixed=fixed)]
        min_tokens = self.lmcache.settings.lookup_min_tokens
        return [chunk_finding(self.where, lengths, found.chunk_tokens, min_tokens, fixed=fixed)]


def _too_large(where: str, asked: int, longest: int | None, *, fixed: bool) -> Finding:
    if longest is not None and longest <= 2 * asked + 16:
        what = f"a chunk of LMCache is larger than the prompts this model takes ({longest} tokens with their answers)"
    else:
        what = f"a chunk of LMCache is larger than a prompt of {asked} tokens"
    return problem(where, f"{what}: lookups can never match", _cure(fixed=fixed))


def _cure(*, fixed: bool) -> str:
    return (
        f"{_WITHOUT} (LMCache's controller knows chunks of 256 tokens only)" if fixed else f"{_SMALLER}, or {_WITHOUT}"
    )


def chunk_finding(
    where: str, lengths: PromptLengths, chunk_tokens: int, min_tokens: int, *, fixed: bool = False
) -> Finding:
    """The verdict on the prompts that came so far. `fixed`: the service knows no other chunk size."""
    below = lengths.share_below(chunk_tokens)
    if lengths.count >= _ENOUGH_PROMPTS and below >= 0.5:
        what = (
            f"{below:.0%} of its {lengths.count} prompts were shorter than one chunk of {chunk_tokens} tokens: "
            "lookups cannot match them"
        )
        return (problem if below >= 0.95 else warning)(where, what, _cure(fixed=fixed))
    if min_tokens < chunk_tokens:
        what = f"prompts of {min_tokens} tokens are looked up, but a chunk has {chunk_tokens}: shorter ones never match"
        return warning(where, what, f"set `lookup_min_tokens: {chunk_tokens}` of the kvcache filter")
    seen = f"at least {below:.0%} of its {lengths.count} prompts were shorter" if lengths.count else "no prompts so far"
    return ok(where, f"chunks have {chunk_tokens} tokens; {seen}")
