"""The ledger of one endpoint: counts, wait estimate, samples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.base.types import LowerTokens, Tier
from kvproxy.cluster.routing.load import EndpointLoad
from kvproxy.cluster.routing.work import HEAD_REQUESTS, Features, PromptSplit, features_of, seconds_of, sum_of

SECONDS: Features = (0.01, 1e-3, 0.0, 0.0)


class Samples(list[tuple[Features, float, float]]):
    """Samples that a learner would receive."""

    def __call__(
        self, work: Features, busy_s: float, now: float, *, lower: LowerTokens = (), scraped: bool = False
    ) -> None:
        self.append((work, busy_s, now))


@pytest.fixture
def samples() -> Samples:
    return Samples()


@pytest.fixture
def load(samples: Samples) -> EndpointLoad:
    return EndpointLoad(on_sample=samples)


def test_counts_follow_a_request_through_its_life(load: EndpointLoad) -> None:
    """Pending until the first token, resident until the end."""
    reservation = load.reserve(300, 100, 1.0)
    assert (load.in_flight, load.pending_tokens, load.resident_tokens, load.pending_requests) == (1, 300, 400, 1)
    load.first_token(reservation, 2.0)
    assert (load.in_flight, load.pending_tokens, load.resident_tokens, load.pending_requests) == (1, 0, 400, 0)
    assert reservation.first_token_at == 2.0
    load.release(reservation, 3.0)
    load.release(reservation, 4.0)
    assert (load.in_flight, load.pending_tokens, load.resident_tokens) == (0, 0, 0)


def test_one_request_alone_is_one_sample(load: EndpointLoad, samples: Samples) -> None:
    """Busy from the reservation to the first token."""
    load.first_token(load.reserve(300, 100, 1.0), 1.5)
    assert samples == [(features_of(300, 100), 0.5, 1.5)]


def test_first_tokens_of_one_step_are_one_sample(load: EndpointLoad, samples: Samples) -> None:
    """A group closes when a later step's first token comes, or nothing is pending."""
    first, second, third = (load.reserve(100, 0, 0.0) for _ in range(3))
    load.first_token(first, 0.2)
    load.first_token(second, 0.201)
    assert samples == []
    load.first_token(third, 0.3)
    assert [(work[0], round(busy_s, 3)) for work, busy_s, _ in samples] == [(2.0, 0.201), (1.0, 0.099)]


def test_waiting_before_the_engine_is_not_busy_time(load: EndpointLoad, samples: Samples) -> None:
    """A copy of KV, say. While the engine has others to do, these are what it was busy with."""
    waits = load.reserve(300, 100, 1.0)
    load.begin(waits, PromptSplit(300, 100), 5.0)
    assert load.wait_s(SECONDS, 1.0, 5.0) == pytest.approx(0.31)
    load.first_token(waits, 5.5)
    assert samples == [(features_of(300, 100), 0.5, 5.5)]
    other, waits = load.reserve(300, 0, 10.0), load.reserve(300, 0, 10.0)
    load.begin(waits, PromptSplit(300, 0), 10.4)
    load.first_token(other, 10.5)
    load.first_token(waits, 11.0)
    assert [round(busy_s, 3) for _, busy_s, _ in samples[1:]] == [0.5, 0.5]
    load.begin(waits, PromptSplit(300, 0), 12.0)
    assert len(samples) == 3


def test_a_failed_transfer_counts_from_its_beginning(load: EndpointLoad, samples: Samples) -> None:
    """It was to be read from the host's memory, and the engine computes it: nothing is learned of how fast that is."""
    lower = ((Tier.HOST, 600),)
    waits = load.reserve(100, 600, 0.0, onboarding_s=0.05, lower=lower)
    other = load.reserve(300, 0, 0.0)
    load.begin(waits, PromptSplit(700, 0), 0.5)
    assert (load.pending_tokens, load.resident_tokens) == (1000, 1000)
    assert load._work == pytest.approx(sum_of(features_of(300, 0), features_of(700, 0)))
    load.first_token(other, 0.6)
    assert load.wait_s(SECONDS, 1.0, 0.6) == pytest.approx(seconds_of(features_of(700, 0), SECONDS))
    load.first_token(waits, 1.6)
    assert [(work, round(busy_s, 3)) for work, busy_s, _ in samples] == [
        (features_of(300, 0), 0.6),
        (features_of(700, 0), 1.0),
    ]
    assert waits.lower == ()
    load.begin(waits, PromptSplit(0, 900), 2.0)  # it has its first token
    assert (load.pending_tokens, waits.uncached_tokens) == (0, 700)


