"""Filter before the router: streams on routes with `resume` get a continuation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from starlette.types import ASGIApp

from kvproxy.base.settings.compose import part_of
from kvproxy.base.types import RequestKind
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.pick import Pick
from kvproxy.features.resume.chat_form import ChatForms
from kvproxy.features.resume.context import ContextLengths
from kvproxy.features.resume.derendered import Derenderers
from kvproxy.features.resume.metrics import ResumeMetrics
from kvproxy.features.resume.openai import OpenAiEvents
from kvproxy.features.resume.plan import Wishes
from kvproxy.features.resume.proof import Proofs
from kvproxy.features.resume.settings import Grade, ResumePlace
from kvproxy.features.resume.stream import ResumableStream, StreamEvents
from kvproxy.features.resume.typed import MessagesEvents, ResponsesEvents
from kvproxy.proxy.filters.chain import FilterContext, FilterType
from kvproxy.proxy.filters.step import Step
from kvproxy.proxy.request.downstream import Downstream
from kvproxy.proxy.request.exchange import Exchange

_EVENTS: Mapping[RequestKind, Callable[[], StreamEvents]] = {
    RequestKind.CHAT: partial(OpenAiEvents, RequestKind.CHAT),
    RequestKind.COMPLETION: partial(OpenAiEvents, RequestKind.COMPLETION),
    RequestKind.MESSAGES: MessagesEvents,
    RequestKind.RESPONSES: ResponsesEvents,
}


class ResumeFilter(Step):
    """Has the streams of some routes go on with another engine when theirs fails."""

    reads_state = False

    def __init__(self, app: ASGIApp, context: FilterContext) -> None:
        super().__init__(app, metrics=context.metrics, clock=context.clock)
        self._routes = context.services.routes
        self._lengths = ContextLengths(context.services.pool)
        self._proofs = Proofs(context.services.pool)
        self._derenderers = Derenderers(context.services.pool)
        self._forms = ChatForms(context.services.pool)
        context.lifetimes.extend((self._lengths, self._proofs, self._derenderers, self._forms))
        self._counts = context.metrics.group(ResumeMetrics)

    def before(self, exchange: Exchange, downstream: Downstream) -> None:
        """Set the continuation of a stream."""
        inference = exchange.inference
        if inference is None or not inference.stream or inference.kind not in _EVENTS:
            return
        target = self._routes.resolve(downstream.scope["path"], inference.model)
        if target is None or target.route is None:
            return
        wanted = part_of(target.route, ResumePlace)
        if wanted.resume is Grade.OFF:
            return
        exchange.continuation = ResumableStream(
            exchange,
            _EVENTS[inference.kind](),
            kind=inference.kind,
            wishes=Wishes(
                wanted.resume,
                wanted.resume_best_effort,
                chat_forms=self._forms.forms,
                is_sglang=self._forms.is_sglang,
            ),
            metrics=self._counts,
            clock=self.clock,
            context_tokens=self._find_length if inference.max_tokens is None else _unneeded,
            is_proven=partial(self._is_proven, target.upstream_model or inference.model),
            derenders=partial(self._derenders, target.upstream_model or inference.model),
            others_serve=partial(self._others_serve, target.cluster, target.upstream_model or inference.model),
        )

    def _is_proven(self, model: str, pick: Pick) -> bool:
        return self._proofs.is_proven(pick.endpoint.metrics.cluster, model, pick.endpoint)

    def _derenders(self, model: str, pick: Pick) -> bool:
        return self._derenderers.has_route(model, pick.endpoint)

    def _others_serve(self, cluster: Cluster, model: str) -> bool:
        return cluster.screening.may_serve(model, self.clock())

    def _find_length(self, pick: Pick) -> int | None:
        return self._lengths.find(pick.endpoint)


def _unneeded(pick: Pick) -> None:
    """Find nothing: the request has a limit of its own."""


FILTER = FilterType(None, lambda inner, _, context: ResumeFilter(inner, context))
