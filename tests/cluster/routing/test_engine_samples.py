"""An engine's counters, beside the requests that ended there."""

from __future__ import annotations

import pytest

from kvproxy.cluster.routing.engine_samples import MAX_READINGS, MAX_WEIGHT, EndedWork, Reading
from kvproxy.cluster.routing.load import EndpointLoad
from kvproxy.cluster.routing.work import Features

Sample = tuple[Features, float, bool]


class World:
    """An endpoint whose requests end, and whose engine counts them."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.load = EndpointLoad(on_sample=self._learn)
        self.ended = EndedWork(self.load)
        self.counted = Reading(100, 50.0)  # the engine has a past
        self.read()

    def serve(self, tokens: int = 1000, *, hidden: bool = True, prefill_s: float | None = 0.5) -> None:
        """One request; with None it ended elsewhere than in the engine's counters."""
        self.ended.add_request(self.load.reserve(tokens, 0, 0.0, hidden=hidden))
        if prefill_s is not None:
            self.count(prefill_s)

    def count(self, prefill_s: float) -> None:
        self.counted = Reading(self.counted.prefills + 1, self.counted.seconds + prefill_s)

    def read(self) -> list[Sample]:
        """Return the samples of one reading."""
        before = len(self.samples)
        self.ended.read_counters(self.counted, 1.0)
        return self.samples[before:]

    def _learn(self, work: Features, busy_s: float, now: float, *, scraped: bool = False) -> None:
        self.samples.append((work, busy_s, scraped))


@pytest.fixture
def world() -> World:
    return World()


def test_the_mean_request_and_its_mean_prefill_are_a_sample(world: World) -> None:
    """Worth as many samples as it has requests."""
    world.serve(1000, prefill_s=0.5)
    world.serve(3000, prefill_s=1.5)
    samples = world.read()
    assert len(samples) == 2
    work, busy_s, scraped = samples[0]
    assert (work[:2], busy_s, scraped) == ((1.0, 2000.0), pytest.approx(1.0), True)
    assert world.read() == []  # nothing ended since


def test_many_requests_do_not_outweigh_everything_before(world: World) -> None:
    """A busy engine's reading is one moment all the same."""
    for _ in range(50):
        world.serve()
    assert len(world.read()) == MAX_WEIGHT


def test_samples_of_streams_are_not_learned_twice(world: World) -> None:
    """Their first tokens are the better samples; with some answers hidden, those weigh."""
    world.serve(hidden=False)
    assert world.read() == []
    for hidden in (True, False, False):
        world.serve(hidden=hidden)
    assert len(world.read()) == 1


def test_a_request_on_its_way_waits_for_the_next_reading(world: World) -> None:
    """The engine has counted its end, its answer is still on the way: nothing is lost, nothing is learned too early."""
    world.serve()
    world.count(0.5)
    assert world.read() == []
    world.serve(prefill_s=None)
    ((work, busy_s, _), _) = world.read()
    assert (work[:2], busy_s) == ((1.0, 1000.0), pytest.approx(0.5))


def test_another_clients_requests_teach_nothing(world: World) -> None:
    """Whose work is unknown; and a burst of theirs does not spoil the counts for ever."""
    for _ in range(MAX_READINGS):
        world.serve()
        world.count(9.0)
        assert world.read() == []
    world.serve()
    assert [busy_s for _, busy_s, _ in world.read()] == [pytest.approx(0.5)]


def test_an_engine_that_tells_its_tokens_teaches_through_strangers(world: World) -> None:
    """Another proxy before the same engines sends three times as much: the mean of all of them is the sample."""
    world.counted = Reading(100, 50.0, 10_000)
    world.read()
    world.ended.add_request(world.load.reserve(1000, 500, 0.0, hidden=True))
    world.counted = Reading(104, 58.0, 10_000 + 8_000)
    ((work, busy_s, _),) = world.read()
    assert (work[:2], busy_s) == ((1.0, 2000.0), pytest.approx(2.0))
    assert work[2] == pytest.approx(2 * 1000 * (500 + 500))  # the attention behind a token is that of ours


def test_tokens_an_engine_stops_telling_are_not_believed(world: World) -> None:
    """Counts have to agree then."""
    world.counted = Reading(100, 50.0, 10_000)
    world.read()
    world.serve()
    assert len(world.read()) == 1


def test_a_few_strangers_are_tolerated(world: World) -> None:
    """A health check that generates a token is one of these."""
    for _ in range(9):
        world.serve()
    world.count(0.5)
    assert len(world.read()) == MAX_WEIGHT


def test_a_request_without_a_prompt_is_no_prefill(world: World) -> None:
    """Lists of models and the like end there, too, and the engine does not count them."""
    for _ in range(5):
        world.serve(0, prefill_s=None)
    assert world.read() == []
    world.serve()
    assert [busy_s for _, busy_s, _ in world.read()] == [pytest.approx(0.5)]


def test_an_engine_that_began_anew_is_counted_anew(world: World) -> None:
    """Its counters say nothing of what the one before it did."""
    world.serve()
    world.counted = Reading(1, 0.1)
    assert world.read() == []
    world.serve(prefill_s=0.25)
    assert [busy_s for _, busy_s, _ in world.read()] == [pytest.approx(0.25)]


def test_the_first_reading_is_only_where_counting_starts(world: World) -> None:
    """The engine's work before this proxy started is not ours."""
    fresh = EndedWork(world.load)
    fresh.add_request(world.load.reserve(1000, 0, 0.0, hidden=True))
    fresh.read_counters(Reading(1, 0.5), 1.0)
    assert world.samples == []
