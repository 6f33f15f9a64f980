"""Carries out what the strategies decide: queued, guarded, retried, checked for effect, and written down."""

from __future__ import annotations

import asyncio
import logging
import random
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Collection

from kvproxy.base.errors import (
    BreakerOpen,
    ClientError,
    ClientTimeout,
    ClientUnavailable,
    InstanceBusy,
    NotSupported,
    TooManyWaiting,
)
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.resilience.retry import retry_background
from kvproxy.base.types import Clock
from kvproxy.cache.actions.job_queue import JOB_TIMEOUT_S, Job, JobQueue
from kvproxy.cache.breakers import OperationBreakers
from kvproxy.cache.store import Action, ActionKind, ActionLocks, OnDone, OnOver, Prefix
from kvproxy.features.lmcache.lookups import LookupClient
from kvproxy.features.lmcache.metrics import LMCacheMetrics
from kvproxy.features.lmcache.provider import Effect
from kvproxy.operate.log_lines import log_fields

log = logging.getLogger("kvproxy.kvcache")
audit = logging.getLogger("kvproxy.audit")

#: Worth another attempt after a pause; everything else would fail the same way.
RETRIED = (ClientTimeout, ClientUnavailable, InstanceBusy, TooManyWaiting)
#: Of an action that is worth something now or not at all.
RETRIED_AT_ONCE = (InstanceBusy, TooManyWaiting)

#: Attempts of an action in all, and the longest pause after the first (full jitter; the next is twice as long).
ATTEMPTS = 3
BACKOFF_S = 0.1

#: Times in a row that an action may have no effect at an instance before it is switched off there.
DISABLE_AFTER = 5


