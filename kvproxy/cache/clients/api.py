"""One bounded HTTP call: own timeout, bounded answer, errors as our own tree with texts safe to log, never a retry."""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any, TypeVar

import httpx
import msgspec

from kvproxy.base.errors import (
    BadResponse,
    ClientTimeout,
    ClientUnavailable,
    ConnectTimeout,
    FirstByteTimeout,
    IdleTimeout,
    NotSupported,
    PoolFull,
    Refused,
    UnsafeRequest,
    UpstreamError,
)
from kvproxy.base.upstream.response import UpstreamResponse
from kvproxy.base.upstream.transport import PooledClient

T = TypeVar("T")

#: Error bodies are read up to here: enough for any message, too little for an echoed prompt to matter.
MAX_ERROR_BYTES = 64 * 1024

#: Objects and lists of an answer: to make more takes some milliseconds, however small they are.
MAX_VALUES = 16_384

_TIMEOUTS = (TimeoutError, httpx.TimeoutException, ConnectTimeout, FirstByteTimeout, IdleTimeout, PoolFull)


def failure(error: Exception) -> str:
    """Name a failed connection; with OpenSSL's reason if TLS was refused."""
    _, mark, reason = str(error).partition("[SSL")
    return f"{type(error).__name__}: {mark}{reason}" if mark else type(error).__name__


