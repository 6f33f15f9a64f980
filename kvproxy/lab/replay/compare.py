"""Policies on a paced trace: one run of one, as the proxy would build it, and several side by side over seeds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from random import Random
from typing import TextIO

from kvproxy.base.errors import KvproxyError
from kvproxy.base.installed import installed
from kvproxy.cluster.feature import ClusterFeature
from kvproxy.cluster.routing.admission import Admission
from kvproxy.cluster.routing.fair_queue import QueueSettings
from kvproxy.cluster.routing.policy import Policy
from kvproxy.cluster.routing.registry import make_policy, policy_types
from kvproxy.cluster.routing.speeds import SpeedModel, SpeedPriors
from kvproxy.cluster.settings import ClusterSettings, PolicyName
from kvproxy.lab.replay.pooled import Bound, measure_bound
from kvproxy.lab.replay.replicas import MakeRouter, RoutersPlan, connect_routers
from kvproxy.lab.replay.report import ReplayReport
from kvproxy.lab.replay.results import GoodputLimits, ReplayOutcome, Summary, summarize_outcomes
from kvproxy.lab.replay.router import SimEndpoint, VirtualRouter
from kvproxy.lab.replay.session_rules import BEST_PLACES, PlacesRouter, find_rule
from kvproxy.lab.replay.settings import EngineBlocks, IndexMode, Pace, ReplayFleet
from kvproxy.lab.replay.trace import Trace
from kvproxy.lab.replay.transfers import SimTransfers
from kvproxy.lab.replay.view import IndexView, endpoint_id
from kvproxy.lab.replay.virtual_time import Change, VirtualTime
from kvproxy.lab.simulator.engine import Engine
from kvproxy.lab.simulator.engine_io import Scheduling
from kvproxy.lab.simulator.timing import TokenGaps
from kvproxy.operate.commands.progress import ProgressBar, announce_part
from kvproxy.operate.config.decode import POLICY_ALIASES, spelling_hint

#: Behind a policy's name, in this order: with the router queue in front of it (which kv_aware has by itself) or without
#: one, with a priority for the engine in each request, without events of tiers below the engines' memory, with KV
#: copied between engines on demand, without rules of admission to the engines' memory.
_MARKS = ("queue", "no_queue", "priority", "tier_blind", "move", "no_admission")
#: Of these, the ones that any policy takes.
_FOR_ALL = ("no_queue", "tier_blind", "no_admission")
#: ...and a rule by which prompts are computed apart, in place of the proxy's own.
_APART = "apart="


class UnknownPolicy(KvproxyError):
    """No policy of this name, or none that can go with the queue or with priorities."""


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """Run to compare: a policy of the configuration and what is beside it. With `priority` the engines schedule by the
    policy's numbers; `apart` is the rule by which a fleet with roles computes prompts apart."""

    name: PolicyName
    queue: bool = False
    priority: bool = False
    tier_blind: bool = False
    move: bool = False
    sessions: str = ""  # rule that gives places to sessions, and so has the choice; it stands alone
    no_admission: bool = False
    apart: str = ""

    @classmethod
    def parse(cls, text: str) -> PolicySpec:
        """From `kv_aware`, `kv_aware+queue`, `kv_aware+priority` or with both, in any order."""
        name, *extras = text.strip().split("+")
        if name not in policy_types():
            alias = POLICY_ALIASES.get(re.sub(r"[^a-z0-9]", "", name.casefold()))
            hint = f"did you mean {str(alias)!r}?" if alias else spelling_hint(name, map(str, policy_types()))
            raise UnknownPolicy(f"no policy {name!r} ({hint})")
        apart = [extra.removeprefix(_APART) for extra in extras if extra.startswith(_APART)]
        marks = [extra for extra in extras if not extra.startswith(_APART)]
        _check_marks(PolicyName(name), marks)
        return cls(
            PolicyName(name),
            queue="no_queue" not in marks and (name == PolicyName.KV_AWARE or "queue" in marks),
            priority="priority" in marks,
            tier_blind="tier_blind" in marks,
            move="move" in marks,
            no_admission="no_admission" in marks,
            apart=_check_apart(apart[-1]) if apart else "",
        )

    @classmethod
    def parse_run(cls, text: str) -> PolicySpec:
        """From the same, or the name of a rule of sessions."""
        name = text.strip()
        if name != BEST_PLACES and find_rule(name) is None:
            return cls.parse(name)
        return cls(PolicyName.ROUND_ROBIN, sessions=name)

    def __str__(self) -> str:
        if self.sessions:
            return self.sessions.rpartition(":")[2]
        by_itself = self.name is PolicyName.KV_AWARE
        has = {"queue": self.queue and not by_itself, "no_queue": by_itself and not self.queue}
        marks = [mark for mark in _MARKS if (has[mark] if mark in has else getattr(self, mark))]
        return "+".join([self.name.value, *marks, *([_APART + self.apart] if self.apart else [])])

    def make(self, *, rng: Random, prior_factor: float = 1.0) -> Policy:
        """Return a fresh policy; learned speeds start from priors wrong by `prior_factor`."""
        priors = SpeedPriors()
        priors = SpeedPriors(
            priors.request_s / prior_factor, priors.tokens_per_s * prior_factor, priors.quadratic_tokens
        )
        policy = make_policy(self.name, rng=rng)
        if policy.learns_speeds:
            policy.speeds = SpeedModel(priors)
        return policy


