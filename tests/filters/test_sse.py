"""A broken stream ends in a way its client understands."""

from __future__ import annotations

import json

import pytest

from kvproxy.filters.sse import error_event
from kvproxy.types import RequestKind


def data_of(event: bytes) -> dict[str, object]:
    line = next(line for line in event.split(b"\n") if line.startswith(b"data: {"))
    loaded = json.loads(line[6:])
    assert isinstance(loaded, dict)
    return loaded


@pytest.mark.parametrize("kind", [RequestKind.CHAT, RequestKind.COMPLETION, None])
def test_openai_streams_end_with_an_error_object_and_done(kind: RequestKind | None) -> None:
    """As vLLM itself ends them."""
    event = error_event(kind, message="gone", reason="idle_timeout", tail=b"data: {}\n\n")
    assert data_of(event) == {
        "error": {"message": "gone", "type": "upstream_error", "param": None, "code": "idle_timeout"}
    }
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\ndata: [DONE]\n\n")


def test_a_half_sent_event_is_ended_first() -> None:
    """Otherwise the error would be read as its continuation."""
    assert error_event(RequestKind.CHAT, message="gone", reason="r", tail=b'data: {"half').startswith(b"\n\ndata: ")


def test_anthropic_and_responses_have_events_of_their_own() -> None:
    """Their clients look at the event's name."""
    anthropic = error_event(RequestKind.MESSAGES, message="gone", reason="r", tail=b"")
    assert anthropic.startswith(b"event: error\n")
    assert data_of(anthropic) == {"type": "error", "error": {"type": "api_error", "message": "gone"}}
    responses = error_event(RequestKind.RESPONSES, message="gone", reason="r", tail=b"")
    assert data_of(responses) == {"type": "error", "code": "r", "message": "gone", "param": None}
