"""The shield: requests that would harm an engine by a known fault of its version."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvproxy.features.shield import rules
from kvproxy.features.shield.fields import WATCHED, PlainValues, fails_as_regex, find_rules
from kvproxy.features.shield.filter import ShieldFilter
from kvproxy.features.shield.rules import ADVISORIES, ALL_RULES, Rule, open_rules, parse_version
from kvproxy.proxy.forward.body_guard import EXAMINED_FIELDS
from kvproxy.proxy.listener.server import serve
from tests.support.fake_engine import FakeEngine
from tests.support.proxy import RunningProxy, chat, running_proxy

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
OLD, NEW = "0.11.0", "0.32.0"
TRUSTED = {"auth": {"keys": [{"name": "gateway", "key": "sk-trusted", "trusted": True}]}}
CHAIN = ["request_id", "inference_request", "router"]


@contextlib.asynccontextmanager
async def shielded(
    *versions: str, shield: str = "refuse", **config: Any
) -> AsyncIterator[tuple[RunningProxy, list[FakeEngine]]]:
    """Yield a proxy in front of engines of these versions ("": not reported)."""
    engines = [FakeEngine(f"e{number}", version=version) for number, version in enumerate(versions)]
    async with contextlib.AsyncExitStack() as stack:
        urls = {engine.name: await stack.enter_async_context(serve(engine)) for engine in engines}
        config = {"filters": CHAIN, **config}
        yield await stack.enter_async_context(running_proxy(urls, shield=shield, **config)), engines


def counted(proxy: RunningProxy, rule: Rule, action: str) -> float:
    return proxy.metric("kvproxy_shield_requests_total", rule=rule.value, action=action)


async def send(proxy: RunningProxy, path: str, body: bytes | dict[str, Any], **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await proxy.client.post(path, content=content, headers={"content-type": "application/json", **headers})


def with_n(value: str, name: str = '"n"') -> bytes:
    return b'{"model":"m","messages":[{"role":"user","content":"x"}],%s:%s}' % (name.encode(), value.encode())


LONG = json.dumps([{"role": "user", "content": "word " * 200}] * 20)
HOSTILE_N = {
    "plain": with_n("1000000"),
    "float": with_n("1e6"),
    "text": with_n('"1000000"'),
    "text with underscores": with_n('"1_000_000"'),
    "beyond any integer": with_n("9" * 5000),
    "infinity": with_n("1e400"),
    "escaped name": with_n("1000000", '"\\u006e"'),
    "duplicate, last": with_n('1,"n":1000000'),
    "duplicate, first": with_n('1000000,"n":1'),
    "beside NaN": with_n('1000000,"temperature":NaN'),
    "beside a lone surrogate": with_n('1000000,"user":"\\ud800"'),
    "byte order mark": b"\xef\xbb\xbf" + with_n("1000000"),
    "UTF-16": with_n("1000000").decode().encode("utf-16"),
    "UTF-32 without a mark": with_n("1000000").decode().encode("utf-32-le"),
    "spaces": with_n(" \n 1000000 \t", '"n" '),
    "behind long messages": b'{"model":"m","messages":%s,"n":1000000}' % LONG.encode(),
    "before long messages": b'{"n":1000000,"model":"m","messages":%s}' % LONG.encode(),
    "large": b'{"model":"m","messages":[{"role":"user","content":"%s"}],"n":1000000}' % (b"x" * 3_000_000),
    "nested parameters": with_n('{"n":1000000}', '"sampling_params"'),
}


@pytest.mark.parametrize("body", HOSTILE_N.values(), ids=HOSTILE_N)
async def test_a_huge_n_is_refused_however_it_is_written(body: bytes) -> None:
    """400 in the client's dialect, nothing reaches the engine, and it is counted by its rule."""
    async with shielded(OLD) as (proxy, [engine]):
        answer = await send(proxy, CHAT, body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "shield"
        assert OLD not in answer.text
        assert engine.calls == []
        assert counted(proxy, Rule.HUGE_N, "refused") == 1


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions/batch", "/generate"])
async def test_other_paths_are_guarded_too(path: str) -> None:
    """Also those whose bodies nothing else reads."""
    async with shielded(OLD) as (proxy, [engine]):
        assert (await send(proxy, path, {"model": "m", "prompt": "x", "n": 1e9})).status_code == 400
        assert (await send(proxy, path, {"model": "m", "prompt": "x", "n": 2})).status_code == 200
        [call] = engine.calls
        assert json.loads(call.body)["n"] == 2


async def test_a_form_is_streamed_unread() -> None:
    """An upload is not held to be looked through."""
    async with shielded(OLD) as (proxy, [engine]):
        form = {"file": ("a.wav", b"RIFF" + bytes(100_000)), "model": (None, "m"), "n": (None, "1000000")}
        assert (await proxy.client.post("/v1/audio/transcriptions", files=form)).status_code == 200
        assert len(engine.calls) == 1


async def test_messages_get_the_error_of_their_own_api() -> None:
    """Anthropic's shape."""
    async with shielded(OLD) as (proxy, _):
        body = {"model": "m", "max_tokens": 5, "messages": [], "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}
        answer = await send(proxy, "/v1/messages", body)
        assert answer.status_code == 400
        assert answer.json()["type"] == "error"


async def test_the_request_goes_to_an_engine_without_the_fault() -> None:
    """Whatever the policy would have chosen, the retry included; the client sees no refusal."""
    async with shielded(OLD, NEW, OLD) as (proxy, engines):
        for _ in range(6):
            assert (await send(proxy, CHAT, with_n("1000000"))).status_code == 200
        assert [len(engine.calls) for engine in engines] == [0, 6, 0]
        assert counted(proxy, Rule.HUGE_N, "rerouted") == 6


async def test_an_engine_of_unknown_version_is_preferred_only_to_a_faulty_one() -> None:
    """It may have the fault: one that surely has not goes first."""
    async with shielded(OLD, "") as (proxy, engines):
        assert (await send(proxy, CHAT, with_n("1000000"))).status_code == 200
        assert [len(engine.calls) for engine in engines] == [0, 1]
    async with shielded(OLD, "", NEW) as (proxy, engines):
        for _ in range(4):
            assert (await send(proxy, CHAT, with_n("1000000"))).status_code == 200
        assert [len(engine.calls) for engine in engines] == [0, 0, 4]


async def test_engines_without_the_fault_get_everything() -> None:
    """And so do those of an unknown version, and other kinds."""
    for version in (NEW, ""):
        async with shielded(version) as (proxy, [engine]):
            assert (await send(proxy, CHAT, with_n("1000000"))).status_code == 200
            assert len(engine.calls) == 1
            assert counted(proxy, Rule.HUGE_N, "refused") == 0


async def test_a_warning_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """`warn`, the default: the request passes."""
    async with shielded(OLD, shield="warn") as (proxy, [engine]):
        await versions_of(proxy)
        for _ in range(2):
            assert (await send(proxy, CHAT, with_n("1000000"))).status_code == 200
        assert len(engine.calls) == 2
        assert counted(proxy, Rule.HUGE_N, "passed") == 2
        assert len([one for one in caplog.records if one.name == "kvproxy.shield"]) == 1


async def test_off_asks_and_does_nothing() -> None:
    """Not even for the version."""
    async with shielded(OLD, shield="off") as (proxy, [engine]):
        assert (await send(proxy, CHAT, with_n("1000000"))).status_code == 200
        assert engine.versions_told == 0


async def versions_of(proxy: RunningProxy) -> None:
    """Query the versions as the background does a second after the start."""
    shield = next(one for one in proxy.proxy.generations.current.chain.steps if isinstance(one, ShieldFilter))  # type: ignore[attr-defined]
    await shield._versions.ask()


async def test_a_cluster_has_the_versions_of_its_engines_once() -> None:
    """Prompts with media go by them, without a look at every engine."""
    async with shielded("0.28.0", "0.32.0", "0.32.0") as (proxy, _):
        cluster = proxy.proxy.clusters["default"]
        assert cluster.software == frozenset()
        await versions_of(proxy)
        assert cluster.software == {"vLLM 0.28.0", "vLLM 0.32.0"}


@pytest.mark.parametrize("path", ["/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"])
async def test_scoring_gets_an_id_of_our_own(path: str) -> None:
    """Two clients of one id get two upstream; each gets its own back, also where the engine sends ours."""
    async with shielded("0.29.0", shield="warn") as (proxy, [engine]):
        for _ in range(2):
            answer = await send(proxy, path, {"model": "m"}, **{"x-request-id": "shared"})
            assert answer.headers["x-request-id"] == "shared"
        ids = [call.header("x-request-id") for call in engine.calls]
        assert len({*ids, "shared"}) == 3
        assert all(len([k for k, _ in call.headers if k == b"x-request-id"]) == 1 for call in engine.calls)
        assert counted(proxy, Rule.CLIENT_REQUEST_ID, "rewritten") == 2


async def test_scoring_gets_an_id_of_our_own_without_the_filter_for_ids() -> None:
    """Or with one that goes by another header."""
    for chain in (["router"], [{"request_id": {"header": "x-correlation-id"}}, "router"]):
        async with shielded("0.29.0", filters=chain) as (proxy, [engine]):
            await send(proxy, "/score", {"model": "m"}, **{"x-request-id": "shared"})
            [call] = engine.calls
            assert call.header("x-request-id") not in (None, "shared")


async def test_other_paths_and_versions_keep_the_clients_id() -> None:
    """It correlates the logs."""
    async with shielded("0.29.0") as (proxy, [engine]):
        await send(proxy, CHAT, chat(), **{"x-request-id": "mine"})
        assert engine.calls[0].header("x-request-id") == "mine"
    async with shielded("0.30.0") as (proxy, [engine]):
        await versions_of(proxy)
        await send(proxy, "/score", {"model": "m"}, **{"x-request-id": "mine"})
        assert engine.calls[0].header("x-request-id") == "mine"


PARAMS = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [[1]], "remote_request_id": "r",
          "remote_host": "h", "remote_port": 1}  # fmt: skip


async def test_incomplete_transfers_of_trusted_clients_are_refused() -> None:
    """From others the field is cut out as ever; there is no release without the fault."""
    auth = {"auth": {"keys": [{"name": "gateway", "key": "sk-t", "trusted": True}, {"name": "user", "key": "sk-u"}]}}
    async with shielded(NEW, filters=[auth, *CHAIN]) as (proxy, [engine]):
        body = chat(kv_transfer_params={**PARAMS, "remote_request_id": None})
        assert (await send(proxy, CHAT, body, authorization="Bearer sk-t")).status_code == 400
        assert (await send(proxy, CHAT, body, authorization="Bearer sk-u")).status_code == 200
        assert (
            await send(proxy, CHAT, chat(kv_transfer_params=PARAMS), authorization="Bearer sk-t")
        ).status_code == 200
        assert [b"kv_transfer_params" in call.body for call in engine.calls] == [False, True]


async def test_a_body_that_cannot_be_checked_is_refused() -> None:
    """Too many names for a scan, which an engine still reads."""
    body = b'{"model":"m","messages":[],"x":NaN' + b',"n":1' * 1100 + b"}"
    async with shielded(OLD) as (proxy, [engine]):
        assert (await send(proxy, CHAT, body)).status_code == 400
        assert engine.calls == []
        assert counted(proxy, Rule.UNREADABLE, "refused") == 1


def found(path: str = CHAT, **fields: Any) -> set[Rule]:
    return find_rules([(name, json.dumps(value).encode()) for name, value in fields.items()], path)


@pytest.mark.parametrize(
    ("path", "fields", "rule"),
    [
        (CHAT, {"prompt_logprobs": 0}, Rule.PROMPT_LOGPROBS),
        (COMPLETIONS, {"echo": "yes", "logprobs": 1}, Rule.PROMPT_LOGPROBS),
        (CHAT, {"echo": 1}, Rule.PROMPT_LOGPROBS),
        (COMPLETIONS, {"prompt_embeds": "x"}, Rule.PROMPT_EMBEDS),
        (RESPONSES, {"chat_template_kwargs": {"chat_template": "x"}}, Rule.RESPONSES_CHAT_TEMPLATE),
        (CHAT, {"chat_template": "x"}, Rule.CHAT_TEMPLATE),
        (CHAT, {"chat_template_kwargs": {"tokenize": True}}, Rule.CHAT_TEMPLATE),
        (CHAT, {"sampling_params": {"prompt_logprobs": 1}}, Rule.PROMPT_LOGPROBS),
        (CHAT, {"structured_outputs": {"json": ""}}, Rule.STRUCTURED_OUTPUT),
        (CHAT, {"structured_outputs": {"json": "{"}}, Rule.STRUCTURED_OUTPUT),
        (CHAT, {"structured_outputs": {"json_object": False}}, Rule.STRUCTURED_OUTPUT),
        (CHAT, {"structured_outputs": {"regex": "^(|.*)$"}}, Rule.STRUCTURED_OUTPUT),
        (CHAT, {"structured_outputs": {"choice": []}}, Rule.STRUCTURED_OUTPUT),
        (CHAT, {"structured_outputs": {"grammar": 'root ::= "a"\nroot ::= "b"'}}, Rule.STRUCTURED_OUTPUT),
        (CHAT, {"structured_outputs": {"grammar": "?? nothing"}}, Rule.STRUCTURED_OUTPUT),
        (CHAT, {"guided_regex": "(?=x)"}, Rule.STRUCTURED_OUTPUT),
        (CHAT, {"guided_json": {"properties": {"a": {"pattern": "(|a)"}}}}, Rule.STRUCTURED_OUTPUT),
        (CHAT, {"response_format": {"json_schema": {"schema": {"pattern": "a("}}}}, Rule.STRUCTURED_OUTPUT),
        (RESPONSES, {"text": {"format": {"schema": {"pattern": "*"}}}}, Rule.STRUCTURED_OUTPUT),
        (CHAT, {"tools": [{"function": {"parameters": {"pattern": "\\1"}}}]}, Rule.STRUCTURED_OUTPUT),
        (CHAT, {"kv_transfer_params": 5}, Rule.KV_TRANSFER_PARAMS),
        (CHAT, {"kv_transfer_params": {**PARAMS, "tp_size": 10**9}}, Rule.KV_TRANSFER_PARAMS),
        (CHAT, {"vllm_xargs": {"kv_transfer_params": {"do_remote_prefill": True}}}, Rule.KV_TRANSFER_PARAMS),
        (COMPLETIONS, {"kv_transfer_params": PARAMS, "prompt": ["a", "b"]}, Rule.KV_TRANSFER_PARAMS),
    ],
)  # fmt: skip
def test_shapes_that_meet_a_fault(path: str, fields: dict[str, Any], rule: Rule) -> None:
    """Each by the value that triggers it."""
    assert rule in found(path, **fields)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"n": 4, "prompt_logprobs": None, "echo": False, "prompt_embeds": None}),
        (COMPLETIONS, {"echo": True, "logprobs": None, "n": "1"}),
        (COMPLETIONS, {"logprobs": 5, "n": [1], "echo": None}),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False, "chat_template": None}, "n": {}}),
        (CHAT, {"structured_outputs": {"json": {"type": "object"}, "json_object": None}}),
        (CHAT, {"structured_outputs": {"json": '{"type": "object"}', "regex": r"^\d{3}-[A-Z(|]+$"}}),
        (CHAT, {"structured_outputs": {"choice": ["a", "b"], "grammar": 'root ::= "a" | "b"'}}),
        (CHAT, {"structured_outputs": {"grammar": "start: WORD\nWORD: /a+/"}}),
        (CHAT, {"response_format": {"type": "json_object"}, "structured_outputs": "x"}),
        (CHAT, {"tools": [{"function": {"description": 'a "pattern": "(|"', "parameters": {"pattern": "^a|b$"}}}]}),
        (CHAT, {"kv_transfer_params": {"do_remote_decode": True, "remote_engine_id": None}}),
        (CHAT, {"kv_transfer_params": {"do_remote_prefill": True, "transfer_id": "x", "remote_engine_id": "e"}}),
        (COMPLETIONS, {"kv_transfer_params": PARAMS, "prompt": [1, 2, 3]}),
        (RESPONSES, {"text": "x", "chat_template_kwargs": [1]}),
        ("/v1/score", {"text": {"format": {"type": "text"}}}),
    ],
)  # fmt: skip
def test_shapes_that_every_engine_bears(path: str, fields: dict[str, Any]) -> None:
    """Clients' everyday requests pass."""
    assert found(path, **fields) == set()


