"""Errors in vLLM's words: status, JSON body, parameter."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvproxy.lab.simulator.json_app import HttpError

BUSY = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
SCALE_OUT_DISABLED = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."


class VllmError(HttpError):
    """Becomes `{"error": {message, type, param, code}}`."""

    def __init__(
        self, message: str, *, kind: str = "BadRequestError", param: str | None = None, code: int = 400
    ) -> None:
        super().__init__(code, {"error": {"message": message, "type": kind, "param": param, "code": code}})


def model_not_found(model: str, known: Sequence[str]) -> VllmError:
    """404 for a model (or LoRA) that is not served here."""
    message = f"The model `{model}` does not exist. Valid aliases: {', '.join(known)}."
    return VllmError(message, kind="NotFoundError", param="model", code=404)


def prompt_too_long(prompt_tokens: int, limit: int) -> VllmError:
    """400; vLLM counts no further than one over the limit."""
    seen = min(prompt_tokens, limit + 1)
    message = (
        f"This model's maximum context length is {limit} tokens. However, your prompt contains at least {seen} "
        "input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input "
        f"prompt. (parameter=input_tokens, value={seen})"
    )
    return VllmError(message, param="input_tokens")


def request_too_long(prompt_tokens: int, output_tokens: int, limit: int) -> VllmError:
    """400 when prompt and answer together do not fit the context."""
    message = (
        f"This model's maximum context length is {limit} tokens. However, you requested {output_tokens} output tokens "
        f"and your prompt contains at least {prompt_tokens} input tokens, for a total of at least "
        f"{prompt_tokens + output_tokens} tokens. Please reduce the length of the input prompt or the number of "
        f"requested output tokens. (parameter=input_tokens, value={prompt_tokens})"
    )
    return VllmError(message, param="input_tokens")


def bad_parameter(name: str, value: Any, text: str) -> VllmError:
    """400 for one parameter out of its range."""
    return VllmError(f"{text} (parameter={name}, value={value})", param=name)


def busy() -> VllmError:
    """503 made for a router to try elsewhere."""
    return VllmError(BUSY, kind="Service Unavailable", code=503)


def engine_dead() -> VllmError:
    """500 when the engine process is gone; in a stream it is an event."""
    return VllmError(ENGINE_DEAD, kind="InternalServerError", code=500)


def validation_errors(problems: Sequence[Mapping[str, Any]]) -> VllmError:
    """400 as pydantic's findings come out; the first one names the parameter."""
    count = f"{len(problems)} validation error" + ("s" if len(problems) > 1 else "")
    lines = "\n".join(f"  {dict(problem)}" for problem in problems)
    return VllmError(f"{count}:\n{lines}", kind="Bad Request", param=str(problems[0]["loc"]))


def missing_fields(body: Mapping[str, Any], *fields: str) -> VllmError:
    """400 naming each required field that is not there."""
    shown = f"<dict of {len(body)} items>"
    return validation_errors(
        [{"type": "missing", "loc": f"body.{field}", "msg": "Field required", "input": shown} for field in fields]
    )


def no_integer(field: str, value: Any) -> VllmError:
    """400 for a fraction, null or words where an integer belongs."""
    problem = {"type": "int_type", "loc": f"body.{field}", "msg": "Input should be a valid integer", "input": value}
    return validation_errors([problem])


def priority_not_enabled(priority: int) -> VllmError:
    """400 of a version that takes a priority only where it schedules by it."""
    return VllmError(f"Got priority {priority} but Priority scheduling is not enabled.")


def unsupported_media_type() -> VllmError:
    """400 for a body that is not announced as JSON."""
    message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
    return VllmError(message, kind="Bad Request")


def bad_json(error: json.JSONDecodeError) -> VllmError:
    """400 naming the position where parsing ended."""
    problem = {
        "type": "json_invalid",
        "loc": f"body.{error.pos}",
        "msg": "JSON decode error",
        "input": "<dict of 0 items>",
        "ctx": {"error": error.msg},
    }
    return validation_errors([problem])
