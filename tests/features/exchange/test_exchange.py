"""Decisions of one proxy reach the others: in order, once, and again after losses."""

from __future__ import annotations

import math
from array import array
from random import Random

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvproxy.base.types import EndpointId
from kvproxy.cache.overlap.last_served import Served
from kvproxy.cluster.routing.load import EndpointLoad
from kvproxy.cluster.routing.policy import OverlapFacts
from kvproxy.cluster.routing.remote_load import LoadRow
from kvproxy.cluster.routing.work import NO_WORK
from kvproxy.features.exchange import deltas, wire
from kvproxy.features.exchange.peers import SyncStatus
from kvproxy.features.exchange.shared_state import SharedState
from kvproxy.features.exchange.snapshot import take_pieces
from tests.features.exchange.support import (
    BEAT_S,
    A,
    B,
    Bus,
    Cluster,
    Node,
    Request,
    Sent,
    join_third,
    look_twice,
    pair,
)


def test_a_route_in_one_process_is_held_in_all() -> None:
    """From the next batch on, the prompt is found and its load is counted, until the request is over."""
    bus, one, two = pair()
    request = one.begin(A, 1, 2, 3, tokens=500)
    one.flush()
    bus.deliver()
    assert two.held(1, 2, 3, 4) == {A: 3}
    assert two.in_flight() == {A: 1, B: 0}
    assert two.cluster.ledgers[A].pending_tokens == 500
    assert two.cluster.ledgers[A].wait_s((0.0, 0.001, 0.0, 0.0), 1.0, two.now) > 0.0
    one.end(request)
    one.flush()
    bus.deliver()
    assert two.held(1, 2, 3) == {A: 3}
    assert two.in_flight() == {A: 0, B: 0}
    assert two.cluster.ledgers[A].pending_tokens == 0


def test_a_failed_request_leaves_nothing() -> None:
    """A rollback here is a rollback there."""
    bus, one, two = pair()
    request = one.begin(A, 1, 2)
    one.flush()
    bus.deliver()
    assert two.held(1, 2) == {A: 2}
    one.end(request, prefilled=False)
    one.flush()
    bus.deliver()
    assert two.held(1, 2) == {}


def test_own_load_and_that_of_others_add_up() -> None:
    """Each counts its own and what it was told; what it tells is its own alone."""
    bus, one, two = pair()
    one.begin(A, 1)
    two.begin(A, 2)
    one.begin(A, 3)
    for node in (one, two, one, two):
        node.flush()
        bus.deliver()
    assert one.in_flight() == two.in_flight() == {A: 3, B: 0}
    assert one.cluster.ledgers[A].own_in_flight == 2
    assert two.cluster.ledgers[A].own_in_flight == 1


def test_a_denied_prefix_is_forgotten_everywhere() -> None:
    """The engine reused less than was believed: the rest is held nowhere any more."""
    bus, one, two = pair()
    indexes = one.cluster.indexes
    assert indexes is not None
    first = one.begin(A, 1, 2, 3, 4)
    one.end(first)
    request = one.begin(A, 1, 2, 9)
    one.flush()
    bus.deliver()
    assert two.held(1, 2, 3, 4) == {A: 4}
    indexes.state.watch.contradicted(A, request.entry.cursor, 1)  # type: ignore[union-attr]
    indexes.approximate.contradict(A, request.entry.cursor, 1)
    one.end(request)
    one.flush()
    bus.deliver()
    assert two.held(1, 2, 3, 4) == one.held(1, 2, 3, 4) == {A: 2}


def test_a_lost_batch_is_asked_for_and_comes_in_its_place() -> None:
    """The next one shows that it is missing; deltas wait for it, loads do not."""
    bus, one, two = pair()
    request = one.begin(A, 1, 2)
    bus.fate = lambda sent: 0
    one.flush()
    bus.fate = lambda sent: 1
    one.end(request)
    other = one.begin(B, 5)
    one.flush()
    [batch] = bus.waiting
    bus.waiting = []
    two.peers.receive(wire.decode(batch.payload), two.now)
    assert two.in_flight() == {A: 0, B: 1}
    assert two.held(5) == {}
    assert two.peers.status is SyncStatus.DEGRADED
    bus.deliver()
    assert two.held(1, 2) == {A: 2}
    assert two.held(5) == {B: 1}
    assert two.peers.status is SyncStatus.SYNCED
    assert two.peers.lives.consistency_ratio(two.now) == 1.0
    one.end(other)


