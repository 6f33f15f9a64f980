"""Prefill apart from decode, chosen per request and by others' rules, on request traces in virtual time.

    python -m benchmarks.disaggregation [--requests N] [--jobs N] [--seeds N] [--traces T,T...]

Eight engines, routed by kv_aware: all alike, or 2 that prefill for 6, or 4 for 4. A pull goes over a link of 12.5 GB/s;
a token's KV is 128 KiB. The prompt is computed where the plan of kvproxy/features/disaggregation expects the first
token earlier, always elsewhere, or by Dynamo's rule (local below 2,048 uncached tokens that are less than 0.7 of the
prompt) or llm-d's threshold (elsewhere from 512 uncached tokens on). Writes disaggregation.md and disaggregation.json
of benchmarks/reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from statistics import fmean
from typing import Any

from benchmarks.by_trace import Rows, measure_traces
from benchmarks.markdown import table
from benchmarks.routing_cells import capacity_tokens_of, trace_of
from kvproxy.cluster.pick import reserve
from kvproxy.cluster.routing.costs import wait_s
from kvproxy.cluster.routing.fair_queue import QueueSettings
from kvproxy.cluster.routing.kv_aware import CostWeights
from kvproxy.cluster.routing.policy import Overlap, OverlapFacts, PickRequest
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.settings import EndpointRole
from kvproxy.features.disaggregation.plan import PullPrice, choose_plan, split_of_pulled, wait_before
from kvproxy.features.disaggregation.settings import DisaggregationSettings
from kvproxy.lab.replay.compare import PolicySpec
from kvproxy.lab.replay.pooled import measure_bound
from kvproxy.lab.replay.results import GoodputLimits, ReplayOutcome, summarize_outcomes
from kvproxy.lab.replay.router import LiveRequest, Placement, SimEndpoint, VirtualRouter
from kvproxy.lab.replay.settings import ReplayFleet
from kvproxy.lab.replay.view import IndexView, endpoint_id
from kvproxy.lab.replay.virtual_time import VirtualTime
from kvproxy.lab.simulator.engine import Engine
from kvproxy.lab.simulator.engine_io import SimRequest
from kvproxy.lab.simulator.timing import TokenGaps

ENGINES = 8
LOADS = (0.7, 0.9)
TOKENS_PER_S = 12.5e9 / 131_072
LATENCY_S = 0.005
LIMITS = GoodputLimits(ttft_s=2.0, tpot_s=0.05)
#: Engines that prefill alone, of eight, and the rule.
CELLS = tuple(
    (prefill, rule)
    for prefill in (0, 2, 4)
    for rule in ("never", "chosen", "always", "dynamo", "llm_d")
    if prefill or rule in ("never", "chosen")
)
NOTES = """Why not always within 5 %: the plan weighs first tokens, and the answers that a prefill delays as `kv_aware`
does. Always separating keeps decoders free of prompts, so its ITL is that of decoding alone; where prefillers are too
few, first tokens take minutes. No plan is best in both figures. What is left of first tokens is what comes to a
decoder while a prompt is computed elsewhere: the decode leg queues behind it. Engines are simulated."""
STALL = CostWeights().stall
MIN_TOKENS = DisaggregationSettings().min_tokens


class RoledEndpoint(SimEndpoint):
    """An engine with a role."""

    role = EndpointRole.BOTH


class ApartRouter(VirtualRouter):
    """A router that learns from first tokens of decoders how long pulls take, as the proxy does."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.price = PullPrice()
        self.pulling: dict[str, tuple[float, int]] = {}  # when its decoder is to be free, and its tokens

    def first_token(self, placement: Placement, now: float) -> None:
        super().first_token(placement, now)
        pulled = self.pulling.pop(placement.request.name, None)
        if pulled is not None:
            free_at, tokens = pulled
            self.price.observe(tokens, now - free_at)


#: The prefiller of a request whose decoder lacks so many tokens of its prompt; None: the decoder computes.
Rule = Callable[["ApartTime", Placement, OverlapFacts, float], SimEndpoint | None]


