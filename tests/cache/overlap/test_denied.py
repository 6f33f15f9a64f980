"""Blocks that engines denied: found by one look at a prompt's blocks, for a while, within a bound."""

from __future__ import annotations

from array import array

import pytest

from kvproxy.base.types import Tier
from kvproxy.cache.overlap import denied
from kvproxy.cache.overlap.denied import EVERY_ENDPOINT, DeniedPlacements, trusted_tokens
from kvproxy.cache.service import KvCache
from kvproxy.operate.metrics.catalog import Metrics
from tests.cache.support import NOWHERE, A, B, cluster_of, settings
from tests.support.clock import FakeClock

HASHES = array("Q", range(100, 120))
DISK = ((Tier.HOST, 512), (Tier.DISK, 1024))
STORE = ((Tier.SHARED, 1024),)


def test_where_it_was_denied() -> None:
    """A disk's counts for its endpoint, a store's for all; what is nearer than the disk stands."""
    clock = FakeClock()
    placements = DeniedPlacements(clock)
    placements.note_denial(A, HASHES, 600, 5, DISK)
    placements.note_denial(B, HASHES, 256, 2, STORE)
    denials = placements.find_denials(HASHES)
    assert sorted(denials) == [(EVERY_ENDPOINT, 256), (A, 600)]
    assert [trusted_tokens(one, DISK, denials) for one in (A, B)] == [600, 1536]
    assert trusted_tokens(A, DISK, [(A, 100)]) == 512
    assert [trusted_tokens(one, STORE, denials) for one in (A, B)] == [256, 256]
    assert placements.find_denials(HASHES[:2]) == ()
    assert placements.find_denials(array("Q", [7])) == ()


def test_it_is_believed_again_after_a_while() -> None:
    clock = FakeClock()
    placements = DeniedPlacements(clock)
    placements.note_denial(A, HASHES, 600, 5, DISK)
    clock.advance(denied.DISTRUST_S + 1)
    assert not placements
    assert not placements.find_denials(HASHES)


def test_a_denial_in_one_cluster_is_none_in_another() -> None:
    """They may serve the same model from stores of their own, and name their endpoints alike."""
    one, other = cluster_of({"a": NOWHERE}), cluster_of({"a": NOWHERE})
    service = KvCache(settings(), clusters={"one": one, "other": other}, metrics=Metrics())
    indexes = service.overlap.indexes
    indexes["one"].denied.note_denial(A, HASHES, 256, 2, STORE)
    assert indexes["one"].denied.find_denials(HASHES) == [(EVERY_ENDPOINT, 256)]
    assert indexes["other"].denied.find_denials(HASHES) == ()
    assert [each.denied.cap_hint(A, HASHES, 1024) for each in indexes.values()] == [256, 1024]


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest stay."""
    monkeypatch.setattr(denied, "DISTRUSTED", 4)
    placements = DeniedPlacements(FakeClock())
    for block in range(100):
        placements.note_denial(A, array("Q", [block]), 16, 0, DISK)
        assert len(placements) <= 4
        assert len(placements._places) <= 8
    assert placements.find_denials(array("Q", range(100))) == [(A, 16)] * 4


def test_it_ends_between_two_looks_at_the_clock() -> None:
    """A block that is trusted again while it is read is no denial, and no error."""
    clock = FakeClock()

    def ticking() -> float:
        clock.advance(0.01)
        return clock()

    placements = DeniedPlacements(ticking)
    placements.note_denial(A, HASHES, 600, 5, DISK)
    noted_at = clock()
    for late_s in range(-5, 5):
        clock.advance(noted_at + denied.DISTRUST_S + late_s * 0.01 - clock())
        assert placements.find_denials(HASHES) in ([(A, 600)], [])