def test_a_lost_end_is_noticed_by_the_next_heartbeat() -> None:
    """Nothing follows that would show the gap but the heartbeat."""
    bus, one, two = pair()
    request = one.begin(A, 1)
    one.flush()
    bus.deliver()
    one.end(request)
    bus.fate = lambda sent: 0
    one.flush()
    assert two.in_flight()[A] == 1
    bus.heal(1)
    assert two.in_flight()[A] == 0


def test_batches_too_old_for_a_resend_count_as_lost() -> None:
    """It is told how things stand instead, and the consistency says what is missing."""
    bus, one, two = pair()
    bus.fate = lambda sent: 0
    ended = one.begin(A, 1, 2)
    one.flush()
    one.end(ended)
    under_way = one.begin(B, 7, 8)
    one.flush()
    one.peers.own.sent.clear()
    bus.heal(2)
    assert two.held(1, 2) == {}
    assert two.held(7, 8) == {B: 2}
    assert two.in_flight() == {A: 0, B: 1}
    assert two.peers.lives.consistency_ratio(two.now) == 0.5
    one.end(under_way)
    bus.heal(1)
    assert two.in_flight() == {A: 0, B: 0}
    assert two.peers.status is SyncStatus.SYNCED


def test_a_silent_peer_takes_its_load_along_and_brings_it_back() -> None:
    """After three missed heartbeats it is dead; of what it had under way the prompts stay where they are."""
    bus, one, two = pair()
    ended = one.begin(A, 4)
    one.end(ended)
    one.begin(A, 1, 2)
    one.flush()
    bus.deliver()
    bus.fate = lambda sent: 0
    for _ in range(4):
        bus.now += BEAT_S
        two.beat()
    assert two.in_flight()[A] == 0
    assert two.held(1, 2) == {A: 2}
    assert two.held(4) == {A: 1}
    assert two.peers.status is SyncStatus.ALONE
    bus.heal(2)
    assert two.in_flight()[A] == 1
    assert two.held(1, 2) == {A: 2}
    assert two.peers.status is SyncStatus.SYNCED


def test_another_life_of_a_peer_replaces_it() -> None:
    """Its load is gone at once, and late words of the life before change nothing."""
    bus, one, two = pair()
    one.begin(A, 1)
    one.flush()
    [late] = bus.waiting
    bus.deliver()
    assert two.in_flight()[A] == 1
    bus.nodes.remove(one)
    again = Node(bus, "one", epoch=2)
    again.peers.join(again.now)
    bus.deliver()
    assert two.in_flight()[A] == 0
    two.peers.receive(wire.decode(late.payload), two.now)
    assert two.in_flight()[A] == 0
    assert [peer.origin.epoch for peer in two.peers.known.values()] == [2]


def test_a_peer_that_ends_says_so() -> None:
    """Nothing is waited for."""
    bus, one, two = pair()
    one.begin(A, 1)
    one.flush()
    one.peers.leave()
    bus.deliver()
    assert two.in_flight()[A] == 0
    assert not two.peers.known


def test_an_endpoint_that_is_not_known_here_is_left_out() -> None:
    """Discovery may be later here, or it was removed: nothing of it enters the index."""
    bus, one, two = pair()
    del two.cluster.ledgers[B]
    one.begin(B, 1, 2)
    one.flush()
    bus.deliver()
    assert two.held(1, 2) == {}
    [peer] = two.peers.living
    assert peer.heard.unknown == 2  # the prompt and the load


def test_two_that_start_at_once_do_not_wait_for_each_other() -> None:
    """Neither has anything to tell the other: both serve after a moment."""
    bus = Bus()
    one, two = Node(bus, "one"), Node(bus, "two")
    for node in (one, two):
        node.peers.join(node.now)
    request = one.begin(A, 1)
    one.flush()
    bus.deliver()
    assert one.peers.status is two.peers.status is SyncStatus.JOINING
    for _ in range(2):
        bus.now += 1.0
        for node in (one, two):
            node.beat()
        bus.deliver()
    assert not one.served
    assert not two.served
    assert one.peers.status is two.peers.status is SyncStatus.SYNCED
    assert two.held(1) == {A: 1}
    one.end(request)


