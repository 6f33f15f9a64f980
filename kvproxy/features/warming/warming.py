"""Computing a prompt at one endpoint, within its idle capacity."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvproxy.base.errors import ClientError
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock
from kvproxy.cache.engines import Engines
from kvproxy.cluster.endpoint import Condition, Endpoint
from kvproxy.features.warming.metrics import WarmingMetrics

#: One send; a long prompt on a slow engine.
TIMEOUT_S = 120.0
#: An engine that runs and holds more is left alone.
MAX_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class Prefill:
    """Tokens of a request by the engine's own count; None: reuse not reported."""

    prompt_tokens: int
    cached_tokens: int | None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    prompt_tokens_details: _Details | None = None


class _Generated(msgspec.Struct):
    usage: _Usage


@dataclass(frozen=True, slots=True)
class Warmed:
    """Result of warming: `done`, `no_effect`, `unverified` (the engine does not report reuse), `busy`, or the reason
    of a failed call. Tokens are the engine's count of the prompt, and of it those that a second send found."""

    result: str
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Warmer:
    """Sends its caller's prompt to one endpoint at a time, within idle capacity."""

    def __init__(self, *, engines: Engines, metrics: Metrics, clock: Clock) -> None:
        self._clock = clock
        self._engines = engines
        self._tokens = metrics.group(WarmingMetrics).warmed_tokens

    async def warm_body(self, endpoint: Endpoint, path: str, body: bytes) -> Warmed:
        """Send a request that generates one token, and again to see what is reused of it."""
        if endpoint.rank is not None:
            return Warmed("not_supported")  # the engine itself would choose the rank
        first = Prefill(0, 0)
        try:
            if not await self.is_idle(endpoint):
                return Warmed("busy")
            first = await self._send(endpoint, path, body)
            again = await self._send(endpoint, path, body)
        except ClientError as error:
            return Warmed(error.reason, first.prompt_tokens)
        if again.cached_tokens is None:
            return Warmed("unverified", again.prompt_tokens)
        return Warmed("done" if again.cached_tokens else "no_effect", again.prompt_tokens, again.cached_tokens)

    async def is_idle(self, endpoint: Endpoint) -> bool:
        """By its own word, and by what this proxy has under way there. ClientError where it cannot be asked."""
        if endpoint.condition(self._clock()) is not Condition.UP or endpoint.load.in_flight > MAX_REQUESTS:
            return False
        engine = await self._engines.client(endpoint.engine).fetch_metrics()
        if endpoint.load.in_flight > MAX_REQUESTS or engine.running is None:
            return False
        return engine.running + (engine.waiting or 0) <= MAX_REQUESTS

    async def _send(self, endpoint: Endpoint, path: str, body: bytes) -> Prefill:
        api = self._engines.client(endpoint.engine).api
        usage = (await api.post(path, body, _Generated, timeout_s=TIMEOUT_S)).usage
        details = usage.prompt_tokens_details
        answer = Prefill(usage.prompt_tokens, None if details is None else details.cached_tokens)
        found = answer.cached_tokens or 0
        self._tokens.labels("found").inc(found)
        self._tokens.labels("computed").inc(max(0, answer.prompt_tokens - found))
        return answer
