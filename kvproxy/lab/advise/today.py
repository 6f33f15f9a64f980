"""Recorded traffic and the present fleet, from engines, configuration and receipts, in the replay's terms.

The trace has sessions, and blocks that are equal where prompts were. A receipt names some of its prompt's prefixes by
hashes. Going through the requests in order of arrival, a prompt's blocks are those of the deepest prefix that an
earlier prompt named too, and new ones from there on."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import fmean, median

from kvproxy.base.errors import KvproxyError
from kvproxy.cluster.routing.registry import policy_types
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.routing.work import Features
from kvproxy.cluster.settings import ClusterSettings, EnginePriorityMode
from kvproxy.lab.advise.engines import EngineSettingsSeen
from kvproxy.lab.advise.known import usual_capacity
from kvproxy.lab.advise.traffic import Occupancy, RecordedRequest, Traffic
from kvproxy.lab.replay.compare import PolicySpec
from kvproxy.lab.replay.recorded_decisions import read_decisions
from kvproxy.lab.replay.settings import IndexMode, ReplayFleet
from kvproxy.lab.replay.trace import Trace, TraceSession, Turn
from kvproxy.lab.simulator.timing import EngineTiming

#: Tokens of a trace's block: about those of a text block, the finest unit recorded.
BLOCK_TOKENS = 64


def make_trace(traffic: Traffic, requests: Sequence[RecordedRequest], *, block_tokens: int = BLOCK_TOKENS) -> Trace:
    """Return the trace of these requests of a pool, which are in order of arrival."""
    blocks = _shared_blocks(requests, block_tokens)
    first = requests[0].arrived_at
    usual = traffic.usual_output_tokens or 1
    sessions = []
    for members in _sessions(requests):
        turns = []
        before = requests[members[0]].arrived_at
        for index in members:
            one = requests[index]
            turns.append(Turn(one.arrived_at - before, one.prompt_tokens, one.output_tokens or usual, blocks[index]))
            before = one.ended_at
        sessions.append(TraceSession(requests[members[0]].arrived_at - first, tuple(turns)))
    return Trace("recorded", block_tokens, tuple(sessions))


def _sessions(requests: Sequence[RecordedRequest]) -> list[list[int]]:
    """Return the indexes of each session's requests, in order of their starts. A request without a session key, or
    before the end of the previous one, begins a new session: there is no sign that it waited."""
    sessions: list[list[int]] = []
    latest: dict[str, list[int]] = {}
    for index, one in enumerate(requests):
        under_way = latest.get(one.session) if one.session else None
        if under_way is not None and requests[under_way[-1]].ended_at <= one.arrived_at:
            under_way.append(index)
        else:
            latest[one.session] = [index]
            sessions.append(latest[one.session])
    return sessions


def _shared_blocks(requests: Sequence[RecordedRequest], block_tokens: int) -> list[array[int]]:
    texts = sum(one.prompt_blocks for one in requests)
    known_tokens = sum(one.prompt_tokens for one in requests if one.prompt_blocks)
    blocks_per_text = known_tokens / texts / block_tokens if texts else 0.0
    fresh = count(1)
    named: dict[bytes, array[int]] = {}  # by a prefix's hash, the blocks of a prompt that begins with it
    found = []
    for one in requests:
        whole = one.prompt_tokens // block_tokens
        own: array[int] = array("Q")
        for depth, name in reversed(one.prefixes):
            if name in named:
                own = named[name][: min(whole, int(depth * blocks_per_text))]
                break
        own.extend(next(fresh) for _ in range(whole - len(own)))
        for _, name in one.prefixes:
            named.setdefault(name, own)
        found.append(own)
    return found


#: vLLM's defaults below 70 GiB of GPU memory; where more requests were seen at a time, those above.
_SEQUENCES = 256
_MORE_SEQUENCES = 1024
_STEP_TOKENS = 2048
#: Sufficient samples of one endpoint's speed.
_SAMPLES = 30
#: Engines whose speeds differ by less (as a logarithm) count as equal: learned speeds differ that much by chance.
_ALIKE = 0.25


class NoModel(KvproxyError):
    """Nothing can be simulated, and why."""


@dataclass(frozen=True, slots=True)
class Today:
    """Present settings. `assumed` lists those without a source; `block_tokens` are of the engines' blocks."""

    fleet: ReplayFleet
    spec: PolicySpec
    block_tokens: int
    assumed: tuple[str, ...] = ()

    @property
    def trace_block_tokens(self) -> int:
        """Nothing is known of what prompts share in finer blocks."""
        return max(BLOCK_TOKENS, self.block_tokens)

    def describe(self) -> str:
        """One line."""
        fleet = self.fleet
        parts = [
            "by priority" if self.spec.priority else "fcfs",
            f"{fleet.max_batched_tokens:,} tokens a step",
            f"{fleet.max_sequences:,} sequences",
            f"blocks of {self.block_tokens}",
            f"{fleet.capacity_tokens:,} tokens of KV memory each",
            f"policy {self.spec}",
            "KV events" if fleet.index is IndexMode.EVENTS else "no KV events",
        ]
        return ", ".join(parts) + (f" (assumed: {', '.join(self.assumed)})" if self.assumed else "")


