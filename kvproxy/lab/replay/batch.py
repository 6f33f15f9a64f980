"""A batch of sessions, played once: how soon they are through, how long they wait, and how fairly."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from statistics import StatisticsError, correlation, fmean
from typing import Any, TextIO

from kvproxy.lab.replay.compare import ComparisonPlan, PolicySpec, play_all, play_policy
from kvproxy.lab.replay.report import Column, format_seconds, name_half
from kvproxy.lab.replay.results import Ratio, ReplayOutcome, average, jain_index, mean_ratio, percentile
from kvproxy.lab.replay.session_rules import BEST_PLACES, find_best_places
from kvproxy.lab.replay.settings import Pace, ReplayFleet
from kvproxy.lab.replay.trace import Half, Trace
from kvproxy.lab.simulator.engine import Engine
from kvproxy.lab.simulator.engine_io import SimRequest
from kvproxy.operate.commands.progress import ProgressBar, announce_part
from kvproxy.operate.log_lines import align_columns


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """One policy on one batch, over what was answered. A session lasts from its first request to its last answer; its
    slowdown is that against the time it takes alone on an idle engine. A request waits until an engine admits it; the
    longest wait is that of one that was refused since it came again."""

    sessions: float
    ended: float  # sessions of which every request was answered
    failed: float  # requests
    sessions_per_hour: float
    makespan_s: float
    session_mean_s: float
    session_p90_s: float
    first_answer_p90_s: float  # first token of a session's first request
    ttft_mean_s: float
    wait_max_s: float
    hit_rate: float
    fairness: float  # Jain's index of the slowdowns
    wait_by_length: float  # correlation of a request's wait with the length of its prompt
    refused: float = 0.0  # times that a request was refused after too long a wait, and came again


COLUMNS: Sequence[Column[BatchFigures]] = (
    Column("sessions/h", lambda each: f"{each.sessions_per_hour:.1f}"),
    Column("makespan", lambda each: format_seconds(each.makespan_s)),
    Column("session", lambda each: format_seconds(each.session_mean_s)),
    Column("p90", lambda each: format_seconds(each.session_p90_s)),
    Column("first p90", lambda each: format_seconds(each.first_answer_p90_s)),
    Column("wait max", lambda each: format_seconds(each.wait_max_s)),
    Column("hit", lambda each: f"{each.hit_rate:.3f}"),
    Column("fair", lambda each: f"{each.fairness:.3f}"),
    Column("wait~len", lambda each: f"{each.wait_by_length:.2f}"),
)
LEGEND = (
    "session (mean, p90): s from a session's start to its last answer; first p90: TTFT of first requests;",
    "wait max: longest until an engine admitted a request, or since its refusal (429); hit: share of prompt",
    "tokens found in cache;",
    "fair: Jain's index of the sessions' slowdowns; wait~len: correlation of a request's wait with its",
    "prompt's length; /baseline: mean session time over {baseline}'s",
)


@dataclass(frozen=True, slots=True)
class BatchReport:
    """Every policy's runs, one per seed."""

    trace: str
    half: Half
    instances: int
    sessions: int
    sessions_at_once: int
    requests: int
    hit_ceiling: float
    baseline: str
    runs: Mapping[str, Sequence[BatchFigures]]
    settings: Mapping[str, Any]

    @property
    def policies(self) -> Mapping[str, BatchFigures]:
        """Every policy's figures, averaged over its runs."""
        return {name: average(runs) for name, runs in self.runs.items()}

    def ratio(self, policy: str) -> Ratio:
        """Mean session time against the baseline's, seed by seed."""
        pairs = zip(self.runs[policy], self.runs[self.baseline], strict=True)
        return mean_ratio([[(mine.session_mean_s, base.session_mean_s) for mine, base in pairs]])

    def as_json(self) -> dict[str, Any]:
        policies = {
            name: {
                **asdict(figures),
                "vs_baseline": self.ratio(name).value,
                "runs": [asdict(each) for each in self.runs[name]],
            }
            for name, figures in self.policies.items()
        }
        kept = ("trace", "half", "instances", "sessions", "sessions_at_once", "requests", "hit_ceiling", "baseline")
        return {**{name: getattr(self, name) for name in kept}, "settings": dict(self.settings), "policies": policies}

    def render_table(self) -> str:
        rows = [["policy", *(column.title for column in COLUMNS), "/baseline"]]
        for name, figures in self.policies.items():
            failed = f" ({figures.failed:g} failed)" if figures.failed else ""
            rows.append([name + failed, *(column.show(figures) for column in COLUMNS), str(self.ratio(name))])
        legend = [line.format(baseline=self.baseline) for line in LEGEND]
        return "\n".join([self.title(), *align_columns(rows), *legend])

    def title(self) -> str:
        """Return what was played."""
        at_once = f", {self.sessions_at_once} at once" if self.sessions_at_once else ""
        return (
            f"{self.trace}, {name_half(self.half)}: {self.sessions} sessions once{at_once}, {self.requests} requests, "
            f"{self.instances} instances, hit ceiling {self.hit_ceiling:.3f}"
        )


