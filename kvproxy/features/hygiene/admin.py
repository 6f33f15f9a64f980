"""The route of the operator's listener that lists breaks."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvproxy.features.hygiene.prefix_breaks import PrefixBreaks
from kvproxy.operate.admin.operated import AdminTarget
from kvproxy.operate.admin.replies import reply_json
from kvproxy.operate.admin.views import require_cache


class BreakRoutes:
    """`/cache/breaks`: sums, and the latest breaks."""

    def __init__(self, operated: AdminTarget) -> None:
        self._operated = operated

    def list_routes(self) -> list[Route]:
        """Its path."""
        return [Route("/cache/breaks", self._breaks, methods=["GET"])]

    async def _breaks(self, request: Request) -> Response:
        observer = require_cache(self._operated).observers.by_feature["hygiene"]
        assert isinstance(observer, PrefixBreaks)
        return reply_json(observer.book.describe(self._operated.clock()))