def _check_marks(name: PolicyName, marks: Sequence[str]) -> None:
    if unknown := [mark for mark in marks if mark not in _MARKS]:
        hint = spelling_hint(f"+{unknown[0]}", [f"+{mark}" for mark in _MARKS])
        raise UnknownPolicy(f"nothing '+{unknown[0]}' goes behind a policy ({hint})")
    if "move" in marks and name is not PolicyName.KV_AWARE:
        raise UnknownPolicy("+move needs kv_aware, which prices copies")
    timed = [mark for mark in marks if mark not in _FOR_ALL]
    if timed and not policy_types()[name].learns_speeds:
        raise UnknownPolicy(f"{name} does not know how long a prefill takes; +{timed[0]} needs kv_aware or least_ttft")


def _check_apart(rule: str) -> str:
    from kvproxy.lab.replay.apart import RULES

    if rule not in RULES:
        raise UnknownPolicy(f"no rule {rule!r} computes prompts apart (known: {', '.join(RULES)})")
    return rule


#: A policy with nothing beside it.
PLAIN = PolicySpec(PolicyName.ROUND_ROBIN)


def play_policy(
    trace: Trace,
    pace: Pace,
    fleet: ReplayFleet,
    policy: Policy,
    spec: PolicySpec = PLAIN,
    *,
    seed: int = 0,
    streamed: float = 1.0,
    token_gaps: TokenGaps | None = None,
    progress: Callable[[int], None] = lambda finished: None,
    router_type: type[VirtualRouter] = VirtualRouter,
    beside: Sequence[Policy] = (),
    delay_s: float | None = None,
) -> Sequence[ReplayOutcome]:
    """Play every request of the trace and return the outcomes as its clients saw them.

    The policy is a fresh one that learns during the run; `spec` has what is beside it; `streamed` is the share of
    requests whose first token it sees; any `seed` but 0 moves the arrivals a little; `token_gaps` collects times
    between tokens; `beside` are policies of further routers, each of which receives the others' reports after
    `delay_s`."""
    fleet = _fleet_of(fleet, spec)
    blocks = fleet.blocks_of(trace)
    endpoints, changes = _make_endpoints(fleet, blocks, pace.duration_s(trace))
    link = fleet.link if spec.move else None
    transfers = None if link is None else SimTransfers(link, block_size=blocks.size, rng=Random(seed + 4))
    make_time = VirtualTime if fleet.prefill is None else _separate(endpoints, policy, spec.apart, fleet)
    make_router = _find_rule_router(spec.sessions, trace, fleet) or partial(
        router_type,
        queue=QueueSettings(limit=100_000) if spec.queue else None,
        priority=spec.priority,
        reports_cached=fleet.reports_cached,
        transfers=transfers,
        make_admission=None if spec.no_admission else make_admission,
    )
    make_view = partial(IndexView, fleet, blocks.size, tier_blind=spec.tier_blind)
    parts = [(each, make_view(rng=Random(seed + 1))) for each in (policy, *beside)]
    there = fleet.answering_at_first()
    router, view = connect_routers(parts, endpoints, there, make_router, delay_s, chance=Random(seed + 5))
    engines = [endpoint.engine for endpoint in endpoints] + [each.engine for each in changes if each.engine is not None]
    run = make_time(
        blocks,
        pace,
        router,
        view,
        index_delay_s=fleet.index_delay_s,
        changes=changes,
        transfers=transfers,
        jitter=Random(seed + 3) if seed else None,
        streams=partial(_draw, streamed, Random(seed + 2)),
        progress=progress,
    )
    return _run(run, engines, token_gaps)


