"""Filter `normalize`: rewrites what clients put into their prompts that keeps engines from reusing them, where that
proves to help."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec
from starlette.types import ASGIApp
from xxhash import xxh3_64_intdigest

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, InferenceRequest
from kvproxy.cache.prefix.shape_identity import is_system
from kvproxy.cluster.routes import RouteTarget
from kvproxy.features.normalize.metrics import NormalizeMetrics
from kvproxy.features.normalize.normalize_rules import Piece, pieces_of, put_into, replaced_prompt, rewrite
from kvproxy.features.normalize.settings import NormalizeRule, NormalizeSettings
from kvproxy.proxy.filters.chain import FilterContext
from kvproxy.proxy.filters.step import Step
from kvproxy.proxy.request.downstream import Downstream
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.observer import RequestObserver
from kvproxy.proxy.request.parse import decode_body
from kvproxy.proxy.request.session import NO_CALLER

#: The least difference of shares that is worth rewriting prompts for.
LEAST_GAIN = 0.03
#: Sessions with and without before anything is concluded; turns of one that make it count.
_LEAST_SESSIONS = 8
_LEAST_TURNS = 3
#: The threshold of a test that is repeated many times.
_SURELY = 3.5
_CLEARLY = 2.5
#: Lower bound on the standard error of a difference.
_LEAST_ERROR = 0.005
#: Sessions that were rewritten after which it should have shown; all that are kept of both kinds.
_ENOUGH_SESSIONS = 400
MAX_SESSIONS = 4096
#: Turns between two looks.
_EVERY = 64


class TrialState(StrEnum):
    """State of a trial; a metric label."""

    TRYING = "trying"
    ON = "on"
    OFF = "off"


class _Session:
    __slots__ = ("share", "treated", "turns")

    def __init__(self, *, treated: bool) -> None:
        self.treated = treated
        self.turns = 0
        self.share = 0.0  # reused, the sum over its turns


class Trial:
    """Of one combination of rules on one cluster's traffic. Bounded by MAX_SESSIONS, the latest of which count."""

    def __init__(self, *, share: float, seed: int) -> None:
        self.state = TrialState.ON if share >= 1.0 else TrialState.TRYING
        self.gain: float | None = None  # of the reused share, at the last look
        self._bound = int(share * 2**32)
        self._seed = seed
        self._sessions: dict[int, _Session] = {}
        self._turns = 0

    def applies(self, session: int) -> bool:
        """Return True if the session's prompts are rewritten: all of them, or none, while the trial lasts."""
        if self.state is TrialState.TRYING:
            return self._is_treated(session)
        return self.state is TrialState.ON

    def observe_turn(self, session: int, *, prompt_tokens: int, cached_tokens: int) -> TrialState | None:
        """Return an engine reused so much of a prompt that the rules change, or would; the new state, if that settles
        it."""
        if self.state is not TrialState.TRYING or prompt_tokens <= 0:
            return None
        known = self._sessions.pop(session, None)
        if known is None:
            if len(self._sessions) >= MAX_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
            known = _Session(treated=self._is_treated(session))
        self._sessions[session] = known
        known.turns += 1
        known.share += min(1.0, cached_tokens / prompt_tokens)
        self._turns += 1
        return self._look() if self._turns % _EVERY == 0 else None

    def _is_treated(self, session: int) -> bool:
        return (session ^ self._seed) % 2**32 < self._bound

    def _look(self) -> TrialState | None:
        counted = [one for one in self._sessions.values() if one.turns >= _LEAST_TURNS]
        treated = [one.share / one.turns for one in counted if one.treated]
        others = [one.share / one.turns for one in counted if not one.treated]
        if min(len(treated), len(others)) < _LEAST_SESSIONS:
            return None
        (mean, spread), (other_mean, other_spread) = _mean(treated), _mean(others)
        self.gain = mean - other_mean
        error = max(_LEAST_ERROR, math.sqrt(spread / len(treated) + other_spread / len(others)))
        if self.gain >= LEAST_GAIN and self.gain >= _SURELY * error:
            self.state = TrialState.ON
        elif self.gain + _CLEARLY * error < LEAST_GAIN or len(treated) >= _ENOUGH_SESSIONS:
            self.state = TrialState.OFF
        else:
            return None
        self._sessions.clear()
        return self.state


def _mean(values: Iterable[float]) -> tuple[float, float]:
    """Mean and variance."""
    numbers = list(values)
    mean = sum(numbers) / len(numbers)
    return mean, sum((one - mean) ** 2 for one in numbers) / max(1, len(numbers) - 1)


log = logging.getLogger("kvproxy.filters")

_VERDICTS = {
    TrialState.ON: "[normalize] %s on for cluster %s: of prompts that are rewritten %.0f %% more is reused",
    TrialState.OFF: "[normalize] %s off for cluster %s: rewritten prompts are not reused more (%+.0f %%)",
}


class ResolvesRoutes(Protocol):
    """The routes, as far as the filter needs them."""

    def resolve(self, path: str, model: str) -> RouteTarget | None: ...