class ActionExecutor:
    """Executor of actions: one at a time per instance, each with a breaker of its kind. An action that repeatedly has
    no effect at an instance is switched off there, with a warning."""

    def __init__(
        self,
        *,
        dry_run: bool,
        jobs: JobQueue,
        lookups: LookupClient,
        breakers: OperationBreakers,
        locks: Callable[[], ActionLocks | None] = lambda: None,
        metrics: Metrics,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._dry_run = dry_run
        self._jobs = jobs
        self._lookups = lookups
        self._breakers = breakers
        self._locks = locks
        self._results = metrics.group(LMCacheMetrics).actions
        self._clock = clock
        self._rng = rng
        self._without_effect: Counter[tuple[str, str]] = Counter()  # in a row, by kind and instance

    def is_disabled(self, action: Action) -> bool:
        """Return True if this kind of action was switched off at that instance."""
        return self._without_effect[action.kind, action.instance_id] >= DISABLE_AFTER

    @property
    def switched_off(self) -> list[tuple[str, str]]:
        """Kind and instance of what switched itself off for want of effect."""
        counts = self._without_effect.items()
        return sorted((kind, instance) for (kind, instance), count in counts if count >= DISABLE_AFTER)

    def keep_only(self, instances: Collection[str]) -> None:
        """Forget what came of actions at all others."""
        for where in [where for where in self._without_effect if where[1] not in instances]:
            del self._without_effect[where]

    def submit(self, action: Action, on_done: OnDone, on_over: OnOver | None = None) -> bool:
        """Queue it, unless it is switched off, its breaker is open, or it waits or runs already. `on_done` is called
        once it had its effect."""
        if self._lookups.provider is None or self.is_disabled(action) or not self._breakers.admits(action.kind):
            return False
        key = (action.kind, action.instance_id, 0 if action.prefix is None else action.prefix.key, action.own)
        about = f"{action.kind} {'*' if action.prefix is None else action.prefix.name}"
        job = Job(key, lambda: self._run(action, on_done, on_over), lane=action.instance_id, about=about)
        return self._jobs.submit(job)

    async def _run(self, action: Action, on_done: OnDone, on_over: OnOver | None) -> bool:
        started = self._clock()
        result = "abandoned"
        amount = None
        try:
            result, amount = await self._carry_out(action, on_done)
        finally:
            if on_over is not None:
                on_over(result, amount, self._clock() - started)
        return result in ("done", "dry_run")

    async def _carry_out(self, action: Action, on_done: OnDone) -> tuple[str, int | None]:
        if self.is_disabled(action):
            return "disabled", None
        locks = None if action.own else self._locks()
        if locks is not None and not await _claim(locks, action):
            self._results.labels(action.kind, "elsewhere").inc()
            return "elsewhere", None
        started = self._clock()
        result, amount = await self._attempt(action)
        self._results.labels(action.kind, result).inc()
        _record(action, result, amount, self._clock() - started)
        gone = action.kind is ActionKind.UNPIN and result == "no_effect"  # the service has forgotten the pin
        if gone or result in ("done", "dry_run"):
            on_done(action, self._clock())
            if locks is not None:
                locks.acted(action)
        if not gone and result in ("done", "no_effect"):
            self._judge(action, had_effect=result == "done")
        return result, amount

    async def _attempt(self, action: Action) -> tuple[str, int | None]:
        """How it went (a metric label), and the amount the service named."""
        if self._dry_run:
            return "dry_run", None
        try:
            effect = await retry_background(
                self._call(action),
                attempts=ATTEMPTS,
                deadline_s=JOB_TIMEOUT_S,
                base_s=BACKOFF_S,
                max_s=2 * BACKOFF_S,
                retry_on=RETRIED if action.timeout_s is None else RETRIED_AT_ONCE,
                rng=self._rng,
                clock=self._clock,
            )
        except BreakerOpen:
            return "breaker_open", None
        except ClientError as error:
            level = logging.DEBUG if isinstance(error, NotSupported) else logging.WARNING
            log.log(level, "[kvcache] %s at %s: %s", action.kind, action.instance_id, error)
            return error.reason, None
        # A service that does not report the amount (before 0.3.5) is assumed to have succeeded.
        return "no_effect" if effect.amount == 0 else "done", effect.amount

    def _call(self, action: Action) -> Callable[[], Awaitable[Effect]]:
        provider = self._lookups.provider
        assert provider is not None
        known = action.prefix
        prefix = Prefix(array("I"), "") if known is None else Prefix(known.tokens, known.model, known.cache_salt)

        async def act() -> Effect:
            try:
                async with asyncio.timeout(action.timeout_s):
                    return await provider.act(action.kind, action.instance_id, prefix, source=action.source)
            except TimeoutError:
                raise ClientTimeout(f"not over within {action.timeout_s:g} s") from None

        return lambda: self._breakers.call(action.kind, act)

    def _judge(self, action: Action, *, had_effect: bool) -> None:
        where = (action.kind, action.instance_id)
        if had_effect:
            del self._without_effect[where]
            return
        self._without_effect[where] += 1
        if self.is_disabled(action):
            log.warning(
                "[kvcache] %s at %s had no effect %d times in a row and is switched off there; check its location, "
                "method and instance id",
                action.kind,
                action.instance_id,
                self._without_effect[where],
            )


async def _claim(locks: ActionLocks, action: Action) -> bool:
    prefix = "*" if action.prefix is None else action.prefix.name
    return await locks.claim(f"{action.kind} {action.instance_id} {prefix}", JOB_TIMEOUT_S)


def _record(action: Action, result: str, amount: int | None, took_s: float) -> None:
    """One line an action: hashes and counts, never prompts."""
    prefix = action.prefix
    fields = {
        "action": action.kind.value,
        "instance": action.instance_id,
        "prefix": "*" if prefix is None else prefix.name,
        "tokens": 0 if prefix is None else len(prefix.tokens),
        "reason": action.reason,
        **({} if action.score is None else {"score": round(action.score, 3)}),
        "result": result,
        "amount": amount,
        "took_ms": round(took_s * 1000, 1),
        **({"source": action.source or "shared"} if action.kind is ActionKind.TRANSFER else {}),
    }
    log_fields(audit, "cache", fields)
