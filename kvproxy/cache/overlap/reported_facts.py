"""Blocks of a request's media that engines reported: put into its facts, and learned from its end."""

from __future__ import annotations

from kvproxy.cache.overlap.facts import RequestFacts, Result
from kvproxy.cache.overlap.media_reports import ServedPrompt


def recall_reported(facts: RequestFacts) -> None:
    """Put the blocks that engines reported of a prompt with media into its facts."""
    facts.noted = facts.indexes.followed.reported.noted
    if facts.request.continues is None and _call_media_alike(facts):
        facts.reported = facts.indexes.followed.reported.find_beginning(facts.keys, facts.hashes, facts.media)


def note_reported(facts: RequestFacts, result: Result) -> None:
    """Learn from what complete events report of a prompt with media that an engine has computed."""
    endpoint = result.endpoint if result.prefill_endpoint is None else result.prefill_endpoint
    indexes = facts.indexes
    tokens = result.prompt_tokens
    if endpoint is None or tokens is None or facts.request.continues is not None:
        return
    known = facts.reported is not None and facts.reported.whole
    if known or endpoint not in indexes.exact or not _call_media_alike(facts):
        return
    blocks = indexes.blocks_of(facts.tokens, facts.hashed_tokens, facts.model, facts.request.cache_salt)
    served = ServedPrompt(
        facts.model,
        facts.keys,
        facts.hashes,
        facts.media,
        blocks,
        tokens,
        facts.noted,
    )
    indexes.followed.reported.note_served(endpoint, served)


def _call_media_alike(facts: RequestFacts) -> bool:
    """Return whether the cluster's engines are of one version, as far as is known."""
    return facts.indexes.followed.reported.follow_software(facts.cluster.software)
