"""Sessions, parents, ends and clients, from headers and bodies as agents really send them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvproxy.base.types import InferenceRequest, RequestHints, RequestKind
from kvproxy.proxy.placement import Placement
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.parse import MAX_DECODED_BYTES, parse_body
from kvproxy.proxy.request.session import CLIENTS, MAX_SESSION_KEY, NO_CALLER, Caller, Session, SessionHeaders
from tests.cluster.test_router_queue import cluster_of
from tests.support.clock import FakeClock

CHAT, RESPONSES, MESSAGES = RequestKind.CHAT, RequestKind.RESPONSES, RequestKind.MESSAGES
ROOT = "5f0c4c3e-2f6e-4c83-9f7b-0b6d1f1c7a11"
OTHER = "019a3f6e-7b1c-7d10-8a52-5f6d3b2a9c01"

CLAUDE_CODE = {
    "user-agent": "claude-cli/2.1.126 (external, cli)",
    "x-app": "cli",
    "anthropic-version": "2023-06-01",
    "x-claude-code-session-id": ROOT,
}
CODEX = {
    "user-agent": "codex-tui/0.154.0 (Mac OS 26.5.2; arm64) iTerm.app/3.6.11 (codex-tui; 0.154.0)",
    "originator": "codex-tui",
    "session-id": ROOT,
    "thread-id": ROOT,
    "x-client-request-id": ROOT,
    "x-codex-window-id": f"{ROOT}:0",
    "x-codex-turn-metadata": json.dumps(
        {"session_id": ROOT, "thread_id": ROOT, "turn_id": "t", "thread_source": "user"}
    ),
}
OPENCODE = {
    "user-agent": "opencode/1.14.2 ai-sdk/provider-utils/4.0.1",
    "x-session-affinity": "ses_a",
    "x-session-id": "ses_a",
}


def caller(headers: dict[str, str], *, session_header: str = "") -> Caller:
    """As the filter reads it: of all headers, those that are looked at."""
    reader = SessionHeaders(session_header)
    pairs = {name.lower().encode(): value.encode() for name, value in headers.items()}
    return reader.read({name: value for name, value in pairs.items() if name in reader.names})


def parsed(kind: RequestKind, body: dict[str, Any], headers: dict[str, str] | None = None) -> InferenceRequest:
    request = parse_body(kind, json.dumps(body).encode(), caller=caller(headers or {}))
    assert request is not None
    return request


@pytest.mark.parametrize(
    ("headers", "client", "key", "parent"),
    [
        (CLAUDE_CODE, "claude-code", ROOT, None),
        (CLAUDE_CODE | {"x-claude-code-agent-id": "a1b2"}, "claude-code", f"{ROOT}/a1b2", ROOT),
        (
            CLAUDE_CODE | {"x-claude-code-agent-id": "a1b2", "x-claude-code-parent-agent-id": "c3"},
            "claude-code",
            f"{ROOT}/a1b2",
            f"{ROOT}/c3",
        ),
        (CODEX, "codex", ROOT, None),
        (CODEX | {"thread-id": OTHER, "x-codex-parent-thread-id": ROOT}, "codex", OTHER, ROOT),
        (CODEX | {"thread-id": OTHER}, "codex", OTHER, ROOT),
        (
            CODEX | {"thread-id": OTHER, "x-codex-turn-metadata": '{"thread_id":"x","forked_from_thread_id":"fork"}'},
            "codex",
            OTHER,
            "fork",
        ),
        (
            {"user-agent": "codex_cli_rs/0.40.0 (Debian 12)", "session_id": ROOT, "conversation_id": ROOT},
            "codex",
            ROOT,
            None,
        ),
        (OPENCODE, "opencode", "ses_a", None),
        (OPENCODE | {"x-session-id": "ses_b", "x-parent-session-id": "ses_a"}, "opencode", "ses_b", "ses_a"),
        ({"x-opencode-session": "ses_c"}, "", "ses_c", None),
        ({"user-agent": "Python/3.11 aiohttp/3.12.15", "x-openwebui-chat-id": "c"}, "open-webui", "c", None),
        ({"user-agent": "AsyncOpenAI/Python 2.24.0", "x-session-id": " s "}, "openai-sdk", "s", None),
        ({"x-smg-routing-key": "rollout-7"}, "", "rollout-7", None),
        ({"user-agent": "aiperf/1.0", "x-correlation-id": "c1", "x-request-id": "r"}, "aiperf", "c1", None),
        (
            {"x-dynamo-session-id": "run-42:researcher", "x-dynamo-parent-session-id": "run-42"},
            "",
            "run-42:researcher",
            "run-42",
        ),
    ],
)
def test_headers_that_agents_send(headers: dict[str, str], client: str, key: str, parent: str | None) -> None:
    """Each agent's own words name its session and the one it comes from."""
    assert caller(headers) == Caller(Session(key, parent), client)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-correlation-id": "of one request"},
        {"user-agent": "curl/8", "x-correlation-id": "of one request"},
        {"x-session-token": "bnMvcG9k"},
        {"x-claude-code-agent-id": "a child without a root"},
        {"x-codex-parent-thread-id": "a parent without a child"},
        {"x-session-id": "  "},
    ],
)
def test_requests_without_a_session(headers: dict[str, str]) -> None:
    """Ids of requests, names of endpoints and half a schema are none."""
    assert caller(headers) == NO_CALLER


