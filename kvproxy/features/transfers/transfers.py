"""Transfers: KV is copied into an instance's memory before a request needs it there.

On demand (on_demand.py), from a store that its instance reads or from another instance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from kvproxy.base.settings.compose import part_of
from kvproxy.base.types import Clock, EndpointId
from kvproxy.cache.actions.hotness import KnownPrefix
from kvproxy.cache.feature import CacheParts
from kvproxy.cache.store import Action, ActionKind, Prefix
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.routing.speeds import SpeedModel
from kvproxy.cluster.routing.work import prefill_s
from kvproxy.features.transfers.metrics import TransferMetrics
from kvproxy.features.transfers.recent_copies import RecentCopies
from kvproxy.features.transfers.settings import TransferPlace, TransferSettings

#: Weight of a new transfer's speed against earlier ones, and how long speeds are valid.
_NEW = 0.3
SPEED_AGE_S = 60.0

#: A transfer that is not over by then has failed; later where requests may wait longer for it.
TIMEOUT_S = 2.0
#: Transfers under way at once, over all instances.
AT_ONCE = 2


class Link:
    """Concurrency and bandwidth limits for transfers, plus measured throughput."""

    def __init__(self, settings: TransferSettings, *, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self.running = 0
        self._speed = 0.0
        self._seen_at = -math.inf
        self._budget = float(settings.tokens_per_second)
        self._refilled_at = clock()

    @property
    def tokens_per_s(self) -> float:
        """Of one transfer; 0: none was seen lately."""
        return self._speed if self._clock() - self._seen_at <= SPEED_AGE_S else 0.0

    def why_refused(self, tokens: int, compute_s: float) -> str:
        """Why so many tokens, which take so long to compute, are not transferred now (a metric label); "": they may."""
        now = self._clock()
        most = float(self._settings.tokens_per_second)
        self._budget = min(most, self._budget + most * (now - self._refilled_at))
        self._refilled_at = now
        if self.running >= AT_ONCE:
            return "busy"
        if min(tokens, most) > self._budget:
            return "budget"
        return "slow" if tokens / (self.tokens_per_s or math.inf) > compute_s else ""

    def begin(self, tokens: int) -> None:
        """Begin a transfer of `tokens`."""
        self.running += 1
        self._budget -= tokens

    def end(self, tokens: int, seconds: float) -> None:
        """End a transfer that brought `tokens`."""
        self.running -= 1
        if tokens and seconds > 0.0:
            seen = tokens / seconds
            speed = self.tokens_per_s
            self._speed, self._seen_at = speed + _NEW * (seen - speed) if speed else seen, self._clock()


#: Sources within this many tokens of the longest are equally good.
STEP_TOKENS = 256

#: Called with a transfer's outcome (a metric label), and its tokens.
OnTransferred = Callable[[str, int], None]


class Transfers:
    """Made by the store, under its rules."""

    def __init__(self, parts: CacheParts) -> None:
        self.settings = part_of(parts.settings, TransferPlace).transfers
        self.copied = RecentCopies(parts.clock)
        self.store = parts.overlap.store
        self.store.find_more = self.copied.find_holders
        self.metrics = parts.metrics.group(TransferMetrics)
        self.clock = parts.clock
        self.rng = parts.rng
        self.link = Link(self.settings, clock=parts.clock)

    def done(self, action: Action, now: float) -> None:
        if action.prefix is not None:
            action.prefix.instances.add(action.instance_id)

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
        action = Action(
            ActionKind.TRANSFER,
            target.instance_id,
            prefix,
            reason,
            source=source,
            timeout_s=max(TIMEOUT_S, self.settings.max_wait),
        )
        over = partial(self._over, target.id, prefix, action, on_over)
        if not self.store.submit(action, self.done, over):
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
            self.copied.note_copy(action.instance_id, held, tokens)
        if on_over is not None:
            on_over(result, tokens)
