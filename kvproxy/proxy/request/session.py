"""Session and client of a request: one table of the names that agents, engines and routers use. Pure.

The first schema that matches decides, headers before the body (`fields.py`), and no two are mixed: the ids of one
schema mean nothing in another. A schema names a root and may name a child (a sub-agent): the child is a session of its
own, with the root as its parent, or as the schema defines.

| schema | session | child | parent |
|---|---|---|---|
| configured | `session_header` | | |
| Dynamo | `x-dynamo-session-id` | | `x-dynamo-parent-session-id` |
| Claude Code, from 2.1.86 | `x-claude-code-session-id` | `x-claude-code-agent-id` | `x-claude-code-parent-agent-id` |
| Codex | `thread-id`, `session-id`, `session_id` | | `x-codex-parent-thread-id`, `x-codex-turn-metadata` |
| OpenCode, vLLM | `x-session-id`, `x-session-affinity`, `x-opencode-session` | | `x-parent-session-id` |
| Open WebUI | `x-openwebui-chat-id` | | |
| SGLang's router | `x-smg-routing-key`, `x-sgl-routing-key` | | |
| AIPerf alone | `x-correlation-id` (others number requests with it) | | |
| body: vLLM, SGLang | `session_id` | | |
| body: vLLM | `vllm_xargs.session_id` | | |
| body: vLLM's router | `vllm_xargs.agentic_context.program_id`, or its `task_id:agent_id` | | its `parent_program_id` |
| body: Dynamo | `nvext.agent_context.session_id` | | its `parent_session_id` |
| body: Codex | `client_metadata.thread_id`, `.session_id` | | its `x-codex-parent-thread-id` |
| body: Responses | `conversation` | | |
| body: Claude Code before 2.1.86 | the session in `metadata.user_id` | | |
| body | `user`, `metadata.user_id`: an end user, the nearest thing to a session | | |

`x-dynamo-session-final: true` ends a session of any schema. No session is llm-d's `x-session-token`, which names an
endpoint and is shared by all that were sent there, nor `prompt_cache_key`, which many sessions share."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import msgspec

#: A longer session key is replaced by its digest, so that clients cannot choose how much is kept.
MAX_SESSION_KEY = 128
#: A longer header with JSON in it is not parsed.
_MAX_JSON = 8192
#: Bytes examined of a `user-agent`, and number of them cached.
_AGENT_BYTES = 48
_REMEMBERED_AGENTS = 256

#: Beginning of the `user-agent` of each kind of client, in lower case; the longer of two matches comes first.
_AGENTS = (
    ("claude-cli/", "claude-code"),
    ("codex", "codex"),
    ("opencode/", "opencode"),
    ("qwencode/", "qwen-code"),
    ("roocode/", "roo-code"),
    ("kilo-code/", "kilo-code"),
    ("litellm/", "litellm"),
    ("aiperf/", "aiperf"),
    ("openai/", "openai-sdk"),
    ("asyncopenai/", "openai-sdk"),
    ("anthropic/", "anthropic-sdk"),
    ("asyncanthropic/", "anthropic-sdk"),
)


class _Schema(NamedTuple):
    root: tuple[bytes, ...]  # headers; the first one present counts
    child: bytes = b""
    parent: bytes = b""
    client: str = ""  # client that surely sent it, if the `user-agent` names none


_CODEX = _Schema((b"thread-id", b"session-id", b"session_id"), parent=b"x-codex-parent-thread-id")
_TURN_METADATA = b"x-codex-turn-metadata"
_SCHEMAS = (
    _Schema((b"x-dynamo-session-id",), parent=b"x-dynamo-parent-session-id"),
    _Schema(
        (b"x-claude-code-session-id",),
        child=b"x-claude-code-agent-id",
        parent=b"x-claude-code-parent-agent-id",
        client="claude-code",
    ),
    _CODEX,
    _Schema((b"x-session-id", b"x-session-affinity", b"x-opencode-session"), parent=b"x-parent-session-id"),
    _Schema((b"x-openwebui-chat-id",), client="open-webui"),
    _Schema((b"x-smg-routing-key", b"x-sgl-routing-key")),
)
_CORRELATION = b"x-correlation-id"
_FINAL = b"x-dynamo-session-final"
_AGENT = b"user-agent"

#: Kinds of clients; a metric label. "": unknown.
CLIENTS = ("", *dict.fromkeys(client for _, client in _AGENTS), "open-webui")


class Session(NamedTuple):
    """One conversation, and the one it comes from."""

    key: str
    parent: str | None = None
    of_user: bool = False  # the key names an end user, who may have several at a time


class Caller(msgspec.Struct, frozen=True):
    """Client and session of a request by its headers."""

    session: Session | None = None
    client: str = ""  # one of CLIENTS
    ends: bool = False  # the session ends with this request


NO_CALLER = Caller()


class SessionHeaders:
    """Reads callers from headers, with the header an operator configured before all others."""

    def __init__(self, session_header: str = "") -> None:
        first = (_Schema((session_header.lower().encode(),)),) if session_header else ()
        self._schemas = (*first, *_SCHEMAS)
        parts = [name for schema in self._schemas for name in (*schema.root, schema.child, schema.parent) if name]
        #: Headers that are read; any one of several with the same name.
        self.names = frozenset((*parts, _TURN_METADATA, _CORRELATION, _FINAL, _AGENT))

    def read(self, headers: Mapping[bytes, bytes]) -> Caller:
        """Return the caller by these headers, which are all of `names` that were sent."""
        agent = headers.get(_AGENT)
        caller = NO_CALLER if agent is None else _caller_of(agent[:_AGENT_BYTES])
        if len(headers) == (agent is not None):
            return caller
        client = caller.client
        ends = headers.get(_FINAL, b"").strip().lower() == b"true"
        for schema in self._schemas:
            for name in schema.root:
                if root := _text(headers, name):
                    return Caller(_session(schema, root, headers), client or schema.client, ends)
        root = _text(headers, _CORRELATION) if client == "aiperf" else ""
        return Caller(Session(bounded_key(root)) if root else None, client, ends)


def child_session(root: str, child: str, parent: str = "") -> Session:
    """Return the session of a sub-agent of `root`; its parent is the root where it is no other sub-agent."""
    if not child or child == root:
        return Session(bounded_key(root), bounded_key(parent) if parent and parent != root else None)
    return Session(bounded_key(f"{root}/{child}"), bounded_key(f"{root}/{parent}" if parent else root))


def bounded_key(key: str) -> str:
    """Return the key itself, or its digest if it is long."""
    if len(key) <= MAX_SESSION_KEY:
        return key
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _session(schema: _Schema, root: str, headers: Mapping[bytes, bytes]) -> Session:
    parent = _text(headers, schema.parent) if schema.parent else ""
    if schema.child:
        return child_session(root, _text(headers, schema.child), parent)
    if schema is _CODEX and not parent:
        parent = _fork_of(headers.get(_TURN_METADATA, b"")) or _text(headers, b"session-id")
    return child_session(root, "", parent)


class _TurnMetadata(msgspec.Struct):
    parent_thread_id: str = ""
    forked_from_thread_id: str = ""


_decode_metadata = msgspec.json.Decoder(_TurnMetadata).decode


def _fork_of(metadata: bytes) -> str:
    """Return the thread that this one was forked from by Codex's metadata."""
    if b"thread_id" not in metadata or len(metadata) > _MAX_JSON:
        return ""
    try:
        said = _decode_metadata(metadata)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return said.parent_thread_id or said.forked_from_thread_id


def _text(headers: Mapping[bytes, bytes], name: bytes) -> str:
    value = headers.get(name)
    return "" if value is None else value.decode("latin-1").strip()


@lru_cache(_REMEMBERED_AGENTS)
def _caller_of(agent: bytes) -> Caller:
    text = agent.decode("latin-1").strip().lower()
    for prefix, client in _AGENTS:
        if text.startswith(prefix):
            return Caller(client=client)
    return NO_CALLER


class _ClaudeUser(msgspec.Struct):
    session_id: str = ""


_decode_user = msgspec.json.Decoder(_ClaudeUser).decode


def session_of_user(text: str) -> Session | None:
    """Return the session in what Claude Code writes as `metadata.user_id`: JSON, or before 2.1.78
    `user_..._session_ID`."""
    root = ""
    if text.startswith("user_"):
        root = text.partition("_session_")[2]
    elif text.startswith("{") and len(text) <= _MAX_JSON:
        try:
            root = _decode_user(text).session_id
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            return None
    return Session(bounded_key(root)) if root else None
