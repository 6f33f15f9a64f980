"""The router queue: order, bounds, fairness, and which endpoint a request waits for; time is an argument."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.base.types import EndpointId
from kvproxy.cluster.routing.costs import Best
from kvproxy.cluster.routing.fair_queue import LOOKS, FairQueue, QueueSettings
from kvproxy.cluster.routing.waiting_lines import LEVEL_S, Ticket
from tests.routing.fleet import FakeCandidate, fleet

A, B = EndpointId("e0"), EndpointId("e1")
BUSY = 5.0


class World:
    """Two endpoints, what is pending in each, and where each request would go: by name, or to the one with least."""

    def __init__(self, settings: QueueSettings = QueueSettings()) -> None:
        self.queue: FairQueue[str] = FairQueue(settings)
        self.endpoints = {one.id: one for one in fleet(2)}
        self.waits: dict[EndpointId, float] = {A: 0.0, B: 0.0}
        self.homes: dict[str, EndpointId | None] = {}
        self.own_s: dict[str, float] = {}
        self.asked: list[str] = []

    def hold(self, item: str, own_s: float = 1.0, now: float = 0.0, **how: int | str) -> Ticket[str]:
        self.own_s[item] = own_s
        ticket = self.queue.offer(item, own_s, now, **how)  # type: ignore[arg-type]
        assert ticket is not None
        return ticket

    def find_best(self, item: str, now: float) -> Best | None:
        """Its home; without one the endpoint with the least to do."""
        self.asked.append(item)
        least = min(self.waits, key=lambda one: self.waits[one] + self.endpoints[one].load.held_s, default=None)
        home = self.homes.get(item, least)
        return None if home is None else Best(self.endpoints[home], self.own_s[item], self.own_s[item])

    def poll(self, now: float = 0.0, **waits: float) -> str | None:
        """One release, with these seconds pending from now on."""
        self.waits.update({EndpointId(name): wait for name, wait in waits.items()})
        ticket = self.queue.poll(self.waits, now, self.find_best)
        return None if ticket is None else ticket.item

    def drained(self, now: float = 0.0, **waits: float) -> list[str]:
        """Everything released while nothing changes."""
        released = []
        while (item := self.poll(now, **waits)) is not None:
            released.append(item)
        return released

    def held_s(self) -> Mapping[str, float]:
        return {str(one.id): one.load.held_s for one in self.endpoints.values()}


def test_a_request_whose_endpoint_has_room_waits_for_nothing() -> None:
    """Under 0.3 s pending there, and no request ahead that may go there."""
    world = World()
    assert world.queue.admits(A, 0.29)
    assert not world.queue.admits(A, 0.3)
    world.hold("first")
    assert not world.queue.admits(A, 0.0)  # it was not asked yet, so it may want any endpoint
    world.homes["first"] = A
    assert world.poll(e0=BUSY, e1=0.0) is None
    assert world.queue.admits(B, 0.0)
    assert not world.queue.admits(A, 0.0)


def test_the_shortest_goes_first() -> None:
    """Least own work first keeps the mean short."""
    world = World()
    for item, own_s in (("long", 9.0), ("short", 0.1), ("middle", 2.0)):
        world.hold(item, own_s)
    assert world.drained() == ["short", "middle", "long"]


def test_waiting_counts_against_length() -> None:
    """A request of 3 s more is due 10 s earlier."""
    world = World()
    world.hold("long", 3.2, now=0.0)
    world.hold("late", 0.1, now=10.0)
    world.hold("later", 0.1, now=10.5)
    assert world.drained(11.0) == ["late", "long", "later"]


def test_nothing_leaves_while_every_endpoint_is_busy() -> None:
    """That is what the queue is for; nothing is even asked."""
    world = World()
    world.hold("a")
    assert world.poll(29.9, e0=BUSY, e1=BUSY) is None
    assert (len(world.queue), world.asked) == (1, [])


def test_a_request_is_held_for_its_best_endpoint_while_others_go() -> None:
    """The most urgent one waits for the engine that has its prefix; the next one takes the engine that is free."""
    world = World()
    world.homes = {"home": A, "other": B}
    world.hold("home", 0.1)
    world.hold("other", 3.0)
    assert world.drained(e0=BUSY, e1=0.0) == ["other"]
    assert world.held_s() == {"e0": 0.1, "e1": 0.0}
    assert world.drained(e0=0.0, e1=BUSY) == ["home"]
    assert world.held_s() == {"e0": 0.0, "e1": 0.0}


def test_one_idle_model_does_not_let_go_what_waits_for_another() -> None:
    """A model's endpoint is idle all the time; requests for the other model stay in the order of their own."""
    world = World()
    for number, own_s in enumerate((3.0, 1.0, 2.0)):
        world.homes[f"busy{number}"] = A
        world.hold(f"busy{number}", own_s)
    assert world.drained(e0=BUSY, e1=0.0) == []
    world.homes["idle"] = B
    world.hold("idle", 9.0)
    assert world.drained() == ["idle"]
    assert world.drained(e0=0.0) == ["busy1", "busy2", "busy0"]


