"""The breaker: pybreaker's verdicts, settled synchronously, on an injected clock."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys

import pytest

from kvproxy.base.errors import BreakerOpen
from kvproxy.base.resilience.breaker import Breaker, BreakerState
from kvproxy.base.settings.model import BreakerSettings
from tests.support.clock import FakeClock

SETTINGS = BreakerSettings(failure_threshold=3, recovery_timeout=10)


def opened(clock: FakeClock) -> Breaker:
    breaker = Breaker("a", SETTINGS, clock=clock)
    for _ in range(3):
        breaker.admit().record_failure()
    return breaker


def half_open(clock: FakeClock) -> Breaker:
    breaker = opened(clock)
    clock.advance(10)
    return breaker


def test_opens_after_the_threshold_of_failures_in_a_row(clock: FakeClock) -> None:
    """Two failures leave it closed, the third opens it, and then no call is admitted."""
    breaker = Breaker("a", SETTINGS, clock=clock)
    for expected in (BreakerState.CLOSED, BreakerState.CLOSED, BreakerState.OPEN):
        breaker.admit().record_failure()
        assert breaker.state is expected
    assert not breaker.admits
    with pytest.raises(BreakerOpen, match="breaker a is open"):
        breaker.admit()


def test_a_success_forgets_earlier_failures(clock: FakeClock) -> None:
    """Only failures in a row count."""
    breaker = Breaker("a", SETTINGS, clock=clock)
    for _ in range(5):
        breaker.admit().record_failure()
        breaker.admit().record_failure()
        breaker.admit().record_success()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.failures == 0


def test_cancellation_is_neither_failure_nor_success(clock: FakeClock) -> None:
    """A client that leaves blames no engine, and does not wash earlier failures away."""
    breaker = Breaker("a", SETTINGS, clock=clock)
    breaker.admit().record_failure()
    breaker.admit().record_failure()
    for _ in range(10):
        breaker.admit().record_cancellation()
    assert (breaker.state, breaker.failures) == (BreakerState.CLOSED, 2)
    breaker.admit().record_failure()
    assert breaker.state is BreakerState.OPEN


async def test_an_awaited_call_that_is_cancelled_counts_nothing(clock: FakeClock) -> None:
    """The whole pattern: admit, await outside, settle; CancelledError passes through."""
    breaker = Breaker("a", BreakerSettings(failure_threshold=1), clock=clock)
    started = asyncio.Event()

    async def call() -> None:
        permit = breaker.admit()
        try:
            started.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            permit.record_cancellation()
            raise

    task = asyncio.create_task(call(), name="call")
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert breaker.state is BreakerState.CLOSED


@pytest.mark.parametrize(("waited_s", "admits"), [(0.0, False), (9.99, False), (10.0, True), (1e6, True)])
def test_reopens_by_the_injected_clock_alone(clock: FakeClock, waited_s: float, admits: bool) -> None:
    """The wall clock plays no part in recovery."""
    breaker = opened(clock)
    assert breaker.reopens_at == clock.now + 10
    clock.advance(waited_s)
    assert breaker.admits is admits
    assert breaker.state is BreakerState.OPEN


def test_half_open_admits_only_its_probe_slots(clock: FakeClock) -> None:
    """Further callers are refused while the probes run."""
    breaker = half_open(clock)
    breaker.admit()
    breaker.admit()
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.admits
    with pytest.raises(BreakerOpen):
        breaker.admit()


def test_a_cancelled_probe_gives_its_slot_back(clock: FakeClock) -> None:
    """Clients that leave must not leave the breaker stuck half open."""
    breaker = half_open(clock)
    for _ in range(10):
        breaker.admit().record_cancellation()
    assert (breaker.state, breaker.admits) == (BreakerState.HALF_OPEN, True)


def test_a_successful_probe_closes_it(clock: FakeClock) -> None:
    """And failures start counting from nothing."""
    breaker = half_open(clock)
    breaker.admit().record_success()
    assert (breaker.state, breaker.failures) == (BreakerState.CLOSED, 0)
    assert breaker.reopens_at == math.inf


def test_a_failed_probe_opens_it_for_a_whole_period_again(clock: FakeClock) -> None:
    """One failure is enough while half open."""
    breaker = half_open(clock)
    breaker.admit().record_failure()
    assert breaker.state is BreakerState.OPEN
    clock.advance(9.9)
    assert not breaker.admits
    clock.advance(0.1)
    assert breaker.admits


@pytest.mark.parametrize("late", ["record_success", "record_failure", "record_cancellation"])
def test_a_verdict_of_a_past_era_counts_nothing(clock: FakeClock, late: str) -> None:
    """A call admitted before the breaker opened says nothing about the endpoint's recovery, nor frees a slot."""
    breaker = Breaker("a", SETTINGS, clock=clock)
    old = breaker.admit()
    for _ in range(3):
        breaker.admit().record_failure()
    clock.advance(10)
    breaker.admit()
    breaker.admit()
    getattr(old, late)()
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.admits


def test_a_permit_is_settled_once(clock: FakeClock) -> None:
    """The first word stands."""
    breaker = half_open(clock)
    permit = breaker.admit()
    permit.record_cancellation()
    permit.record_failure()
    permit.record_success()
    permit.record_cancellation()
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.admit()
    breaker.admit()
    assert not breaker.admits


def test_on_change_is_told_whenever_admission_may_change(clock: FakeClock) -> None:
    """Opening, half opening, running out of probe slots, a freed slot, closing; not ordinary calls."""
    changes: list[tuple[str, bool]] = []
    breaker = Breaker(
        "a", SETTINGS, clock=clock, on_change=lambda: changes.append((breaker.state.value, breaker.admits))
    )
    breaker.admit().record_success()
    breaker.admit().record_failure()
    assert changes == []
    breaker.admit().record_failure()
    breaker.admit().record_failure()
    assert changes == [("open", False)]
    clock.advance(10)
    first, second = breaker.admit(), breaker.admit()
    assert changes[1:] == [("half-open", True), ("half-open", False)]
    first.record_cancellation()
    assert changes[3:] == [("half-open", True)]
    second.record_success()
    assert changes[4:] == [("closed", True)]


def test_repr_names_it_with_its_state(clock: FakeClock) -> None:
    """For logs."""
    assert repr(opened(clock)) == "<Breaker a open>"


@pytest.mark.slow
def test_the_redis_client_stays_out_until_it_is_asked_for() -> None:
    """pybreaker imports it wherever it is installed: a good part of each start, for nothing. Another user of
    pybreaker in the process has it whole."""
    program = (
        "import sys\n"
        "import kvproxy.app\n"
        "loaded = {'redis', 'opentelemetry'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "import pybreaker\n"
        "assert pybreaker.HAS_REDIS_SUPPORT\n"
    )
    pytest.importorskip("redis")
    subprocess.run([sys.executable, "-c", program], check=True)
