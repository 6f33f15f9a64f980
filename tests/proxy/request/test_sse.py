"""A broken stream ends in a way its client understands."""

from __future__ import annotations

import json

import pytest

from kvproxy.base.types import RequestKind
from kvproxy.proxy.request.error_reply import error_event
from kvproxy.proxy.request.usage import error_status


def data_of(event: bytes) -> dict[str, object]:
    line = next(line for line in event.split(b"\n") if line.startswith(b"data: {"))
    loaded = json.loads(line[6:])
    assert isinstance(loaded, dict)
    return loaded


@pytest.mark.parametrize("kind", [RequestKind.CHAT, RequestKind.COMPLETION, None])
def test_openai_streams_end_with_an_error_object_and_done(kind: RequestKind | None) -> None:
    """As vLLM itself ends them."""
    event = error_event(kind, message="gone", reason="idle_timeout")
    assert data_of(event) == {
        "error": {"message": "gone", "type": "upstream_error", "param": None, "code": "idle_timeout"}
    }
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\ndata: [DONE]\n\n")


def test_anthropic_and_responses_have_events_of_their_own() -> None:
    """Their clients look at the event's name."""
    anthropic = error_event(RequestKind.MESSAGES, message="gone", reason="r")
    assert anthropic.startswith(b"event: error\n")
    assert data_of(anthropic) == {"type": "error", "error": {"type": "api_error", "message": "gone"}}
    responses = error_event(RequestKind.RESPONSES, message="gone", reason="r")
    assert data_of(responses) == {"type": "error", "code": "r", "message": "gone", "param": None}


@pytest.mark.parametrize(
    ("events", "status"),
    [
        (b'data: {"choices":[{"delta":{"content":"say \\"error\\""}}]}\n\n', None),
        (b'data: {"choices":[{"finish_reason":"error"}]}\n\n', None),
        (b'data: {"type":"response.completed","response":{"error":null}}\n\n', None),
        (b'data: {"type":"response.failed","response":{"error":null}}\n\n', 500),
        (b'data: {"type":"response.failed","response":{"error":{"code":"invalid_prompt"}}}\n\n', 400),
        (b'data: {"error": {"message": "x", "code": 500}}\n\ndata: [DONE]\n\n', 500),
        (b'data: {"error": {"message": "x", "code": 404.0}}\n\n', 404),
        (b'data: {"error": {"message": "x", "code": true, "type": "InternalServerError"}}\n\n', 500),
        (b'data: {"error": {"message": "x", "code": 1e300}}\n\n', 500),
        (b'data: {"error": {"message": "x", "code": "9999999999999999"}}\n\n', 500),
        (b'data: {"error": {"message": "x", "type": "Service Unavailable"}}\n\n', 503),
        (b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"}}\n\n', 503),
        (b'event: error\ndata: {"type":"error","error":{"type":"internal_error"}}\n\n', 500),
        (b'data: {"error":"a message alone"}\n\n', 500),
        (b'data: {"error": {"half\n\n', None),
        (b'data: {"error": ' + b"[" * 60_000 + b"\n\n", None),
        (b'data: ["error"]\n\n', None),
        (b'{"error": {"code": 400}}', None),
        (b'event: error\ndata: [DONE]\n\ndata: {"finish_reason":"error"}\n\n', None),  # the name is of one event alone
        (b"", None),
    ],
)
def test_the_status_an_error_event_amounts_to(events: bytes, status: int | None) -> None:
    """By its number, else by its type; what is no error, or cannot be read, has none."""
    assert error_status(events) == status


def test_only_the_first_event_is_looked_at_where_that_is_asked() -> None:
    """Comments before it are none."""
    events = b': keep-alive\n\ndata: {"choices":[]}\n\ndata: {"error": {"code": 400}}\n\n'
    assert error_status(events) == 400
    assert error_status(events, first=True) is None
    assert error_status(events[:14] + events[36:], first=True) == 400


def test_only_the_end_of_a_long_piece_is_searched_for_an_error() -> None:
    """Splitting it all into lines would take as long as an engine likes."""
    error = b'data: {"error": {"code": 503}}\n\n'
    assert error_status(b"\n" * 100_000 + error) == 503
    assert error_status(error + b"\n" * 100_000) is None
    assert error_status(error + b"\n" * 100_000, first=True) == 503
    assert error_status(b"\n" * 100_000 + error, first=True) is None