def test_the_first_schema_decides_and_none_are_mixed() -> None:
    """A parent of another schema means nothing."""
    both = {"x-dynamo-session-id": "d", **CLAUDE_CODE, "x-parent-session-id": "p", "x-codex-parent-thread-id": "q"}
    assert caller(both).session == Session("d")
    del both["x-dynamo-session-id"]
    assert caller(both).session == Session(ROOT)
    assert caller({**both, "x-chat": "c"}, session_header="X-Chat").session == Session("c")
    assert caller(both, session_header="X-Chat").session == Session(ROOT)


def test_headers_come_before_the_body() -> None:
    """And what the body says of a parent is of its own schema."""
    body = {"session_id": "b", "nvext": {"agent_context": {"session_id": "n", "parent_session_id": "p"}}}
    request = parsed(CHAT, body, OPENCODE)
    assert (request.session_key, request.parent_session) == ("ses_a", None)


@pytest.mark.parametrize("value", ["true", " True "])
def test_a_session_of_any_schema_may_end(value: str) -> None:
    """Dynamo's header is a request's, whatever named the session."""
    final = {"x-dynamo-session-final": value}
    assert parsed(CHAT, {}, CLAUDE_CODE | final).session_ends
    ended = parsed(CHAT, {"session_id": "b"}, final)
    assert (ended.session_key, ended.session_ends) == ("b", True)
    assert not parsed(CHAT, {"session_id": "b"}, {"x-dynamo-session-final": "false"}).session_ends


