"""A trace's shape as real requests to a running proxy or engine, measured from the client's side."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import httpx

from kvproxy.replay.outcome import Outcome
from kvproxy.replay.prompts import prompt_text
from kvproxy.replay.settings import Pace
from kvproxy.replay.trace import Session, Trace, Turn
from kvproxy.types import Clock

_DATA = "data:"


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """Where to send, and how."""

    url: str
    model: str = ""  # empty: the first one the server lists
    api_key: str = ""
    concurrency: int = 256  # requests under way at once
    timeout_s: float = 600.0
    endpoint_header: str = "x-kvproxy-endpoint"


class LiveReplay:
    """Plays sessions against a URL; outcomes as in virtual time, endpoints numbered as they appear."""

    def __init__(
        self,
        trace: Trace,
        pace: Pace,
        settings: LiveSettings,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Clock = time.monotonic,
        progress: Callable[[int], None] = lambda finished: None,
    ) -> None:
        self._trace = trace
        self._pace = pace
        self._settings = settings
        self._clock = clock
        self._progress = progress
        self._slots = asyncio.Semaphore(settings.concurrency)
        headers = {"authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
        self._client = httpx.AsyncClient(
            base_url=settings.url.rstrip("/"),
            headers=headers,
            timeout=settings.timeout_s,
            transport=transport,
            limits=httpx.Limits(max_connections=settings.concurrency),
        )
        self._endpoints: dict[str, int] = {}
        self._outcomes: list[Outcome] = []
        self._finished = 0
        self._model = settings.model

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Names of the endpoints that answered, in the order of their numbers."""
        return tuple(self._endpoints)

    async def run(self) -> list[Outcome]:
        """Every request's outcome, in order of arrival. Raises httpx.HTTPError when the server lists no models."""
        async with self._client:
            self._model = self._model or await self._first_model()
            started = self._clock()
            async with asyncio.TaskGroup() as tasks:
                for number, session in enumerate(self._trace.sessions):
                    tasks.create_task(self._play(session, number, started), name=f"replay session {number}")
        return self._outcomes

    async def _first_model(self) -> str:
        response = await self._client.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])

    async def _play(self, session: Session, number: int, started: float) -> None:
        await asyncio.sleep(max(0.0, started + session.start_s * self._pace.scale - self._clock()))
        for turn in session.turns:
            await asyncio.sleep(turn.delay_s * self._pace.scale)
            async with self._slots:
                await self._ask(turn, number)
            self._finished += 1
            self._progress(self._finished)

    async def _ask(self, turn: Turn, session: int) -> None:
        outcome = Outcome(self._clock(), turn.prompt_tokens)
        self._outcomes.append(outcome)
        body = {
            "model": self._model,
            "prompt": prompt_text(turn, self._trace.block_size),
            "max_tokens": turn.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        request = self._client.stream(
            "POST", "/v1/completions", json=body, headers={"x-session-id": f"replay-{session}"}
        )
        try:
            async with request as response:
                if response.status_code != httpx.codes.OK:
                    return
                name = response.headers.get(self._settings.endpoint_header, "")
                outcome.endpoint = self._endpoints.setdefault(name, len(self._endpoints))
                await self._follow(response.aiter_lines(), outcome)
        except httpx.HTTPError:
            outcome.first_token_at = None  # counted as failed, however far it came

    async def _follow(self, lines: AsyncIterator[str], outcome: Outcome) -> None:
        async for line in lines:
            if not line.startswith(_DATA) or line.endswith("[DONE]"):
                continue
            if outcome.first_token_at is None:
                outcome.first_token_at = self._clock()
            usage = json.loads(line[len(_DATA) :]).get("usage")
            if usage:
                outcome.prompt_tokens = usage["prompt_tokens"]
                outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        outcome.finished_at = self._clock()
