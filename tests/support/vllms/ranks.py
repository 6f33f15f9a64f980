"""A simulated vLLM with `--data-parallel-size`: one address, and an engine with a cache of its own for every rank."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvproxy.base.types import Clock, utc_seconds
from kvproxy.lab.simulator.json_app import JsonApp, reply_error
from kvproxy.lab.simulator.vllm_errors import VllmError
from kvproxy.lab.simulator.vllm_info import EXPOSITION, describe_event_source
from kvproxy.lab.simulator.vllm_server import VllmApp
from kvproxy.lab.simulator.vllm_settings import VllmSettings
from kvproxy.lab.simulator.vllm_state import OnPrefilled

RANK_HEADER = "x-data-parallel-rank"
#: The version stood in for reads the header here; it balances requests for `/v1/responses` itself.
_STEERED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages"})
_BALANCED = _STEERED | {"/v1/responses"}
_EVERYWHERE = frozenset({"/reset_prefix_cache", "/sim/faults"})


class FrontEnd(Enum):
    """Server that takes the requests: they read a rank differently if a server's ranks do not begin at 0."""

    PYTHON = "python"  # its place among the server's own
    RUST = "rust"  # its number in the whole deployment


@dataclass(frozen=True, slots=True)
class RankedSettings:
    """`engine` is that of each rank. A server of hybrid balancing has `size` ranks of its deployment, from `first`."""

    engine: VllmSettings
    size: int = 2
    first: int = 0
    front_end: FrontEnd = FrontEnd.PYTHON


class RankedVllm(JsonApp):
    """Serve it (it is an ASGI app) while it is entered. `ranks` are the engines, each a whole server of its own."""

    def __init__(
        self,
        settings: RankedSettings,
        *,
        clock: Clock = time.monotonic,
        wall_clock: Callable[[], float] = utc_seconds,
        rng: random.Random | None = None,
        on_prefilled: OnPrefilled | None = None,
    ) -> None:
        super().__init__()
        self.settings = settings
        source = rng or random.Random()
        self.ranks: dict[int, VllmApp] = {
            rank: VllmApp(
                _of_rank(settings.engine, rank),
                clock=clock,
                wall_clock=wall_clock,
                rng=source,
                on_prefilled=on_prefilled,
            )
            for rank in range(settings.first, settings.first + settings.size)
        }
        self._next = 0  # rank to try first
        self.parts = list(self.ranks.values())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """By one rank, by all, or for all of them."""
        path = scope["path"]
        apps = list(self.ranks.values())
        answer: ASGIApp = apps[0]
        if path in _BALANCED:
            header = Headers(scope=scope).get(RANK_HEADER, "")
            try:
                answer = self._asked(header if path in _STEERED else "")
            except VllmError as error:
                answer = await reply_error(None, error)
        elif path == "/metrics":
            text = merge_expositions([app.state.metrics.render_exposition() for app in apps])
            answer = Response(text, media_type=EXPOSITION)
        elif path == "/kv_event_sources":
            sources = {str(rank): describe_event_source(app.state) for rank, app in self.ranks.items()}
            answer = JSONResponse({rank: source for rank, source in sources.items() if source is not None})
        elif path in _EVERYWHERE:
            answer = self._answer_everywhere
        elif path == "/health":
            dead = any(app.state.faults.values.engine_dead for app in apps)
            answer = Response(status_code=503 if dead else 200)
        await answer(scope, receive, send)

    def _asked(self, header: str) -> VllmApp:
        """Return the engine of the rank in the header, or the least busy one. VllmError for a rank that there
        is not."""
        try:
            number = int(header)
        except ValueError:
            return self._least_busy()
        settings = self.settings
        local = settings.front_end is FrontEnd.PYTHON
        app = self.ranks.get(number + settings.first if local else number)
        if app is not None:
            return app
        if local:
            raise VllmError(f"data_parallel_rank {number} is out of range [0, {settings.size}).")
        raise VllmError("engine-core error", kind="invalid_request_error")

    def _least_busy(self) -> VllmApp:
        """Of equals the next in turn."""
        apps = list(self.ranks.values())
        order = [apps[(self._next + step) % len(apps)] for step in range(len(apps))]
        app = min(order, key=lambda one: one.state.in_flight)
        self._next = (apps.index(app) + 1) % len(apps)
        return app

    async def _answer_everywhere(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Every engine is asked; the last one's answer is the answer."""
        body = await Request(scope, receive).body()

        async def receive_again() -> Message:
            return {"type": "http.request", "body": body}

        async def ignore(_message: Message) -> None:
            pass

        apps = list(self.ranks.values())
        for app in apps:
            await app(dict(scope), receive_again, send if app is apps[-1] else ignore)


def merge_expositions(texts: list[bytes]) -> bytes:
    """One exposition of several: each family once, with the samples of all; what has no rank counts once."""
    families: dict[bytes, dict[bytes, None]] = {}
    for text in texts:
        lines: dict[bytes, None] = {}
        for line in text.splitlines():
            if line.startswith(b"# HELP "):
                lines = families.setdefault(line, {})
            if line.startswith(b"#") or b"engine=" in line or not _is_known(line, lines):
                lines[line] = None
    return b"\n".join(line for lines in families.values() for line in lines) + b"\n"


def _is_known(line: bytes, lines: dict[bytes, None]) -> bool:
    series = line.rpartition(b" ")[0]
    return any(each.rpartition(b" ")[0] == series for each in lines)


def _of_rank(settings: VllmSettings, rank: int) -> VllmSettings:
    """Each publishes on ports of its own, one above those of the rank before."""
    events = settings.kv_events
    if events is not None:
        port, replay_port = (port + rank if port else 0 for port in (events.port, events.replay_port))
        events = replace(events, rank=rank, port=port, replay_port=replay_port)
    return replace(settings, rank=rank, kv_events=events)
