"""Prompts as block hashes for the prefix index benchmark. Standard library alone: the peer's interpreter reads it."""

from __future__ import annotations

import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

ENDPOINTS = 8
LOOKUP_BLOCKS = 2048
LOOKUPS = 2000


@dataclass(frozen=True)
class Shape:
    """Prompts of one length that begin with a common system prompt."""

    name: str
    blocks: int
    shared: int
    entries: int  # (endpoint, block) pairs in all

    @property
    def prompts(self) -> int:
        """Prompts in all."""
        return self.entries // (self.blocks - self.shared)

    @property
    def stored(self) -> int:
        """(endpoint, block) pairs that come of them."""
        return self.prompts * (self.blocks - self.shared) + ENDPOINTS * self.shared


def shapes(entries: int) -> list[Shape]:
    """From long agent sessions to short questions."""
    return [
        Shape("long", 2048, 64, entries),
        Shape("chat", 256, 32, entries),
        Shape("short", 32, 8, entries),
        Shape("tiny", 8, 4, entries),
    ]


def prompts(shape: Shape) -> Iterator[tuple[int, array[int], int]]:
    """(endpoint, hashes, leading blocks the endpoint has already): random 63-bit hashes, unique but for the shared
    beginning, as chained hashes are.
    """
    rng = random.Random(1)
    shared = [rng.getrandbits(63) for _ in range(shape.shared)]
    for number in range(shape.prompts):
        own = [rng.getrandbits(63) for _ in range(shape.blocks - shape.shared)]
        yield number % ENDPOINTS, array("Q", shared + own), shape.shared if number >= ENDPOINTS else 0


def queries(shape: Shape) -> list[array[int]]:
    """Prompts of 2048 blocks that begin with a stored one (whole, for the long shape), in random order."""
    rng = random.Random(2)
    picked = set(rng.sample(range(shape.prompts), min(shape.prompts, 400)))
    known = [hashes for number, (_, hashes, _) in enumerate(prompts(shape)) if number in picked]
    rest = array("Q", [rng.getrandbits(63) for _ in range(LOOKUP_BLOCKS)])
    return [(each + rest)[:LOOKUP_BLOCKS] for each in rng.choices(known, k=LOOKUPS)]


def time_lookups(lookup: Callable[[Any], object], asked: Sequence[Any]) -> dict[str, float]:
    """Microseconds: p50 and p99 by the clock, and the mean CPU time of all threads."""
    took = []
    cpu = time.process_time()
    for query in asked:
        start = time.perf_counter()
        lookup(query)
        took.append(1e6 * (time.perf_counter() - start))
    cpu = time.process_time() - cpu
    took.sort()
    return {
        "lookup_p50_us": statistics.median(took),
        "lookup_p99_us": took[len(took) * 99 // 100],
        "lookup_cpu_us": 1e6 * cpu / len(asked),
    }


def resident_bytes() -> int:
    """Return this process's resident memory (Linux)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