def test_a_new_one_asks_one_peer_for_everything_and_keeps_the_rest_for_later() -> None:
    """Loads count at once; deltas wait until it knows what was before them."""
    bus, one, two = pair()
    three = join_third(bus)
    assert one.served + two.served == [three.origin]
    one.begin(A, 1, 2)
    one.flush()
    bus.deliver()
    assert three.in_flight()[A] == 1
    assert three.held(1, 2) == {}
    server = one if one.served else two
    server.peers.send_to(three.origin, wire.StateChunk(server.origin, 0, b"", [], False))
    bus.deliver()
    assert three.held(1, 2) == {A: 2}
    assert three.peers.status is SyncStatus.SYNCED


def test_a_peer_that_dies_while_it_tells_everything_is_replaced_by_another() -> None:
    """And where there is no other, the new one goes on without."""
    bus, one, two = pair()
    three = join_third(bus)
    bus.now += 3.0
    look_twice(three)
    bus.deliver()
    assert {*one.served, *two.served} == {three.origin}
    assert one.served
    assert two.served
    bus.now += 3.0
    look_twice(three)
    assert not three.peers.newcomer.running


def test_a_new_one_asks_none_that_has_nothing() -> None:
    """Whichever the two are: a peer with at least half of the most blocks is asked."""
    for blocks in ((100, 10), (10, 100)):
        bus, one, two = pair()
        for node, count in zip((one, two), blocks, strict=True):
            node.peers._blocks = lambda count=count: count  # type: ignore[misc]
        three = join_third(bus)
        asked, other = (one, two) if blocks[0] == 100 else (two, one)
        assert (asked.served, other.served) == ([three.origin], [])


def test_answers_that_came_while_a_joining_process_stood_still_are_taken() -> None:
    """It reads them before it goes on without the others."""
    bus, one, two = pair()
    three = Node(bus, "three")
    three.peers.join(three.now)
    bus.now += 5.0
    three.peers.look(three.now)
    assert three.peers.newcomer.running
    bus.deliver()
    three.peers.look(three.now)
    bus.deliver()
    assert one.served + two.served == [three.origin]


def test_clocks_need_not_agree() -> None:
    """An hour of skew changes neither what is believed nor the lag that is measured."""
    bus, one, two = pair(skew_s=3600.0)
    for number in range(20):
        one.begin(A, number, tokens=1000)
        one.flush()
        bus.now += 0.002
        bus.deliver()
    [peer] = two.peers.living
    assert 0.0 <= peer.lag.quantile(0.99) < 0.01
    load = two.cluster.ledgers[A]
    assert load.remote_load is not None
    assert two.now - 1.0 < load.remote_load.busy_at <= two.now


def test_samples_are_those_of_all_requests_on_the_engine() -> None:
    """A sample that others' work is in counts that work, and all learn from it."""
    bus, one, two = pair()
    mine, theirs = one.begin(A, 1, tokens=1000), two.begin(A, 2, tokens=3000)
    heard: list[tuple[float, float]] = []
    one.cluster.ledgers[A].on_sample = lambda work, busy_s, now, **_: heard.append((work[1], busy_s))
    for node in (one, two):
        node.flush()
    bus.deliver()
    bus.now += 1.0
    two.end(theirs)
    two.flush()
    bus.deliver()
    bus.now += 1.0
    one.end(mine)
    one.begin(A, 3)  # until then what the other showed at the same time may still be heard
    assert heard == [(4000.0, 2.0)]
    one.flush()
    bus.deliver()
    assert [(endpoint, work[1]) for endpoint, work, _ in two.cluster.samples] == [(A, 4000.0)]