def test_values_that_are_not_decoded_count_as_harmful() -> None:
    """Too long, or too deep for a parser."""
    assert find_rules([("structured_outputs", b'{"json":"%s"}' % (b"x" * 200_000))], CHAT) == {Rule.STRUCTURED_OUTPUT}
    assert find_rules([("chat_template_kwargs", b"[" * 100_000)], RESPONSES) >= {Rule.RESPONSES_CHAT_TEMPLATE}
    assert find_rules([("sampling_params", b"[" * 100_000)], CHAT) == {Rule.UNREADABLE}
    assert find_rules([("vllm_xargs", b"[" * 100_000)], CHAT) == {Rule.KV_TRANSFER_PARAMS}
    deep = {"json": {"a": None}}
    for _ in range(80):
        deep = {"json": {"a": deep["json"]}}
    assert found(structured_outputs=deep) == {Rule.STRUCTURED_OUTPUT}


@pytest.mark.parametrize("text", ["^(|.*)$", "(a|)", "a||b", "(?=x)", r"\1", r"\bfoo", "[a", "(a", "a)", "()", "*a",
                                  "a\\", "a\0b", "(?i)a", "|a", "a|", "x" * 5000])  # fmt: skip
def test_expressions_on_which_compilers_disagree(text: str) -> None:
    """Empty alternatives, looks around, references, and what is none."""
    assert fails_as_regex(text)


