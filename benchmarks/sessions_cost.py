"""CPU that the admission of sessions adds to a request: the same turns decided, placed and ended with it and without.

    python -m benchmarks.sessions_cost [--rounds 9] [--out FOLDER]

In one process, in pairs. 256 sessions on eight endpoints, each turn with 20 blocks more, at first 400 (some 25,000
tokens). Once everything fits; once the memory is full, 200 sessions wait and the turns of residents are decided beside
them. Writes sessions_cost.md.
"""

from __future__ import annotations

import argparse
import random
import time
from array import array
from pathlib import Path
from statistics import median, quantiles

import msgspec
import psutil

from benchmarks.markdown import table
from benchmarks.report import machine
from kvproxy.base.metrics.groups import Metrics
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.pick import AttemptOutcome
from kvproxy.cluster.routing.load import EngineState
from kvproxy.cluster.routing.policy import OverlapFacts, PickRequest
from kvproxy.cluster.routing.selector import Decision
from kvproxy.cluster.settings import ClusterSettings, EndpointSettings, HealthCheckSettings
from kvproxy.features.residents.admission import SessionAdmission

ENDPOINTS = 8
SESSIONS = 256
TURNS = 8
FIRST_BLOCKS, MORE_BLOCKS, BLOCK_TOKENS = 400, 20, 64
WAITING = 200
ROOMY, FULL = 100_000_000, 900_000


class World:
    """A cluster, with admission or without, and a clock that the caller moves."""

    def __init__(self, *, admits: bool, capacity_tokens: int) -> None:
        self.now = 0.0
        settings = ClusterSettings(
            endpoints=tuple(EndpointSettings(id=f"e{n}", url=f"http://127.0.0.1:{n + 1}") for n in range(ENDPOINTS)),
            health=HealthCheckSettings(active=False),
        )
        self.cluster = Cluster("c", settings, metrics=Metrics(), clock=lambda: self.now, rng=random.Random(1))
        for one in self.cluster.endpoints:
            one.load.engine = EngineState(0.0, capacity_tokens)
        self.rule = SessionAdmission()
        if admits:
            assert self.cluster.queue is not None
            self.cluster.admission = self.cluster.queue.admission = self.rule

    def play(self, session: int, turn: int) -> float:
        """Decide, place and end one turn; returns microseconds of CPU."""
        asked = question(session, FIRST_BLOCKS + turn * MORE_BLOCKS)
        self.now += 0.001
        began = time.process_time_ns()
        decision = self.cluster.decide(asked, self.now)
        assert isinstance(decision, Decision)
        pick = self.cluster.reserve(decision, self.now)
        pick.settle(AttemptOutcome.SUCCESS, self.now)
        return (time.process_time_ns() - began) / 1000.0


def question(session: int, blocks: int) -> PickRequest:
    """Return the question for a turn; sessions begin with the same block."""
    hashes = array("Q", [1, *range(1_000_000 * (session + 1), 1_000_000 * (session + 1) + blocks - 1)])
    return PickRequest(facts=OverlapFacts(blocks * BLOCK_TOKENS, blocks=hashes, block_tokens=BLOCK_TOKENS))


def measure(*, crowded: bool) -> tuple[float, float]:
    """Return the mean microseconds of a turn, with admission and without."""
    worlds = [World(admits=admits, capacity_tokens=FULL if crowded else ROOMY) for admits in (True, False)]
    spent = [0.0, 0.0]
    for turn in range(TURNS):
        if crowded and turn == 2:
            for number in range(WAITING):
                asked = msgspec.structs.replace(question(SESSIONS + number, FIRST_BLOCKS), waits_for_room=True)
                worlds[0].rule.wait(asked, worlds[0].now)
        for session in range(SESSIONS):
            for which, world in enumerate(worlds):
                us = world.play(session, turn)
                spent[which] += us if turn >= 2 else 0.0
    count = SESSIONS * (TURNS - 2)
    return spent[0] / count, spent[1] / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/reports"))
    asked = parser.parse_args()
    about = machine(psutil.cpu_count() or 1, "python -m benchmarks.sessions_cost")
    rows = []
    for name, crowded in (("all sessions fit", False), (f"{WAITING} wait", True)):
        pairs = [measure(crowded=crowded) for _ in range(asked.rounds)]
        more = [on - off for on, off in pairs]
        low, _, high = quantiles(more, n=4)
        on, off = (median(pair[which] for pair in pairs) for which in (0, 1))
        rows.append([name, f"{off:.1f}", f"{on:.1f}", f"{median(more):.1f}", f"{low:.1f} to {high:.1f}"])
    lines = ["# CPU of the admission of sessions", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    lines += [
        "A turn of a session decided, placed and ended, in microseconds of CPU; medians of paired rounds.",
        "",
        *table(["", "without", "with", "more", "quartiles"], rows),
        "",
    ]
    (asked.out / "sessions_cost.md").write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