class Fates:
    """Loss, doubling and disorder by chance."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def __call__(self, sent: Sent) -> int:
        return self.random.choice((0, 1, 1, 1, 2))


@given(st.integers(0, 2**32), st.lists(st.sampled_from(["begin", "end", "fail", "flush", "deliver", "beat", "join"])))
@example(1307, ["beat", "begin", "beat", "end", "flush", "begin", "deliver"])  # a heartbeat after later batches
@example(80, ["beat", "begin", "begin", "beat", "begin", "begin", "deliver"])  # several
@example(4213203, ["end", "beat", "beat", "begin", "flush", *["begin"] * 6, "deliver"])  # the first ones
@example(3515323257, ["flush", "beat", "begin", "flush", "begin", "deliver"])  # doubled ones, of one instant
@example(1, ["begin", "flush", "join", "deliver", *["beat", "begin", "flush", "deliver"] * 6])  # during a join
def test_any_loss_disorder_and_doubling_ends_in_one_state(seed: int, steps: list[str]) -> None:
    """Once messages arrive again, all count the same load and hold the same prompts, whatever happened."""
    bus, random = Bus(), Random(seed)
    nodes = [Node(bus, name, skew_s=random.uniform(-1e6, 1e6)) for name in ("one", "two", "three")]
    under_way: list[tuple[Node, Request]] = []
    bus.fate = Fates(seed)
    number = 0
    for step in steps:
        node = random.choice(nodes)
        if step == "begin":
            number += 1
            under_way.append((node, node.begin(random.choice((A, B)), number % 5, number)))
        elif step in ("end", "fail") and under_way:
            owner, request = under_way.pop(random.randrange(len(under_way)))
            owner.end(request, prefilled=step == "end")
        elif step == "flush":
            node.flush()
        elif step == "deliver":
            bus.deliver(shuffle=random)
        elif step == "beat":
            bus.now += BEAT_S
            node.beat()
        elif step == "join" and len(nodes) == 3:
            nodes.append(Node(bus, "four", skew_s=random.uniform(-1e6, 1e6)))
            nodes[-1].peers.join(nodes[-1].now)
    bus.heal(8 if len(nodes) == 3 else 24)  # one that joins is sent no state here
    assert len({str(node.in_flight()) for node in nodes}) == 1
    expected = sum(1 for _ in under_way)
    assert all(sum(node.in_flight().values()) == expected for node in nodes)
    for first in range(number + 1):
        assert len({str(sorted(node.held(first % 5, first).items())) for node in nodes}) == 1
    assert all(node.peers.status is SyncStatus.SYNCED for node in nodes)
    told = {node.origin: node.journal.told for node in nodes}
    assert all(peer.heard.told == told[peer.origin] for node in nodes for peer in node.peers.living)


def _talk(bus: Bus, speaker: Node, requests: int) -> None:
    """Each in a batch of its own, which arrives."""
    for number in range(requests):
        speaker.end(speaker.begin(A, 1000 + number))
        speaker.flush()
        bus.deliver()


def _talk(bus: Bus, speaker: Node, requests: int) -> None:
    """Each in a batch of its own, which arrives."""
    for number in range(requests):
        speaker.end(speaker.begin(A, 1000 + number))
        speaker.flush()
        bus.deliver()


@pytest.mark.parametrize("told", [True, False])
def test_batches_that_come_during_a_join_are_taken_afterwards(told: bool) -> None:
    """Those of before, too, unless they are in the state that another one sent; none counts as a gap."""
    bus, one, _ = pair()
    _talk(bus, one, 1)
    three = join_third(bus)
    one.end(one.begin(A, 7))
    one.flush()
    bus.deliver()
    assert three.held(7) == {}
    three.peers.newcomer.end(three.now, told=told)
    one.end(one.begin(B, 8))  # comes before the answer
    one.flush()
    bus.deliver()
    assert three.held(7) == {A: 1}
    assert three.held(8) == {B: 1}
    assert three.held(1000) == ({} if told else {A: 1})
    bus.heal(1)
    assert three.peers.status is SyncStatus.SYNCED
    assert [(peer.gaps, peer.lost) for peer in three.peers.living] == [(0, 0)] * 2


def test_a_report_in_several_messages_is_taken_as_one() -> None:
    """A peer has more under way than fits into a message; of what ended meanwhile nothing is left."""
    bus, one, two = pair()
    ended = one.begin(B, 9)
    one.flush()
    bus.deliver()
    bus.fate = lambda sent: 0
    one.end(ended)
    requests = [one.begin(A, *range(number * 5000, number * 5000 + 5000)) for number in range(3)]  # 40 KB each
    one.flush()
    one.peers.own.sent.clear()
    bus.heal(2)
    assert two.in_flight() == {A: 3, B: 0}
    [peer] = two.peers.living
    assert (len(peer.heard.requests.open), peer.lost) == (3, 0)
    assert two.peers.status is SyncStatus.SYNCED
    for request in requests:
        one.end(request)
    bus.heal(1)
    assert two.in_flight() == {A: 0, B: 0}


def test_an_unanswered_request_is_sent_again_although_batches_come_in_order() -> None:
    """A peer that was silent is back, and does not get the request for its loads."""
    bus, one, two = pair()
    one.begin(A, 1)
    bus.heal(1)
    two.peers.known[one.origin.place].die(two.now)
    bus.fate = lambda sent: int(sent.to is two)
    one.beat()
    bus.deliver()
    bus.fate = lambda sent: 1
    for number in range(20):
        one.end(one.begin(B, number))
        one.flush()
        bus.deliver()
        bus.now += 0.01
        two.peers.look(two.now)
        bus.deliver()
    assert two.in_flight()[A] == 1
    assert two.peers.status is SyncStatus.SYNCED


def test_missing_batches_are_asked_for_ever_more_rarely() -> None:
    """A link that is slow, or loses answers, is not filled with them."""
    bus, one, two = pair()
    one.begin(A, 1)
    bus.fate = lambda sent: 0
    one.flush()
    asked: list[float] = []
    bus.fate = lambda sent: int(sent.to is two) if len(sent.payload) < 200 else 0
    one.beat()
    bus.deliver()
    bus.fate = lambda sent: asked.append(bus.now) or 0  # type: ignore[func-returns-value]
    for _ in range(1000):
        bus.now += 0.01
        two.peers.look(two.now)
    assert 3 <= len(asked) <= 10


def _row(**fields: object) -> deltas.EndpointLoads:
    row = LoadRow(in_flight=1, resident_tokens=0, pending=NO_WORK, busy_s=0.0, shown_s=0.0, prefilled=NO_WORK)
    return deltas.EndpointLoads("c", "a", msgspec.structs.replace(row, **fields))


@pytest.mark.parametrize(
    "batch",
    [
        ([], [_row(pending=(math.nan, 0.0, 0.0, 0.0))]),
        ([], [_row(busy_s=math.inf)]),
        ([deltas.Sample("c", "a", (1.0, math.nan, 0.0, 0.0), 1.0, False)], []),
        ([deltas.Retried(1, 0)] * (wire.MAX_DELTAS + 1), []),
    ],
)
def test_no_message_has_numbers_that_spoil_sums_or_more_deltas_than_one_may(
    batch: tuple[list[deltas.Delta], list[deltas.EndpointLoads]],
) -> None:
    """It is refused whole, before anything is changed."""
    payload = wire.encode(wire.Batch(wire.Origin("one", 0, 1), 1, 1.0, *batch))
    with pytest.raises(msgspec.DecodeError):
        wire.decode(payload)


class _Stubborn(Cluster):
    def __init__(self) -> None:
        super().__init__()
        self.refusing = False

    def drain(self, endpoint: EndpointId, *, draining: bool) -> None:
        raise ArithmeticError

    def load(self, endpoint: EndpointId) -> EndpointLoad | None:
        if self.refusing:
            raise ArithmeticError
        return super().load(endpoint)


def stubborn_pair() -> tuple[Bus, Node, Node, _Stubborn]:
    """Two, the second of which cannot apply all it hears."""
    bus, one, two = pair()
    two.cluster = stubborn = _Stubborn()
    two.world = SharedState({"c": stubborn})
    return bus, one, two, stubborn


def test_a_delta_that_cannot_be_applied_is_left_out_alone() -> None:
    """Deltas behind it in the same batch count, and nothing is requested again."""
    bus, one, two, _ = stubborn_pair()
    one.cluster.draining[A] = True
    one.journal.look()
    one.begin(B, 1, 3)
    one.flush()
    bus.deliver()
    assert two.held(1, 3)[B] == 2
    [peer] = two.peers.living
    assert peer.heard.failed == 1
    bus.heal(1)
    assert two.peers.status is SyncStatus.SYNCED


def test_a_request_that_could_not_be_applied_is_asked_for() -> None:
    """The peer says how it stands: what is under way, and what is over."""
    bus, one, two, stubborn = stubborn_pair()
    one.begin(B, 1, 3)
    one.flush()
    [batch], bus.waiting = bus.waiting, []
    stubborn.refusing = True
    said = msgspec.structs.replace(wire.decode(batch.payload), loads=[])
    two.peers.receive(said, two.now)
    assert not two.held(1, 3)
    stubborn.refusing = False
    bus.heal(2)
    assert two.held(1, 3) == {B: 2}
    [peer] = two.peers.living
    assert (peer.heard.failed, len(peer.heard.requests.open)) == (1, 1)
    assert two.peers.status is SyncStatus.SYNCED


def test_batches_of_long_conversations_fit_into_a_message() -> None:
    """However many message prefixes requests name."""
    bus, one, _ = pair()
    for number in range(400):
        one.journal.add(deltas.Used(array("Q", [number] * 300).tobytes(), "m", "", "i", 0))
    one.flush()
    assert max(len(sent.payload) for sent in bus.waiting) <= wire.MAX_BYTES
    bus.deliver()


def test_sessions_for_a_newcomer_fit_into_messages() -> None:
    """However long the prompts were that sessions begin with."""
    _, one, _ = pair()
    assert one.cluster.indexes is not None
    for session in range(1, 101):
        served = Served(A, 0, 1.0, 0, 0, array("Q"), array("Q", range(500)))
        one.cluster.indexes.last_served.adopt(session, 0, served)
    steps = take_pieces(one.origin, one.world, None, {}, clock=lambda: 2.0, wall_clock=lambda: 2.0)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            pieces: list[wire.StateChunk] = done.value
            break
    assert [piece.number for piece in pieces] == list(range(len(pieces)))
    assert sum(len(piece.deltas) for piece in pieces) == 100
    assert max(len(wire.encode(piece)) for piece in pieces) <= wire.MAX_BYTES


def test_policies_know_how_late_which_others_are_heard() -> None:
    """They keep apart by it; with no other process heard they decide as ever."""
    bus = Bus()
    one, two = Node(bus, "one"), Node(bus, "two")
    for _ in range(4):
        bus.now += BEAT_S
        for node in (one, two):
            node.beat()
        bus.now += 0.05
        bus.deliver()
    heard = [node.cluster.policy.others for node in (one, two)]
    assert [(others.routers, others.rank) for others in heard if others is not None] == [(2, 0), (2, 1)]
    assert all(others is not None and 0.0 < others.delay_s < 0.06 for others in heard)
    two.peers.leave()
    bus.deliver()
    one.beat()
    assert one.cluster.policy.others is None


def test_a_row_counts_from_when_it_was_sent() -> None:
    """Work of another router's request went on while its word was under way."""
    bus, one, two = pair()
    for _ in range(4):
        bus.heal(1)
    two.begin(A, 1, tokens=8000)
    two.flush()
    bus.now += 0.5
    bus.deliver()
    load = one.cluster.ledgers[A]
    assert load.backlog((0.0, 0.001, 0.0, 1.0), 1.0, bus.now).elapsed_s == pytest.approx(0.5)


