"""Quotes from an engine that an error may show."""

from __future__ import annotations

import json

import pytest

from kvproxy.cache.clients.api import MAX_TEXT_CHARS, error_param, error_text, scrub_text
from tests.cache.clients.support import captured


def test_fastapi_422_does_not_echo_the_tokens() -> None:
    """LMCache's validation errors repeat the whole request; only place and message are kept."""
    body = {
        "detail": [
            {"type": "missing", "loc": ["body", "location"], "msg": "Field required", "input": {"tokens": [7] * 5000}}
        ]
    }
    assert error_text(json.dumps(body).encode()) == "body.location: Field required"


def test_vllm_400_does_not_echo_the_input() -> None:
    """vLLM quotes the offending value inside the message."""
    text = error_text(captured("tok_prompt_list").content)
    assert "Input should be a valid string" in text
    assert "list of 2" not in text


def test_vllm_400_does_not_echo_a_prompt() -> None:
    """Whatever stands after `'input':` may be the prompt."""
    message = "1 validation error:\n  {'msg': 'bad', 'input': 'my secret prompt, with [brackets] and {braces}'}"
    assert "secret" not in error_text(json.dumps({"error": {"message": message}}).encode())


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>token 1,2,3,4,5</html>", b'{"tokens": [1,2,3,4]}', b'{"detail": [1,2,3,4]}', b"[1,2,3,4,5]", b"\xff"],
)
def test_an_unknown_body_is_not_quoted(body: bytes) -> None:
    """It may be an echo of the request."""
    assert error_text(body) == ""
    assert error_param(body) == ""


def test_number_lists_are_cut_out() -> None:
    """Also where a known field holds them."""
    assert scrub_text("bad tokens [1, 2, 3, 4, 5] here") == "bad tokens [...] here"
    assert scrub_text("limit is 1,000,000") == "limit is 1,000,000"


def test_texts_are_one_short_line() -> None:
    """A log line stays a line."""
    text = scrub_text("a\nb\x00c" + "x" * 1000)
    assert text.startswith("a b c")
    assert len(text) == MAX_TEXT_CHARS


def test_a_secret_at_the_cut_is_still_hidden() -> None:
    """The credential is replaced before anything is shortened."""
    assert "geheim" not in scrub_text("1, 2, 3, 4, " * 200 + "geheim", secret="geheim")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"detail": "Not Found"}, "Not Found"),
        ({"error": "unknown instance mp-9; re-register"}, "unknown instance mp-9; re-register"),
        ({"error": {"message": "busy", "param": None}}, "busy"),
    ],
)
def test_known_shapes_are_quoted(body: object, text: str) -> None:
    """FastAPI's, the coordinator's and OpenAI's."""
    assert error_text(json.dumps(body).encode()) == text


def test_the_blamed_field() -> None:
    """An unknown model is told from an unknown path by it."""
    assert error_param(captured("tok_badmodel").content) == "model"
    assert error_param(b'{"detail": "Not Found"}') == ""


def test_an_sglang_error_is_flat() -> None:
    """A body that echoes the request and has a `message` of its own is still not quoted."""
    body = {"object": "error", "message": "The request queue is full.", "type": "x", "param": "model", "code": 503}
    raw = json.dumps(body).encode()
    assert (error_text(raw), error_param(raw)) == ("The request queue is full.", "model")
    assert error_text(json.dumps({**body, "param": None}).encode()) == "The request queue is full."
    assert error_text(json.dumps({"message": "my secret prompt"}).encode()) == ""
