"""Late messages, from a life that is over or behind newer ones, and the state kept of silent peers."""

from __future__ import annotations

import msgspec
import pytest

from kvproxy.features.exchange import wire
from kvproxy.features.exchange.lives import FORGET_S
from kvproxy.features.exchange.peers import SyncStatus
from tests.features.exchange.support import BEAT_S, A, B, Bus, Node, join_third, pair


def test_a_load_that_was_overtaken_counts_no_more() -> None:
    """The batch that had a request under way comes after the one that says it is over."""
    bus, one, two = pair()
    request = one.begin(A, 1)
    one.flush()
    [late], bus.waiting = bus.waiting, []
    one.end(request)
    one.flush()
    bus.waiting.append(late)
    [*newer, late] = bus.waiting
    for sent in (*newer, late):
        two.peers.receive(wire.decode(sent.payload), two.now)
    assert two.in_flight() == {A: 0, B: 0}
    assert two.held(1) == {A: 1}


def test_a_life_before_the_one_that_is_known_is_not_begun() -> None:
    """It was never heard of here: its epoch alone says that it is over."""
    bus = Bus()
    two, one = Node(bus, "two"), Node(bus, "one", epoch=5)
    bus.heal(2)
    one.begin(B, 9)
    one.flush()
    bus.deliver()
    earlier = Bus()
    before, _ = Node(earlier, "one", epoch=4), Node(earlier, "two")
    earlier.heal(2)
    before.begin(A, 1)
    before.flush()
    [late] = earlier.waiting
    two.peers.receive(wire.decode(late.payload), two.now)
    assert [peer.origin.epoch for peer in two.peers.known.values()] == [5]
    assert two.in_flight() == {A: 0, B: 1}


def test_prompts_placed_alone_are_sent_to_the_first_peer() -> None:
    bus = Bus()
    one = Node(bus, "one")
    two = Node(bus, "two")
    one.begin(A, 1)
    one.flush()
    assert not bus.waiting
    bus.heal(2)
    assert two.held(1) == {A: 1}
    assert two.in_flight() == {A: 1, B: 0}


def test_a_goodbye_is_the_last_word() -> None:
    """A message that was overtaken by it does not bring the life back."""
    bus, one, two = pair()
    one.begin(A, 1)
    one.flush()
    [late], bus.waiting = bus.waiting, []
    one.peers.leave()
    bus.deliver()
    two.peers.receive(wire.decode(late.payload), two.now)
    assert not two.peers.known
    assert two.in_flight() == {A: 0, B: 0}


def test_long_silent_peers_are_forgotten() -> None:
    """Names of lives that ended without a word do not pile up."""
    bus, one, two = pair()
    bus.nodes.remove(one)
    bus.now += FORGET_S
    two.beat()
    assert [peer.alive for peer in two.peers.known.values()] == [False]
    bus.now += BEAT_S
    two.beat()
    assert not two.peers.known


def test_the_load_of_a_peer_that_dies_during_a_join_is_dropped() -> None:
    """Its messages were kept for later, and do not bring it back then: nothing would ever end it."""
    bus, one, two = pair()
    three = join_third(bus)
    two.begin(B, 7)
    two.flush()
    bus.deliver()
    assert three.in_flight() == {A: 0, B: 1}
    bus.nodes.remove(two)
    for _ in range(4):
        bus.now += BEAT_S
        one.beat()
        three.beat()
        bus.deliver()
    assert three.in_flight() == {A: 0, B: 0}
    bus.heal(8)
    assert three.peers.status is SyncStatus.SYNCED
    assert three.in_flight() == {A: 0, B: 0}
    assert three.held(7) == {}


def test_a_drain_of_an_endpoint_that_came_back_is_told_again() -> None:
    """It was drained before it left; what was told then says nothing of the one that has its name now."""
    bus, one, two = pair()
    one.cluster.draining[A] = True
    bus.heal(2)
    assert two.cluster.draining == {A: True}
    ledger = one.cluster.ledgers.pop(A)
    one.cluster.draining.clear()
    bus.heal(2)
    one.cluster.ledgers[A] = ledger
    two.cluster.draining.clear()
    bus.heal(2)
    assert two.cluster.draining == {}
    one.cluster.draining[A] = True
    bus.heal(2)
    assert two.cluster.draining == {A: True}


def test_the_end_of_a_drain_is_not_lost_to_late_words_of_its_beginning() -> None:
    """Both had the orders themselves; each gets the other's first report behind its own second order."""
    bus, one, two = pair()
    for node in (one, two):
        node.cluster.draining[A] = True
        node.beat()
        node.flush()
    for node in (one, two):
        node.cluster.draining[A] = False
    bus.deliver()
    bus.heal(2)
    assert (one.cluster.draining, two.cluster.draining) == ({A: False}, {A: False})


def test_a_prefill_after_a_cache_loss_is_known_elsewhere_too() -> None:
    """The loss empties what is believed of it; the prompt that showed it is there."""
    bus, one, two = pair()
    indexes = one.cluster.indexes
    assert indexes is not None
    one.end(one.begin(A, 1, 2, 3))
    request = one.begin(A, 5, 6)
    one.flush()
    bus.deliver()
    assert two.held(5, 6) == {A: 2}
    for node in (one, two):
        assert node.cluster.indexes is not None
        node.cluster.indexes.approximate.clear(A)
        assert node.held(5, 6) == {}
    indexes.settle_entry(request.entry, prefilled=True, lost=True)
    one.flush()
    bus.deliver()
    assert two.held(5, 6) == one.held(5, 6) == {A: 2}


def test_messages_behind_a_lost_batch_wait_no_more() -> None:
    """How things stand says more than it did: nothing is asked for again, and the peer is in order."""
    bus, one, two = pair()
    bus.fate = lambda sent: 0
    one.end(one.begin(A, 1))
    one.flush()
    one.peers.own.sent.clear()
    bus.fate = lambda sent: 1
    one.begin(B, 7)
    one.flush()
    bus.deliver()
    assert two.held(7) == {B: 1}
    assert [peer.waiting for peer in two.peers.living] == [0]
    assert two.peers.status is SyncStatus.SYNCED


def test_a_snapshot_with_a_hole_is_asked_of_another() -> None:
    """A lost piece would otherwise be made up for by those behind it."""
    bus, one, two = pair()
    three = join_third(bus)
    asked, other = (one, two) if one.served else (two, one)
    asked.peers.send_to(three.origin, wire.StateChunk(asked.origin, 0, b"first", [], True))
    asked.peers.send_to(three.origin, wire.StateChunk(asked.origin, 2, b"third", [], False))
    bus.deliver()
    assert three.peers.status is SyncStatus.JOINING
    assert other.served == [three.origin]


def test_an_oversized_message_is_not_read() -> None:
    """However well it is formed."""
    long = wire.StateChunk(wire.Origin("one", 0, 1), 0, b"0" * (2 * wire.MAX_BYTES), [], False)
    with pytest.raises(msgspec.DecodeError):
        wire.decode(wire.encode(long))