def test_a_queue_of_requests_with_different_best_endpoints_goes_out_by_endpoint() -> None:
    """Each endpoint that opens takes the most urgent of its own; what is held for the other stays."""
    world = World()
    for number in range(6):
        world.homes[f"{number}"] = A if number % 2 else B
        world.hold(f"{number}", 6.0 - number)
    world.drained(e0=BUSY, e1=BUSY)
    assert world.drained(e0=BUSY, e1=0.0) == ["4", "2", "0"]
    assert world.drained(e0=0.0, e1=BUSY) == ["5", "3", "1"]


def test_what_is_held_for_an_endpoint_is_its_backlog() -> None:
    """Ten requests like that busy endpoint best, but not once the first of them are held for it."""
    world = World()
    for number in range(10):
        world.hold(f"{number}", 1.0)
    released = world.drained(e0=2.5, e1=4.0) + world.drained(e0=2.5, e1=0.2)
    assert len(released) == 10  # held for neither beyond what the other one would take
    assert world.held_s() == {"e0": 0.0, "e1": 0.0}


def test_an_idle_endpoint_is_offered_what_waits_for_a_busy_one() -> None:
    """It was held for A; once it would go to B, B takes it, though A has no room."""
    world = World()
    world.homes["moves"] = A
    world.hold("moves")
    assert world.poll(e0=BUSY, e1=0.0) is None
    world.homes["moves"] = B
    assert world.poll(e0=BUSY, e1=0.0) == "moves"
    assert world.held_s() == {"e0": 0.0, "e1": 0.0}


def test_a_request_held_for_an_endpoint_that_left_is_asked_again() -> None:
    """Nothing waits for an endpoint that may not be chosen."""
    world = World()
    world.homes["a"] = A
    world.hold("a")
    assert world.poll(e0=BUSY, e1=BUSY - 4.9) is None
    del world.waits[A]
    world.homes["a"] = B
    assert world.poll(e1=BUSY) is None
    assert world.held_s() == {"e0": 0.0, "e1": 1.0}
    assert world.poll(e1=0.0) == "a"


def test_a_request_no_endpoint_may_take_goes_at_once() -> None:
    """The refusal is its answer."""
    world = World()
    world.hold("a")
    world.homes["a"] = None
    world.waits.clear()
    assert world.poll() == "a"


def test_a_poll_asks_a_bounded_number() -> None:
    """However many want an endpoint that is busy; the next poll goes on where it stopped."""
    world = World()
    for number in range(3 * LOOKS):
        world.homes[f"{number}"] = A
        world.hold(f"{number}", float(number))
    assert world.poll(e0=BUSY, e1=0.0) is None
    assert len(world.asked) == LOOKS
    assert world.queue.next_poll_at(world.waits, 7.0) == 7.0
    assert world.poll() is None
    assert world.asked == [f"{number}" for number in range(2 * LOOKS)]


def test_nothing_starves() -> None:
    """A long request among an endless flow of short ones: only those that came less than own work / ageing seconds
    after it go before it."""
    ageing, own_s = 0.3, 6.0
    world = World(QueueSettings(ageing=ageing, max_wait_s=10_000.0))
    world.homes = dict.fromkeys(["long", *(f"{number}" for number in range(400))], A)
    world.hold("long", own_s)
    before, now = 0, 0.0
    while True:
        for _ in range(2):  # twice as much as is served
            world.hold(f"{before}", 0.0, now=now)
            before += 1
        if world.poll(now, e0=0.0, e1=BUSY) == "long":
            break
        now += 0.1
    came_until = own_s / ageing
    assert now == pytest.approx(came_until * 2, rel=0.05)  # so long takes what came until then
    assert world.drained(now)[0] == f"{round(came_until * 20)}"


def test_after_the_longest_wait_it_goes_whatever_is_pending() -> None:
    """The bound for clients that would give up, oldest first."""
    world = World(QueueSettings(max_wait_s=30.0))
    world.hold("long", 99.0, now=0.0)
    world.hold("short", 0.1, now=1.0)
    assert world.poll(30.0, e0=BUSY, e1=BUSY) == "long"
    assert world.asked == ["long"]
    assert world.poll(30.0) is None


def test_overload_does_not_turn_the_order_into_that_of_arrival() -> None:
    """Everything has waited over 30 s, and the short ones still go first."""
    world = World()
    for number in range(20):
        world.hold(f"{number}", 20.0 - number, now=float(number) / 10)
    assert world.drained(120.0) == [f"{number}" for number in reversed(range(20))]