@pytest.mark.parametrize(
    ("kind", "body", "key", "parent"),
    [
        (CHAT, {"vllm_xargs": {"session_id": "x", "n": 1}}, "x", None),
        (CHAT, {"vllm_xargs": {"agentic_context": {"program_id": "p", "task_id": "t"}}}, "p", None),
        (CHAT, {"vllm_xargs": {"agentic_context": {"program_id": "t:a", "agent_id": "a"}}}, "t:a", None),
        (
            CHAT,
            {"vllm_xargs": {"agentic_context": {"program_id": "t:a", "parent_program_id": "t:lead", "agent_id": "a"}}},
            "t:a",
            "t:lead",
        ),
        (CHAT, {"vllm_xargs": {"agentic_context": '{"program_id": "p", "priority": 3}'}}, "p", None),
        (CHAT, {"vllm_xargs": {"agentic_context": {"task_id": "t"}}}, "t:lead", None),
        (CHAT, {"vllm_xargs": {"agentic_context": {"session_id": "s", "agent_id": "a"}}}, "s:a", "s:lead"),
        (CHAT, {"vllm_xargs": {"agentic_context": {"task_id": "t", "agent_id": "t:a"}}}, "t:a", "t:lead"),
        (
            CHAT,
            {"vllm_xargs": {"agentic_context": {"task_id": "t", "agent_id": "b", "parent_agent_id": "a"}}},
            "t:b",
            "t:a",
        ),
        (CHAT, {"vllm_xargs": {"agentic_context": {"program_id": "p", "parent_program_id": "q"}}}, "p", "q"),
        (CHAT, {"vllm_xargs": {"agentic_context": "text"}, "user": "u"}, "u", None),
        (CHAT, {"vllm_xargs": {"agentic_context": '{"program_id": ' + "[" * 9000}, "user": "u"}, "u", None),
        (CHAT, {"vllm_xargs": {"agentic_context": " " * 20_000}, "user": "u"}, "u", None),
        (CHAT, {"vllm_xargs": {"agentic_context": {"agent_id": "a"}}}, None, None),
        (
            CHAT,
            {"nvext": {"agent_context": {"session_id": "n", "parent_session_id": "p"}, "agent_hints": {}}},
            "n",
            "p",
        ),
        (CHAT, {"nvext": {"agent_hints": {"osl": 5}}, "user": "u"}, "u", None),
        (RESPONSES, {"client_metadata": {"session_id": "s", "thread_id": "s"}}, "s", None),
        (RESPONSES, {"client_metadata": {"session_id": "s", "thread_id": "t"}}, "t", "s"),
        (
            RESPONSES,
            {"client_metadata": {"session_id": "s", "thread_id": "t", "x-codex-parent-thread-id": "p"}},
            "t",
            "p",
        ),
        (RESPONSES, {"client_metadata": {}, "conversation": "conv_1"}, "conv_1", None),
        (RESPONSES, {"conversation": {"id": "conv_2"}, "user": "u"}, "conv_2", None),
        (RESPONSES, {"conversation": [], "user": "u"}, "u", None),
        (MESSAGES, {"metadata": {"user_id": json.dumps({"device_id": "d", "session_id": ROOT})}}, ROOT, None),
        (MESSAGES, {"metadata": {"user_id": f"user_{'0f' * 32}_account__session_{ROOT}"}}, ROOT, None),
        (MESSAGES, {"metadata": {"user_id": "user_7"}}, "user_7", None),
        (MESSAGES, {"metadata": {"user_id": "{not json"}}, "{not json", None),
        (MESSAGES, {"metadata": {"user_id": 5}}, "5", None),
        (CHAT, {"conversation": "c", "client_metadata": {"session_id": "s"}}, None, None),
    ],
)
def test_bodies_that_agents_send(kind: RequestKind, body: dict[str, Any], key: str | None, parent: str | None) -> None:
    """The same of a body that is decoded and of one that is scanned."""
    for padded in (body, {**body, "padding": "x" * MAX_DECODED_BYTES}):
        request = parsed(kind, padded)
        assert (request.session_key, request.parent_session) == (key, parent)


@pytest.mark.parametrize(
    ("body", "hints"),
    [
        ({"vllm_xargs": {"agentic_context": {"program_id": "p"}}}, None),
        ({"vllm_xargs": {"agentic_context": {"program_id": "p", "priority": 10}}}, RequestHints(10)),
        (
            {"vllm_xargs": {"agentic_context": {"deadline_seconds": 30, "expected_output_length": "2048"}}},
            RequestHints(0, 30.0, 2048),
        ),
        ({"vllm_xargs": {"agentic_context": '{"deadline_seconds": 1.5}'}}, RequestHints(0, 1.5)),
        (
            {"vllm_xargs": {"agentic_context": {"deadline_seconds": -3, "expected_output_length": 1e300}}},
            RequestHints(0, 0.0, 131_072),
        ),
        ({"vllm_xargs": {"agentic_context": {"priority": "high", "deadline_seconds": "nan"}}}, None),
        ({"nvext": {"agent_hints": {"priority": 4, "osl": 5}}}, RequestHints(4, None, 5)),
        ({"nvext": {"agent_hints": {}}}, None),
        ({}, None),
    ],
)
def test_hints_for_one_request(body: dict[str, Any], hints: RequestHints | None) -> None:
    """By vLLM's router and Dynamo, within bounds; of a body that is decoded and of one that is scanned."""
    for padded in (body, {**body, "padding": "x" * MAX_DECODED_BYTES}):
        assert parsed(CHAT, padded).hints == hints


def test_a_cache_group_is_no_session() -> None:
    """Many sessions send one `prompt_cache_key`: Codex gives its sub-agents the parent's."""
    request = parsed(RESPONSES, {"prompt_cache_key": "group", "previous_response_id": "resp_1"})
    assert (request.session_key, request.cache_group, request.continues) == (None, "group", "resp_1")
    assert parsed(CHAT, {"prompt_cache_key": "", "previous_response_id": "resp_1"}).cache_group is None
    assert parsed(CHAT, {"previous_response_id": "resp_1"}).continues is None
    assert parsed(RESPONSES, {"previous_response_id": 5}).continues is None
    scanned = parsed(RESPONSES, {"previous_response_id": "resp_1", "padding": "x" * MAX_DECODED_BYTES})
    assert scanned.continues == "resp_1"


