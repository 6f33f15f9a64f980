from __future__ import annotations

from kvproxy.base.types import EndpointId
from kvproxy.cache.indexes.approximate import MAX_CAPACITY_BLOCKS, STEP_RUNS, ApproximateIndex
from tests.cache.indexes.support import A, B, C, chained

PROMPT = tuple(range(10))


def test_a_request_in_flight_counts_as_cached_soon() -> None:
    """A burst of one prompt sees where the first of it went."""
    index = ApproximateIndex()
    claim = index.route(A, index.locate(chained(PROMPT)))
    assert claim.new_blocks == 10
    assert index.lookup(index.locate(chained((*PROMPT, 99)))) == {A: 10}


def test_a_failed_request_takes_back_what_it_alone_inserted() -> None:
    """Blocks that were there before, or that another request in flight counts on, stay."""
    index = ApproximateIndex()
    index.insert(A, index.locate(chained(PROMPT[:3])))
    first = index.route(A, index.locate(chained(PROMPT[:6])))
    second = index.route(A, index.locate(chained(PROMPT)))
    index.rollback(first)
    assert index.lookup(index.locate(chained(PROMPT))) == {A: 10}
    index.rollback(second)
    assert index.lookup(index.locate(chained(PROMPT))) == {A: 3}
    index.rollback(second)
    assert index.counts.entries == 3


def test_a_confirmed_request_vouches_for_all_of_its_prompt() -> None:
    """Once one of two requests was answered, the other's failure changes nothing."""
    index = ApproximateIndex()
    first, second = index.route(A, index.locate(chained(PROMPT))), index.route(A, index.locate(chained(PROMPT)))
    index.confirm(first)
    index.rollback(second)
    assert index.lookup(index.locate(chained(PROMPT))) == {A: 10}


def test_a_contradiction_drops_the_prefix_and_what_extends_it() -> None:
    """The engine evicts from the end: without block 4 there is nothing beyond it, in any branch. Others keep theirs."""
    index = ApproximateIndex()
    for tail in ((), (77, 78), (88,)):
        index.insert(A, index.locate(chained((*PROMPT, *tail))))
    index.insert(B, index.locate(chained(PROMPT)))
    index.insert(A, index.locate(chained((*PROMPT[:4], 99))))
    assert index.contradict(A, index.locate(chained(PROMPT)), 4) == 9
    assert index.lookup(index.locate(chained((*PROMPT, 77)))) == {A: 4, B: 10}
    assert index.lookup(index.locate(chained((*PROMPT[:4], 99)))) == {A: 5, B: 4}


def test_the_contradicted_request_itself_was_computed() -> None:
    """Its own prompt is held again once it is confirmed; the rest of the prefix's branches are not."""
    index = ApproximateIndex()
    index.insert(A, index.locate(chained((*PROMPT, 77))))
    claim = index.route(A, index.locate(chained((*PROMPT, 88))))
    assert index.contradict(A, claim.cursor, 0) == 12
    index.confirm(claim)
    assert index.lookup(index.locate(chained((*PROMPT, 77)))) == {A: 10}
    assert index.lookup(index.locate(chained((*PROMPT, 88)))) == {A: 11}


def test_nothing_to_contradict() -> None:
    """An unknown endpoint, an unknown prompt, or an engine that had it all."""
    index = ApproximateIndex()
    index.insert(A, index.locate(chained(PROMPT)))
    assert index.contradict(B, index.locate(chained(PROMPT)), 0) == 0
    assert index.contradict(A, index.locate(chained((5, 5))), 0) == 0
    assert index.contradict(A, index.locate(chained(PROMPT)), 10) == 0


def test_an_endpoint_forgets_like_its_engine() -> None:
    """The end of the prompt not asked for longest goes first, and only as much as needed."""
    index = ApproximateIndex(capacity_blocks=20)
    index.insert(A, index.locate(chained(PROMPT)))
    index.insert(A, index.locate(chained((50, *PROMPT[:8]))))
    index.insert(A, index.locate(chained((60, 61, 62))))
    assert index.lookup(index.locate(chained(PROMPT))) == {A: 8}
    assert index.counts.held_blocks(A) == 20


def test_a_late_settlement_after_a_restart_is_void() -> None:
    """The engine lost its cache in between, or left."""
    index = ApproximateIndex()
    confirmed, failed = index.route(A, index.locate(chained(PROMPT))), index.route(A, index.locate(chained((7, 7))))
    index.clear(A)
    gone = index.route(B, index.locate(chained(PROMPT)))
    index.remove(B)
    for claim in (confirmed, gone):
        index.confirm(claim)
    index.rollback(failed)
    assert (index.counts.entries, index.counts.endpoints) == (0, (A,))


def test_clearing_keeps_the_capacity() -> None:
    """A restarted engine is as large as before; one that left is forgotten altogether."""
    index = ApproximateIndex(capacity_blocks=100)
    index.set_capacity(A, 7)
    index.clear(A)
    assert index.counts.capacity(A) == 7
    index.remove(A)
    assert index.counts.capacity(A) == 100


def test_no_engine_makes_the_index_keep_what_it_likes() -> None:
    """Its word on how much it holds is believed up to a bound."""
    index = ApproximateIndex()
    index.set_capacity(A, 10**18)
    assert index.counts.capacity(A) == MAX_CAPACITY_BLOCKS


