"""Several routers' ledgers of one endpoint, each told of the others', against one ledger that counted everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.base.types import EndpointId
from kvproxy.cluster.routing.load import EndpointLoad, Reservation, row_of
from kvproxy.cluster.routing.remote_load import MAX_TOLD, RemoteLoad, ReplicaSpread
from kvproxy.cluster.routing.traffic import Pool
from kvproxy.cluster.routing.work import Features
from tests.cluster.routing.fleet import FakeCandidate

SECONDS: Features = (0.01, 0.0001, 0.0, 1.0)


@dataclass
class Routers:
    """`one` counts what all of `several` do."""

    several: list[EndpointLoad] = field(default_factory=lambda: [EndpointLoad() for _ in range(3)])
    one: EndpointLoad = field(default_factory=EndpointLoad)
    pending: list[tuple[EndpointLoad, Reservation, Reservation]] = field(default_factory=list)
    now: float = 100.0

    def __post_init__(self) -> None:
        for load in self.several:
            load.remote_load = RemoteLoad(load)

    def begin(self, router: int, tokens: int) -> None:
        load = self.several[router]
        self.pending.append((load, load.reserve(tokens, 0, self.now), self.one.reserve(tokens, 0, self.now)))
        self.tell()

    def show(self, index: int, *, first_token: bool = True) -> None:
        """Show the first token of a waiting request, or its end without any."""
        load, ours, all_of_them = self.pending.pop(index)
        for ledger, reservation in ((load, ours), (self.one, all_of_them)):
            if first_token:
                ledger.first_token(reservation, self.now)
            ledger.release(reservation, self.now)
        self.tell()

    def tell(self) -> None:
        for load in self.several:
            for other in self.several:
                if other is not load:
                    assert load.remote_load is not None
                    load.remote_load.tell(id(other), row_of(other, self.now), self.now)

    def check(self) -> None:
        for slowness in (1.0, 2.0):
            expected = self.one.wait_s(SECONDS, slowness, self.now)
            for load in self.several:
                assert load.wait_s(SECONDS, slowness, self.now) == pytest.approx(expected)
                backlog = load.backlog(SECONDS, slowness, self.now)
                assert backlog.wait_s(SECONDS, slowness) == pytest.approx(expected)


@pytest.mark.parametrize("router", [0, 1])
def test_a_long_prefill_that_another_router_placed_is_believed_to_go_on(router: int) -> None:
    """Its progress counts in every router alike."""
    routers = Routers()
    routers.begin(0, 100_000)
    routers.begin(1, 1000)
    routers.now += 8.0
    assert routers.several[router].wait_s(SECONDS, 1.0, routers.now) == pytest.approx(10.01 - 8.0 + 0.11)


def test_work_of_another_routers_request_began_with_our_first_token() -> None:
    routers = Routers()
    routers.begin(0, 1000)
    routers.begin(1, 50_000)
    routers.now += 1.0
    routers.show(0)
    routers.now += 2.0
    assert routers.several[0].wait_s(SECONDS, 1.0, routers.now) == pytest.approx(5.01 - 2.0)
    assert routers.several[1].wait_s(SECONDS, 1.0, routers.now) == pytest.approx(5.01 - 2.0)


STEPS = st.tuples(
    st.sampled_from(["begin", "begin", "show", "show", "leave"]),
    st.integers(0, 2),
    st.sampled_from([1, 40, 900, 3000, 90_000]),
    st.sampled_from([0.001, 0.05, 0.7, 9.0]),
)


@given(st.lists(STEPS, max_size=30))
def test_with_no_delay_every_router_expects_what_one_would(steps: list[tuple[str, int, int, float]]) -> None:
    """Whatever began, showed its first token or left, in whatever order."""
    routers = Routers()
    for what, number, tokens, pause_s in steps:
        if what == "begin":
            routers.begin(number, tokens)
        elif routers.pending:
            routers.show(number % len(routers.pending), first_token=what == "show")
        routers.check()
        routers.now += pause_s
        routers.check()


def test_many_short_requests_at_the_head_are_told_in_a_few_words() -> None:
    """The head of the line is whole, whatever it is told in."""
    routers = Routers()
    for _ in range(3 * MAX_TOLD):
        routers.begin(0, 10)
    row = row_of(routers.several[0], routers.now)
    assert len(row.head) == MAX_TOLD
    assert sum(ahead.work[1] for ahead in row.head) == 240
    routers.now += 0.1
    routers.check()


def chosen(
    *costs: float,
    owns: Sequence[float] = (),
    weights: Sequence[float] = (),
    routers: int = 4,
    delay_s: float = 0.25,
    work_s: float = 8.0,
    ids: str = "abcdefghijklmnopqrstuvwxyz",
) -> list[int]:
    """Where each of so many routers places the same request, of 2 s of prefill unless `owns` has them by endpoint."""
    best = costs.index(min(costs))
    owns = owns or [2.0] * len(costs)
    weights = weights or [1.0] * len(costs)
    pool = Pool([FakeCandidate(EndpointId(name), weight) for name, weight in zip(ids, weights, strict=False)])
    spreads = [ReplicaSpread(delay_s, routers, rank) for rank in range(routers)]
    return [spread.choose_spread(best, costs, weights, pool.places, owns[best], work_s) for spread in spreads]


def test_routers_that_hear_of_each_other_late_do_not_take_the_same_idle_endpoint() -> None:
    """Each keeps to its own among those that are as good for all that is known."""
    assert chosen(0.0, 0.0, 0.0, 0.0, 9.0) == [0, 1, 2, 3]


def test_an_endpoint_belongs_to_the_same_router_wherever_it_is_listed() -> None:
    """Routers may have learned of endpoints in different orders."""
    assert chosen(0.0, 0.0, 0.0, 0.0, ids="dcba") == [3, 2, 1, 0]


def test_an_endpoint_is_left_for_one_that_costs_no_more_than_what_may_have_come_to_it() -> None:
    """1.5 s of work are not known of; half of this request may be there, 1 s."""
    assert chosen(1.0, 1.2, 2.6, 1.1) == [0, 1, 0, 3]
    assert chosen(1.0, 2.1, 2.6, 2.1) == [0, 0, 0, 0]
    assert chosen(1.0, 2.4, 2.6, 2.4, owns=[4.0] * 4) == [0, 1, 0, 3]


def test_an_endpoint_is_not_left_for_one_that_holds_much_less_of_the_prompt() -> None:
    """It looks best to this request, and no better than others to the rest."""
    assert chosen(0.3, 0.5, 0.3, 0.5, owns=[0.2, 0.4, 0.2, 0.4]) == [0, 0, 2, 0]


def test_unknown_work_counts_by_weight_as_costs_do() -> None:
    """At weight 4 a second of cost is four of work."""
    assert chosen(1.0, 1.2, 1.2, 1.2, weights=[4.0] * 4) == [0, 1, 2, 3]
    assert chosen(1.0, 1.3, 1.3, 1.3, weights=[4.0] * 4) == [0, 0, 0, 0]


def test_where_little_comes_or_is_heard_of_soon_all_take_the_best() -> None:
    """There is nothing that could be there and is not known of."""
    assert chosen(0.0, 0.1, 0.1, work_s=0.1) == [0, 0, 0, 0]
    assert chosen(0.0, 0.1, 0.1, delay_s=0.001) == [0, 0, 0, 0]
    assert chosen(0.0, 0.0, 0.0, delay_s=0.0) == [0, 0, 0, 0]


def test_more_endpoints_than_routers_are_chosen_among_by_cost() -> None:
    """Each has some of them; where two kinds alternate, some of either kind."""
    assert chosen(0.02, 0.01, 0.0, 0.03, routers=2) == [0, 2]
    assert chosen(0.0, 0.5, 0.0, 0.5, routers=2) == [0, 2]


def test_more_routers_than_endpoints_share_them() -> None:
    """None is without one."""
    assert chosen(0.0, 0.0, routers=5) == [0, 1, 0, 1, 0]


@given(
    st.lists(st.tuples(st.floats(0.0, 50.0), st.floats(0.0, 5.0)), min_size=1, max_size=20),
    st.integers(1, 9),
    st.floats(0.0, 5.0),
    st.floats(0.0, 20.0),
)
def test_every_router_has_an_endpoint_and_one_that_is_alone_the_best(
    columns: list[tuple[float, float]], routers: int, delay_s: float, work_s: float
) -> None:
    """None costs more than the best one and all that may have come to it."""
    costs, owns = zip(*columns, strict=True)
    own_s = owns[costs.index(min(costs))]
    found = chosen(*costs, owns=owns, routers=routers, delay_s=delay_s, work_s=work_s)
    assert all(costs[one] <= min(costs) + min(0.5 * own_s, work_s * delay_s) for one in found)
    if routers == 1:
        assert costs[found[0]] == min(costs)