class Turns:
    """Fake rule of admission that notes the turns of other proxies."""

    def __init__(self) -> None:
        self.running: dict[object, tuple[EndpointId, int, int]] = {}
        self.ended: list[tuple[bool, bool]] = []
        self.kept_elsewhere = set[EndpointId]()

    def placed_elsewhere(self, turn: object, facts: OverlapFacts, endpoint: EndpointId, now: float) -> None:
        assert (facts.session, facts.parent) == (7, 8)
        self.running[turn] = endpoint, facts.prompt_tokens, len(facts.blocks)

    def ended_elsewhere(self, turn: object, now: float, *, served: bool, calls_tool: bool) -> None:
        if self.running.pop(turn, None) is not None:
            self.ended.append((served, calls_tool))


def test_turns_of_sessions_are_counted_where_others_placed_them() -> None:
    """With their blocks, tokens and names, until their ends: failures, final ones, and answers without a tool call."""
    bus, one, two = pair()
    two.cluster.admission = Turns()
    requests = [one.begin(A, 1, 2, 3, tokens=300), *(one.begin(B, 1, 2, tokens=200) for _ in range(3))]
    one.flush()
    bus.deliver()
    assert sorted(two.cluster.admission.running.values()) == [(A, 300, 3), *[(B, 200, 2)] * 3]
    one.end(requests[0])
    one.end(requests[1], prefilled=False)
    one.end(requests[2], ends=True)
    one.end(requests[3], calls_tool=False)
    one.flush()
    bus.deliver()
    assert not two.cluster.admission.running
    assert two.cluster.admission.ended == [(True, True), (False, True), (False, True), (True, False)]