def test_a_prompt_of_another_length_than_was_counted_leaves_nothing_over(load: EndpointLoad) -> None:
    """More is known of it when the engine gets it."""
    waits = load.reserve(100, 600, 0.0)
    load.begin(waits, PromptSplit(900, 0), 0.5)
    assert (load.pending_tokens, load.resident_tokens) == (900, 900)
    load.release(waits, 1.0)
    assert (load.pending_tokens, load.resident_tokens, load.in_flight) == (0, 0, 0)


def test_an_idle_gap_is_not_busy(load: EndpointLoad, samples: Samples) -> None:
    """A sample begins with the work, not with the end of the one before."""
    load.first_token(load.reserve(100, 0, 0.0), 0.2)
    load.first_token(load.reserve(100, 0, 50.0), 50.3)
    assert [round(busy_s, 3) for _, busy_s, _ in samples] == [0.2, 0.3]


def test_a_cancelled_prefill_voids_the_open_sample(load: EndpointLoad, samples: Samples) -> None:
    """The engine may have worked for it, it is not known how long."""
    kept, gone = load.reserve(100, 0, 0.0), load.reserve(900, 0, 0.0)
    load.release(gone, 0.4)
    load.first_token(kept, 0.5)
    assert [(work[1], round(busy_s, 3)) for work, busy_s, _ in samples] == [(100.0, 0.1)]


def test_the_end_of_a_decode_voids_nothing(load: EndpointLoad, samples: Samples) -> None:
    """Releases after the first token have nothing to do with prefill."""
    decoding = load.reserve(100, 0, 0.0)
    load.first_token(decoding, 0.1)
    pending = load.reserve(200, 0, 1.0)
    load.release(decoding, 1.1)
    load.first_token(pending, 1.3)
    assert [round(busy_s, 3) for _, busy_s, _ in samples] == [0.1, 0.3]


def test_without_a_learner_nothing_breaks() -> None:
    """A ledger alone counts."""
    load = EndpointLoad()
    load.first_token(load.reserve(10, 0, 0.0), 0.1)
    assert load.in_flight == 1


def test_a_first_token_after_the_release_changes_nothing(load: EndpointLoad, samples: Samples) -> None:
    """A late byte of a cancelled request is no sample."""
    reservation = load.reserve(10, 0, 0.0)
    load.release(reservation, 0.1)
    load.first_token(reservation, 0.2)
    assert samples == []
    assert reservation.first_token_at is None


def test_an_idle_endpoint_has_no_wait(load: EndpointLoad) -> None:
    """Nothing pending, nothing to wait for."""
    assert load.wait_s(SECONDS, 5.0, 0.0) == 0.0


def test_wait_is_pending_work_times_slowness(load: EndpointLoad) -> None:
    """In the endpoint's own seconds."""
    load.reserve(1000, 0, 0.0)
    assert load.wait_s(SECONDS, 2.0, 0.0) == pytest.approx(2.02)


def test_progress_shortens_the_wait_but_never_finishes_the_head(load: EndpointLoad) -> None:
    """Time since the last first token counts, up to 95 % of what the engine works at now."""
    load.reserve(2048, 0, 0.0)
    load.reserve(1000, 0, 0.0)
    assert load.wait_s(SECONDS, 1.0, 1.0) == pytest.approx(3.068 - 1.0)
    assert load.wait_s(SECONDS, 1.0, 4.0) == pytest.approx(3.068 - 0.95 * 2.058)


def test_the_head_is_bounded(load: EndpointLoad) -> None:
    """Fully cached requests do not all run at once."""
    for _ in range(HEAD_REQUESTS + 44):
        load.reserve(0, 64, 0.0)
    assert load.wait_s(SECONDS, 1.0, 5.0) == pytest.approx(3.0 - 0.95 * 2.56)


def test_lower_tiers_are_part_of_the_pending_work(load: EndpointLoad) -> None:
    """Bringing blocks up takes the engine's time."""
    load.reserve(0, 1000, 0.0, onboarding_s=0.6)
    assert load.wait_s((0.0, 0.0, 0.0, 1.0), 1.0, 0.0) == pytest.approx(0.6)


def test_a_sample_tells_what_was_brought_up_for_it() -> None:
    """Of the first tokens in it alone: what leaves before its first token takes the open sample with it."""
    told: list[LowerTokens] = []
    load = EndpointLoad(on_sample=lambda work, busy_s, now, *, lower=(), scraped=False: told.append(lower))
    host, disk = ((Tier.HOST, 600),), ((Tier.DISK, 50),)
    first, second, third = (load.reserve(0, 1000, 0.0, lower=lower) for lower in (host, disk, host))
    load.first_token(first, 1.0)
    load.first_token(second, 1.001)  # one step of the engine
    load.first_token(third, 2.0)
    assert told == [(*host, *disk), host]
    kept, gone = load.reserve(0, 1000, 3.0, lower=disk), load.reserve(0, 1000, 3.0, lower=host)
    load.first_token(kept, 4.0)
    load.release(gone, 5.0)
    load.first_token(load.reserve(10, 0, 6.0), 7.0)
    assert told[2:] == [()]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5000), st.integers(0, 5000)), max_size=60))