def test_a_full_queue_refuses() -> None:
    """The caller answers 429, and says when the oldest must be out."""
    world = World(QueueSettings(limit=1, max_wait_s=30.0))
    assert world.queue.retry_after_s(0.0) == 1.0
    world.hold("a", now=0.0)
    assert world.queue.offer("b", 0.1, 12.0) is None
    assert world.queue.retry_after_s(12.0) == 18.0
    assert world.queue.retry_after_s(29.9) == 1.0


def test_a_cancelled_request_is_never_released() -> None:
    """Cancelling makes room; twice, or after the release, does nothing."""
    world = World(QueueSettings(limit=2))
    gone, kept = world.hold("gone", 0.1), world.hold("kept")
    world.queue.cancel(gone)
    world.queue.cancel(gone)
    assert len(world.queue) == 1
    assert world.drained() == ["kept"]
    world.queue.cancel(kept)
    assert len(world.queue) == 0
    assert world.poll(99.0) is None


def test_a_client_that_leaves_takes_its_backlog_along() -> None:
    """What was held for an endpoint counts there no longer."""
    world = World()
    world.homes["gone"] = A
    gone = world.hold("gone", 2.0)
    assert world.poll(e0=BUSY, e1=0.0) is None
    assert world.held_s()["e0"] == 2.0
    world.queue.cancel(gone)
    assert world.held_s()["e0"] == 0.0
    assert world.queue.next_poll_at(world.waits, 0.0) is None


def test_the_overdue_oldest_may_be_cancelled() -> None:
    """The next oldest is looked at."""
    world = World(QueueSettings(max_wait_s=30.0))
    gone = world.hold("gone", now=0.0)
    world.hold("kept", now=1.0)
    world.queue.cancel(gone)
    assert world.poll(30.0, e0=BUSY, e1=BUSY) is None
    assert world.poll(31.0) == "kept"


def test_a_higher_level_goes_before_length() -> None:
    """Each is worth so many seconds of work, also among those held for an endpoint; more work than that is not."""
    world = World()
    world.homes = dict.fromkeys(("usual", "urgent", "long"), A)
    world.hold("usual", 0.1)
    world.hold("urgent", 0.9 * LEVEL_S, level=1)
    world.hold("long", 1.1 * LEVEL_S + 0.1, level=1)
    world.poll(e0=BUSY, e1=0.0)
    assert world.drained(e0=0.0, e1=BUSY) == ["urgent", "usual", "long"]


def test_tenants_take_turns_by_work() -> None:
    """One tenant's flood does not hold up another's few requests, however short its own are."""
    world = World()
    for number in range(6):
        world.hold(f"flood{number}", 0.5, tenant="flood")
    for number in range(2):
        world.hold(f"few{number}", 1.0, tenant="few")
    order = world.drained()
    assert order.index("few0") <= 1
    assert order.index("few1") <= 4


def test_tenants_take_turns_at_every_endpoint() -> None:
    """What a tenant was granted at one endpoint counts at the other, too."""
    world = World()
    world.homes = {"a0": A, "a1": B, "b0": B}
    world.hold("a0", 5.0, tenant="a")
    world.hold("a1", 0.1, tenant="a")
    world.hold("b0", 3.0, tenant="b")
    assert world.drained(e0=0.0, e1=BUSY) == ["a0"]
    assert world.drained(e0=BUSY, e1=0.0) == ["b0", "a1"]


def test_a_newcomer_does_not_claim_the_past() -> None:
    """A tenant that comes late starts level with those that wait, not with all they were granted before."""
    world = World()
    for number in range(10):
        world.hold(f"old{number}", 1.0, tenant="old")
    for _ in range(6):
        world.poll()
    for number in range(4):
        world.hold(f"new{number}", 1.0, tenant="new")
    order = world.drained()
    assert {item[:3] for item in order[:3]} == {"old", "new"}


def test_next_poll_is_when_an_endpoint_will_have_room_or_the_oldest_is_due() -> None:
    """So that a timer, not a loop, drives it: any endpoint before a request was asked, its own afterwards."""
    world = World(QueueSettings(max_wait_s=30.0))
    assert world.queue.next_poll_at({A: BUSY}, 0.0) is None
    gone = world.hold("gone", now=0.0)
    world.hold("a", now=2.0)
    world.queue.cancel(gone)
    assert world.queue.next_poll_at({A: 5.3, B: 7.3}, 3.0) == pytest.approx(8.0)
    assert world.queue.next_poll_at({A: 500.0, B: 500.0}, 3.0) == pytest.approx(32.0)
    assert world.queue.next_poll_at({A: 0.0, B: BUSY}, 3.0) == 3.0
    world.homes["a"] = B
    assert world.poll(3.0, e0=0.0, e1=BUSY) is None
    assert world.queue.next_poll_at({A: 0.0, B: 5.3}, 3.0) == pytest.approx(8.0)