@pytest.mark.parametrize(
    ("kind", "said", "continuable"),
    [
        (RESPONSES, {}, True),  # the API's own default is to store
        (RESPONSES, {"store": True}, True),
        (RESPONSES, {"store": None}, True),
        (RESPONSES, {"store": False}, False),
        (CHAT, {"store": True}, False),  # kept, but nothing goes on from it
    ],
)
def test_states_to_resume_from(kind: RequestKind, said: dict[str, Any], continuable: bool) -> None:
    """The same of a body that is decoded and of one that is scanned."""
    for body in (said, {**said, "padding": "x" * MAX_DECODED_BYTES}):
        assert parsed(kind, body).continuable is continuable


def test_client_chosen_values_are_bounded() -> None:
    """Long keys become digests, each another one; long metadata is not looked into; a client is one of a few."""
    long = "k" * (MAX_SESSION_KEY + 1)
    headers = {"x-claude-code-session-id": long, "x-claude-code-agent-id": long + "1", "user-agent": "x" * 5000}
    one, other = caller(headers).session, caller(headers | {"x-claude-code-agent-id": long + "2"}).session
    assert one is not None
    assert other is not None
    assert {len(one.key), len(one.parent or ""), len(other.key)} == {32}
    assert one.key != other.key
    assert one.parent == other.parent
    assert len(parsed(CHAT, {"prompt_cache_key": long}).cache_group or "") == 32
    assert len(parsed(RESPONSES, {"previous_response_id": long}).continues or "") == 32
    huge = json.dumps({"thread_id": "t", "forked_from_thread_id": "f", "more": "x" * 9000})
    assert caller({"thread-id": "t", "x-codex-turn-metadata": huge}).session == Session("t")
    assert caller({"thread-id": "t", "x-codex-turn-metadata": '{"thread_id":'}).session == Session("t")
    assert {caller({"user-agent": agent}).client for agent in ("claude-cli/9", "Mozilla/5.0", "CODEX_exec/1")} <= {
        *CLIENTS
    }


@pytest.mark.parametrize("user_id", ["user_x_session_", '{"session_id": 5}', '{"session_id": ""}', "{" + "[" * 9000])
def test_a_user_id_without_a_session_is_a_user(user_id: str) -> None:
    """It names the end user then, as it does for other clients."""
    request = parsed(MESSAGES, {"metadata": {"user_id": user_id}})
    assert request.session_key is not None
    assert (request.session_key == user_id) is (len(user_id) <= MAX_SESSION_KEY)


def test_keys_of_sticky_policies() -> None:
    """A sub-agent or a fork goes where its parent's session goes; without a session, cache group and prompt's beginning
    count together, so that neither one key for all nor one system prompt for all is enough to meet."""
    child = parsed(CHAT, {}, CLAUDE_CODE | {"x-claude-code-agent-id": "a"})
    assert _sticky_key(child) == _sticky_key(parsed(CHAT, {}, CLAUDE_CODE)) == ROOT
    assert _sticky_key(parsed(CHAT, {"prompt_cache_key": "k"})) is None
    bodies = [
        {"messages": [{"content": first}], **group}
        for first in ("one", "two")
        for group in ({}, {"prompt_cache_key": "k"}, {"prompt_cache_key": "l"})
    ]
    assert len({parsed(CHAT, body).head for body in bodies}) == len(bodies)
    assert parsed(CHAT, {"messages": [{"content": "x" * 5000}]}).head.startswith(b'{"content": "xxx')
    assert len(parsed(CHAT, {"messages": [{"content": "x" * 5000}]}).head) == 1024
    assert parsed(CHAT, {}).head == b""


def _sticky_key(request: InferenceRequest) -> str | None:
    """Return the key by which policies are asked."""
    exchange = Exchange(received_at=0.0, inference=request)
    clock = FakeClock()
    placement = Placement(exchange=exchange, cluster=cluster_of(clock), clock=clock, model="m")
    return placement.make_question().session_key
