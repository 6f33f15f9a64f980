"""Length of a prompt that no filter looks up in caches. Pure."""

from __future__ import annotations

from kvproxy.base.types import InferenceRequest, Prompt
from kvproxy.cache.feedback.token_counts import DEFAULT_BYTES_PER_TOKEN
from kvproxy.cache.media.cut import cut_prompt
from kvproxy.cache.media.placeholders import guess_tokens
from kvproxy.cache.media.urls import UrlSignatures
from kvproxy.cluster.routing.policy import NO_FACTS, OverlapFacts
from kvproxy.proxy.request.repeats import Repeats

_SIGNATURES = UrlSignatures()


def estimate_length(request: InferenceRequest | None, repeats: Repeats | None = None) -> OverlapFacts:
    """Return the estimated length of the prompt as its only fact: load and cost count it, nothing learns from it.

    Messages without media that came before are not searched for media again."""
    if request is None:
        return NO_FACTS
    prompt = request.prompt
    plain = 0 if repeats is None else repeats.plain_messages
    earlier = prompt.parts[:plain]
    fresh, media = cut_prompt(Prompt(prompt.shape, prompt.parts[plain:], prompt.unread_bytes), _SIGNATURES)
    if repeats is not None and not media:
        repeats.note_plain()
    text_bytes = sum(map(len, earlier)) + fresh.size_bytes - sum([medium.size for medium in media])
    tokens = sum([guess_tokens(request.model, medium) for medium in media])
    return OverlapFacts(int(text_bytes / DEFAULT_BYTES_PER_TOKEN) + tokens, searched=False)