def test_a_growing_chat_stays_one_run() -> None:
    """Memory follows blocks, not turns."""
    index = ApproximateIndex()
    for turn in range(1, 200):
        index.confirm(index.route(A, index.locate(chained(range(5 * turn)))))
    assert (index.counts.runs, index.counts.held_blocks(A)) == (1, 995)


def test_touch_records_do_not_pile_up() -> None:
    """A prompt asked for a thousand times is remembered once, and the order of eviction survives tidying up."""
    index = ApproximateIndex(capacity_blocks=20)
    index.insert(A, index.locate(chained(PROMPT)))
    index.insert(A, index.locate(chained((50, 51))))
    for _ in range(1000):
        index.insert(A, index.locate(chained(PROMPT)))
    touched = list(index.counts.newest_first(A))
    assert len(touched) < 100
    assert len([run for run in touched if run is not None]) == 2
    index.insert(A, index.locate(chained((70, *range(9)))))
    assert index.lookup(index.locate(chained((50, 51)))) == {}
    assert index.lookup(index.locate(chained(PROMPT))) == {A: 10}


def test_no_single_call_gives_up_more_than_a_step() -> None:
    """An endpoint that leaves, or shrinks, is worked off over the following calls."""
    index = ApproximateIndex()
    for session in range(3 * STEP_RUNS):
        index.insert(A, index.locate(chained((session,))))
        index.insert(B, index.locate(chained((session,))))
    index.set_capacity(B, 0)
    assert index.counts.held_blocks(B) == 2 * STEP_RUNS
    index.remove(A)
    assert index.lookup(index.locate(chained((3 * STEP_RUNS - 1,)))) == {B: 1}
    assert index.counts.entries == 4 * STEP_RUNS
    while not index.sweep(STEP_RUNS) or index.counts.entries:
        index.insert(B, index.locate(chained((1,))))
    assert index.counts.entries == index.counts.runs == 0


def test_unswept_blocks_of_an_endpoint_that_left_match_nobody() -> None:
    """Not even another endpoint that never held them."""
    index = ApproximateIndex()
    index.insert(B, index.locate(chained((0,))))
    for session in range(2 * STEP_RUNS):
        index.insert(A, index.locate(chained((1, session))))
    index.remove(A)
    assert index.lookup(index.locate(chained((1, 2 * STEP_RUNS - 1)))) == {}


def test_endpoints_beyond_the_bound_are_passed_over() -> None:
    """No room for one more endpoint costs its overlap, not the request; a place is free again once swept."""
    index = ApproximateIndex(max_endpoints=2)
    index.insert(A, index.locate(chained(PROMPT)))
    index.insert(B, index.locate(chained(PROMPT)))
    claim = index.route(C, index.locate(chained(PROMPT)))
    index.insert(C, index.locate(chained(PROMPT)))
    index.set_capacity(C, 5)
    index.confirm(claim)
    index.rollback(claim)
    assert index.lookup(index.locate(chained(PROMPT))) == {A: 10, B: 10}
    index.remove(A)
    index.insert(C, index.locate(chained(PROMPT[:4])))
    assert index.lookup(index.locate(chained(PROMPT))) == {B: 10, C: 4}


def test_every_endpoint_of_a_fleet_of_thousands_is_known() -> None:
    """All hold the common beginning; the one that was asked holds more."""
    index = ApproximateIndex()
    endpoints = [EndpointId(f"e{n}") for n in range(2500)]
    for number, endpoint in enumerate(endpoints):
        index.insert(endpoint, index.locate(chained((*PROMPT, 1000 + number))))
    found = index.lookup(index.locate(chained((*PROMPT, 1999))))
    assert found == {**dict.fromkeys(endpoints, 10), EndpointId("e999"): 11}


def test_five_hundred_and_twelve_endpoints() -> None:
    """Wide masks are masks."""
    index = ApproximateIndex()
    endpoints = [EndpointId(f"e{n}") for n in range(512)]
    for depth, endpoint in enumerate(endpoints, 1):
        index.insert(endpoint, index.locate(chained(range(depth))))
    assert index.lookup(index.locate(chained(range(600)))) == {
        endpoint: depth for depth, endpoint in enumerate(endpoints, 1)
    }
    for endpoint in endpoints[:500]:
        index.remove(endpoint)
    assert len(index.lookup(index.locate(chained(range(600))))) == 12


def test_a_cursor_follows_what_changes_on_its_path() -> None:
    """Split above its end, grown at its end, given up and taken in again: it answers as a new one does."""
    index = ApproximateIndex(capacity_blocks=30)
    cursor = index.locate(chained(PROMPT))
    index.confirm(index.route(A, cursor))
    index.insert(A, index.locate(chained((*PROMPT, 77))))
    assert index.lookup(cursor) == {A: 10}
    index.insert(B, index.locate(chained((*PROMPT[:4], 99))))
    assert index.lookup(cursor) == {A: 10, B: 4}
    index.insert(C, index.locate(chained(PROMPT)))
    index.insert(C, index.locate(chained((*PROMPT, 77))))
    assert index.lookup(cursor) == {A: 10, B: 4, C: 10}
    for endpoint in (A, C):
        index.contradict(endpoint, index.locate(chained(PROMPT)), 6)
    assert index.lookup(cursor) == {A: 6, B: 4, C: 6}
    index.confirm(index.route(B, cursor))
    index.remove(B)
    assert index.lookup(cursor) == {A: 6, C: 6}
    index.insert(B, index.locate(chained(PROMPT)))
    index.insert(B, index.locate(chained((*PROMPT, 5))))
    assert index.lookup(cursor) == {A: 6, C: 6, B: 10}
