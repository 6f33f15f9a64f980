"""Another proxy's messages, applied in a running one; unknown names are left out and counted."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvproxy.base.types import EndpointId
from kvproxy.cache.actions.hotness import KnownPrefix
from kvproxy.cache.store import ActionKind
from kvproxy.features.exchange.deltas import (
    Acted,
    Counted,
    Delta,
    Drained,
    Entered,
    Retried,
    Sample,
    SessionServed,
    Spent,
    Started,
    Used,
)
from kvproxy.features.exchange.peer_applier import PeerApplier
from kvproxy.features.exchange.wire import Batch, Bye, Hello, Origin, encode
from kvproxy.operate.companion import Siblings
from tests.features.exchange.support import Deciding, deciding
from tests.support.fake_engine import FakeEngine
from tests.support.loopback import serve

A = EndpointId("a")
OTHER = Origin("elsewhere", 0, 1)
BLOCKS = array("Q", range(1, 41)).tobytes()
CHAIN = ["inference_request", "kvcache", {"rate_limit": {"requests_per_minute": 60}}, "router"]


class Hearing:
    """A running proxy that is told things."""

    def __init__(self, deciding: Deciding) -> None:
        self.one, self._seq = deciding, 0

    @property
    def heard(self) -> PeerApplier:
        return self.one.sync.peers.known[OTHER.place].heard

    def hear(self, *said: Delta) -> None:
        """Apply the next batch."""
        self._seq += 1
        self.one.sync._heard(encode(Batch(OTHER, self._seq, 0.0, list(said), [])), store=False)
        assert self.one.metric("kvproxy_sync_messages_total", result="failed") == 0


@pytest.fixture
async def hearing(tmp_path: Path) -> AsyncIterator[Hearing]:
    """In front of one engine."""
    async with (
        serve(FakeEngine("a")) as engine,
        deciding(engine, siblings=Siblings(tmp_path, 0, 1), filters=CHAIN) as one,
    ):
        one.sync.peers.newcomer.end(one.proxy.clock())
        one.sync._heard(encode(Hello(OTHER)), store=False)
        yield Hearing(one)


async def test_prompts_that_came_past_all_proxies(hearing: Hearing) -> None:
    """They are held where the engine said so, and nowhere else."""
    hearing.hear(Entered("default", "a", BLOCKS))
    assert hearing.one.entries() == 40
    hearing.hear(Entered("default", "gone", BLOCKS), Entered("other", "a", BLOCKS))
    assert hearing.one.entries() == 40
    assert (hearing.heard.told, hearing.heard.unknown) == (3, 2)


async def test_an_engine_that_began_anew_holds_nothing(hearing: Hearing) -> None:
    """When it began is said by each that asks it; the same word again changes nothing."""
    hearing.hear(Started("default", "a", 100.0), Entered("default", "a", BLOCKS))
    hearing.hear(Started("default", "a", 100.0))
    assert hearing.one.entries() == 40
    hearing.hear(Started("default", "a", 200.0))
    assert hearing.one.entries() == 0
    hearing.hear(Started("default", "gone", 1.0))
    assert hearing.heard.unknown == 1
    assert dict(hearing.one.sync.journal.starts.items()) == {("default", "a"): 200.0}


async def test_where_a_session_was_served(hearing: Hearing) -> None:
    """Until it is over."""
    assert hearing.one.proxy.kvcache is not None
    table = hearing.one.proxy.kvcache.overlap.indexes["default"].last_served
    before = table.sessions
    hearing.hear(SessionServed("default", 7, 0, "a", 1.0, 500, 520, BLOCKS, b""))
    assert table.sessions == before + 1
    hearing.hear(SessionServed("default", 7, 0, ""))
    assert table.sessions == before
    hearing.hear(SessionServed("other", 7, 0, "a"))
    assert (table.sessions, hearing.heard.unknown) == (before, 1)


async def test_samples_of_other_processes(hearing: Hearing) -> None:
    """Of tokens, of speeds and of retries; an endpoint that is not there teaches nothing."""
    proxy = hearing.one.proxy
    assert proxy.kvcache is not None
    hearing.hear(Counted("m", 5, 3000, 1000), Counted("m", 0, 3000, 1000))
    assert proxy.kvcache.state.bytes_per_token.look_up("m") == 3.0
    speeds = proxy.clusters["default"].speeds
    assert speeds is not None
    before = speeds.slowness(A, proxy.clock()), speeds.seconds
    hearing.hear(Sample("default", "gone", (1.0, 9000.0, 0.0, 0.0), 3.0, False))
    hearing.hear(Sample("other", "a", (1.0, 9000.0, 0.0, 0.0), 3.0, False))
    assert (speeds.slowness(A, proxy.clock()), speeds.seconds) == before
    hearing.hear(*[Sample("default", "a", (1.0, 9000.0, 0.0, 0.0), 3.0, False)] * 20)
    assert (speeds.slowness(A, proxy.clock()), speeds.seconds) != before
    budget = hearing.one.sync._world.budgets["router"]
    hearing.hear(Retried(0, 4))
    left = 0
    while budget.withdraw_retry(proxy.clock()):
        left += 1
    assert left == 6


async def test_charges_of_other_processes(hearing: Hearing) -> None:
    """To the limit that was meant; one that is not here is left out."""
    hearing.hear(Spent("rate_limit", "x", "requests", 3.0))
    assert hearing.one.spent() == pytest.approx(3.0, abs=0.5)
    hearing.hear(Spent("other", "x", "requests", 3.0), Spent("", "x", "requests", 3.0))
    assert hearing.one.spent() == pytest.approx(3.0, abs=0.5)


async def test_charges_handed_over_count_once(hearing: Hearing) -> None:
    """However many processes hand them over; charges known here already are a part of them."""
    hearing.hear(Spent("rate_limit", "x", "requests", 1.0))
    for _ in range(3):
        hearing.hear(Spent("rate_limit", "x", "requests", 3.0, at_least=True))
    assert hearing.one.spent() == pytest.approx(3.0, abs=0.5)
    hearing.hear(Spent("rate_limit", "x", "requests", 2.0, at_least=True))
    assert hearing.one.spent() == pytest.approx(3.0, abs=0.5)


async def test_drains_of_what_is_not_here(hearing: Hearing) -> None:
    """Neither a cluster nor an endpoint that another one has breaks what comes behind it."""
    hearing.hear(Drained("other", "a", True), Drained("default", "gone", True), Drained("default", "a", True))
    assert hearing.one.proxy.clusters["default"].endpoints[0].draining


async def test_actions_of_other_processes(hearing: Hearing) -> None:
    """A pin is a lease here too; a kind that a later version knows is counted."""
    assert hearing.one.proxy.kvcache is not None
    actions = hearing.one.proxy.kvcache.actions
    store = hearing.one.proxy.kvcache.overlap.store
    done: list[tuple[ActionKind, str, KnownPrefix | None]] = []
    adopt = store.adopt_action
    store.adopt_action = lambda action, at: (  # type: ignore[method-assign]
        done.append((action.kind, action.instance_id, action.prefix)), adopt(action, at),
    )[1]  # fmt: skip
    tokens = array("I", range(64)).tobytes()
    hearing.hear(Used(array("Q", [5, 6]).tobytes(), "m", "", "a", 1), Used(b"", "m", "", "a", 1))
    assert actions.hotness.find_prefix(6) is not None
    hearing.hear(
        Acted("pin", "a", 6, "m", "", tokens), Acted("clear", "a", 0, "m", ""), Acted("pin", "a", 99, "m", "", tokens)
    )
    assert [(kind, instance, prefix and prefix.key) for kind, instance, prefix in done] == [
        (ActionKind.PIN, "a", 6), (ActionKind.CLEAR, "a", None), (ActionKind.PIN, "a", 99),
    ]  # fmt: skip
    known = actions.hotness.find_prefix(6)
    assert known is not None
    assert list(known.tokens) == list(range(64))
    hearing.hear(Acted("teleport", "a", 6, "m", ""))
    assert (len(done), hearing.heard.unknown) == (3, 1)


async def test_siblings_are_heard_by_their_own_way_alone(hearing: Hearing) -> None:
    """Their messages to a store come back from it, and would count twice."""
    one = hearing.one
    sibling = Origin(one.sync.origin.host, 1, 1)
    for message in (Hello(sibling), Batch(sibling, 1, 0.0, [Entered("default", "a", BLOCKS)], [])):
        one.sync._heard(encode(message), store=True)
    assert (one.entries(), list(one.sync.peers.known)) == (0, [OTHER.place])
    one.sync._heard(encode(Hello(sibling)), store=False)
    one.sync._heard(encode(Batch(sibling, 1, 0.0, [Entered("default", "a", BLOCKS)], [])), store=False)
    assert one.entries() == 40
    one.sync._heard(encode(Bye(sibling)), store=True)
    assert list(one.sync.peers.known) == [OTHER.place, sibling.place]
    one.sync._heard(encode(Bye(sibling)), store=False)
    assert list(one.sync.peers.known) == [OTHER.place]
