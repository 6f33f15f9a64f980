"""Length of a prompt that no filter looks up in caches. Pure."""

from __future__ import annotations

from kvproxy.base.types import InferenceRequest
from kvproxy.cache.feedback.token_counts import DEFAULT_BYTES_PER_TOKEN
from kvproxy.cache.media.cut import cut_prompt
from kvproxy.cache.media.placeholders import guess_tokens
from kvproxy.cache.media.urls import UrlSignatures
from kvproxy.cluster.routing.policy import NO_FACTS, OverlapFacts

_SIGNATURES = UrlSignatures()


def estimate_length(request: InferenceRequest | None) -> OverlapFacts:
    """Return the estimated length of the prompt as its only fact: load and cost count it, nothing learns from it."""
    if request is None:
        return NO_FACTS
    prompt, media = cut_prompt(request.prompt, _SIGNATURES)
    text_bytes = prompt.size_bytes - sum([medium.size for medium in media])
    tokens = sum([guess_tokens(request.model, medium) for medium in media])
    return OverlapFacts(int(text_bytes / DEFAULT_BYTES_PER_TOKEN) + tokens, searched=False)
