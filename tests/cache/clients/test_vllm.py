"""The vLLM client against captured answers of a real server."""

from __future__ import annotations

import json
from array import array

import httpx
import msgspec
import pytest

from kvproxy.base.errors import BadResponse, NotSupported, Refused
from kvproxy.base.types import RequestKind
from kvproxy.cache.clients.event_sources import KvEventSource
from kvproxy.cache.clients.tokens import tokens_from_json
from kvproxy.cache.clients.vllm import RENDER_PATHS, VllmClient
from tests.cache.clients.support import FIXTURES, Handler, Upstream, captured, captures

CHAT = b'{"model":"tiny","messages":[{"role":"user","content":"Hello world"}]}'


def client(handler: Handler | httpx.Response, url: str = "http://127.0.0.1:8000") -> tuple[VllmClient, Upstream]:
    upstream = Upstream(handler)
    return VllmClient(upstream.http, url), upstream


async def test_a_prompt_becomes_an_array_of_token_ids() -> None:
    """Four bytes a token, no list of boxed ints kept."""
    vllm, upstream = client(captured("tok_prompt"))
    assert await vllm.tokenize_prompt("tiny", "Hello world") == array("I", [9707, 1879])
    assert upstream.body == captures("tok_prompt")[0]["req"]


async def test_no_model_is_sent_when_none_is_known() -> None:
    """The engine then takes its own."""
    vllm, upstream = client(captured("tok_empty"))
    assert await vllm.tokenize_prompt("", "") == array("I")
    assert upstream.body == {"prompt": ""}


async def test_a_chat_is_tokenized_from_its_raw_body() -> None:
    """The captured request and its ids."""
    exchange = captures("tok_msgs")[0]
    vllm, upstream = client(captured("tok_msgs"))
    tokens = await vllm.tokenize_chat("", json.dumps(exchange["req"]).encode())
    assert list(tokens) == json.loads(exchange["body"])["tokens"]
    assert upstream.body == exchange["req"]


async def test_render_gives_the_same_ids_as_tokenize() -> None:
    """Captured from one server: the exact alternative agrees."""
    vllm, _ = client(captured("chat_render", status=200))
    rendered = await vllm.render_prompt(RequestKind.CHAT, "", CHAT)
    assert vllm.renders == {RequestKind.CHAT: True}
    assert list(rendered) == json.loads(captures("tok_msgs")[0]["body"])["tokens"]


@pytest.mark.parametrize(
    "refusal", [captured("chat_render", status=403), httpx.Response(404, json={"detail": "Not Found"})]
)
async def test_an_engine_without_render_is_asked_once(refusal: httpx.Response) -> None:
    """From then on its chats are tokenized straight away."""

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/tokenize":
            return captured("tok_msgs")
        return httpx.Response(refusal.status_code, content=refusal.content)

    vllm, upstream = client(handler)
    with pytest.raises(NotSupported):
        await vllm.render_prompt(RequestKind.CHAT, "tiny", CHAT)
    await vllm.prompt_tokens(RequestKind.CHAT, "tiny", CHAT)
    assert [request.url.path for request in upstream.requests] == ["/v1/chat/completions/render", "/tokenize"]


async def test_a_chat_falls_back_on_the_first_refusal() -> None:
    """It need not be known beforehand what the engine can do."""

    def handler(request: httpx.Request) -> httpx.Response:
        return captured("tok_msgs") if request.url.path == "/tokenize" else captured("chat_render", status=403)

    vllm, _ = client(handler)
    assert not vllm.renders
    assert len(await vllm.prompt_tokens(RequestKind.CHAT, "tiny", CHAT)) == 18
    assert vllm.renders == {RequestKind.CHAT: False}


@pytest.mark.parametrize("kind", RENDER_PATHS)
async def test_render_is_preferred(kind: RequestKind) -> None:
    """Exact for every template input; the body goes as it came."""
    vllm, upstream = client(captured("chat_render", status=200))
    await vllm.prompt_tokens(kind, "tiny", CHAT)
    await vllm.prompt_tokens(kind, "tiny", CHAT)
    assert {request.url.path for request in upstream.requests} == {RENDER_PATHS[kind]}
    assert upstream.requests[-1].content == CHAT


async def test_an_unknown_model_says_nothing_about_render() -> None:
    """A 404 about the model leaves the capability open."""
    vllm, _ = client(captured("tok_badmodel"))
    with pytest.raises(Refused, match="does not exist"):
        await vllm.render_prompt(RequestKind.CHAT, "nope", CHAT)
    assert not vllm.renders