class Api:
    """An HTTP API below `base_url`, spoken over an injected client.

    `service` names it in error texts. `authorization` is a whole header value; it is sent, never shown.
    """

    def __init__(
        self, http: httpx.AsyncClient, base_url: str, *, service: str, authorization: str | None = None
    ) -> None:
        self._http = http
        self._base = base_url.rstrip("/")
        self._service = service
        self._secret = "" if authorization is None else authorization.partition(" ")[2] or authorization
        # No compression, and nothing is unpacked: a bounded body must not become an unbounded one.
        self._headers = {"accept": "*/*", "accept-encoding": "identity"}
        if authorization is not None:
            self._headers["authorization"] = authorization

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._service})"

    @property
    def base_url(self) -> httpx.URL:
        """Where this API lives; its host also reaches the service's other ports."""
        return httpx.URL(self._base)

    def with_header(self, name: str, value: str) -> Api:
        """Return the same, with one header more on every request."""
        other = copy.copy(self)
        other._headers = {**self._headers, name: value}
        return other

    async def call(
        self, method: str, path: str, *, timeout_s: float, body: bytes | None = None, max_bytes: int = 1 << 20
    ) -> bytes:
        """Return the body of a 2xx answer; raises ClientError for everything else. Cancellation passes through."""
        headers = self._headers if body is None else {**self._headers, "content-type": "application/json"}
        try:
            async with asyncio.timeout(timeout_s):
                if isinstance(self._http, PooledClient) and "@" not in self._base:  # no name and password in it
                    pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
                    url = self._base + path
                    answer = await self._http.pooled.fetch(method.encode(), url, pairs, body, timeout_s=timeout_s)
                    return await self._read_pooled(answer, path, max_bytes)
                async with self._http.stream(
                    method, self._base + path, content=body, headers=headers, timeout=httpx.Timeout(timeout_s)
                ) as response:
                    return await self._read(response, path, max_bytes)
        except _TIMEOUTS as error:
            raise ClientTimeout(f"{self._service} {path}: no answer within {timeout_s:g} s") from error
        except (httpx.TransportError, UpstreamError, UnsafeRequest) as error:
            raise ClientUnavailable(f"{self._service} {path}: {failure(error)}") from error
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            raise BadResponse(f"{self._service} {path}: {type(error).__name__}") from error

    async def get(self, path: str, answer: type[T], *, timeout_s: float, max_bytes: int = 1 << 20) -> T:
        """Return the decoded answer of a GET."""
        return self.decode(await self.call("GET", path, timeout_s=timeout_s, max_bytes=max_bytes), answer, path)

    async def post(self, path: str, body: Any, answer: type[T], *, timeout_s: float, max_bytes: int = 1 << 20) -> T:
        """Return the decoded answer of a POST; `body` is raw JSON bytes or something to encode."""
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        reply = await self.call("POST", path, timeout_s=timeout_s, body=raw, max_bytes=max_bytes)
        return self.decode(reply, answer, path)

    def decode(self, raw: bytes, answer: type[T], path: str, *, max_values: int = MAX_VALUES) -> T:
        """`raw` as `answer`; raises BadResponse, also for more than `max_values` objects and lists together. The text
        names the place, never the content."""
        if raw.count(b"{") + raw.count(b"[") > max_values:
            raise BadResponse(f"{self._service} {path}: more than {max_values} objects and lists")
        try:
            return msgspec.json.decode(raw, type=answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadResponse(f"{self._service} {path}: {_decode_text(error)}") from error

    async def _read(self, response: httpx.Response, path: str, max_bytes: int) -> bytes:
        coding = response.headers.get("content-encoding", "")
        return await self._bounded_body(response.status_code, coding, response.aiter_bytes(), path, max_bytes)

    async def _read_pooled(self, response: UpstreamResponse, path: str, max_bytes: int) -> bytes:
        try:
            coding = dict(response.headers).get(b"content-encoding", b"").decode("latin-1")
            return await self._bounded_body(response.status, coding, _chunks_of(response), path, max_bytes)
        finally:
            if not response.complete:
                response.abort()

    async def _bounded_body(
        self, status: int, coding: str, chunks: AsyncIterator[bytes], path: str, max_bytes: int
    ) -> bytes:
        """Return the body of a 2xx answer; raises ClientError for every other one."""
        coding = coding.strip().lower()
        packed = coding not in ("", "identity")
        if 200 <= status < 300:
            if packed:
                raise BadResponse(f"{self._service} {path}: answer in content-encoding {coding[:20]!r}, not asked for")
            body = await _bounded(chunks, max_bytes)
            if body is None:
                raise BadResponse(f"{self._service} {path}: answer over {max_bytes} bytes")
            return body
        text = None if packed else await _bounded(chunks, MAX_ERROR_BYTES)
        raise self._refusal(path, status, text or b"")

    def _refusal(self, path: str, status: int, body: bytes) -> Refused:
        text = error_text(body, secret=self._secret)
        message = f"{self._service} {path}: {status}" + (f" {text}" if text else "")
        # A 404 refers to the path, or to a requested object: a model, an instance.
        of_path = text in ("", "Not Found") and not error_param(body)
        missing = status in (405, 501) or (status == 404 and of_path)
        return (NotSupported if missing else Refused)(message, status=status)


async def _chunks_of(response: UpstreamResponse) -> AsyncIterator[bytes]:
    while chunk := await response.next_chunk():
        yield chunk


async def _bounded(chunks: AsyncIterator[bytes], max_bytes: int) -> bytes | None:
    """Return the body, which is in no coding, or None when it is longer than `max_bytes`; then the rest stays
    unread."""
    read: list[bytes] = []
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size > max_bytes:
            return None
        read.append(chunk)
    return read[0] if len(read) == 1 else b"".join(read)


def _decode_text(error: Exception) -> str:
    return str(error)[:120] if isinstance(error, msgspec.ValidationError) else "not JSON"


def query_string(pairs: Mapping[str, str | int]) -> str:
    """Return a query string from the given pairs that are not empty."""
    given = {key: value for key, value in pairs.items() if value != ""}
    return f"?{httpx.QueryParams(given)}" if given else ""


#: Of an error text.
MAX_TEXT_CHARS = 200
_NUMBER_LIST = re.compile(r"\[?\s*-?\d+(?:\s*,\s*-?\d+){3,}\s*,?\s*\]?")
_CREDENTIAL = re.compile(r"(?i)\b(bearer|basic)\s+[^\s`\"']+")
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
    """The error bodies of vLLM and SGLang (flat), FastAPI, gRPC gateways and the LMCache coordinator; of FastAPI's 422
    everything but `input`."""

    error: _OpenAIError | str = ""
    detail: list[_Validation] | str = ""
    kind: object = msgspec.field(name="object", default="")
    resource: object = msgspec.field(name="kind", default="")
    message: object = ""
    param: object = None

    @property
    def blamed(self) -> _OpenAIError | str:
        """The error, wherever it is written."""
        flat = (self.kind == "error" or self.resource == "Status") and isinstance(self.message, str)
        return _OpenAIError(str(self.message), self.param) if flat else self.error


_decode_error = msgspec.json.Decoder(_ErrorBody).decode


def _parsed(body: bytes) -> _ErrorBody:
    try:
        return _decode_error(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _ErrorBody()


def error_text(body: bytes, *, secret: str = "") -> str:
    """Return a safe line about an error body; empty when the body is not one of the known error shapes.

    Only known fields are quoted: an unknown body may be an echo of the request.
    """
    parsed = _parsed(body)
    if isinstance(parsed.detail, list):
        return scrub_text("; ".join(_validation_text(entry) for entry in parsed.detail[:3]), secret=secret)
    error = parsed.blamed
    if isinstance(error, str):
        return scrub_text(parsed.detail or error, secret=secret)
    return scrub_text(error.message, secret=secret)


def error_param(body: bytes) -> str:
    """Return the field an OpenAI-style error blames; empty when it names none."""
    error = _parsed(body).blamed
    return error.param if isinstance(error, _OpenAIError) and isinstance(error.param, str) else ""


def scrub_text(text: str, *, secret: str = "") -> str:
    """`text` on one line of at most 200 characters, without number lists, echoed input and credentials."""
    if secret:
        text = text.replace(secret, "***")
    text = _INPUT_ECHO.sub(r"\1...", text[: 8 * MAX_TEXT_CHARS])
    text = _NUMBER_LIST.sub("[...]", _CREDENTIAL.sub(r"\1 ***", text))
    text = _SPACE.sub(" ", text).strip()
    return text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 3] + "..."


def _validation_text(entry: _Validation) -> str:
    return f"{'.'.join(str(part) for part in entry.loc)}: {entry.msg}"