def test_every_order_of_events_settles_to_zero(steps: list[tuple[int, int, int]]) -> None:
    """Whatever happens to requests, nothing leaks and the wait never goes below zero."""
    load, live, now = EndpointLoad(), [], 0.0
    for action, uncached, cached in steps:
        now += 0.1
        if action == 0 or not live:
            live.append(load.reserve(uncached, cached, now))
        elif action == 1:
            load.first_token(live[uncached % len(live)], now)
        else:
            load.release(live.pop(uncached % len(live)), now)
        assert load.wait_s(SECONDS, 1.0, now) >= 0.0
    for reservation in live:
        load.release(reservation, now)
    assert (load.in_flight, load.pending_tokens, load.resident_tokens, load.pending_requests) == (0, 0, 0, 0)
    assert load._work == pytest.approx((0.0, 0.0, 0.0, 0.0), abs=1e-3)


def test_a_later_first_token_shows_that_hidden_ones_are_prefilled(load: EndpointLoad, samples: Samples) -> None:
    """Engines prefill in order of arrival, so their work belongs to the same sample."""
    load.reserve(1000, 0, 0.0, hidden=True)
    streamed = load.reserve(500, 0, 0.0)
    load.first_token(streamed, 1.5)
    assert load.pending_tokens == 0
    assert [(work[:2], busy) for work, busy, _ in samples] == [((2.0, 1500.0), 1.5)]


def test_a_hidden_one_behind_the_first_token_stays_pending(load: EndpointLoad) -> None:
    """It has not been reached."""
    streamed = load.reserve(500, 0, 0.0)
    load.reserve(1000, 0, 0.0, hidden=True)
    load.first_token(streamed, 0.5)
    assert (load.pending_tokens, load.pending_requests) == (1000, 1)


def test_a_hidden_request_is_presumed_prefilled_when_its_time_has_passed(load: EndpointLoad) -> None:
    """A long answer that is not streamed does not look like a long prefill."""
    load.reserve(1000, 0, 0.0, hidden=True)
    per_token = (0.0, 0.001, 0.0, 0.0)
    assert load.wait_s(per_token, 1.0, 0.5) == pytest.approx(0.5)
    assert load.wait_s(per_token, 1.0, 1.0) == 0.0
    assert load.pending_tokens == 1000  # asking changes nothing
    load.advance(per_token, 1.0, 1.0)
    assert load.pending_tokens == 0
    assert load.in_flight == 1


@pytest.mark.parametrize("moment", [0.0, 0.3, 0.99, 1.0, 1.7, 3.5, 9.0])
@pytest.mark.parametrize("hidden", [(True, True, False), (False, True, True), (True, False, True)])
def test_the_wait_is_that_of_the_backlog(load: EndpointLoad, hidden: tuple[bool, ...], moment: float) -> None:
    """Worked out shortly where no hidden request is over; at other speeds and moments the same again."""
    for one in hidden:
        load.reserve(1000, 500, 0.0, hidden=one)
    for seconds in (SECONDS, (0.0, 0.002, 0.0, 0.0), SECONDS):
        for slowness in (1.0, 2.0):
            expected = load.backlog(seconds, slowness, moment).wait_s(seconds, slowness)
            assert load.wait_s(seconds, slowness, moment) == pytest.approx(expected)


def test_hidden_requests_are_prefilled_one_after_the_other(load: EndpointLoad) -> None:
    """The second began when the first must have been done, so that half of it is done half its time later."""
    per_token = (0.0, 0.001, 0.0, 0.0)
    load.reserve(1000, 0, 0.0, hidden=True)
    load.reserve(1000, 0, 0.6, hidden=True)
    load.reserve(1000, 0, 0.6, hidden=True)
    assert load.wait_s(per_token, 1.0, 1.5) == pytest.approx(1.5)
    load.advance(per_token, 1.0, 1.5)
    assert (load.pending_requests, load.wait_s(per_token, 1.0, 1.5)) == (2, pytest.approx(1.5))
    assert load.wait_s(per_token, 1.0, 2.25) == pytest.approx(0.75)
    load.advance(per_token, 1.0, 2.25)
    assert (load.pending_requests, load.hidden_requests) == (1, 1)


