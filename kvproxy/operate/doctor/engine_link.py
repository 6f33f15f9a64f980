"""The way to one engine: whether it can be connected to, its health path, its answer to browsers."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx

from kvproxy.base.errors import ClientUnavailable
from kvproxy.base.upstream.origin import Origin
from kvproxy.operate.doctor.tools import ConnectResult, Tools, try_connect, try_tls

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HealthReply:
    """The answer of the health path. `skew_s` is the engine's clock minus ours (its header has whole seconds)."""

    status: int
    skew_s: float | None = None
    took_s: float = 0.0


class EngineLink:
    """Link to an engine; `key` names it among all that a visit queries."""

    def __init__(
        self,
        key: str,
        origin: Origin,
        http: httpx.AsyncClient,
        *,
        where: str,
        health_path: str,
        headers: Mapping[str, str],
        tools: Tools,
    ) -> None:
        self.origin = origin
        self.tools = tools
        self.where = where
        self._key = key
        self._http = http
        self._health_path = health_path
        self._headers = headers

    async def try_link(self) -> ConnectResult:
        timeout_s = self.tools.timeouts.exchange_s
        return await self.tools.answers.ask_once(
            f"{self._key} link", lambda: try_connect(self.origin, timeout_s=timeout_s)
        )

    async def is_reachable(self) -> bool:
        """Return True if connecting worked; the connection check reports why not."""
        return (await self.try_link()).error is None

    async def speaks_tls(self) -> bool:
        """Return True if it needs https although its url has http; tried only after http failed."""
        if self.origin.scheme != "http":
            return False
        timeout_s = self.tools.timeouts.exchange_s
        return await self.tools.answers.ask_once(
            f"{self._key} speaks tls", lambda: try_tls(self.origin, timeout_s=timeout_s)
        )

    async def health_reply(self) -> HealthReply:
        return await self.ask_once("hello", self._ask_health)

    async def allowed_origins(self) -> str:
        """`access-control-allow-origin` of its answer to a browser's preflight; "" if it has none."""
        return await self.ask_once("preflight", self._ask_preflight)

    async def ask_once(self, name: str, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return a fact, for which the engine is queried once. Raises ClientUnavailable if it cannot be connected to:
        no check waits for it again."""
        if not await self.is_reachable():
            raise ClientUnavailable(f"{self.where} cannot be connected to")
        return await self.tools.answers.ask_once(f"{self._key} {name}", ask)

    async def _ask_preflight(self) -> str:
        timeout_s = self.tools.timeouts.exchange_s
        asked = {"origin": "https://app.example", "access-control-request-method": "POST"}
        try:
            response = await self._http.options(
                f"{self.origin}/v1/chat/completions", headers=asked, timeout=httpx.Timeout(timeout_s)
            )
        except httpx.HTTPError as error:
            raise ClientUnavailable(f"{self.where} preflight: {type(error).__name__}") from error
        return str(response.headers.get("access-control-allow-origin", ""))

    async def _ask_health(self) -> HealthReply:
        timeout_s = self.tools.timeouts.exchange_s
        sent = self.tools.wall_clock()
        began = self.tools.clock()
        try:
            response = await self._http.get(
                f"{self.origin}{self._health_path}", headers=self._headers, timeout=httpx.Timeout(timeout_s)
            )
        except httpx.HTTPError as error:
            raise ClientUnavailable(f"{self.where} {self._health_path}: {type(error).__name__}") from error
        took_s = self.tools.clock() - began
        skew_s = _skew_s(response.headers.get("date"), sent + took_s / 2, took_s)
        return HealthReply(response.status_code, skew_s, took_s)


def _skew_s(date: str | None, now: float, took_s: float) -> float | None:
    """Return the least offset of a clock by its `date` header, written at any moment of the call's `took_s` around
    `now`. It states the second that has begun: on average half a second too early."""
    if date is None:
        return None
    try:
        theirs = parsedate_to_datetime(date)
    except ValueError:
        return None
    if theirs.tzinfo is None:
        theirs = theirs.replace(tzinfo=UTC)
    skew_s = (theirs - datetime.fromtimestamp(now, UTC)).total_seconds() + 0.5
    return math.copysign(max(0.0, abs(skew_s) - took_s / 2), skew_s)
