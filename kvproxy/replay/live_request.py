"""One request of a live replay: sent, followed to its end, and what became of it in one word."""

from __future__ import annotations

from dataclasses import dataclass

import httpx
import msgspec

from kvproxy.replay.outcome import Outcome
from kvproxy.types import Clock

_DATA, _DONE = "data:", "[DONE]"


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None
    error: object = None


class RequestFailed(Exception):
    """It was not answered as it should be; the text is a short reason to count by."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What goes out: the body and the session it belongs to."""

    body: dict[str, object]
    session: str


async def follow(client: httpx.AsyncClient, sent: Sent, outcome: Outcome, *, endpoint_header: str, clock: Clock) -> str:
    """Fills in `outcome`; the name of the endpoint that answered ("" when the server does not say). RequestFailed."""
    headers = {"x-session-id": sent.session}
    decoder = msgspec.json.Decoder(_Event)
    try:
        async with client.stream("POST", "/v1/completions", json=sent.body, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                raise RequestFailed(f"status {response.status_code}")
            async for line in response.aiter_lines():
                if line.startswith(_DATA) and not line.endswith(_DONE):
                    _note(decoder.decode(line[len(_DATA) :]), outcome, clock)
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


def _note(event: _Event, outcome: Outcome, clock: Clock) -> None:
    """An event with choices is a token; the last one may carry the counts alone."""
    if event.error is not None:
        raise RequestFailed("error event")
    if event.choices and outcome.first_token_at is None:
        outcome.first_token_at = clock()
    if event.usage is not None:
        outcome.prompt_tokens = event.usage.prompt_tokens or outcome.prompt_tokens
        details = event.usage.prompt_tokens_details
        outcome.cached_tokens = 0 if details is None else details.cached_tokens or 0
