"""Errors in SGLang's words: a flat object, whatever it is about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class SglangError(Exception):
    """Becomes `{"object": "error", message, type, param, code}`."""

    def __init__(
        self, message: str, *, kind: str = "BadRequestError", param: str | None = None, code: int = 400
    ) -> None:
        super().__init__(message)
        self.code = code
        self.body = flat_error(message, kind=kind, param=param, code=code)


def flat_error(message: str, *, kind: str, param: str | None, code: int) -> dict[str, Any]:
    """The body; in a stream it is the value of `error`."""
    return {"object": "error", "message": message, "type": kind, "param": param, "code": code}


def flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    """A body of vLLM's shape in SGLang's."""
    error = nested["error"]
    return flat_error(error["message"], kind=error["type"], param=error["param"], code=error["code"])


def input_too_long(tokens: int, limit: int) -> SglangError:
    """400 for a prompt that does not fit the context."""
    return SglangError(f"The input ({tokens} tokens) is longer than the model's context length ({limit} tokens).")


def request_too_long(tokens: int, limit: int) -> SglangError:
    """400 for a prompt and an answer that together do not fit."""
    return SglangError(
        f"Requested token count exceeds the model's maximum context length of {limit} tokens. "
        f"You requested a total of {tokens} tokens."
    )


def queue_full() -> SglangError:
    """503 with `--max-queued-requests`."""
    return SglangError("The request queue is full.", kind="SERVICE_UNAVAILABLE", code=503)


def engine_dead() -> SglangError:
    """500 once the scheduler is gone."""
    return SglangError("Internal server error", kind="InternalServerError", code=500)
