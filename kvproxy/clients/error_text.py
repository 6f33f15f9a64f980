"""What may be said about a failed call: short, without token lists, prompt text or credentials."""

from __future__ import annotations

import re

import msgspec

MAX_TEXT_CHARS = 200

_NUMBER_LIST = re.compile(r"\[?\s*-?\d+(?:\s*,\s*-?\d+){3,}\s*,?\s*\]?")
_CREDENTIAL = re.compile(r"(?i)\b(bearer|basic)\s+\S+")
#: vLLM's validation errors quote the offending value: `'input': '...'` up to the end of that error.
_INPUT_ECHO = re.compile(r"""(['"]input['"]\s*:\s*).*""", re.DOTALL)
_SPACE = re.compile(r"[\s\x00-\x1f\x7f]+")


class _OpenAIError(msgspec.Struct):
    message: str = ""
    param: object = None


class _Validation(msgspec.Struct):
    loc: list[object] = []
    msg: str = ""


class _ErrorBody(msgspec.Struct):
    """The error bodies of vLLM, FastAPI and the LMCache coordinator; of FastAPI's 422 everything but `input`."""

    error: _OpenAIError | str = ""
    detail: list[_Validation] | str = ""


_DECODER = msgspec.json.Decoder(_ErrorBody)


def error_text(body: bytes, *, secret: str = "") -> str:
    """A safe line about an error body; empty when the body is not one of the known error shapes.

    Only known fields are quoted: an unknown body may be an echo of the request.
    """
    try:
        parsed = _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    if isinstance(parsed.detail, list):
        return scrub("; ".join(_validation_text(entry) for entry in parsed.detail[:3]), secret=secret)
    if isinstance(parsed.error, str):
        return scrub(parsed.detail or parsed.error, secret=secret)
    return scrub(parsed.error.message, secret=secret)


def error_param(body: bytes) -> str:
    """The field an OpenAI-style error blames; empty when it names none."""
    try:
        error = _DECODER.decode(body).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return error.param if isinstance(error, _OpenAIError) and isinstance(error.param, str) else ""


def scrub(text: str, *, secret: str = "") -> str:
    """`text` on one line of at most 200 characters, without number lists, echoed input and credentials."""
    if secret:
        text = text.replace(secret, "***")
    text = text[: 8 * MAX_TEXT_CHARS]
    text = _INPUT_ECHO.sub(r"\1...", text)
    text = _CREDENTIAL.sub(r"\1 ***", text)
    text = _NUMBER_LIST.sub("[...]", text)
    text = _SPACE.sub(" ", text).strip()
    return text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 3] + "..."


def _validation_text(entry: _Validation) -> str:
    return f"{'.'.join(str(part) for part in entry.loc)}: {entry.msg}"
