"""The one exception tree. Only the router filter turns these into local replies; cancellation is not among them.

    KvproxyError
      ConfigError          a configuration that cannot be used; carries its `Problem`s
      DiscoveryError       a source of endpoints failed; the last ones stay
      UpstreamError        an attempt on an endpoint failed: may be tried elsewhere before the first byte
        ConnectError (ConnectTimeout), PoolFull (NoDescriptors), FirstByteTimeout, IdleTimeout, EndpointUnhealthy,
        UpstreamDisconnected, UpstreamProtocolError (ResponseHeadTooLarge), EngineReportedError
      QueueFull            no place to wait is left: answered with 429
      UnsafeRequest        the request cannot be framed: answered with 400, no endpoint is to blame
      BreakerOpen          a breaker refused the call
      ClientError          a call to a helper API failed: costs a fact or an action, never a request
        ClientTimeout, ClientUnavailable, BadResponse, WrongTokens, TooManyWaiting,
        Refused (InstanceBusy, UnknownInstance, NotSupported)

`reason` is a closed set: a metric label, and the `code` of the OpenAI error object the client gets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: An error refuses the configuration; a warning does not; a note reports an intended difference from the file.
Severity = Literal["error", "warning", "note"]


class KvproxyError(Exception):
    """Base of everything kvproxy raises on purpose."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a configuration: where (dotted path), what, and what to do about it."""

    path: str
    message: str
    hint: str = ""
    severity: Severity = "error"
    file: str = ""
    line: int = 0
    """In the file, from 1; 0: not known."""
    column: int = 0
    meant: str = ""
    """Dotted path of the key that was probably meant by an unknown one."""

    def __str__(self) -> str:
        where = self.path or (f"line {self.line}, column {self.column}" if self.line else "(file)")
        return f"{where}: {self._text()}"

    @property
    def place(self) -> str:
        """`config.yaml:3:1`, as editors and terminals make a link of it; without a line only the file, or nothing."""
        return f"{self.file}:{self.line}:{self.column}" if self.file and self.line else self.file

    def located(self) -> str:
        """`config.yaml:3:1: polcy: unknown key (did you mean 'policy'?)`."""
        if self.line and not (self.place or self.path):
            return str(self)
        return ": ".join(part for part in (self.place, self.path, self._text()) if part)

    def _text(self) -> str:
        return self.message + (f" ({self.hint})" if self.hint else "")


class ConfigError(KvproxyError):
    """The configuration cannot be used; carries every problem found, not just the first."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))


class UpstreamError(KvproxyError):
    """An attempt on an endpoint failed. `reason` is a closed set and a metric label."""

    reason = "upstream_error"


class ConnectError(UpstreamError):
    """No connection: refused, unreachable, name not found, TLS failure."""

    reason = "connect_error"


class ConnectTimeout(ConnectError):
    """No connection within the connect timeout."""

    reason = "connect_timeout"


class PoolFull(UpstreamError):
    """Every connection to this origin is busy and the waiting line is at its bound (or waited too long)."""

    reason = "pool_full"


class NoDescriptors(PoolFull):
    """The proxy's own process can open no further socket; no endpoint is to blame."""

    reason = "no_file_descriptors"


class FirstByteTimeout(UpstreamError):
    """The engine accepted the request but sent no response head in time."""

    reason = "first_byte_timeout"


class IdleTimeout(UpstreamError):
    """The engine went silent in the middle of a response."""

    reason = "idle_timeout"


class EndpointUnhealthy(UpstreamError):
    """The endpoint was declared unhealthy while the request waited for its first byte."""

    reason = "unhealthy"


class UpstreamDisconnected(UpstreamError):
    """The engine closed the connection before the response was complete."""

    reason = "upstream_disconnected"


class UpstreamProtocolError(UpstreamError):
    """The engine sent something that is not HTTP, or breaks its framing."""

    reason = "protocol_error"


class ResponseHeadTooLarge(UpstreamProtocolError):
    """The head of a response is over the proxy's own bound: the request asked for it, so no endpoint is to blame."""

    reason = "response_head_too_large"


class QueueFull(KvproxyError):
    """No place is left to wait; come back in `retry_after_s` seconds."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("the router queue is full")
        self.retry_after_s = retry_after_s


class UnsafeRequest(KvproxyError):
    """The request cannot be framed safely (CR, LF or NUL, contradicting lengths); no endpoint is to blame."""


class EngineReportedError(UpstreamError):
    """The engine itself ended a stream with an error event."""

    reason = "engine_error"

    def __init__(self, message: str, *, status: int = 500) -> None:
        self.status = status  # HTTP status that the event stands for
        super().__init__(message)


class BreakerOpen(KvproxyError):
    """A circuit breaker refused the call; no request was sent."""


class ClientError(KvproxyError):
    """A call to a helper API (an engine's own, LMCache's, KV events) failed. `reason` is a closed set, a metric label.

    Texts are short and safe to log: no token lists, no prompt text, no credentials.
    """

    reason = "client_error"


class ClientTimeout(ClientError):
    """No complete answer within the call's own timeout."""

    reason = "timeout"


class ClientUnavailable(ClientError):
    """No answer at all: refused, unreachable, cut off."""

    reason = "unavailable"


class BadResponse(ClientError):
    """An answer that is not what this API sends: wrong shape, not JSON, over the bound."""

    reason = "bad_response"


class WrongTokens(ClientError):
    """Token ids of a prompt that cannot be those which the engine computed: it counted another number."""

    reason = "wrong_tokens"


class TooManyWaiting(ClientError):
    """The line of calls for one instance is at its bound; nothing was sent."""

    reason = "too_many_waiting"


class Refused(ClientError):
    """The API answered with an error status."""

    reason = "refused"

    def __init__(self, message: str, *, status: int) -> None:
        self.status = status
        super().__init__(message)


class InstanceBusy(Refused):
    """LMCache's socket to that instance is in use or stuck; the same call may work after a pause."""

    reason = "busy"


class UnknownInstance(Refused):
    """LMCache has no such instance, or its ranks disagree, which looks the same."""

    reason = "unknown_instance"


class NotSupported(Refused):
    """The service does not offer this call: route missing, switched off, or the worker cannot do it."""

    reason = "not_supported"


class DiscoveryError(KvproxyError):
    """A source of endpoints could not list them."""


def describe_os_error(error: OSError) -> str:
    """`FILE: No such file or directory`: which file and why, without a number."""
    return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else error.strerror or str(error)
