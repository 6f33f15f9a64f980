"""Filter `normalize`: rewrites what clients put into their prompts that keeps engines from reusing them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from starlette.types import ASGIApp

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, InferenceRequest
from kvproxy.cluster.routes import RouteTarget
from kvproxy.features.normalize.feature import NormalizeRule, NormalizeSettings
from kvproxy.features.normalize.metrics import NormalizeMetrics
from kvproxy.features.normalize.normalize_rules import Piece, pieces_of, put_into, replaced_prompt, rewrite
from kvproxy.proxy.filters.chain import FilterContext
from kvproxy.proxy.filters.step import Step
from kvproxy.proxy.request.downstream import Downstream
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.parse import decode_body
from kvproxy.proxy.request.session import NO_CALLER


class ResolvesRoutes(Protocol):
    """The routes, as far as the filter needs them."""

    def resolve(self, path: str, model: str) -> RouteTarget | None: ...


class NormalizeFilter(Step):
    """Rewrites the prompts that rules change. Between `inference_request` and `kvcache`: what follows sees the request
    as the engine will."""

    def __init__(
        self,
        app: ASGIApp,
        rules: Sequence[NormalizeRule],
        *,
        routes: ResolvesRoutes,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        super().__init__(app, metrics=metrics, clock=clock)
        self._rules = rules
        self._routes = routes

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
        changes = [(old, new) for old, new in zip(pieces, changed, strict=True) if old != new]
        result = "rewritten" if put_all(exchange, downstream, request, changes) else "failed"
        self.metrics.group(NormalizeMetrics).normalized.labels(target.cluster.name, names, result).inc()

    def _rewritten(self, pieces: Sequence[Piece]) -> tuple[Sequence[Piece], str]:
        """Return the pieces after all rules, and the names of those that changed something."""
        names = []
        for rule in self._rules:
            after = [rewrite(rule, piece) for piece in pieces]
            if after != pieces:
                pieces = after
                names.append(rule.value)
        return pieces, "+".join(names)


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
    return NormalizeFilter(
        app,
        settings.rules,
        routes=context.services.routes,
        metrics=context.metrics,
        clock=context.clock,
    )