def model_today(
    traffic: Traffic,
    engines: Sequence[EngineSettingsSeen],
    occupancy: Occupancy,
    cluster: ClusterSettings,
    *,
    follows_events: bool,
) -> Today:
    """Return the present fleet. Raises NoModel where something is missing that no default can stand for."""
    capacity = usual_capacity(engines)
    if capacity is None:
        raise NoModel("no engine reports its KV memory (its /metrics have to be reachable)")
    assumed: list[str] = []
    sequences = _sequences(engines, occupancy, assumed)
    step_tokens = _step_tokens(traffic, engines, assumed)
    learns = policy_types()[cluster.policy].learns_speeds
    seconds, slowness = learn_speeds(traffic, max_sequences=sequences)
    request_s, token_s, attention_s, _ = seconds
    timing = EngineTiming(
        prefill_tokens_per_s=1 / token_s,
        quadratic_tokens=token_s / attention_s,
        prefill_step_s=max(0.0, request_s - EngineTiming().decode_step_s),
    )
    fleet = ReplayFleet(
        instances=len(traffic.endpoints),
        capacity_tokens=capacity,
        max_batched_tokens=max(step_tokens, sequences + 1),
        max_sequences=sequences,
        reuse_outputs=True,  # as engines do
        timing=timing,
        slowness=tuple(slowness.get(endpoint, 1.0) for endpoint in traffic.endpoints),
        index=IndexMode.EVENTS
        if follows_events and engines and all(one.publishes for one in engines)
        else IndexMode.APPROXIMATE,
    )
    ordered = cluster.engine_priority is EnginePriorityMode.ON
    spec = PolicySpec(cluster.policy, learns and cluster.queues, learns and ordered)
    blocks = [one.block_tokens for one in engines if one.block_tokens]
    return Today(fleet, spec, round(median(blocks)) if blocks else 16, tuple(assumed))


def _sequences(engines: Sequence[EngineSettingsSeen], occupancy: Occupancy, assumed: list[str]) -> int:
    said = [one.sequences for one in engines if one.sequences]
    slots = round(median(said)) if said else occupancy.find_slots(usual_capacity(engines))
    if slots is not None:
        return slots
    assumed.append("sequences")
    return _SEQUENCES if occupancy.answering < _SEQUENCES else _MORE_SEQUENCES


def _step_tokens(traffic: Traffic, engines: Sequence[EngineSettingsSeen], assumed: list[str]) -> int:
    """Return the bound on tokens a step; the largest step seen shows it only if prompts are longer."""
    longest = max(one.prompt_tokens - (one.cached_tokens or 0) for one in traffic.requests)
    said = [one.step_tokens for one in engines if one.step_tokens and one.step_tokens < longest]
    if said:
        return round(median(said))
    assumed.append("tokens a step")
    return _STEP_TOKENS


def learn_speeds(traffic: Traffic, *, max_sequences: int) -> tuple[Features, Mapping[str, float]]:
    """Learn the pool's seconds for a unit of prefill work and the slowness of each endpoint, over all the receipts.
    Requests that waited for a slot are left out: they reveal nothing about the speed of prefill."""
    speeds = SpeedModel()
    logs: dict[str, list[float]] = {endpoint: [] for endpoint in traffic.endpoints}
    seconds: list[Features] = []
    for decision in read_decisions(traffic.receipts):
        sample = decision.sample
        free = decision.candidates[decision.index].load.in_flight < max_sequences
        if sample is not None and sample.work is not None and free:
            speeds.observe(sample.endpoint, sample.work, sample.busy_s, sample.at)
            seconds.append(speeds.seconds)
            logs.setdefault(sample.endpoint, []).append(math.log(speeds.slowness(sample.endpoint, sample.at)))
    if len(seconds) < _SAMPLES:
        raise NoModel(f"{len(seconds)} streamed answers show how fast engines prefill, at least {_SAMPLES} are needed")
    late = seconds[len(seconds) // 4 :]
    request_s, token_s, attention_s, _ = (fmean(column) for column in zip(*late, strict=True))
    slowness = {endpoint: math.exp(fmean(each[len(each) // 4 :])) for endpoint, each in logs.items() if each}
    different = {endpoint: each for endpoint, each in slowness.items() if abs(math.log(each)) > _ALIKE}
    return (request_s, token_s, attention_s, 0.0), different