def compare_batch(trace: Trace, plan: ComparisonPlan, *, sessions_at_once: int = 0, err: TextIO) -> BatchReport:
    """Play the trace once with every policy, at its own pace; with `sessions_at_once` further sessions begin as others
    end."""
    pace = Pace(closed_loop=plan.closed_loop, sessions_at_once=sessions_at_once)
    alone_s = measure_alone(trace, plan.fleet)
    if any(spec.sessions == BEST_PLACES for spec in plan.policies):
        best = PolicySpec.parse_run(find_places(trace, plan.fleet, alone_s, pace=pace, err=err))
        found = [best if one.sessions == BEST_PLACES else one for one in plan.policies]
        plan = replace(plan, policies=list(dict.fromkeys(found)))  # the best number may be among them
    bar = ProgressBar(trace.requests * plan.seeds * len(plan.policies), out=err)
    runs: dict[str, list[BatchFigures]] = {}
    for run in play_all(trace, pace, plan, bar):
        runs.setdefault(run.policy, []).append(summarize_batch(run.outcomes, trace, alone_s))
    return BatchReport(
        trace=trace.name,
        half=trace.half,
        instances=plan.fleet.instances,
        sessions=len(trace.sessions),
        sessions_at_once=sessions_at_once,
        requests=trace.requests,
        hit_ceiling=trace.hit_ceiling(),
        baseline=plan.baseline or next(iter(runs)),
        runs=runs,
        settings={"fleet": asdict(plan.fleet), "seeds": plan.seeds},
    )


def find_places(
    trace: Trace, fleet: ReplayFleet, alone_s: Sequence[float], *, pace: Pace = Pace(), err: TextIO | None = None
) -> str:
    """Return the bound `places=N` with the N of which most sessions end an hour."""

    def measure(places: int) -> float:
        rule = f"{BEST_PLACES}={places}"
        if err is not None:
            announce_part(f"trying {rule}", err)
        spec = PolicySpec.parse_run(rule)
        outcomes = play_policy(trace, pace, fleet, spec.make(rng=Random(1)), spec, seed=1)
        return summarize_batch(outcomes, trace, alone_s).sessions_per_hour

    most = math.ceil(len(trace.sessions) / fleet.instances)
    return f"{BEST_PLACES}={find_best_places(measure, most)}"


def measure_alone(trace: Trace, fleet: ReplayFleet) -> list[float]:
    """Seconds that each session takes alone, its pauses included, on an engine as fast as the fleet's are set to be."""
    blocks = fleet.undisturbed().blocks_of(trace)
    settings = fleet.undisturbed().engine_settings(blocks.size, 0, 0.0)
    spans = []
    for number, session in enumerate(trace.sessions):
        engine = Engine(settings)
        now = 0.0
        for turn_number, turn in enumerate(session.turns):
            now += turn.delay_s
            left = blocks.left_by(number, turn_number)
            engine.submit(SimRequest(str(turn_number), left, turn.prompt_tokens, turn.output_tokens), now)
            while (due := engine.next_event_at()) is not None:
                now = due
                engine.advance(now)
        spans.append(now)
    return spans


def summarize_batch(outcomes: Sequence[ReplayOutcome], trace: Trace, alone_s: Sequence[float]) -> BatchFigures:
    """Figures of one run; sessions that lost a request are left out of those of sessions."""
    done = [each for each in outcomes if each.finished_at is not None]
    spans = dict(_ended(done, trace))
    times = sorted(last - first for first, last in spans.values())
    waits = [(each.prompt_tokens, each.admitted_at - each.arrived_at) for each in done if each.admitted_at is not None]
    firsts: dict[int, ReplayOutcome] = {}
    for each in outcomes:
        firsts.setdefault(each.session, each)
    makespan_s = max((each.finished_at or 0.0 for each in done), default=0.0) - min(
        (each.arrived_at for each in outcomes), default=0.0
    )
    prompt = sum(each.prompt_tokens for each in done)
    return BatchFigures(
        sessions=len(trace.sessions),
        ended=len(spans),
        failed=len(outcomes) - len(done),
        sessions_per_hour=3600 * len(spans) / makespan_s if makespan_s > 0 else 0.0,
        makespan_s=makespan_s,
        session_mean_s=fmean(times) if times else 0.0,
        session_p90_s=percentile(times, 0.9),
        first_answer_p90_s=percentile(sorted(each.ttft_s for each in firsts.values() if each.ttft_s is not None), 0.9),
        ttft_mean_s=fmean(each.ttft_s for each in done if each.ttft_s is not None) if done else 0.0,
        wait_max_s=max((each.admitted_at - each.came_at for each in done if each.admitted_at is not None), default=0.0),
        hit_rate=sum(each.cached_tokens for each in done) / prompt if prompt else 0.0,
        fairness=jain_index([(last - first) / alone_s[number] for number, (first, last) in spans.items()]),
        wait_by_length=_correlate(waits),
        refused=sum(each.refusals for each in outcomes),
    )


def _ended(done: Sequence[ReplayOutcome], trace: Trace) -> Iterator[tuple[int, tuple[float, float]]]:
    """Sessions that were answered in full: when each began and ended."""
    by_session: dict[int, list[ReplayOutcome]] = {}
    for each in done:
        by_session.setdefault(each.session, []).append(each)
    for number, turns in by_session.items():
        if len(turns) == len(trace.sessions[number].turns):
            yield number, (min(each.arrived_at for each in turns), max(each.finished_at or 0.0 for each in turns))


def _correlate(pairs: Sequence[tuple[float, float]]) -> float:
    """Pearson's correlation; 0 where one of both never differs."""
    try:
        return correlation([first for first, _ in pairs], [second for _, second in pairs])
    except StatisticsError:
        return 0.0
