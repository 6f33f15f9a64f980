"""Several routers' ledgers of one endpoint, each told of the others', against one ledger that counted everything."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.routing.elsewhere import MAX_TOLD, Elsewhere
from kvproxy.routing.load import EndpointLoad, Reservation
from kvproxy.routing.work import Features

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
            load.elsewhere = Elsewhere(load)

    def begin(self, router: int, tokens: int) -> None:
        load = self.several[router]
        self.pending.append((load, load.reserve(tokens, 0, self.now), self.one.reserve(tokens, 0, self.now)))
        self.tell()

    def show(self, index: int, *, first_token: bool = True) -> None:
        """The first token of one that waits, or its end without any."""
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
                    assert load.elsewhere is not None
                    load.elsewhere.tell(id(other), other.row(self.now), self.now)

    def check(self) -> None:
        for slowness in (1.0, 2.0):
            expected = self.one.wait_s(SECONDS, slowness, self.now)
            for load in self.several:
                assert load.wait_s(SECONDS, slowness, self.now) == pytest.approx(expected)
                backlog = load.backlog(SECONDS, slowness, self.now)
                assert backlog.wait_s(SECONDS, slowness) == pytest.approx(expected)


@pytest.mark.parametrize("router", [0, 1])
def test_a_long_prefill_that_another_router_placed_is_believed_to_go_on(router: int) -> None:
    """What is done of it counts in every router alike."""
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
    row = routers.several[0].row(routers.now)
    assert len(row.head) == MAX_TOLD
    assert sum(ahead.work[1] for ahead in row.head) == 240
    routers.now += 0.1
    routers.check()