class Trials:
    """Trials of all clusters, by the rules that change a prompt: where two things break a prefix, curing one of them
    alone shows nothing. Their results outlive a reload."""

    def __init__(self, *, share: float, seed: int, metrics: Metrics) -> None:
        self._share = share
        self._seed = seed
        self._metrics = metrics
        self._trials: dict[tuple[str, str], Trial] = {}

    def of(self, cluster: str, rules: str) -> Trial:
        """Made on first use."""
        trial = self._trials.get((cluster, rules))
        if trial is None:
            trial = self._trials[cluster, rules] = Trial(share=self._share, seed=self._seed + len(self._trials))
            self._show(cluster, rules, trial.state)
        return trial

    def record_verdict(self, cluster: str, rules: str, trial: Trial) -> None:
        """Record the end of a trial."""
        log.info(_VERDICTS[trial.state], rules, cluster, 100 * (trial.gain or 0.0))
        self._show(cluster, rules, trial.state)

    def _show(self, cluster: str, rules: str, state: TrialState) -> None:
        for one in TrialState:
            self._metrics.group(NormalizeMetrics).normalize_state.labels(cluster, rules, one.value).set(one is state)


class NormalizeFilter(Step):
    """Rewrites the prompts that rules change, of the sessions that are chosen. Between `inference_request` and
    `kvcache`: what follows sees the request as the engine will."""

    def __init__(
        self,
        app: ASGIApp,
        rules: Sequence[NormalizeRule],
        *,
        routes: ResolvesRoutes,
        trials: Trials,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        super().__init__(app, metrics=metrics, clock=clock)
        self._rules = rules
        self._routes = routes
        self._trials = trials

    def before(self, exchange: Exchange, downstream: Downstream) -> None:
        """Forward the request, rewritten or not; a body too long to be decoded at once is left alone."""
        request = exchange.inference
        body = exchange.body
        if request is None or body is None or exchange.members is not None:
            return
        pieces = pieces_of(request.prompt)
        changed, names = self._rewritten(pieces)
        target = self._routes.resolve(downstream.scope["path"], request.model) if names else None
        if target is None:
            return
        cluster = target.cluster.name
        session = session_of(exchange.tenant, request)
        result = "left"
        trial = self._trials.of(cluster, names)
        if trial.applies(session):
            changes = [(old, new) for old, new in zip(pieces, changed, strict=True) if old != new]
            result = "rewritten" if put_all(exchange, downstream, request, changes) else "failed"
        self.metrics.group(NormalizeMetrics).normalized.labels(cluster, names, result).inc()
        if trial.state is TrialState.TRYING and result != "failed":
            exchange.attach(TrialWatch(self._trials, trial, (cluster, names), session))

    def _rewritten(self, pieces: Sequence[Piece]) -> tuple[Sequence[Piece], str]:
        """Return the pieces after all rules, and the names of those that changed something."""
        names = []
        for rule in self._rules:
            after = [rewrite(rule, piece) for piece in pieces]
            if after != pieces:
                pieces = after
                names.append(rule.value)
        return pieces, "+".join(names)


class TrialWatch(RequestObserver):
    """Reports to the trial the outcome of one request that its rules change, or would."""

    __slots__ = ("_of", "_session", "_trial", "_trials")

    def __init__(self, trials: Trials, trial: Trial, of: tuple[str, str], session: int) -> None:
        self._trials = trials
        self._trial = trial
        self._of = of
        self._session = session

    def finished(self, exchange: Exchange, now: float) -> None:
        """By the engine's own count, where it gave one."""
        prompt = exchange.outcome.prompt_tokens
        cached = exchange.outcome.cached_tokens
        if prompt is None or cached is None:
            return
        if self._trial.observe_turn(self._session, prompt_tokens=prompt, cached_tokens=cached) is not None:
            self._trials.record_verdict(*self._of, self._trial)


def session_of(tenant: str, request: InferenceRequest) -> int:
    """Return a number for the session, or for a conversation without one: by its first message."""
    name = request.session_key
    if name is not None:
        return xxh3_64_intdigest(f"{tenant}\0{name}".encode("utf-8", "surrogatepass"))
    first = next((part for part in request.prompt.parts if not is_system(part)), b"")
    return xxh3_64_intdigest(first)


def put_all(
    exchange: Exchange, downstream: Downstream, request: InferenceRequest, changes: Sequence[tuple[Piece, Piece]]
) -> bool:
    """Put the changed pieces into the body and the request. False, and nothing changed, where that cannot be done
    without a doubt: what is parsed of the new body must be the old request with these changes."""
    body = exchange.body
    for before, after in changes:
        body = None if body is None else put_into(body, before, after)
    if body is None:
        return False
    wanted = replaced_prompt(request.prompt, changes)
    parsed = decode_body(request.kind, body, NO_CALLER)
    if parsed is None or parsed.prompt != wanted:
        return False
    exchange.body = downstream.replayed = body
    exchange.inference = msgspec.structs.replace(request, prompt=wanted)
    scope = downstream.scope
    length = b"%d" % len(body)
    scope["headers"] = [(name, length if name == b"content-length" else value) for name, value in scope["headers"]]
    return True


def build(app: ASGIApp, settings: NormalizeSettings, context: FilterContext) -> ASGIApp:
    """Return the filter around `app`; `app` itself without rules."""
    if not settings.rules:
        return app
    seed = context.rng.getrandbits(64)
    trials = context.states.get(
        Trials,
        (settings.rules, settings.share),
        lambda: Trials(share=settings.share, seed=seed, metrics=context.metrics),
    )
    return NormalizeFilter(
        app,
        settings.rules,
        routes=context.services.routes,
        trials=trials,
        metrics=context.metrics,
        clock=context.clock,
    )