@pytest.mark.parametrize("kept", [True, False])
def test_a_request_whose_prompt_is_computed_elsewhere_is_one_turn(kept: bool) -> None:
    """Prefilled at another endpoint and answered where it was placed, it is neither two turns nor a failure. The other
    router holds the prompt where this one does, and a third, which joins meanwhile, too."""
    bus, one, two = pair()
    two.cluster.admission = Turns()
    request = one.begin(B, 1, 2, 3, tokens=300)
    one.move(request, A, kept=False)
    one.flush()
    bus.deliver()
    three = Node(bus, "three")
    bus.heal(2)
    assert one.held(1, 2, 3) == two.held(1, 2, 3) == three.held(1, 2, 3) == {A: 3}
    one.move(request, B, kept=kept)
    one.flush()
    bus.deliver()
    assert list(two.cluster.admission.running.values()) == [(B, 300, 3)]
    one.end(request)
    one.flush()
    bus.deliver()
    assert two.cluster.admission.ended == [(True, True)]
    assert one.held(1, 2, 3) == two.held(1, 2, 3) == three.held(1, 2, 3) == ({A: 3, B: 3} if kept else {B: 3})


def test_a_request_that_moves_to_an_endpoint_that_is_not_known_here_is_left_out() -> None:
    """Its entry ends with the move."""
    bus, one, two = pair()
    two.cluster.admission = Turns()
    del two.cluster.ledgers[A]
    request = one.begin(B, 1, 2)
    one.move(request, A, kept=False)
    one.end(request)
    one.flush()
    bus.deliver()
    assert two.held(1, 2) == {}
    assert two.cluster.admission.ended == [(False, True)]