def _run(run: VirtualTime, engines: Sequence[Engine], token_gaps: TokenGaps | None) -> Sequence[ReplayOutcome]:
    outcomes = run.run()
    if token_gaps is not None:
        for engine in engines:
            token_gaps.update(engine.scheduler.counters.token_gaps)
    return outcomes


def _draw(share: float, chance: Random) -> bool:
    return chance.random() < share


def _separate(
    endpoints: Sequence[SimEndpoint], policy: Policy, rule: str, fleet: ReplayFleet
) -> Callable[..., VirtualTime]:
    """Return how a run is made in which prompts may be computed apart."""
    from kvproxy.lab.replay.apart import separating  # other replays need no feature

    return separating(endpoints, policy, rule, fleet.pull_s_per_token)


def _fleet_of(fleet: ReplayFleet, spec: PolicySpec) -> ReplayFleet:
    """Return the fleet as this run needs it."""
    fleet = replace(fleet, scheduling=Scheduling.PRIORITY) if spec.priority else fleet
    return replace(fleet, index=IndexMode.APPROXIMATE) if spec.sessions else fleet  # no events for nothing


def _find_rule_router(sessions: str, trace: Trace, fleet: ReplayFleet) -> MakeRouter | None:
    """Return the router of a rule of sessions; None: there is no such rule."""
    make_rule = find_rule(sessions)
    if make_rule is None:
        return None
    turns = [len(session.turns) for session in trace.sessions]
    return partial(PlacesRouter, rule=make_rule(fleet.timing), turns=turns)


def _make_endpoints(
    fleet: ReplayFleet, blocks: EngineBlocks, duration_s: float
) -> tuple[list[SimEndpoint], list[Change]]:
    """Return an endpoint for each engine, and when engines leave and join."""
    settings = [fleet.engine_settings(blocks.size, index, duration_s) for index in range(fleet.instances)]
    future = fleet.future_of(blocks)
    make_engine = partial(Engine, store=fleet.shared_store(blocks.size, future=future), future=future)
    endpoints = [
        SimEndpoint(endpoint_id(index), index, make_engine(each), role=fleet.role_of(index))
        for index, each in enumerate(settings)
    ]
    changes = [
        Change(share * duration_s, endpoints[index], make_engine(settings[index]) if joins else None)
        for share, index, joins in fleet.changes()
    ]
    return endpoints, changes


