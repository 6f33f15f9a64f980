"""A worker's own listener, for its supervisor alone: the admin app without access control, and a reload in halves."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Sequence

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvproxy.app import Proxy
from kvproxy.base.errors import ConfigError, Problem
from kvproxy.features.workers.assignment import Assignment, Change, take_share
from kvproxy.operate.admin.replies import REPEATED, receive_body, reply_error, reply_json
from kvproxy.operate.runtime.generation import Generation

log = logging.getLogger("kvproxy")

RELOAD = "/worker/reload"
#: Headers that only this listener reads: who sent the request to the supervisor, and that another worker notes it in
#: the audit log.
FROM = b"x-kvproxy-from"
REPEAT = b"x-kvproxy-repeat"
#: A prepared configuration is discarded if the supervisor sends no further order for this long.
FORGET_S = 60.0
_MAX_CONFIG_BYTES = 64 << 20


class ControlApp:
    """The ASGI app. Its socket is in a folder that only the user of both processes may open."""

    def __init__(self, proxy: Proxy, assignment: Assignment) -> None:
        self._proxy = proxy
        self._assignment = assignment
        self._prepared: Generation | None = None
        self._forgetting: asyncio.TimerHandle | None = None
        halves = {"prepare": self._prepare, "adopt": self._adopt, "discard": self._discard}
        routes = [Route(f"{RELOAD}/{name}", half, methods=["POST"]) for name, half in halves.items()]
        self._reload = Starlette(routes=routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"].startswith(RELOAD):
            await self._reload(scope, receive, send)
            return
        headers = dict(scope["headers"])
        scope["client"] = (headers.get(FROM, b"unknown").decode("latin-1"), 0)
        scope[REPEATED] = REPEAT in headers
        await self._proxy.admin.app(scope, receive, send)

    async def repeat_changes(self, changes: Sequence[Change]) -> None:
        """Repeat the changes an operator made before this worker started."""
        transport = httpx.ASGITransport(self._repeated)
        async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
            for one in changes:
                headers = {"content-type": "application/json"} if one.body else {}
                answer = await client.request(one.method, one.target, content=one.body, headers=headers)
                if not answer.is_success:
                    log.warning("%s %s cannot be repeated: %s", one.method, one.target, answer.text)

    async def _repeated(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._proxy.admin.app({**scope, REPEATED: True}, receive, send)

    async def _prepare(self, request: Request) -> Response:
        self._drop()
        config = pickle.loads(await receive_body(request, most=_MAX_CONFIG_BYTES))
        mine = take_share(config, self._assignment.index, self._assignment.count)
        try:
            self._prepared = await self._proxy.generations.prepare(mine)
        except ConfigError as refused:
            return reply_error(422, refused.problems)
        except Exception as failed:  # any error of a part: the old ones still run
            log.exception("the new configuration cannot be started")
            return reply_error(422, [Problem("", f"a part cannot be started: {type(failed).__name__}: {failed}")])
        self._forgetting = asyncio.get_running_loop().call_later(FORGET_S, self._drop)
        return reply_json({})

    async def _adopt(self, request: Request) -> Response:
        if self._prepared is None:
            return reply_error(409, [Problem("", "no configuration is prepared")])
        generation = self._prepared
        self._prepared = None
        self._drop()
        reloaded = self._proxy.generations.adopt(generation)
        return reply_json({"after_restart": reloaded.after_restart})

    async def _discard(self, request: Request) -> Response:
        self._drop()
        return reply_json({})

    def _drop(self) -> None:
        """Drop the prepared generation, if any."""
        if self._forgetting is not None:
            self._forgetting.cancel()
            self._forgetting = None
        if self._prepared is not None:
            generation = self._prepared
            self._prepared = None
            self._proxy.generations.discard(generation)