def test_the_end_of_a_hidden_request_shows_that_those_before_it_are_prefilled(load: EndpointLoad) -> None:
    """Whatever the estimate says; a short answer overtakes a long one, not its prefill."""
    load.reserve(1000, 0, 0.0, hidden=True)
    short = load.reserve(1000, 0, 0.0, hidden=True)
    load.reserve(1000, 0, 0.0, hidden=True)
    load.first_token(short, 0.5)
    assert load.pending_requests == 1
    assert load.wait_s((0.0, 0.001, 0.0, 0.0), 1.0, 0.75) == pytest.approx(0.75)


def test_the_end_of_a_hidden_request_is_no_sample(load: EndpointLoad, samples: Samples) -> None:
    """When its prefill ended within its answer is not known; what follows is learned from afresh."""
    hidden = load.reserve(1000, 0, 0.0, hidden=True)
    load.first_token(hidden, 9.0)
    load.release(hidden, 9.0)
    streamed = load.reserve(500, 0, 10.0)
    load.first_token(streamed, 10.5)
    assert [(work[:2], busy) for work, busy, _ in samples] == [((1.0, 500.0), 0.5)]
    assert (load.in_flight, load.pending_tokens, load.resident_tokens) == (0 + 1, 0, 500)


@pytest.mark.parametrize("hidden", [False, True])
def test_an_unknown_prompt_is_no_sample(load: EndpointLoad, samples: Samples, hidden: bool) -> None:
    """How much the engine computed for it is not known; what follows is learned from afresh."""
    unknown = load.reserve(0, 0, 0.0, hidden=hidden)
    load.first_token(unknown, 9.0)
    load.first_token(load.reserve(500, 0, 10.0), 10.5)
    assert [(work[:2], busy) for work, busy, _ in samples] == [((1.0, 500.0), 0.5)]
    assert (unknown.first_token_at, load.pending_requests) == (None if hidden else 9.0, 0)


@pytest.mark.parametrize("hidden", [False, True])
def test_a_prompt_that_was_not_looked_for_counts_and_is_no_sample(
    load: EndpointLoad, samples: Samples, hidden: bool
) -> None:
    """Its length is known, but not how much of it the engine had to compute."""
    reservation = load.reserve(300, 0, 0.0, hidden=hidden, known=False)
    assert (load.pending_tokens, load.resident_tokens) == (300, 300)
    load.first_token(reservation, 1.0)
    load.release(reservation, 2.0)
    assert samples == []


@pytest.mark.parametrize("hidden", [False, True])
def test_prefills_behind_an_unknown_prompt_are_learned_from_its_end_on(
    load: EndpointLoad, samples: Samples, hidden: bool
) -> None:
    """A hidden one ends at a time that is not known, so the first token behind it ends no sample, either."""
    unknown = load.reserve(0, 0, 0.0, hidden=hidden)
    second = load.reserve(500, 0, 0.0)
    third = load.reserve(400, 0, 0.0)
    if not hidden:
        load.first_token(unknown, 3.0)
    load.first_token(second, 3.5)
    load.first_token(third, 4.0)
    learned = [(work[:2], busy) for work, busy, _ in samples]
    assert learned == ([] if hidden else [((1.0, 500.0), 0.5)]) + [((1.0, 400.0), 0.5)]


def test_an_unknown_prompt_that_is_presumed_prefilled_voids_the_next_sample(
    load: EndpointLoad, samples: Samples
) -> None:
    """The engine is still at work on it when its estimated time, that of no token, has passed."""
    load.reserve(0, 0, 0.0, hidden=True)
    streamed = load.reserve(500, 0, 0.0)
    load.advance(SECONDS, 1.0, 0.5)
    assert load.pending_requests == 1
    load.first_token(streamed, 4.0)
    assert samples == []


def test_an_overdue_step_counts_as_not_begun() -> None:
    """A step at work for much longer than it takes is something else: what is pending is all still to do, where it
    seemed nearly done before."""
    load = EndpointLoad()
    load.reserve(990, 0, 0.0)
    assert load.wait_s(SECONDS, 1.0, 1.9) == pytest.approx(0.05)
    assert load.wait_s(SECONDS, 1.0, 2.1) == pytest.approx(1.0)
    assert load.backlog(SECONDS, 1.0, 2.1).wait_s(SECONDS, 1.0) == pytest.approx(1.0)


def test_a_request_that_waits_for_a_slot_stays_pending(samples: Samples, load: EndpointLoad) -> None:
    """Its whole prefill is still to come, and how long it took teaches that the engine is slow just now."""
    for _ in range(4):
        load.first_token(load.reserve(100, 0, 0.0), 0.1)
    samples.clear()
    waiting = load.reserve(100, 0, 1.0)
    assert load.wait_s(SECONDS, 1.0, 3.0) == pytest.approx(0.11)
    load.first_token(waiting, 4.0)
    assert [busy_s for _, busy_s, _ in samples] == [3.0]