def make_admission() -> Admission | None:
    """Return the rule of admission that clusters have by default; None: there is none."""
    made = (feature.make_admission(ClusterSettings()) for feature in installed(ClusterFeature))
    return next((one for one in made if one is not None), None)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The report, and every request's time to first token by policy (first seed), sorted."""

    report: ReplayReport
    ttft_s: dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Run:
    """One policy with one seed: outcomes in order of arrival, and the times between tokens."""

    policy: str
    outcomes: Sequence[ReplayOutcome]
    token_gaps: TokenGaps


@dataclass(frozen=True, slots=True)
class ComparisonPlan:
    """Comparison to run. The load is a share of the pooled cache's saturated throughput on an undisturbed fleet."""

    fleet: ReplayFleet
    policies: Sequence[PolicySpec]
    load: float = 0.7
    baseline: str = ""  # the first policy unless given
    seeds: int = 1
    closed_loop: bool = True
    streamed: float = 1.0  # share of the answers
    goodput: GoodputLimits = field(default_factory=GoodputLimits)
    routers: RoutersPlan = field(default_factory=RoutersPlan)


def compare(trace: Trace, plan: ComparisonPlan, *, err: TextIO, bound: Bound | None = None) -> Comparison:
    """Plays every policy; with `bound` the pace is not calibrated again."""
    if bound is None:
        announce_part("calibrating the load on one pooled cache", err)
        bound = measure_bound(
            trace, plan.fleet.undisturbed(), plan.load, closed_loop=plan.closed_loop, limits=plan.goodput
        )
    requests = bound.trace.requests
    bar = ProgressBar(requests * plan.seeds * len(plan.policies), out=err)
    runs: dict[str, list[Summary]] = {}
    ttft_s: dict[str, list[float]] = {}
    for run in play_all(bound.trace, bound.pace, plan, bar):
        outcomes = run.outcomes
        summary = summarize_outcomes(outcomes, plan.fleet.instances, token_gaps=run.token_gaps, limits=plan.goodput)
        runs.setdefault(run.policy, []).append(summary)
        ttft_s.setdefault(run.policy, sorted(each.ttft_s for each in outcomes if each.ttft_s is not None))
    return Comparison(_report(trace, plan, bound, runs), ttft_s)


def play_all(trace: Trace, pace: Pace, plan: ComparisonPlan, bar: ProgressBar) -> Iterator[Run]:
    """Plays every policy with every seed."""
    for spec in plan.policies:
        bar.begin(str(spec))
        for seed in range(1, plan.seeds + 1):
            token_gaps = TokenGaps()
            seeds = (seed + 1000 * number for number in range(plan.routers.count))
            policy, *beside = (spec.make(rng=Random(one)) for one in seeds)
            outcomes = play_policy(
                trace,
                pace,
                plan.fleet,
                policy,
                spec,
                seed=seed,
                streamed=plan.streamed,
                token_gaps=token_gaps,
                progress=bar.advance,
                beside=beside,
                delay_s=plan.routers.delay_s,
            )
            bar.end(trace.requests)
            yield Run(str(spec), outcomes, token_gaps)
    bar.close()


def _report(trace: Trace, plan: ComparisonPlan, bound: Bound, runs: dict[str, list[Summary]]) -> ReplayReport:
    return ReplayReport(
        trace=trace.name,
        half=trace.half,
        instances=plan.fleet.instances,
        load=plan.load,
        requests=bound.trace.requests,
        hit_ceiling=bound.trace.hit_ceiling(),
        reference=bound.summary,
        baseline=plan.baseline or next(iter(runs)),
        runs=runs,
        settings={
            "fleet": asdict(plan.fleet),
            "pace": asdict(bound.pace),
            "seeds": plan.seeds,
            "streamed": plan.streamed,
            "goodput": asdict(plan.goodput),
            "routers": asdict(plan.routers),
            "requests_per_s_at_load_1": bound.capacity_per_s,
        },
        routers=str(plan.routers) if plan.routers.count > 1 else "",
        of_trace=trace.requests if trace.requests != bound.trace.requests else 0,
    )