@given(
    st.lists(
        st.tuples(st.sampled_from("oocph"), st.integers(0, 50), st.sampled_from(["a", "b", "c"]), st.booleans()),
        max_size=150,
    )
)
def test_everyone_leaves_exactly_once(steps: list[tuple[str, int, str, bool]]) -> None:
    """Released or cancelled, never both, never lost, whatever the order and whichever endpoint is busy; what is held
    for endpoints is what their loads say, and nothing in the end."""
    world = World(QueueSettings(limit=40))
    waiting: dict[str, Ticket[str]] = {}
    for now, (action, number, tenant, first) in enumerate(steps):
        item, home = str(now), A if first else B
        if action == "o":
            world.own_s[item], world.homes[item] = number / 10, home
            ticket = world.queue.offer(item, number / 10, float(now), tenant=tenant)
            assert (ticket is None) == (len(waiting) == 40)
            if ticket is not None:
                waiting[item] = ticket
        elif action == "c" and waiting:
            world.queue.cancel(waiting.pop(list(waiting)[number % len(waiting)]))
        elif action == "h" and waiting:
            world.homes[list(waiting)[number % len(waiting)]] = home
        elif action == "p":
            released = world.poll(float(now), e0=BUSY if first else 0.0, e1=0.0 if number % 2 else BUSY)
            if released is not None:
                del waiting[released]
        assert len(world.queue) == len(waiting)
        held = dict.fromkeys(("e0", "e1"), 0.0)
        for ticket in waiting.values():
            if ticket.best is not None:
                held[str(ticket.best.endpoint.id)] += ticket.best.pooled_s
        assert world.held_s() == pytest.approx(held)
        assert world.queue._lines._present == len(waiting)
    for item in world.drained(0.0, e0=0.0, e1=0.0):
        del waiting[item]
    assert not waiting
    assert world.held_s() == {"e0": 0.0, "e1": 0.0}


def test_cancelled_requests_do_not_pile_up() -> None:
    """Clients that come and go behind one that waits leave nothing behind."""
    world = World()
    world.hold("stays", 0.1)
    for number in range(1000):
        world.queue.cancel(world.hold(f"goes{number}"))
    assert len(world.queue._arrivals) < 100
    assert world.queue._lines._entries < 100


def test_the_oldest_wait_is_known() -> None:
    """Of those that still wait, whatever order they will go in."""
    world = World()
    assert world.queue.oldest_wait_s(5.0) == 0.0
    first = world.hold("long", 9.0, now=1.0)
    world.hold("short", 0.1, now=3.0)
    assert world.queue.oldest_wait_s(5.0) == 4.0
    world.queue.cancel(first)
    assert world.queue.oldest_wait_s(5.0) == 2.0


def test_other_settings_reorder_those_that_wait() -> None:
    """As if they had come under the new ageing, wherever they are held; a smaller limit drops no request."""
    world = World(QueueSettings(ageing=0.0, limit=3))
    world.homes["late"] = A
    for item, own_s, now in (("long", 3.2, 0.0), ("late", 0.1, 10.0), ("later", 0.3, 10.5)):
        world.hold(item, own_s, now)
    world.poll(10.5, e0=BUSY, e1=BUSY)
    world.queue.reconfigure(QueueSettings(ageing=0.3, limit=1))
    assert world.queue.offer("refused", 0.1, 10.5) is None
    assert world.drained(11.0, e0=0.0, e1=0.0) == ["late", "long", "later"]


def test_a_shorter_bound_counts_for_those_that_wait() -> None:
    """They are overdue at once."""
    world = World()
    world.hold("a")
    assert world.poll(10.0, e0=BUSY, e1=BUSY) is None
    world.queue.reconfigure(QueueSettings(max_wait_s=5.0))
    assert world.poll(10.0) == "a"


def test_policies_see_what_is_held_as_waiting() -> None:
    """Pooled seconds on an endpoint that takes twice as long; the engine's own wait is what is left."""
    candidate: FakeCandidate = fleet(1)[0]
    seconds = (0.0, 0.001, 0.0, 0.0)
    candidate.load.held_s = 1.5
    assert candidate.load.wait_s(seconds, 2.0, 0.0) == 3.0
    candidate.load.reserve(1000, 0, 0.0)
    assert candidate.load.wait_s(seconds, 2.0, 0.0) == pytest.approx(5.0)
    candidate.load.reserve(1000, 0, 0.0, hidden=True)
    assert candidate.load.wait_s(seconds, 2.0, 0.0) == pytest.approx(7.0)
