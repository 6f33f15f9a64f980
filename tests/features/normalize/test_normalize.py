"""Filter normalize: what its rules do to a body."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Send

from kvproxy.base.types import RequestKind
from kvproxy.features.normalize.normalize import Piece, pieces_of, put_all, put_into, rewrite
from kvproxy.features.normalize.settings import NormalizeRule
from kvproxy.operate.config.load import check_config
from kvproxy.proxy.request.downstream import Downstream
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.parse import decode_body, parse_body
from kvproxy.proxy.request.session import NO_CALLER
from tests.support.asgi import http_scope
from tests.support.fake_engine import Call, FakeEngine, reply
from tests.support.loopback import serve
from tests.support.proxy import RunningProxy, running_proxy

HEADER = "x-anthropic-billing-header: cc_version=2.1.37; cch=fa690;"
COUNTER = "<total_tokens>14999 tokens left</total_tokens>"
BILLING, TOOLS, COUNTERS = NormalizeRule
FILTERS = ["inference_request", {"normalize": {"rules": list(NormalizeRule)}}, "kvcache", "router"]
Body = dict[str, Any]


def block(text: str, **more: Any) -> Body:
    return {"type": "text", "text": text, **more}


def tool(name: str) -> Body:
    return {"name": name, "input_schema": {"type": "object", "properties": {"tools": {"type": "string"}}}}


RULES: dict[str, tuple[NormalizeRule, bytes, Any, Any]] = {
    "a header block": (BILLING, b"system", [block(HEADER), block("You are")], [block("You are")]),
    "a header block alone": (BILLING, b"system", [block(HEADER)], [block(HEADER)]),
    "a header line": (BILLING, b"system", f"{HEADER}\nYou are", "You are"),
    "a header in the middle": (BILLING, b"system", f"You\n{HEADER}\nare", f"You\n{HEADER}\nare"),
    "a header as all there is": (BILLING, b"system", HEADER, HEADER),
    "a chat's header line": (
        BILLING, b"messages", {"role": "system", "content": f"{HEADER}\nYou"}, {"role": "system", "content": "You"},
    ),
    "a chat's header part": (
        BILLING,
        b"messages",
        {"role": "system", "content": [block(HEADER), block("You")]},
        {"role": "system", "content": [block("You")]},
    ),
    "a chat's system prompt without one": (
        BILLING, b"messages", {"role": "system", "content": "You"}, {"role": "system", "content": "You"},
    ),
    "tools": (TOOLS, b"tools", [tool("b"), tool("a"), tool("c")], [tool("a"), tool("b"), tool("c")]),
    "tools in order": (TOOLS, b"tools", [tool("a"), tool("b")], [tool("a"), tool("b")]),
    "a chat's tools": (
        TOOLS,
        b"tools",
        [{"type": "function", "function": tool("b")}, {"type": "function", "function": tool("a")}],
        [{"type": "function", "function": tool("a")}, {"type": "function", "function": tool("b")}],
    ),
    "tools that are none": (TOOLS, b"tools", [1, "a"], [1, "a"]),
    "tools that are no list": (TOOLS, b"tools", {"b": 1}, {"b": 1}),
    "too many tools": (TOOLS, b"tools", [tool("b")] * 2000 + [tool("a")], [tool("b")] * 2000 + [tool("a")]),
    "a counter block": (COUNTERS, b"system", [block("You"), block(COUNTER)], [block("You")]),
    "a counter behind a text": (COUNTERS, b"system", [block(f"You\n\n{COUNTER}")], [block("You")]),
    "counters in a string": (COUNTERS, b"system", f"You\n{COUNTER}\n{COUNTER} are", "You are"),
    "a chat's counter": (
        COUNTERS,
        b"messages",
        {"role": "system", "content": f"You {COUNTER}"},
        {"role": "system", "content": "You "},
    ),
    "instructions with a counter": (COUNTERS, b"instructions", f"You\n{COUNTER}", "You"),
    "a backslash before the counter's line": (COUNTERS, b"system", "a\\\n" + COUNTER, "a\\\n"),
    "no counter": (COUNTERS, b"system", [block("tokens left: many")], [block("tokens left: many")]),
    "a rule that says nothing of it": (TOOLS, b"system", "b a", "b a"),
}  # fmt: skip


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")], ids=["compact", "spaced"])
@pytest.mark.parametrize("case", RULES)
def test_pieces_after_a_rule(case: str, separators: tuple[str, str]) -> None:
    """And that what it makes is JSON."""
    rule, name, before, after = RULES[case]
    piece = Piece(name, json.dumps(before, separators=separators).encode())
    changed = rewrite(rule, piece)
    assert json.loads(changed.value) == after
    assert rewrite(rule, changed) == changed
    if before == after:
        assert changed is piece or changed == piece


texts = st.text(max_size=30) | st.sampled_from([HEADER, COUNTER, f"{HEADER}\nx", f"\\\n{COUNTER}", '"', "\\"])


@given(st.lists(texts, max_size=4), st.sampled_from(list(NormalizeRule)), st.booleans())
def test_whatever_the_texts_the_result_is_json(parts: list[str], rule: NormalizeRule, ascii_only: bool) -> None:
    """Only headers and counters are gone, whatever is around them."""
    for value in ([block(text) for text in parts], "".join(parts)):
        piece = Piece(b"system", json.dumps(value, ensure_ascii=ascii_only).encode())
        after = json.loads(rewrite(rule, piece).value)
        if HEADER not in str(value) and COUNTER not in str(value):
            assert after == value
        assert type(after) is type(value)


def test_a_piece_that_is_written_oddly_is_not_replaced() -> None:
    """Nor one that is not there."""
    before, after = Piece(b"tools", b"[1]"), Piece(b"tools", b"[2]")
    assert put_into(b'{"tools":[1],"x":0}', before, after) == b'{"tools":[2],"x":0}'
    assert put_into(b'{"tools" : [1]}', before, after) is None


async def usage(engine: FakeEngine, call: Call, send: Send) -> None:
    """Answer with token counts."""
    counted = {"input_tokens": 10, "output_tokens": 1, "cache_read_input_tokens": 90}
    await reply(send, 200, json.dumps({"type": "message", "content": [], "usage": counted}).encode())


AGENT = {
    "model": "m",
    "max_tokens": 5,
    "system": [block(HEADER), block("You are", cache_control={"type": "ephemeral"}), block(COUNTER)],
    "tools": [tool("write"), tool("read")],
    "messages": [{"role": "user", "content": f"{HEADER}\n{COUNTER} \u00e9 \\u00e9"}],
    "metadata": {"tools": [3, 2, 1]},
}


async def test_every_other_byte_is_the_clients() -> None:
    """Spaces, escapes and the order of members."""
    engine = FakeEngine("a", usage)
    body = json.dumps(AGENT, indent=None, ensure_ascii=True).encode()
    wanted = body
    for name, value in {"system": AGENT["system"][1:2], "tools": AGENT["tools"][::-1]}.items():
        wanted = wanted.replace(json.dumps(AGENT[name]).encode(), json.dumps(value, separators=(",", ": ")).encode())
    async with serve(engine) as url, running_proxy({"a": url}, policy="kv_aware", filters=FILTERS) as proxy:
        await send(proxy, body)
    (call,) = engine.calls
    assert json.loads(call.body) == json.loads(wanted)
    assert call.body.startswith(b'{"model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "You are"')
    assert call.body.endswith(body[body.index(b'"messages"') :])
    assert call.header("content-length") == str(len(call.body))
    assert proxy.metric(
        "kvproxy_normalized_requests_total",
        cluster="default", rules="billing_header+sort_tools+token_counters", result="rewritten",
    ) == 1.0  # fmt: skip


def test_filters_behind_it_see_the_length_of_what_is_there() -> None:
    """One that counts what it reads by the header would wait for the rest, or leave some for the next request."""
    body = json.dumps({"model": "m", "system": f"{HEADER}\nYou are", "messages": []}).encode()
    exchange = Exchange(received_at=0.0)
    inference = exchange.inference = decode_body(RequestKind.MESSAGES, body, NO_CALLER)
    exchange.body = body
    assert inference is not None
    scope = http_scope(headers=[(b"host", b"x"), (b"content-length", b"%d" % len(body))])
    downstream = Downstream.begin(exchange, scope, nothing, ignore)
    changes = [(piece, rewrite(BILLING, piece)) for piece in pieces_of(inference.prompt)]
    assert put_all(exchange, downstream, inference, [(old, new) for old, new in changes if old != new])
    assert exchange.body == downstream.replayed
    assert len(exchange.body) < len(body)
    assert downstream.scope["headers"] == [(b"host", b"x"), (b"content-length", b"%d" % len(exchange.body))]


async def nothing() -> Message:
    """Fail: this client sends nothing more."""
    raise AssertionError


async def ignore(message: Message) -> None:
    """Take every message."""


async def send(proxy: RunningProxy, body: bytes, path: str = "/v1/messages", session: str = "s") -> None:
    headers = {"content-type": "application/json", "x-session-id": session}
    assert (await proxy.client.post(path, content=body, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", b'{"model":"m","tools" : [{"name":"b"},{"name":"a"}],"messages":[]}'),
        ("/v1/messages", b'{"model":"m","tools":[{"name":"b"},{"name":"a"}],"messages":[],"tools":[{"name":"c"}]}'),
        ("/v1/messages", b'{"metadata":{"tools":[{"name":"b"},{"name":"a"}]},"tools" :[{"name":"b"},{"name":"a"}]}'),
        ("/v1/messages", b"no JSON"),
        ("/v1/models/x", b'{"tools":[{"name":"b"},{"name":"a"}]}'),
        ("/v1/chat/completions", b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'),
    ],
    ids=["odd spaces", "a name twice", "another member first", "no JSON", "another path", "nothing to change"],
)
async def test_an_uncertain_rewrite_is_left_out(path: str, body: bytes) -> None:
    """The engine gets what the client sent."""
    engine = FakeEngine("a", usage)
    config: dict[str, Any] = {"policy": "kv_aware", "filters": [*FILTERS[:-1], {"router": {"paths": "all"}}]}
    async with serve(engine) as url, running_proxy({"a": url}, **config) as proxy:
        await send(proxy, body, path)
    assert engine.calls[0].body == body


def test_the_share_of_a_trial_is_a_setting_that_is_gone() -> None:
    """The rest of the file is used."""
    filters = ["inference_request", {"normalize": {"share": 1}}, "kvcache", "router"]
    config, problems = check_config({"endpoints": ["http://127.0.0.1:1"], "filters": filters})
    assert config is not None
    (gone,) = (one for one in problems if one.path == "filters[1].normalize.share")
    assert (gone.severity, gone.message) == ("warning", "ignored: no longer a setting")


def test_its_place_in_the_chain_is_checked() -> None:
    """After the parsing, before the predictions; without rules it is not there."""
    _, problems = check_config("endpoints: [http://a:1]\nfilters: [kvcache, normalize, inference_request, router]\n")
    said = " ".join(one.message for one in problems)
    assert "normalize rewrites prompts that inference_request parses" in said
    assert "kvcache predicts for prompts that normalize then rewrites" in said


def test_only_some_pieces_are_looked_at() -> None:
    """A chat that begins with a user's message has none but its tools."""
    request = parse_body(RequestKind.CHAT, b'{"tools":[],"reasoning_effort":"low","messages":[{"role":"user"}]}')
    assert request is not None
    assert pieces_of(request.prompt) == [Piece(b"tools", b"[]")]
