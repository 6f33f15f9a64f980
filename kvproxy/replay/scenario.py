"""One run of one policy on a paced trace: the fleet, the router's view, the policy as the proxy would build it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from kvproxy.config.cluster_schema import POLICY_ALIASES, ClusterSettings, PolicyName
from kvproxy.config.fields import spelling_hint
from kvproxy.errors import KvproxyError
from kvproxy.replay.results import ReplayOutcome
from kvproxy.replay.router import SimEndpoint, VirtualRouter
from kvproxy.replay.settings import Pace, ReplayFleet
from kvproxy.replay.trace import Trace
from kvproxy.replay.view import IndexView, endpoint_id
from kvproxy.replay.virtual_time import VirtualTime
from kvproxy.routing.fair_queue import QueueSettings
from kvproxy.routing.policy import Policy
from kvproxy.routing.registry import POLICIES, make_policy
from kvproxy.routing.speeds import SpeedModel, SpeedPriors
from kvproxy.simulator.engine import Engine
from kvproxy.simulator.engine_io import TokenGaps

#: Behind a policy's name: with the router queue in front of it.
QUEUE_SUFFIX = "+queue"


class UnknownPolicy(KvproxyError):
    """No policy of this name, or none the queue can stand before."""


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """What to run: a policy of the configuration, with or without the router queue."""

    name: PolicyName
    queue: bool = False

    @classmethod
    def parse(cls, text: str) -> PolicySpec:
        """From `kv_aware` or `kv_aware+queue`."""
        name, queue = text.strip().removesuffix(QUEUE_SUFFIX), text.strip().endswith(QUEUE_SUFFIX)
        if name not in PolicyName.__members__.values():
            alias = POLICY_ALIASES.get(re.sub(r"[^a-z0-9]", "", name.casefold()))
            hint = f"did you mean {str(alias)!r}?" if alias else spelling_hint(name, map(str, PolicyName))
            raise UnknownPolicy(f"no policy {name!r} ({hint})")
        if queue and not POLICIES[PolicyName(name)].learns_speeds:
            raise UnknownPolicy(
                f"{name} does not know how long a prefill takes; the queue needs kv_aware or least_ttft"
            )
        return cls(PolicyName(name), queue)

    def __str__(self) -> str:
        return self.name.value + (QUEUE_SUFFIX if self.queue else "")

    def make(self, *, rng: Random, prior_factor: float = 1.0) -> Policy:
        """A fresh policy; learned speeds start from priors wrong by `prior_factor`."""
        priors = SpeedPriors()
        priors = SpeedPriors(
            priors.request_s / prior_factor, priors.tokens_per_s * prior_factor, priors.quadratic_tokens
        )
        policy = make_policy(self.name, ClusterSettings(policy=self.name), rng=rng)
        if policy.learns_speeds:
            policy.speeds = SpeedModel(priors)
        return policy


def play_policy(
    trace: Trace,
    pace: Pace,
    fleet: ReplayFleet,
    policy: Policy,
    *,
    queue: bool = False,
    seed: int = 1,
    streamed: float = 1.0,
    token_gaps: TokenGaps | None = None,
    progress: Callable[[int], None] = lambda finished: None,
) -> Sequence[ReplayOutcome]:
    """Every request of the trace, as its client saw it. The policy is a fresh one: it learns as it goes; `streamed` is
    the share of requests whose first token it sees; `token_gaps` is given the times between tokens."""
    duration_s = pace.duration_s(trace)
    endpoints = [
        SimEndpoint(endpoint_id(index), index, Engine(fleet.engine_settings(trace.block_size, index, duration_s)))
        for index in range(fleet.instances)
    ]
    view = IndexView(fleet, trace.block_size, rng=Random(seed + 1))
    router = VirtualRouter(endpoints, policy, view, queue=QueueSettings(limit=100_000) if queue else None)
    chance = Random(seed + 2)
    run = VirtualTime(
        trace,
        pace,
        router,
        view,
        index_delay_s=fleet.index_delay_s,
        jitter=Random(seed + 3) if seed > 1 else None,
        streams=lambda: chance.random() < streamed,
        progress=progress,
    )
    outcomes = run.run()
    if token_gaps is not None:
        for endpoint in endpoints:
            token_gaps.update(endpoint.engine.counters.token_gaps)
    return outcomes