class ApartTime(VirtualTime):
    """Requests whose prompts `rule` sends elsewhere are prefilled there first."""

    def __init__(
        self, *args: Any, rule: Rule, prefillers: Sequence[SimEndpoint], speeds: SpeedModel, **more: Any
    ) -> None:
        super().__init__(*args, **more)
        self._rule = rule
        self.prefillers = prefillers
        self.speeds = speeds
        assert isinstance(self._router, ApartRouter)
        self.pulling = self._router.pulling
        self.price = self._router.price
        self.separated = 0
        self._waiting: dict[str, tuple[Placement, OverlapFacts]] = {}  # by the name of the prefill leg

    def _submit(self, placement: Placement, now: float) -> None:
        facts = self._facts_of(placement, now)
        prefill = self._rule(self, placement, facts, now)
        if prefill is None:
            super()._submit(placement, now)
            return
        self.separated += 1
        request = placement.request
        assert isinstance(self._router, VirtualRouter)
        asked = PickRequest(facts=facts)
        reservation = reserve(prefill, asked, self.speeds, now)
        outcome = ReplayOutcome(now, request.turn.prompt_tokens, predicted_tokens=facts.matched_tokens(prefill.id))
        leg = LiveRequest(request.session, request.number, request.turn, outcome, name=f"p{request.name}")
        self._placed[leg.name] = Placement(leg, prefill, reservation, lambda predicted, cached: None)
        self._waiting[leg.name] = placement, facts
        self._count_as_pulled(placement, facts, now)
        work = SimRequest(leg.name, request.turn.blocks, request.turn.prompt_tokens, 1)
        prefill.engine.submit(work, now)
        self._wake(prefill)

    def _facts_of(self, placement: Placement, now: float) -> OverlapFacts:
        """Return what was known before the placement, by which its endpoint counts as a holder."""
        request = placement.request
        assert isinstance(self._router, VirtualRouter)
        facts = self._router.facts_of(request, now)
        held = {**facts.by_endpoint, placement.endpoint.id: Overlap(request.outcome.predicted_tokens)}
        return OverlapFacts(facts.prompt_tokens, held)

    def _finish(self, placement: Placement, now: float) -> None:
        waiting = self._waiting.pop(placement.request.name, None)
        if waiting is None:
            super()._finish(placement, now)
            return
        self._router.finished(placement, now)
        decode, facts = waiting
        missing = facts.prompt_tokens - facts.matched_tokens(decode.endpoint.id)
        before_s = wait_before(decode.reservation, decode.endpoint, self.speeds, now)
        self.pulling[decode.request.name] = now + before_s, missing
        self._push(now + LATENCY_S + missing / TOKENS_PER_S, self._pulled, (decode, facts))

    def _pulled(self, pulled: tuple[Placement, OverlapFacts], now: float) -> None:
        placement, facts = pulled
        placement.endpoint.engine.receive(placement.request.turn.blocks, now)
        self._count_as_pulled(placement, facts, now)
        self._placed[placement.request.name] = placement
        self._give(placement, now)

    def _count_as_pulled(self, placement: Placement, facts: OverlapFacts, now: float) -> None:
        placement.reservation.known = False
        split = split_of_pulled(facts, placement.endpoint, self.price)  # type: ignore[arg-type]
        placement.endpoint.load.begin(placement.reservation, split, now)


def never(time: ApartTime, placement: Placement, facts: OverlapFacts, now: float) -> None:
    """Keep every prompt at its decoder."""


def chosen(time: ApartTime, placement: Placement, facts: OverlapFacts, now: float) -> SimEndpoint | None:
    """By the expected first token."""
    decode = placement.endpoint
    if facts.prompt_tokens - facts.matched_tokens(decode.id) < MIN_TOKENS:
        return None
    speeds = time.speeds
    before_s = wait_before(placement.reservation, decode, speeds, now)
    others = [one for one in time.prefillers if one is not decode]
    plans = choose_plan(facts, decode, others, speeds, now, stall=STALL, decode_wait_s=before_s, price=time.price)  # type: ignore[arg-type]
    return plans[0].prefill if plans else None  # type: ignore[return-value]


def always(time: ApartTime, placement: Placement, facts: OverlapFacts, now: float) -> SimEndpoint:
    """At the prefiller that is free first."""
    return min(time.prefillers, key=lambda one: wait_s(one, time.speeds, now))


def dynamo(time: ApartTime, placement: Placement, facts: OverlapFacts, now: float) -> SimEndpoint | None:
    """Elsewhere from 2,048 uncached tokens on, or where they are most of the prompt."""
    missing = facts.prompt_tokens - facts.matched_tokens(placement.endpoint.id)
    local = missing < 2048 and missing < 0.7 * facts.prompt_tokens
    return None if local else always(time, placement, facts, now)


def llm_d(time: ApartTime, placement: Placement, facts: OverlapFacts, now: float) -> SimEndpoint | None:
    """Elsewhere from 512 uncached tokens on."""
    missing = facts.prompt_tokens - facts.matched_tokens(placement.endpoint.id)
    return None if missing < 512 else always(time, placement, facts, now)


RULES: dict[str, Rule] = {"never": never, "chosen": chosen, "always": always, "dynamo": dynamo, "llm_d": llm_d}


