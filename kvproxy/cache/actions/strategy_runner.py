"""One pass of the strategies after each response; what each decides goes to the queue."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Self

from kvproxy.base.metrics.bounds import BoundMetrics
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock
from kvproxy.cache.actions.executor import ActionExecutor
from kvproxy.cache.actions.hotness import Hotness, KnownPrefix
from kvproxy.cache.actions.job_queue import Job, JobQueue
from kvproxy.cache.actions.strategies import (
    MAX_PRIORITIES,
    Action,
    ColdPrefixes,
    HotPin,
    OnDone,
    PressureOf,
    Served,
    Strategy,
)
from kvproxy.cache.breakers import OperationBreakers
from kvproxy.cache.clients.tokens import TokenIds
from kvproxy.cache.overlap.facts import RequestFacts
from kvproxy.cache.overlap.lookup import LookupClient
from kvproxy.cache.overlap.merge import HolderOverlap
from kvproxy.cache.overlap.tokens import TokenSource
from kvproxy.cache.prefix.eviction import Priority
from kvproxy.cache.providers import ActionKind
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cluster.endpoint import Endpoint

#: Facts of a request, the longest message prefix of its prompt, the prompt's tokens, and the endpoint that computed it.
OnTokens = Callable[[RequestFacts, KnownPrefix, TokenIds, Endpoint], None]


class StrategyRunner:
    """Runner of the strategies that features add: holds their data on prefixes (`hotness`) and the queue of their
    actions. An async context manager around that queue."""

    def __init__(
        self,
        settings: KvCacheSettings,
        *,
        hotness: Hotness,
        priorities: dict[int, Priority],
        tokens: TokenSource,
        lookups: LookupClient,
        breakers: OperationBreakers,
        pressure: PressureOf,
        metrics: Metrics,
        counts_uses: bool,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        strategy = settings.cache_strategy
        self.hotness = hotness
        self.priorities = priorities
        self.cold = ColdPrefixes(strategy, hotness, priorities)
        self._stated = (strategy.pin_instance_id, strategy.compress_instance_id, strategy.evict_instance_id)
        self.strategies: list[Strategy] = []  # of features, in the order in which they decide
        self.adopted: dict[ActionKind, OnDone] = {}  # of features, for actions that other proxies did
        self.jobs = JobQueue(metrics=metrics)
        self.executor = ActionExecutor(
            settings, jobs=self.jobs, lookups=lookups, breakers=breakers, metrics=metrics, clock=clock, rng=rng
        )
        self._counts_uses = counts_uses
        self.on_tokens: Sequence[OnTokens] = ()  # of features, once a prompt's tokens are known
        self._tokens = tokens
        self._lookups = lookups
        self._pressure = pressure
        self._clock = clock

    async def __aenter__(self) -> Self:
        await self.jobs.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.jobs.__aexit__()

    @property
    def enabled(self) -> bool:
        """True if there is work after a response."""
        return bool(self.strategies) and self._lookups.provider is not None

    def run_strategies(self, facts: RequestFacts, endpoint: Endpoint | None) -> None:
        """Run the strategies after a response of the endpoint (None: it left), with the prompt's tokens. Unknown tokens
        are fetched first, which also gives the chat's next turn its beginning."""
        used = self._use(facts, endpoint) if endpoint is not None and (self.enabled or self._counts_uses) else []
        if facts.tokens is not None and facts.tokens_exact:
            if endpoint is not None and used:
                self._consider(facts, used, facts.tokens, endpoint)
        elif self._tokens.may_ask(facts):
            key = ("tokenize", facts.model, facts.hashes[-1] if facts.hashes else 0, facts.prompt_bytes)
            run = partial(self._tokenize, facts, used, endpoint)
            self.jobs.submit(Job(key, run, about="tokenize", held_bytes=len(facts.body)))

    def bind_gauges(self, metrics: Metrics) -> None:
        self.jobs.bind_gauges(metrics)
        metrics.group(BoundMetrics).show_queue("priorities", lambda: len(self.priorities), limit=MAX_PRIORITIES)

    def set_priority(self, key: int, priority: Priority) -> bool:
        """Set the priority of the prefix with this key, known or not; NORMAL: decided by its score and promises alone.
        False: too many have one."""
        if priority is Priority.NORMAL:
            self.priorities.pop(key, None)
        elif key in self.priorities or len(self.priorities) < MAX_PRIORITIES:
            self.priorities[key] = priority
        else:
            return False
        return True

    def describe_prefixes(self, limit: int) -> list[dict[str, object]]:
        """For people: those with a priority of their own, then the last used ones. Hashes, never prompts."""
        now = self._clock()
        found = {key: self.hotness.find_prefix(key) for key in self.priorities}
        found |= {one.key: one for one in self.hotness.walk_latest(limit)}
        return [
            {
                "prefix": f"{key:016x}",
                "set": self.priorities.get(key, Priority.NORMAL).name.lower(),
                "priority": None if one is None else self.cold.priority(one, now).name.lower(),
                "score": None if one is None else round(self.cold.score(one, now), 3),
                "tokens": None if one is None else len(one.tokens),
                "uses": None if one is None else self.hotness.count_recent_uses(one, now),
            }
            for key, one in islice(found.items(), limit)
        ]

    def tick(self, instances: Iterable[str]) -> None:
        """Between requests: forget instances other than these and those that settings name, and renew pins that are
        due."""
        there = {*instances, *self._stated}
        self.executor.keep_only(there)
        if self._lookups.provider is None:
            return
        for strategy in self.strategies:
            for action in strategy.tick(there, self._clock()):
                self._submit(action, strategy)

    def adopt_action(self, action: Action, now: float) -> None:
        """Another proxy did this, at this time."""
        on_done = self.adopted.get(action.kind)
        if on_done is not None:
            on_done(action, now)

    def list_pins(self, now: float) -> Mapping[tuple[str, int], HotPin]:
        """Return the pins of all strategies, by instance and prefix key."""
        return {where: pin for strategy in self.strategies for where, pin in strategy.list_pins(now).items()}

    def without_undone(self, facts: RequestFacts, holders: Sequence[HolderOverlap]) -> list[HolderOverlap]:
        """Return the holders without those where something must be undone first (a prefix is compressed there), which
        begins now."""
        if not self.strategies:
            return list(holders)
        instances = {endpoint.id: endpoint.instance_id for endpoint in facts.endpoints}
        return [holder for holder in holders if not self._undo(facts.keys, instances[holder.endpoint])]

    def _use(self, facts: RequestFacts, endpoint: Endpoint) -> list[KnownPrefix]:
        """Count the use of this prompt's prefixes."""
        salt = facts.request.cache_salt or ""
        return self.hotness.count_use(
            facts.keys,
            model=facts.model,
            cache_salt=salt,
            instance=endpoint.instance_id,
            now=self._clock(),
            session=facts.names.session,
        )

    async def _tokenize(self, facts: RequestFacts, used: Sequence[KnownPrefix], endpoint: Endpoint | None) -> bool:
        task = self._tokens.start_tokenizing(facts)
        tokens = None if task is None else await asyncio.shield(task)
        if tokens is not None and tokens.whole and endpoint is not None and used:
            self._consider(facts, used, tokens.ids, endpoint)
        return tokens is not None

    def _consider(self, facts: RequestFacts, used: Sequence[KnownPrefix], tokens: TokenIds, endpoint: Endpoint) -> None:
        """Decide on a prompt that was served there, so that its KV exists, and queue the actions."""
        self.hotness.learn_tokens(used, tokens)
        for note in self.on_tokens:
            note(facts, used[-1], tokens, endpoint)
        now = self._clock()
        served = Served(endpoint.instance_id, used)
        taken = {one.head for one in used if one.tokens}
        taken |= {pin.prefix.head for pin in self.list_pins(now).values()}
        for strategy in self.strategies:
            for action in strategy.plan(served, self._pressure, taken, now):
                self._submit(action, strategy)

    def _undo(self, keys: Sequence[int], instance: str) -> bool:
        """Return True if something is undone at the instance."""
        undone = False
        for strategy in self.strategies:
            for action in strategy.plan_undoing(keys, instance):
                self._submit(action, strategy)
                undone = True
        return undone

    def _submit(self, action: Action, strategy: Strategy) -> None:
        """With the score that the prefix has now."""
        if action.prefix is not None:
            action = replace(action, score=self.cold.score(action.prefix, self._clock()))
        self.executor.submit(action, strategy.done)
