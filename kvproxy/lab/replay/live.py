"""A trace's shape as real requests to a running proxy or engine, measured from the client's side."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import httpx
import msgspec

from kvproxy.base.errors import KvproxyError
from kvproxy.base.types import Clock
from kvproxy.lab.replay.results import ReplayOutcome
from kvproxy.lab.replay.settings import Pace, make_prompt
from kvproxy.lab.replay.trace import Trace, Turn
from kvproxy.lab.simulator.timing import TokenGaps

_DATA = "data:"
_DONE = "[DONE]"
_CONNECT_TIMEOUT_S = 10.0


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None
    error: object = None


class RequestFailed(Exception):
    """It was not answered as it should be; the text is a short reason to count by."""


async def follow_request(
    client: httpx.AsyncClient,
    body: dict[str, object],
    session: str,
    outcome: ReplayOutcome,
    *,
    endpoint_header: str,
    clock: Clock,
    token_gaps: TokenGaps,
) -> str:
    """Send a request and fill in `outcome`; returns the name of the endpoint that answered ("" if not reported). Raises
    RequestFailed."""
    headers = {"x-session-id": session}
    decoder = msgspec.json.Decoder(_Event)
    try:
        async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                raise RequestFailed(f"status {response.status_code}")
            async for line in response.aiter_lines():
                if line.startswith(_DATA) and not line.endswith(_DONE):
                    _note(decoder.decode(line[len(_DATA) :]), outcome, clock, token_gaps)
            if outcome.first_token_at is None:
                raise RequestFailed("empty answer")
            outcome.finished_at = clock()
            return str(response.headers.get(endpoint_header, ""))
    except httpx.TimeoutException:
        raise RequestFailed("timeout") from None
    except httpx.ConnectError:
        raise RequestFailed("no connection") from None
    except httpx.HTTPError:
        raise RequestFailed("broken off") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise RequestFailed("unreadable answer") from None


def _note(event: _Event, outcome: ReplayOutcome, clock: Clock, token_gaps: TokenGaps) -> None:
    """Note an event: one with choices is a token, the latest of which is the end so far; the last may carry the counts
    alone."""
    if event.error is not None:
        raise RequestFailed("error event")
    if event.choices:
        now = clock()
        if outcome.finished_at is None:
            outcome.first_token_at = now
        else:
            token_gaps.add(now - outcome.finished_at)
        outcome.finished_at = now
    if event.usage is not None:
        outcome.prompt_tokens = event.usage.prompt_tokens or outcome.prompt_tokens
        outcome.output_tokens = event.usage.completion_tokens or outcome.output_tokens
        details = event.usage.prompt_tokens_details
        outcome.cached_tokens = 0 if details is None else details.cached_tokens or 0


class NoServer(KvproxyError):
    """The server cannot be reached, or does not list its models."""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """Where to send, and how."""

    url: str  # of the server, with or without the /v1 of its API
    model: str = ""  # empty: the first one the server lists
    api_key: str = ""
    concurrency: int = 256  # requests under way at once
    timeout_s: float = 600.0
    endpoint_header: str = "x-kvproxy-endpoint"


class LiveReplay:
    """Plays sessions against a URL; outcomes as in virtual time, endpoints numbered as they appear.

    Cancelled, it keeps the outcomes it has. In a closed loop a turn follows the end of the one before it, whatever
    became of that; in an open loop turns come at the trace's times. All times of the trace are multiplied by the pace's
    scale.
    """

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
            base_url=settings.url.rstrip("/").removesuffix("/v1"),
            headers=headers,
            timeout=httpx.Timeout(settings.timeout_s, connect=_CONNECT_TIMEOUT_S),
            transport=transport,
            limits=httpx.Limits(max_connections=settings.concurrency),
        )
        self._endpoints: dict[str, int] = {}
        self._model = settings.model
        self.outcomes: list[ReplayOutcome] = []  # of requests that are over, in the order they ended
        self.failures: Counter[str] = Counter()  # by reason
        self.token_gaps = TokenGaps()  # of all answers: from one event with a token to the next
        self.held_back = 0  # requests that had to wait here for others to end: they came later than they should

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Names of the endpoints that answered, in the order of their numbers; "" for a server that names none."""
        return tuple(self._endpoints)

    async def run(self) -> list[ReplayOutcome]:
        """Every request's outcome. Raises NoServer before anything was sent."""
        async with self._client:
            self._model = self._model or await self._first_model()
            started = self._clock()
            async with asyncio.TaskGroup() as tasks:
                for at, number, turns in self._starts():
                    await asyncio.sleep(max(0.0, started + at - self._clock()))
                    tasks.create_task(self._play(number, turns), name=f"replay session {number}")
        return self.outcomes

    def _starts(self) -> Iterator[tuple[float, int, tuple[Turn, ...]]]:
        """Yield what begins when: sessions in a closed loop, single turns in an open one."""
        sessions = self._trace.sessions
        scale = self._pace.scale
        if self._pace.closed_loop:
            yield from ((session.start_s * scale, number, session.turns) for number, session in enumerate(sessions))
            return
        timed = replace(self._pace, scale=1.0).arrivals(self._trace)
        for at, number, turn in sorted(timed):
            yield at * scale, number, (sessions[number].turns[turn],)

    async def _first_model(self) -> str:
        try:
            response = await self._client.get("/v1/models")
            response.raise_for_status()
            return msgspec.json.decode(response.content, type=_Models).data[0].id
        except httpx.HTTPStatusError as error:
            raise NoServer(f"the server answers {error.response.status_code} on its list of models") from None
        except httpx.HTTPError as error:
            raise NoServer(f"{self._settings.url} cannot be reached: {error or type(error).__name__}") from None
        except (msgspec.DecodeError, IndexError):
            raise NoServer("the server lists no models: give one with --model") from None

    async def _play(self, number: int, turns: tuple[Turn, ...]) -> None:
        for index, turn in enumerate(turns):
            if index:
                await asyncio.sleep(turn.delay_s * self._pace.scale)
            self.held_back += self._slots.locked()
            async with self._slots:
                await self._ask(turn, number)
            self._progress(len(self.outcomes))

    async def _ask(self, turn: Turn, session: int) -> None:
        body = {
            "model": self._model,
            "prompt": make_prompt(turn, self._trace.block_size),
            "max_tokens": turn.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        outcome = ReplayOutcome(
            self._clock(),
            turn.prompt_tokens,
            output_tokens=turn.output_tokens,
            session=session,
            tenant=self._trace.sessions[session].tenant,
        )
        try:
            name = await follow_request(
                self._client,
                body,
                f"replay-{session}",
                outcome,
                endpoint_header=self._settings.endpoint_header,
                clock=self._clock,
                token_gaps=self.token_gaps,
            )
            outcome.endpoint = self._endpoints.setdefault(name, len(self._endpoints))
        except RequestFailed as failed:
            self.failures[str(failed)] += 1
            outcome.first_token_at = None  # counted as failed, however far it came
        self.outcomes.append(outcome)
