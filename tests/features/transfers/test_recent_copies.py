"""Copies made lately, before LMCache reports them."""

from __future__ import annotations

from kvproxy.cache.store import Prefix
from kvproxy.features.transfers.recent_copies import RecentCopies
from tests.cache.support import tokens
from tests.support.clock import FakeClock


def test_a_copy_is_believed_for_a_minute_whatever_goes_elsewhere_meanwhile(clock: FakeClock) -> None:
    """A beginning that is copied again and again, each time to another instance, is in the first one's memory no longer
    for that."""
    copied, prefix = RecentCopies(clock), Prefix(tokens(512), "m")
    copied.note_copy("a", prefix, 512)
    clock.advance(40.0)
    copied.note_copy("b", prefix, 512)
    assert [holder.instance_id for holder in copied.find_holders(prefix)] == ["a", "b"]
    clock.advance(40.0)
    copied.note_copy("c", prefix, 512)
    assert [holder.instance_id for holder in copied.find_holders(prefix)] == ["b", "c"]
