"""The collector of a serving process: what it never looks at, and when it looks at everything."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise

import pytest

from kvproxy.cache.indexes.precise import PreciseIndex
from kvproxy.cache.indexes.runs import Run
from kvproxy.operate.commands import garbage
from kvproxy.operate.commands.configuration import ConfigSource
from kvproxy.operate.commands.garbage import (
    AT_LATEST_S,
    EVERY_S,
    LOOK_S,
    SHORT_S,
    TRIM_EVERY_S,
    YOUNG_OBJECTS,
    YOUNG_ROUNDS,
    GarbageCollections,
)
from kvproxy.operate.commands.last_resort import LastResort
from kvproxy.operate.commands.serve import serve_until_signal
from tests.cache.indexes.support import A, stored

CHAINS = 2000


class Machine:
    """A clock that only sleeping moves, a collector that is told how long it took, and a proxy."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cpu_s = 0.0
        self.quiet = True
        self.replaced = 0
        self.looked_at: list[float] = []
        self.ends_at = 0.0
        self.policy = GarbageCollections(
            is_quiet=lambda: self.quiet,
            replaced=lambda: self.replaced,
            clock=lambda: self.now,
            cpu_clock=lambda: self.cpu_s,
            sleep=self.sleep,
        )

    async def sleep(self, seconds: float) -> None:
        if self.now >= self.ends_at:
            await asyncio.get_running_loop().create_future()
        self.now += seconds
        await asyncio.sleep(0)

    def collection(self, generation: int, seconds: float) -> None:
        """As the collector tells of one."""
        self.policy._timed("start", {"generation": generation})
        self.cpu_s += seconds
        self.policy._timed("stop", {"generation": generation})

    async def run(self, until: float) -> list[float]:
        """When everything was looked at, until then."""

        def note(phase: str, info: dict[str, int]) -> None:
            if phase == "stop" and info["generation"] == 2:
                self.looked_at.append(self.now)

        self.looked_at = []
        self.ends_at = until
        gc.callbacks.append(note)
        task = asyncio.create_task(self.policy._run())
        try:
            while self.now < until:  # noqa: ASYNC110 - the clock moves with the policy's steps
                await asyncio.sleep(0)
        finally:
            gc.callbacks.remove(note)
            task.cancel()
        return self.looked_at


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Nothing but what a test says; a look at everything takes no time."""

    def collect() -> int:
        for callback in gc.callbacks:
            for phase in ("start", "stop"):
                callback(phase, {"generation": 2})
        return 0

    monkeypatch.setattr(gc, "collect", collect)
    gc.disable()
    yield Machine()
    gc.enable()


async def test_a_short_look_needs_no_quiet(machine: Machine) -> None:
    """Every so often, whatever is being served."""
    machine.quiet = False
    looked_at = await machine.run(until=3 * EVERY_S + 10 * LOOK_S)
    assert len(looked_at) == 3
    assert all(EVERY_S <= later - sooner <= EVERY_S + LOOK_S for sooner, later in pairwise(looked_at))


async def test_a_long_look_waits_for_a_quiet_moment(machine: Machine) -> None:
    """Objects that stayed through the middle generation make it long."""
    machine.quiet = False
    for _ in range(5):
        machine.collection(1, SHORT_S / 2)
    assert await machine.run(until=5 * EVERY_S) == []
    machine.quiet = True
    assert len(await machine.run(until=6 * EVERY_S + 2 * LOOK_S)) == 1


async def test_it_does_not_wait_for_ever(machine: Machine) -> None:
    """Unknown cycles must not fill the memory of a proxy that always has requests."""
    machine.quiet = False
    machine.collection(2, 1.0)
    machine.collection(1, 0.01)
    assert machine.policy.expected_s == pytest.approx(1.01)
    (looked_at,) = await machine.run(until=AT_LATEST_S + 2 * LOOK_S)
    assert looked_at >= AT_LATEST_S


async def test_the_heap_is_trimmed_in_quiet_moments_alone(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed_at: list[float] = []
    monkeypatch.setattr(garbage, "trim_heap", lambda: trimmed_at.append(machine.now))
    machine.quiet = False
    await machine.run(until=3 * TRIM_EVERY_S)
    assert trimmed_at == []
    machine.quiet = True
    await machine.run(until=6 * TRIM_EVERY_S + LOOK_S)
    assert len(trimmed_at) == 3
    assert all(later - sooner >= TRIM_EVERY_S for sooner, later in pairwise(trimmed_at))


async def test_a_replaced_configuration_is_collected_soon(machine: Machine) -> None:
    """It is in cycles with itself."""

    class Replaced:
        """Counts one more from the hundredth second on."""

        def __call__(self) -> int:
            return int(machine.now >= 100)

    machine.policy._replaced = Replaced()
    (looked_at,) = await machine.run(until=EVERY_S - LOOK_S)
    assert 100 <= looked_at <= 100 + LOOK_S


async def test_leaving_puts_back_what_was() -> None:
    """And entering sets what the process keeps to."""
    before = gc.get_threshold()
    async with GarbageCollections(is_quiet=lambda: True) as policy:
        assert gc.get_threshold()[:2] == (YOUNG_OBJECTS, YOUNG_ROUNDS)
        assert gc.get_threshold()[2] > 1_000_000
        assert policy._timed in gc.callbacks
    assert gc.get_threshold() == before
    assert policy._timed not in gc.callbacks
    assert gc.get_freeze_count() == 0


def test_a_batch_of_lookups_is_bounded() -> None:
    """A tenth of a microsecond an object and more: 20 ms are not reached."""
    assert YOUNG_OBJECTS * (YOUNG_ROUNDS + 1) <= 60_000


@pytest.mark.slow
def test_a_chain_of_one_block_is_two_objects_to_the_collector() -> None:
    """Its hashes and its names; the run itself is in no cycle. An engine can make a million of them."""
    index = PreciseIndex()
    index.apply_events(A, 0, [stored((0,))])
    gc.collect()
    before = len(gc.get_objects())
    for number in range(1, CHAINS + 1):
        index.apply_events(A, 0, [stored((number,))])
    gc.collect()
    assert len(gc.get_objects()) - before <= 2 * CHAINS + 100
    assert not any(isinstance(each, Run) for each in gc.get_objects())


@pytest.mark.slow
def test_serve_keeps_to_it() -> None:
    """In a process of its own: the collector is one for the whole process."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.operate.commands.test_garbage"], capture_output=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    serving, afterwards = json.loads(ended.stdout)
    assert serving[:2] == [YOUNG_OBJECTS, YOUNG_ROUNDS]
    assert afterwards == [700, 10, 10]