@pytest.mark.parametrize(
    "text", [r"^\d{3}$", "^(a|b)?$", ".*", "", "(?:ab|c)+x?", r"\(\|", "[(|]+", "^a$|^b$", "[^]]*", r"a\\b"]
)
def test_expressions_that_every_compiler_takes(text: str) -> None:
    """As found in everyday schemas."""
    assert not fails_as_regex(text)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.32.0", (0, 32, 0, 0)), ("v0.9.2", (0, 9, 2, 0)), ("0.30", (0, 30, 0, 0)), ("0.30.0rc1", (0, 30, 0, -1)),
        ("0.17.0rc1.dev168+gdc6b57846.d20260309", (0, 17, 0, -1)), ("0.30.0.post1", (0, 30, 0, 0)),
        ("0.30.0+cpu", (0, 30, 0, 0)), ("0.1.dev1+g2b51d23f6", None), ("dev", None), ("", None),
        ("9" * 99 + ".1", None),
    ],
)  # fmt: skip
def test_versions(text: str, version: rules.Version | None) -> None:
    """A pre-release is before its release; a build of a tree without tags means nothing."""
    assert parse_version(text) == version


def test_open_rules() -> None:
    """By the first release without the fault; other kinds of engines have none of vLLM's."""
    assert open_rules(None) == ALL_RULES
    assert open_rules("") == {Rule.CLIENT_REQUEST_ID}
    assert open_rules("SGLang") == open_rules("vLLM 0.1.dev1+g1") == frozenset()
    assert open_rules("vLLM 0.32.0") == {Rule.KV_TRANSFER_PARAMS}
    assert Rule.HUGE_N in open_rules("vLLM 0.18.1")
    assert Rule.HUGE_N not in open_rules("vLLM 0.19.0")
    assert Rule.STRUCTURED_OUTPUT in open_rules("vLLM 0.30.0rc2")
    assert Rule.CHAT_TEMPLATE not in open_rules("vLLM 0.5.4")


def test_the_table_is_whole() -> None:
    """Each rule has its row, and a scan for the proxy keeps what the rules look at."""
    assert set(ADVISORIES) == set(Rule) - {Rule.UNREADABLE}
    assert WATCHED <= EXAMINED_FIELDS


@pytest.mark.parametrize("words", [1, 400])
def test_a_value_with_a_pattern_is_never_taken_for_one_that_was_plain(words: int) -> None:
    """Agents send the same tools again; others of the same length are looked through all the same."""
    values = PlainValues()
    plain = b'[{"type": "function", "parameters": {"pattirn": "%b"}}]' % (b"word " * words)
    for _ in range(2):
        assert not values.has_pattern(plain)
        assert values.has_pattern(plain.replace(b"pattirn", b"pattern"))
    for number in range(100):
        assert not values.has_pattern(plain.replace(b"pattirn", b"%07d" % number))
    assert not values.has_pattern(plain)
