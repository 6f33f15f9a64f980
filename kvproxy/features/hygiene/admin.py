"""`GET /cache/breaks`: what broken prefixes cost, and the latest breaks."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvproxy.features.hygiene.prefix_breaks import PrefixBreaks
from kvproxy.operate.admin.replies import reply_json
from kvproxy.operate.admin.views import require_cache
from kvproxy.operate.runtime.operated import AdminTarget


def list_routes(operated: AdminTarget) -> Sequence[Route]:
    """Return `/cache/breaks`, which answers with the sums and the latest breaks."""

    async def answer(request: Request) -> Response:
        observer = require_cache(operated).observers.by_feature["hygiene"]
        assert isinstance(observer, PrefixBreaks)
        return reply_json(observer.book.describe(operated.clock()))

    return [Route("/cache/breaks", answer, methods=["GET"])]
