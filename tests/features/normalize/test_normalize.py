"""Filter normalize: what its rules do to a body, which sessions they are tried on, and when they are on or off."""

from __future__ import annotations

import json
import logging
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Send

from kvproxy.base.types import RequestKind
from kvproxy.features.normalize.normalize import MAX_SESSIONS, Trial, TrialState, put_all, session_of
from kvproxy.features.normalize.normalize_rules import Piece, pieces_of, put_into, rewrite
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
FILTERS = ["inference_request", {"normalize": {"rules": list(NormalizeRule), "share": 1}}, "kvcache", "router"]
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


async def test_a_share_of_the_sessions_is_rewritten_each_throughout() -> None:
    """By chance, while the trial lasts."""
    engine = FakeEngine("a", usage)
    filters = [FILTERS[0], {"normalize": {"rules": ["sort_tools"], "share": 0.5}}, *FILTERS[2:]]
    body = json.dumps({"model": "m", "tools": [tool("b"), tool("a")], "messages": []}).encode()
    async with serve(engine) as url, running_proxy({"a": url}, policy="kv_aware", filters=filters) as proxy:
        for number in range(40):
            await send(proxy, body, session=str(number // 2))
    came = [call.body == body for call in engine.calls]
    assert came[::2] == came[1::2]
    assert 0 < sum(came[::2]) < 20
    states = {
        state: proxy.metric("kvproxy_normalize_state", cluster="default", rules="sort_tools", state=state)
        for state in TrialState
    }
    assert states == {"trying": 1.0, "on": 0.0, "off": 0.0}


async def test_an_engine_that_reuses_more_of_sorted_tools_settles_it(caplog: pytest.LogCaptureFixture) -> None:
    """On for all; one that reuses no more, off for all."""

    async def sorts(engine: FakeEngine, call: Call, send: Send) -> None:
        names = [one["name"] for one in json.loads(call.body)["tools"]]
        counted = {"input_tokens": 10, "output_tokens": 1, "cache_read_input_tokens": 90 if names == ["a", "b"] else 0}
        await reply(send, 200, json.dumps({"type": "message", "content": [], "usage": counted}).encode())

    filters = [FILTERS[0], {"normalize": {"rules": ["sort_tools"], "share": 0.5}}, *FILTERS[2:]]
    body = json.dumps({"model": "m", "tools": [tool("b"), tool("a")], "messages": []}).encode()
    for behave, changed, said in ((sorts, True, "sort_tools on for cluster"), (usage, False, "sort_tools off for")):
        engine = FakeEngine("a", behave)
        with caplog.at_level(logging.INFO, "kvproxy.filters"):
            async with serve(engine) as url, running_proxy({"a": url}, policy="kv_aware", filters=filters) as proxy:
                for number in range(192):
                    await send(proxy, body, session=str(number // 3))
                last = [call.body != body for call in engine.calls[-24:]]
        assert last == [changed] * 24
        assert said in caplog.text


def trial_of(gain: float, sessions: int, *, turns: int = 8, share: float = 0.2, seed: int = 1) -> tuple[Trial, int]:
    """Return a trial on sessions of mixed fortunes, and after how many it was settled."""
    rng = random.Random(seed)
    trial = Trial(share=share, seed=rng.getrandbits(64))
    for number in range(sessions):
        session, luck = rng.getrandbits(64), rng.gauss(0.5, 0.2)
        treated = trial.applies(session)
        for _ in range(turns):
            reused = min(1.0, max(0.0, luck + rng.gauss(0.0, 0.1) + (gain if treated else 0.0)))
            if trial.observe_turn(session, prompt_tokens=1000, cached_tokens=int(1000 * reused)) is not None:
                return trial, number + 1
    return trial, sessions


@pytest.mark.parametrize("seed", range(5))
def test_a_rule_that_helps_is_on(seed: int) -> None:
    """Soon, if it helps much."""
    trial, after = trial_of(0.35, 2000, seed=seed)
    assert (trial.state, trial.gain is not None and trial.gain > 0.1) == (TrialState.ON, True)
    assert after < 500


@pytest.mark.parametrize("gain", [0.0, -0.2])
def test_a_rule_that_does_not_help_is_off(gain: float) -> None:
    """Of 16 trials on noisy traffic none is on by mistake; all end."""
    states = [trial_of(gain, 4000, seed=seed)[0].state for seed in range(16)]
    assert states == [TrialState.OFF] * 16


def test_few_sessions_settle_nothing() -> None:
    """However large the difference."""
    assert trial_of(0.9, 12)[0].state is TrialState.TRYING


def test_a_trials_memory_is_bounded() -> None:
    """The latest sessions count."""
    trial = Trial(share=0.5, seed=1)
    for session in range(MAX_SESSIONS + 50):
        trial.observe_turn(session, prompt_tokens=100, cached_tokens=50)
    assert len(trial._sessions) == MAX_SESSIONS
    assert trial.observe_turn(1, prompt_tokens=0, cached_tokens=0) is None


def test_a_conversation_without_a_session_is_told_by_its_first_message() -> None:
    """Its system prompt is that of many."""

    def number(first: str, *more: str) -> int:
        messages = [
            {"role": "system", "content": "You"},
            *({"role": "user", "content": text} for text in (first, *more)),
        ]
        request = parse_body(RequestKind.CHAT, json.dumps({"model": "m", "messages": messages}).encode())
        assert request is not None
        return session_of("", request)

    assert number("one") == number("one", "two") != number("two")


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
