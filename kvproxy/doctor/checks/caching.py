"""Is prefix caching on, and does the engine say what it reused?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvproxy.doctor.checks.chat import TRIAL_CALLS
from kvproxy.doctor.engine import Engine
from kvproxy.doctor.finding import Finding, ok, problem, warning
from kvproxy.doctor.trial import Trial

_TURN_ON = "start the engine without `--no-enable-prefix-caching` (older versions: with `--enable-prefix-caching`)"
_SHOW = "start the engine with `--enable-prompt-tokens-details`"


@dataclass(frozen=True, slots=True)
class CachingCheck:
    """One prompt, sent twice."""

    engine: Engine

    name = "prefix caching"
    calls = TRIAL_CALLS

    @property
    def where(self) -> str:
        return self.engine.where

    async def find(self) -> Sequence[Finding]:
        return [caching_finding(self.where, await self.engine.trial())]


def caching_finding(where: str, trial: Trial) -> Finding:
    """The verdict on one trial. What the answer says goes before what metrics say, since those count others too."""
    cached, counted = trial.second.cached_tokens, trial.second.prompt_tokens
    if cached:
        return ok(where, f"{cached} of {counted} prompt tokens came from its cache the second time")
    configured, hits = caching_configured(trial), _hits(trial)
    if configured is False:
        return problem(where, "prefix caching is off (by its /metrics)", _TURN_ON)
    if cached == 0:
        if configured is None and not hits:
            return problem(where, "nothing of a prompt sent twice was reused: prefix caching is off", _TURN_ON)
        fix = "is its KV cache too small, or was it very busy? See `vllm:kv_cache_usage_perc`, give it more memory"
        return warning(where, "prefix caching is on, but a prompt sent twice was computed twice", fix)
    what = "does not say how much of a prompt it reused: predictions cannot be checked"
    if hits:
        return warning(where, f"prefix caching works (by its counters), but the engine {what}", _SHOW)
    if configured:
        fix = f"{_SHOW}; older versions leave the figure out when it is 0, then its KV cache may be too small"
        return warning(where, f"prefix caching is on, but no reuse was seen; the engine {what}", fix)
    if hits == 0:
        return problem(where, "no cached tokens in the answer and none counted: prefix caching is off", _TURN_ON)
    return warning(where, f"the engine shows no counters and {what}", f"{_SHOW}, and serve /metrics")


def caching_configured(trial: Trial) -> bool | None:
    """What the engine's metrics say; None when they do not."""
    for metrics in (trial.after, trial.before):
        if metrics is not None and metrics.cache is not None:
            return metrics.cache.prefix_caching
    return None


def _hits(trial: Trial) -> int | None:
    """Tokens that the engine counted as reused meanwhile; None when it does not count."""
    if trial.before is None or trial.after is None:
        return None
    before, after = trial.before.prefix_hits_tokens, trial.after.prefix_hits_tokens
    return None if before is None or after is None else after - before
