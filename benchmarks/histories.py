"""Conversations that go on by `previous_response_id`: the benefit of the session's last endpoint.

    python -m benchmarks.histories            # writes benchmarks/reports/histories.md

A trace of sessions is played in virtual time on eight engines. Of a later turn the router sees no text: its prompt
begins with a history that only an engine has. It uses nothing, the session (`cache/overlap/last_served.py`, the class
the proxy uses), or, to compare, the text that a client with the whole history sends."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import msgspec

from kvproxy.cache.overlap.last_served import LastServed, RequestNames
from kvproxy.cluster.routing.policy import SESSION, Overlap, OverlapFacts
from kvproxy.lab.replay.compare import PolicySpec, play_policy
from kvproxy.lab.replay.pooled import measure_bound
from kvproxy.lab.replay.results import summarize_outcomes
from kvproxy.lab.replay.router import LiveRequest, Placement, VirtualRouter
from kvproxy.lab.replay.settings import ReplayFleet
from kvproxy.lab.replay.trace import read_trace

HERE = Path(__file__).parent
TRACE, CAPACITY_TOKENS, INSTANCES = "agent_dev", 500_000, 8
LOADS = (0.7,)


class Blind(VirtualRouter):
    """Router without information on later turns but their length."""

    def facts_of(self, request: LiveRequest, now: float) -> OverlapFacts:
        facts = super().facts_of(request, now)
        return facts if request.number == 0 else OverlapFacts(facts.prompt_tokens)


class Remembering(VirtualRouter):
    """Router that keeps where the session was served last, and overlaps of its first prompt, as the proxy does."""

    def facts_of(self, request: LiveRequest, now: float) -> OverlapFacts:
        facts = super().facts_of(request, now)
        if request.number == 0:
            return facts
        last = self._last_served().find_history(RequestNames(session=request.session + 1), now)
        if last is None:
            return OverlapFacts(facts.prompt_tokens)
        root = self._roots[request.session]
        found = {name: Overlap(min(one.tokens, root)) for name, one in facts.by_endpoint.items()}
        found[last.endpoint] = Overlap(min(last.prompt_tokens, facts.prompt_tokens), (), SESSION)
        return msgspec.structs.replace(facts, by_endpoint=found, hot_tokens=min(facts.hot_tokens, root))

    def finished(self, placement: Placement, now: float) -> None:
        request, turn = placement.request, placement.request.turn
        self._last_served().note_served(
            RequestNames(session=request.session + 1),
            response_id="",
            endpoint=placement.endpoint.id,
            prompt_tokens=turn.prompt_tokens,
            answer_tokens=turn.output_tokens,
            now=now,
        )
        self._roots.setdefault(request.session, turn.prompt_tokens)
        super().finished(placement, now)

    def _last_served(self) -> LastServed:
        if not hasattr(self, "_last"):
            self._last, self._roots = LastServed(), dict[int, int]()
        return self._last


CASES: tuple[tuple[str, str, type[VirtualRouter]], ...] = (
    ("the whole history is sent: `kv_aware`", "kv_aware", VirtualRouter),
    ("by id: `kv_aware`, sessions known", "kv_aware", Remembering),
    ("by id: `session`", "session", Blind),
    ("by id: `consistent_hash`", "consistent_hash", Blind),
    ("by id: `kv_aware`, nothing known", "kv_aware", Blind),
    ("by id: `least_request`", "least_request", Blind),
)


def main() -> int:
    """Plays all of it and writes the report."""
    trace = read_trace(HERE / "traces" / f"{TRACE}.jsonl.gz")
    fleet = ReplayFleet(instances=INSTANCES, capacity_tokens=CAPACITY_TOKENS)
    rows = {name: [name] for name, _, _ in CASES}
    for load in LOADS:
        bound = measure_bound(trace, fleet.undisturbed(), load)
        for name, policy, router in CASES:
            made = PolicySpec.parse(policy).make(rng=Random(1))
            outcomes = play_policy(bound.trace, bound.pace, fleet, made, router_type=router)
            summary = summarize_outcomes(outcomes, INSTANCES)
            rows[name] += [f"{summary.ttft_mean_s * 1000:.0f}", f"{summary.ttft_p99_s * 1000:.0f}"]
            print(load, name, rows[name][-2:], flush=True)
    lines = [
        "# Conversations that go on by an id",
        "",
        f"`python -m benchmarks.histories`: trace `{TRACE}`, {trace.requests} requests of",
        f"{len(trace.sessions)} sessions, in virtual time on {INSTANCES} engines of {CAPACITY_TOKENS} tokens;",
        "time to first token in ms. Not part of it: an engine that keeps its responses to itself",
        "answers 404 for another one's.",
        "",
        "| later turns | " + " | ".join(f"mean at {load} | p99 at {load}" for load in LOADS) + " |",
        "|---" * (1 + 2 * len(LOADS)) + "|",
        *("| " + " | ".join(row) + " |" for row in rows.values()),
    ]
    (HERE / "reports" / "histories.md").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
