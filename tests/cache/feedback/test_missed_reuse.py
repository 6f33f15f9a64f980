"""Streams of KV events that miss nothing and still do not describe what an engine reuses."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from kvproxy.cache.feedback.trust import LEAST_TOKENS, WINDOW, MissedReuses
from kvproxy.cache.indexes.block_events import BlockStored
from kvproxy.cache.overlap.index_state import FollowedEvents, IndexState
from kvproxy.cache.overlap.local_indexes import LocalIndexes
from kvproxy.cluster.routing.policy import APPROXIMATE, PRECISE, Overlap
from tests.cache.support import A, B

FAR = {"announced_tokens": 0, "reused_tokens": 4000}
WELL = {"announced_tokens": 3900, "reused_tokens": 4000}


def after(*answers: dict[str, int]) -> MissedReuses:
    missed = MissedReuses()
    for answer in answers:
        missed.observe_reuse(A, **answer)
    return missed


@pytest.mark.parametrize(
    ("answers", "doubted"),
    [
        ([FAR] * 3, False),
        ([FAR] * 4, True),
        ([FAR, WELL] * 4, True),
        ([FAR, WELL, WELL] * 5, False),
        ([FAR] * 8 + [WELL] * 6, True),
        ([FAR] * 8 + [WELL] * 7, False),
        ([{"announced_tokens": 0, "reused_tokens": LEAST_TOKENS - 1}] * 20, False),
        ([{"announced_tokens": 2950, "reused_tokens": 4000}] * 20, False),
        ([{"announced_tokens": 2900, "reused_tokens": 4000}] * 20, True),
    ],
)
def test_half_of_the_latest_answers_end_the_belief(answers: list[dict[str, int]], doubted: bool) -> None:
    """One that is reused further may have been stored meanwhile; seven of eight that are announced restore it."""
    assert (after(*answers).doubted == {A}) is doubted


def test_kept_fields() -> None:
    """The latest that was reused further, and how many were; nothing of an engine of which all is announced."""
    missed = after(FAR, *[FAR] * WINDOW, WELL)
    [found] = missed.doubted_records()
    assert (found.endpoint, found.announced_tokens, found.reused_tokens, found.count) == (A, 0, 4000, WINDOW - 1)
    missed.observe_reuse(B, **WELL)
    missed.forget_endpoint(A)
    assert not list(missed.doubted_records())
    assert not missed._records


def serve(local: LocalIndexes, prompt: array[int], *, cached_tokens: int, known_tokens: int) -> Overlap | None:
    """Serve a prompt at the one endpoint, which reuses `cached_tokens`; returns the previous prediction."""
    blocks = array("Q", range(prompt[0], prompt[0] + 20))
    cursor = local.approximate.locate(blocks)
    tokens = prompt[:known_tokens] if known_tokens else None
    asked: dict[str, Any] = {"bytes_per_token": 4, "tokens": tokens, "cache_salt": None}
    overlap = local.find_overlaps(cursor, **asked).get(A)
    entry = local.route(A, cursor)
    local.correct_prediction(
        A,
        cursor,
        overlap,
        predicted_tokens=0 if overlap is None else overlap.tokens,
        cached_tokens=cached_tokens,
        cached_blocks=20,
        known_tokens=known_tokens,
    )
    local.settle_entry(entry, prefilled=True)
    return overlap


def followed() -> tuple[LocalIndexes, FollowedEvents]:
    events = FollowedEvents()
    events.exact.add(A)
    return LocalIndexes(IndexState(), events), events


def test_routed_prompts_count_where_events_prove_too_little() -> None:
    """A complete stream overrules it; one that announces nothing of what is reused does no longer, and is shown."""
    local, _ = followed()
    prompt = array("I", range(1280))
    assert [serve(local, prompt, cached_tokens=1200, known_tokens=1280) for _ in range(4)] == [None] * 4
    believed = serve(local, prompt, cached_tokens=1200, known_tokens=1280)
    assert believed is not None
    assert (believed.tokens, believed.source) == (1280, APPROXIMATE)
    local.reset_endpoint(A)
    assert not local.missed.doubted


def test_events_that_say_enough_again_are_believed_again() -> None:
    """They are put to the test all the while, beside what was routed."""
    local, events = followed()
    prompt = array("I", range(1280))
    for _ in range(5):
        serve(local, prompt, cached_tokens=1200, known_tokens=1280)
    events.precise.apply_events(A, 0, [BlockStored(tuple(range(80)), None, prompt, 16)])
    for _ in range(8):
        serve(local, prompt, cached_tokens=1200, known_tokens=1280)
    assert not local.missed.doubted
    found = serve(local, prompt, cached_tokens=1200, known_tokens=1280)
    assert found is not None
    assert found.source is PRECISE


def test_only_what_the_events_were_asked_about_is_held_against_them() -> None:
    """Of a grown chat the last answer's tokens are not known, and without tokens nothing is."""
    local, _ = followed()
    prompt = array("I", range(1280))
    for known in (0, 200):
        for _ in range(10):
            serve(local, prompt, cached_tokens=1200, known_tokens=known)
    assert not local.missed.doubted
    other = LocalIndexes(IndexState(), FollowedEvents())  # a stream with gaps is not believed over routing anyway
    for _ in range(10):
        serve(other, prompt, cached_tokens=1200, known_tokens=1280)
    assert not other.missed.doubted


def test_blocks_of_a_request_under_way_are_not_missing() -> None:
    """Its events come when it is prefilled."""
    local, _ = followed()
    prompt = array("I", range(1280))
    cursor = local.approximate.locate(array("Q", range(20)))
    under_way = local.route(A, cursor)
    for _ in range(10):
        serve(local, prompt, cached_tokens=1200, known_tokens=1280)
    assert not local.missed.doubted
    local.settle_entry(under_way, prefilled=True)
