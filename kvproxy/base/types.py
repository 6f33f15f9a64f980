"""Words every room shares: identifiers, clocks, and the parsed inference request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from enum import StrEnum
from typing import NamedTuple, NewType, Protocol

import msgspec

EndpointId = NewType("EndpointId", str)
BlockHash = NewType("BlockHash", int)
TokenId = NewType("TokenId", int)

#: Monotonic seconds. Every component that needs the time takes one by keyword.
Clock = Callable[[], float]

#: `asyncio.sleep` or a stand-in of a test. Every component that pauses takes one by keyword.
Sleep = Callable[[float], Awaitable[None]]


def utc_seconds() -> float:
    """Wall-clock seconds since 1970."""
    return datetime.now(UTC).timestamp()


#: Header list as ASGI and the upstream pool speak it: lower-case names, raw bytes.
Headers = list[tuple[bytes, bytes]]


class Tier(StrEnum):
    """Where KV is kept, from near to far; a metric label."""

    DEVICE = "device"  # the engine's own memory
    PINNED = "pinned"  # host memory that the device reads by itself
    HOST = "host"
    DISK = "disk"  # of the engine's machine
    SHARED = "shared"  # a store that several engines read


#: Leading tokens of a prompt beyond those in engine memory, by the tier they are kept on, in the tiers' order.
LowerTokens = tuple[tuple[Tier, int], ...]


def count_lower(lower: LowerTokens) -> int:
    """Tokens on all of these tiers."""
    return sum([tokens for _, tokens in lower])


def cut_lower(lower: LowerTokens, tokens: int) -> LowerTokens:
    """Return the first `tokens` of them; what is farthest is taken to come last."""
    kept = []
    for tier, here in lower:
        if tokens > 0:
            kept.append((tier, min(here, tokens)))
        tokens -= here
    return tuple(kept)


def skip_lower(lower: LowerTokens, tokens: int) -> LowerTokens:
    """Return what is left without the first `tokens` of them."""
    left = []
    for tier, here in lower:
        if here > tokens:
            left.append((tier, here - max(0, tokens)))
        tokens -= here
    return tuple(left)


#: Scope key of the request's ClientConnection, where our listener serves it.
CONNECTION = "kvproxy.connection"


class ClientConnection(Protocol):
    """Client of one request as plain calls instead of ASGI's receive and send messages.

    A response goes either all through `start` and `write` or all through `send`: an app behind a filter that wraps
    `send` (or `receive`) and should see the messages must use those. The calls raise RuntimeError where `send` would: a
    head with forbidden characters, a body of another length than announced. After the client left they do nothing."""

    loop: asyncio.AbstractEventLoop
    """The one it is served in; asking for that costs a system call."""

    writable: bool
    """False: the client takes less than was written; await `drain` before the next write. True once it left."""

    disconnected: bool
    """The client left before its response was complete."""

    on_disconnect: Callable[[], None] | None
    """Called when that happens, to be set by the app."""

    def take_body(self) -> bytes | None:
        """Return the whole request body, once and uncopied, if all of it has arrived; None: await `receive` for it."""
        ...

    def start(
        self, status: int, headers: Iterable[tuple[bytes, bytes]], first_piece: bytes = b"", *, more: bool
    ) -> None:
        """Write the response head and the first piece of its body at once; `more` pieces follow, or it is complete."""
        ...

    def write(self, piece: bytes, *, more: bool) -> None:
        """Write the next piece of the body; the last one has `more` False and may be empty."""
        ...

    async def drain(self) -> None:
        """Wait until `writable`."""
        ...


class RequestKind(StrEnum):
    """Inference API of a request; the value is a metric label."""

    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSES = "responses"
    EMBEDDINGS = "embeddings"
    MESSAGES = "messages"  # Anthropic


class Prompt(msgspec.Struct, frozen=True):
    """The prompt as the client sent it, cut where a chat grows.

    `shape` is the raw JSON of everything besides the messages that shapes the template (tools, chat_template_kwargs,
    system, ...), each field prefixed by its name; `parts` holds one raw JSON value a message, in order, or the single
    raw `prompt` / `input` value. Equal bytes mean an equal prompt; what else does is in
    `cache/prefix/prompt_identity.py`. Bounded in parts and bytes at the parse: what exceeds that is in the last part,
    all of it or as a digest.
    """

    shape: bytes
    parts: tuple[bytes, ...]
    unread_bytes: int = 0  # tokens covered by the digests

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole prompt, about."""
        return len(self.shape) + sum(map(len, self.parts)) + self.unread_bytes


#: Bytes of a prompt's beginning that hashing policies use.
_HEAD_BYTES = 1024


class RequestHints(NamedTuple):
    """Expectations of a client about one request, which count if it is trusted."""

    level: int = 0  # of its class, larger first
    deadline_s: float | None = None  # longest time that it may wait here
    output_tokens: int = 0  # expected length of its answer; 0: not stated


class InferenceRequest(msgspec.Struct, frozen=True):
    """One parsed inference request; the raw body beside it is what goes upstream, unchanged."""

    kind: RequestKind
    model: str  # "" when the body names none
    prompt: Prompt
    stream: bool = False
    max_tokens: int | None = None
    session_key: str | None = None  # of the conversation; long ones as a digest
    cache_salt: str | None = None
    client: str = ""  # kind of client, one of `proxy.request.session.CLIENTS`; "": unknown
    parent_session: str | None = None  # key of the parent session of a sub-agent or a fork
    session_ends: bool = False  # the session ends with this request
    cache_group: str | None = None  # from `prompt_cache_key`: requests that share prefixes, often of many sessions
    continues: str | None = None  # id of the response or conversation that this prompt continues
    continuable: bool = False  # another request may continue from its response by id
    retention_s: float | None = None  # how long its client wants the whole prompt to be kept after the answer
    request_id: str = ""  # from the body, if it is fit for a header field
    session_of_user: bool = False  # the session's key names an end user, who may have several at a time
    hints: RequestHints | None = None

    @property
    def head(self) -> bytes:
        """How prompts that share a prefix begin: the cache group and the first message's beginning; b"" of none."""
        parts = self.prompt.parts
        group = self.cache_group
        start = parts[0][:_HEAD_BYTES] if parts else b""
        return start if group is None else group.encode("utf-8", "surrogatepass") + b"\0" + start