def play(trace: Any, pace: Any, fleet: ReplayFleet, prefill: int, rule: str, seed: int) -> dict[str, Any]:
    """Return the figures of one run with so many engines that prefill alone."""
    blocks = fleet.blocks_of(trace)
    duration_s = pace.duration_s(trace)
    endpoints = []
    for index in range(ENGINES):
        engine = Engine(fleet.engine_settings(blocks.size, index, duration_s))
        endpoint = RoledEndpoint(endpoint_id(index), index, engine)
        if index < prefill:
            endpoint.role = EndpointRole.PREFILL
        elif prefill:
            endpoint.role = EndpointRole.DECODE
        endpoints.append(endpoint)
    policy = PolicySpec.parse("kv_aware").make(rng=Random(seed))
    speeds = policy.speeds
    assert speeds is not None
    view = IndexView(fleet, blocks.size, rng=Random(seed + 1))
    router = ApartRouter(endpoints[prefill:], policy, view, queue=QueueSettings(limit=100_000))
    for endpoint in endpoints[:prefill]:
        endpoint.load.on_sample = partial(policy.observe_sample, endpoint.id)
    time = ApartTime(
        blocks,
        pace,
        router,
        view,
        jitter=Random(seed + 3),
        rule=RULES[rule],
        prefillers=endpoints[:prefill] or endpoints,
        speeds=speeds,
    )
    outcomes = time.run()
    gaps = TokenGaps()
    for endpoint in endpoints:
        gaps.update(endpoint.engine.counters.token_gaps)
    summary = summarize_outcomes(outcomes, ENGINES, token_gaps=gaps, limits=LIMITS)
    return {
        "prefill": prefill,
        "rule": rule,
        "seed": seed,
        "requests": summary.requests,
        "failed": summary.failed,
        "separated": time.separated,
        "ttft_mean_s": round(summary.ttft_mean_s, 5),
        "ttft_p99_s": round(summary.ttft_p99_s, 5),
        "itl_p99_s": round(summary.itl_p99_s, 5),
        "e2e_mean_s": round(summary.e2e_mean_s, 5),
        "goodput": round(summary.goodput, 4),
    }


@dataclass(frozen=True)
class Job:
    """All cells of one trace, in another process."""

    requests: int
    seeds: int

    def __call__(self, name: str) -> list[dict[str, Any]]:
        fleet = ReplayFleet(instances=ENGINES, capacity_tokens=capacity_tokens_of(name))
        rows = []
        for load in LOADS:
            bound = measure_bound(trace_of(name), fleet, load)
            trace = bound.trace.cut(min(self.requests, bound.trace.requests))
            for prefill, rule in CELLS:
                for seed in range(1, self.seeds + 1):
                    run = play(trace, bound.pace, replace(fleet), prefill, rule, seed)
                    rows.append({"trace": name, "load": load, **run})
        return rows


def as_markdown(rows: Rows, command: str) -> str:
    """Render the report."""
    traces = list(dict.fromkeys(row["trace"] for row in rows))

    def value(trace: str, load: float, cell: tuple[int, str], figure: str) -> float:
        prefill, rule = cell
        wanted = {"trace": trace, "load": load, "prefill": prefill, "rule": rule}
        return fmean(row[figure] for row in rows if wanted.items() <= row.items())

    lines = [
        "# Prefill apart from decode", "",
        f"`{command}`. {ENGINES} simulated engines behind the router queue; a pull at {TOKENS_PER_S:,.0f} tokens/s and "
        f"{1000 * LATENCY_S:g} ms. `8` are engines that do both, `2+6` two that prefill for six. Within limits: the "
        f"first token in {LIMITS.ttft_s:g} s, and {1000 * LIMITS.tpot_s:g} ms a token.",
    ]  # fmt: skip
    figures = (
        ("ttft_mean_s", "mean TTFT, ms", 1000),
        ("itl_p99_s", "ITL p99, ms", 1000),
        ("e2e_mean_s", "mean completion, s", 1),
        ("goodput", "share within limits", 1),
    )
    for load in LOADS:
        for figure, name, factor in figures:
            shown = []
            for cell in CELLS:
                found = [factor * value(trace, load, cell, figure) for trace in traces]
                shown.append([_name(*cell), *(f"{one:.3g}" for one in found)])
            lines += table([f"{name}, load {load}", *traces], shown)
    shares = []
    for cell in CELLS:
        row = [_name(*cell)]
        for trace in traces:
            counts = (value(trace, LOADS[0], cell, name) for name in ("separated", "requests"))
            separated, requests = counts
            row.append(f"{separated / requests:.2f}")
        shares.append(row)
    lines += table([f"share separated, load {LOADS[0]}", *traces], shares)
    lines += [
        "",
        "The choice against the better of always and never (of 8 that do both: against never); within 5 % in bold.",
    ]
    for figure, name, _ in figures[:2]:
        ratios = []
        for load in LOADS:
            for prefill in (0, 2, 4):
                row = [f"{_name(prefill, 'chosen')}, load {load}"]
                for trace in traces:
                    rules = ("never", "always") if prefill else ("never",)
                    best = min(value(trace, load, (prefill, rule), figure) for rule in rules)
                    ratio = value(trace, load, (prefill, "chosen"), figure) / best
                    row.append(f"**{ratio:.2f}**" if ratio <= 1.05 else f"{ratio:.2f}")
                ratios.append(row)
        lines += table([name.partition(",")[0], *traces], ratios)
    lines += ["", NOTES]
    return "\n".join(lines) + "\n"


def _name(prefill: int, rule: str) -> str:
    return f"{prefill}+{ENGINES - prefill}, {rule}" if prefill else f"{ENGINES}, {rule}"


if __name__ == "__main__":
    measure_traces(__doc__ or "", job=Job, as_markdown=as_markdown, requests=2000, seeds=1)