@pytest.mark.parametrize("tokens", ["[-1]", "[4294967296]", '["a"]', "null", "[1.5]"])
async def test_ids_that_are_none_are_a_bad_response(tokens: str) -> None:
    """Nothing outside 32 bits reaches the index."""
    vllm, _ = client(httpx.Response(200, text=f'{{"tokens": {tokens}}}'))
    with pytest.raises(BadResponse):
        await vllm.tokenize_prompt("m", "x")


async def test_metrics_are_scraped() -> None:
    """The captured page of a real server."""
    text = (FIXTURES / "vllm_http/metrics.txt").read_bytes()
    vllm, upstream = client(httpx.Response(200, content=text))
    metrics = await vllm.fetch_metrics()
    assert upstream.requests[0].url.path == "/metrics"
    assert metrics.cache is not None
    assert metrics.cache.block_tokens == 128


async def test_event_sources_are_reached_at_the_http_host() -> None:
    """The engine's own host is `*`."""
    vllm, _ = client(captured("kv_event_sources"), url="http://engine-a:8000/base")
    assert await vllm.kv_event_sources() == (
        KvEventSource(0, "tcp://engine-a:15557", "tcp://engine-a:15558", "kv-events"),
    )


async def test_an_engine_that_cannot_tell_its_event_sources() -> None:
    """Older versions have no such route."""
    vllm, _ = client(httpx.Response(404, json={"detail": "Not Found"}))
    with pytest.raises(NotSupported):
        await vllm.kv_event_sources()


async def test_models_with_lora_adapters() -> None:
    """`root` is what LMCache's coordinator calls the model; adapters name their parent."""
    base = json.loads(captures("models")[0]["body"])["data"][0]
    rows = [base, {"id": "lora-a", "parent": "tiny", "max_model_len": None}]
    vllm, _ = client(httpx.Response(200, json={"data": rows}))
    tiny, lora = await vllm.list_models()
    assert (tiny.id, tiny.root, tiny.parent, tiny.max_model_len) == ("tiny", "models/tiny-qwen", None, 8192)
    assert (lora.id, lora.root, lora.parent, lora.max_model_len) == ("lora-a", "lora-a", "tiny", None)


async def test_version() -> None:
    """As `/version` says."""
    assert await client(captured("version"))[0].fetch_version() == "0.32.0"


async def test_a_long_list_of_ids_is_read_in_steps() -> None:
    """Each a part of the whole, cut between ids."""
    ids = [(number * 7919) % 200_000 for number in range(150_000)]
    for text in (json.dumps(ids), json.dumps(ids, separators=(",", ":")), json.dumps(ids, indent=1)):
        assert (await tokens_from_json(msgspec.Raw(text.encode()))).tolist() == ids
    with pytest.raises(msgspec.DecodeError):
        await tokens_from_json(msgspec.Raw(json.dumps([*ids, "x", *ids]).encode()))
    with pytest.raises(msgspec.DecodeError):
        await tokens_from_json(msgspec.Raw(json.dumps([ids, ids]).encode()))


async def test_a_scrape_has_a_bounded_number_of_lines() -> None:
    """An engine whose metrics never end is not read."""
    vllm, _ = client(httpx.Response(200, content=b"\n" * 50_001))
    with pytest.raises(BadResponse, match="lines"):
        await vllm.fetch_metrics()


async def test_a_long_scrape_is_read_like_a_short_one() -> None:
    """Beside the event loop; many data-parallel ranks say much."""
    text = b"".join(b'vllm:num_requests_running{engine="%d"} 2.0\n' % rank for rank in range(4000))
    vllm, _ = client(httpx.Response(200, content=text))
    assert (await vllm.fetch_metrics()).running == 8000


@pytest.mark.parametrize(("streams", "readable"), [(256, True), (257, False)])
async def test_an_engine_has_a_bounded_number_of_event_streams(streams: int, readable: bool) -> None:
    """Each becomes a socket."""
    sources = {str(rank): {"endpoint": f"tcp://*:{5000 + rank}"} for rank in range(streams)}
    vllm, _ = client(httpx.Response(200, json=sources))
    if readable:
        assert len(await vllm.kv_event_sources()) == streams
    else:
        with pytest.raises(BadResponse, match="streams"):
            await vllm.kv_event_sources()


async def test_an_engine_lists_a_bounded_number_of_models() -> None:
    """Beyond it the list is none."""
    vllm, _ = client(httpx.Response(200, json={"data": [{"id": str(number)} for number in range(5001)]}))
    with pytest.raises(BadResponse, match="models"):
        await vllm.list_models()