def test_a_newcomer_counts_no_turns_of_a_time_that_is_over() -> None:
    """It is sent them again for its index. Sessions that are over would take room, and their pauses would be none."""
    bus, one, _two = pair()
    one.end(one.begin(A, 1, 2, 3, tokens=300))
    one.flush()
    bus.deliver()
    bus.heal(30)
    three = Node(bus, "three")
    three.cluster.admission = Turns()
    bus.heal(2)
    assert three.cluster.admission.ended == []
    one.begin(A, 1, 2, 3, 4, tokens=400)
    one.flush()
    bus.deliver()
    assert list(three.cluster.admission.running.values()) == [(A, 400, 4)]


def test_sessions_of_a_proxy_that_died_may_go_on_elsewhere() -> None:
    """Their turns end as if they had been served, so that they are idle and soon without a place."""
    bus, one, two = pair()
    two.cluster.admission = Turns()
    one.begin(A, 1, 2, 3)
    one.flush()
    bus.deliver()
    bus.nodes.remove(one)
    bus.heal(4)
    assert two.cluster.admission.ended == [(True, True)]


def test_room_that_one_proxy_keeps_is_known_to_the_others() -> None:
    """Since when, by each one's own clock, until it is kept no more or its proxy is gone; the rule of admission is
    told."""
    bus, one, two = pair(skew_s=50.0)
    two.cluster.admission = Turns()
    one.cluster.ledgers[A].keep_room(one.now - 7.0)
    one.flush()
    bus.deliver()
    remote = two.cluster.ledgers[A].remote_load
    assert remote is not None
    assert remote.kept_since == pytest.approx(two.now - 7.0)
    assert two.cluster.admission.kept_elsewhere == {A}
    one.cluster.ledgers[A].keep_room(None)
    one.flush()
    bus.deliver()
    assert remote.kept_since == math.inf
    assert two.cluster.admission.kept_elsewhere == set()
    one.cluster.ledgers[A].keep_room(one.now)
    one.flush()
    bus.deliver()
    bus.nodes.remove(one)
    bus.heal(4)
    assert remote.kept_since == math.inf
    assert two.cluster.admission.kept_elsewhere == set()
