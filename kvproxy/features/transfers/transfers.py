"""Transfers: KV is copied into an instance's memory before a request needs it there.

Ahead of a session's next turn, at the endpoint where the router would send it, from a store that its instance reads or
from another instance; and on demand (on_demand.py).
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from kvproxy.base.errors import BreakerOpen, ClientError
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, EndpointId, Prompt
from kvproxy.cache.actions.executor import ActionExecutor
from kvproxy.cache.actions.hotness import KnownPrefix
from kvproxy.cache.actions.job_queue import Job, JobQueue
from kvproxy.cache.actions.strategies import Action, PressureOf, Served
from kvproxy.cache.clients.tokens import TokenIds
from kvproxy.cache.overlap.facts import RequestFacts
from kvproxy.cache.overlap.merge import HolderOverlap
from kvproxy.cache.overlap.sources import OverlapSources
from kvproxy.cache.providers import ActionKind, Prefix
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.routing.policy import Overlap, PickRequest
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.routing.work import prefill_s
from kvproxy.cluster.screening import Refusal
from kvproxy.features.leases.gaps import SessionPauses
from kvproxy.features.transfers.metrics import TransferMetrics
from kvproxy.features.transfers.planner import draw_source, find_holders, near_tokens
from kvproxy.features.transfers.transfer_link import Link

#: Sessions whose next turn is expected, and tokens of their prompts; further turns are not prepared.
MAX_EXPECTED = 1024
MAX_EXPECTED_TOKENS = 8_000_000
#: What of the usual pause passes before a turn is prepared: late enough that memory still has it when the turn comes,
#: early enough for most turns. Shorter pauses leave no time, and after longer ones another prompt has pushed it out.
LEAD = 0.5
MIN_PAUSE_S = 0.2
MAX_PAUSE_S = 600.0
#: Sources that hold as much as the longest, but for so many tokens, are equally good.
STEP_TOKENS = 256

#: Told how a transfer went (a metric label), and the tokens it brought.
OnTransferred = Callable[[str, int], None]


@dataclass(slots=True, eq=False)
class _Expected:
    """A turn that will begin with this prompt."""

    facts: RequestFacts
    prefix: KnownPrefix
    timer: asyncio.TimerHandle


class Transfers:
    """Made by the executor, under its rules. `plan` has nothing to do after a response: a turn is prepared when it is
    due. Leaving it forgets what is expected."""

    def __init__(
        self,
        settings: KvCacheSettings,
        *,
        overlap: OverlapSources,
        executor: ActionExecutor,
        jobs: JobQueue,
        metrics: Metrics,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self.settings = settings.transfers
        self._timeout_s = settings.request_timeout
        self._overlap = overlap
        self._executor = executor
        self._jobs = jobs
        self.metrics = metrics.group(TransferMetrics)
        self.clock = clock
        self.rng = rng
        self.link = Link(settings.transfers, clock=clock)
        self._pauses = SessionPauses()
        self._expected: dict[int, _Expected] = {}
        self._expected_tokens = 0

    def show(self) -> None:
        """The gauge reads it from now on."""
        self.metrics.expected.set_function(lambda: len(self._expected))

    def close(self) -> None:
        """Prepare no turn any more."""
        for session in list(self._expected):
            self._forget(session)

    def plan(self, served: Served, pressure: PressureOf, taken: set[int], now: float) -> list[Action]:
        return []

    def done(self, action: Action, now: float) -> None:
        if action.prefix is not None:
            action.prefix.instances.add(action.instance_id)

    def expect_turn(self, facts: RequestFacts, prefix: KnownPrefix, tokens: TokenIds) -> None:
        """A turn of a session is over, whose prompt has these tokens: its next one begins with them."""
        session = facts.names.session
        now = self.clock()
        if not self.settings.ahead or not session:
            return
        pause_s = self._pauses.note_turn(session, facts.started_at, now)
        self._forget(session)
        if pause_s is None or not MIN_PAUSE_S <= pause_s <= MAX_PAUSE_S or len(tokens) < self.settings.min_tokens:
            return
        if self._expected_tokens + len(tokens) > MAX_EXPECTED_TOKENS or len(self._expected) >= MAX_EXPECTED:
            return
        timer = asyncio.get_running_loop().call_later(LEAD * pause_s, self.prepare_turn, session)
        self._expected[session] = _Expected(_without_text(facts, tokens), prefix, timer)
        self._expected_tokens += len(tokens)

    def prepare_turn(self, session: int) -> bool:
        """It is due: whether it is looked at."""
        expected = self._forget(session)
        if expected is None:
            return False
        run = partial(self._prepare, expected.facts, expected.prefix)
        return self._jobs.submit(Job(("prepare", session), run, about=f"prepare {expected.prefix.name}"))

    def end_session(self, session: int) -> None:
        """No turn of it comes any more."""
        self._forget(session)

    def _forget(self, session: int) -> _Expected | None:
        expected = self._expected.pop(session, None)
        if expected is not None:
            expected.timer.cancel()
            self._expected_tokens -= len(expected.facts.tokens or ())
        return expected

    async def _prepare(self, facts: RequestFacts, prefix: KnownPrefix) -> bool:
        facts.cursor = facts.indexes.approximate.locate(facts.hashes)
        target = self._find_target(facts) if await self._look_up(facts) else None
        if target is None:
            return False
        found = self._find_source(facts, target)
        if found is None:
            self.metrics.refused.labels("held").inc()
            return False
        source, tokens = found
        return self.begin(target, prefix, tokens, source, "next turn", facts.cluster.speeds)

    async def _look_up(self, facts: RequestFacts) -> bool:
        """Return what holds it now, into the facts; False where nothing says so."""
        lookups = self._overlap.lookups
        tokens = facts.tokens
        if tokens is None or not lookups.possible:
            return False
        salt = facts.request.cache_salt
        try:
            holders = await lookups.find_holders(tokens, model=facts.model, cache_salt=salt, timeout_s=self._timeout_s)
        except (ClientError, BreakerOpen):
            return False
        known = self._overlap.instance_ids()
        local = facts.overlaps.by_endpoint
        looked_up = lookups.count_overlaps(
            holders,
            endpoints=facts.endpoints,
            known=known,
            local=local,
            hashes=facts.hashes,
            denied=facts.indexes.denied,
        )
        self._overlap.add_lookup(facts, looked_up)
        return True

    def _find_target(self, facts: RequestFacts) -> Endpoint | None:
        """Where the router would send it now."""
        cluster = facts.cluster
        preferred = None if cluster.policy.uses_overlap else facts.preferred
        asked = PickRequest(facts.model, facts.request.session_key, facts.overlaps, preferred)
        verdict = cluster.decide(asked, self.clock())
        return None if isinstance(verdict, Refusal) else verdict.endpoint

    def _find_source(self, facts: RequestFacts, target: Endpoint) -> tuple[str, int] | None:
        """Return the instance that the target lacks most from ("": what its own instance reads), and how much
        that is."""
        held = facts.overlaps.by_endpoint.get(target.id, Overlap(0))
        by_endpoint = facts.overlaps.by_endpoint
        far = _far_tokens([one for one in facts.lookup_overlaps if one.endpoint == target.id], held.device_tokens)
        if far >= self.settings.min_tokens:
            return "", far
        provider = self._overlap.lookups.provider
        if provider is None or not provider.copies:
            return None
        others = [one for one in facts.endpoints if one.instance_id != target.instance_id]
        holders = find_holders(others, {name: one.tokens for name, one in by_endpoint.items()}, STEP_TOKENS)
        if not holders:
            return None
        source = draw_source(holders, self.rng)
        missing = by_endpoint[source.id].tokens - held.tokens
        return (source.instance_id, missing) if missing >= self.settings.min_tokens else None

    def begin(
        self,
        target: Endpoint,
        prefix: KnownPrefix,
        tokens: int,
        source: str,
        reason: str,
        speeds: SpeedModel | None,
        on_over: OnTransferred | None = None,
    ) -> bool:
        """Copy the prefix to the target, which lacks so many tokens of it, unless a limit or its price refuses that.
        `source` as of Action."""
        compute_s = math.inf if speeds is None else prefill_s(tokens, 0, 0.0, speeds.seconds)
        if refused := self.link.why_refused(tokens, compute_s):
            self.metrics.refused.labels(refused).inc()
            return False
        action = Action(ActionKind.TRANSFER, target.instance_id, prefix, reason, source=source)
        over = partial(self._over, target.id, prefix, action, on_over)
        if not self._executor.submit(action, self, over):
            return False
        self.link.begin(tokens)
        return True

    def _over(
        self,
        endpoint: EndpointId,
        prefix: KnownPrefix,
        action: Action,
        on_over: OnTransferred | None,
        result: str,
        amount: int | None,
        took_s: float,
    ) -> None:
        tokens = (amount or 0) if result == "done" else 0
        self.link.end(tokens, took_s)
        self.metrics.seconds.labels(result).observe(took_s)
        self.metrics.tokens.labels(endpoint).inc(tokens)
        if tokens:
            held = Prefix(prefix.tokens, prefix.model, prefix.cache_salt)
            self._overlap.lookups.note_transfer(action.instance_id, held, tokens)
        if on_over is not None:
            on_over(result, tokens)


def _far_tokens(told: Sequence[HolderOverlap], device_tokens: int) -> int:
    """Return what a lookup service, asked just now, knows of an endpoint beyond its engine's and its host's memory."""
    near = [near_tokens(Overlap(0, one.lower)) if one.lower else one.tokens for one in told]
    return max((one.tokens for one in told), default=0) - max([device_tokens, *near])


def _without_text(facts: RequestFacts, tokens: TokenIds) -> RequestFacts:
    """Return what has to be known of a prompt to say where it would go."""
    request = msgspec.structs.replace(facts.request, prompt=Prompt(b"", ()))
    return msgspec.structs.replace(
        facts,
        request=request,
        body=b"",
        text=None,
        entry=None,
        tokens=tokens,
        hashed_tokens=None,
        tokens_exact=True,
        tokens_bytes=facts.prompt_bytes,
        lookup_overlaps=(),
    )