async def _serve() -> list[tuple[int, int, int]]:
    gc.set_threshold(700, 10, 10)
    source = ConfigSource(endpoints=("http://127.0.0.1:1",), host="127.0.0.1", port=0, admin=False)
    config, problems = await asyncio.to_thread(source.load)
    serving = asyncio.create_task(serve_until_signal(config, problems, source, LastResort()))
    while gc.get_threshold()[0] == 700:
        await asyncio.wait({serving}, timeout=0.01)
        if serving.done():
            serving.result()
    seen = [gc.get_threshold()]
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    return [*seen, gc.get_threshold()]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(_serve())))


LARGE_BODIES = """
import ctypes, sys
from kvproxy.operate.commands.garbage import return_large_memory

class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Heap
if sys.argv[1] == "returned":
    return_large_memory()
kept = [bytes(100_000) for _ in range(200)]  # no hole is left that something small would go into
before = libc.mallinfo2().arena
for _ in range(10):  # large bodies come and go, and something small that came after them stays
    body = [bytes(1_000_000) for _ in range(40)]
    kept.append(bytes(100_000))
    del body
print(libc.mallinfo2().arena - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33 or later")
def test_large_bodies_leave_nothing_in_the_heap() -> None:
    def heap_growth(how: str) -> int:
        run = subprocess.run([sys.executable, "-c", LARGE_BODIES, how], capture_output=True, text=True, check=True)
        return int(run.stdout)

    assert heap_growth("as it is") > 20_000_000
    assert heap_growth("returned") < 2_000_000
