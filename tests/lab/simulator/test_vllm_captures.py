"""Every captured exchange with a real vLLM, replayed against the simulated one: same status, keys, types, texts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvproxy.lab.simulator.kv_event_publisher import PublisherSettings
from tests.lab.simulator.support import FIXTURES, TINY, Running, captures, engine, shape, sse_events
from tests.support.vllms.scale_out import add_scale_out

CAPTURES = captures()

#: Bodies that must agree byte for byte, not just in shape.
EXACT = {
    *("tok_prompt_list400", "tok_prompt_ids400", "tok_missing400", "tok_badjson400", "tok_badmodel404"),
    *("tok_msgs_both400", "err_model404", "err_model_stream404", "err_maxtok400", "err_badjson400", "err_nomsgs400"),
    *("err_ctype400", "err_temp400", "err_emptymsgs400", "err_404404", "err_405405", "embeddings404", "version200"),
    *("health200", "ping200", "reset_prefix200", "tokenizer_info404", "tok_empty200", "detok200"),
    *("chat_render403", "compl_render403"),
}
STREAMS = ["chat_stream200", "chat_stream_usage200", "chat_stream_usage_cont200", "compl_stream_usage200"]
#: Captures of nothing that kvproxy asks for.
UNUSED = {"load200"}
SHAPES = sorted(set(CAPTURES) - EXACT - set(STREAMS) - UNUSED - {"responses_stream200", "err_toolong400"})


async def replay(running: Running, entry: dict[str, Any]) -> Any:
    """Send a captured request; token ids are the simulator's own."""
    body = entry["req"]
    if entry["name"] == "detok":
        body = {**body, "tokens": running.app.state.tokenizer.encode("Hello world")}
    elif entry["name"] == "completion_ids":
        body = {**body, "prompt": running.app.state.tokenizer.encode("Hello world")}
    content = body if isinstance(body, str) else None if body is None else json.dumps(body)
    return await running.client.request(entry["method"], entry["path"], content=content, headers=entry["req_headers"])


@pytest.mark.parametrize("name", sorted(EXACT))
async def test_the_same_bytes(name: str) -> None:
    """Errors and constants are what vLLM says, word for word."""
    entry = CAPTURES[name]
    async with engine() as running:
        reply = await replay(running, entry)
    assert (reply.status_code, reply.text) == (entry["status"], entry["body"])
    assert reply.headers.get("content-type") == entry["headers"].get("content-type")
    assert reply.headers.get("allow") == entry["headers"].get("allow")


@pytest.mark.parametrize("name", SHAPES)
async def test_the_same_shape(name: str) -> None:
    """Same status, same keys in the same order, same types."""
    entry = CAPTURES[name]
    settings = add_scale_out(TINY) if name.endswith("render200") else TINY
    async with engine(settings, kv_events=PublisherSettings()) as running:
        reply = await replay(running, entry)
    assert reply.status_code == entry["status"]
    ours, theirs = shape(reply.json()), shape(json.loads(entry["body"]))
    assert json.dumps(ours) == json.dumps(theirs)


@pytest.mark.parametrize("name", STREAMS)
async def test_the_same_stream(name: str) -> None:
    """The same events in the same order: role chunk, text, finish, usage, [DONE]."""
    entry = CAPTURES[name]
    async with engine() as running:
        reply = await replay(running, entry)
    assert reply.headers["content-type"] == entry["headers"]["content-type"]
    ours, theirs = sse_events(reply.text), sse_events(entry["body"])
    assert ours[-1] == theirs[-1] == "[DONE]"
    kinds = [json.dumps(shape(event)) for event in theirs]
    said = [json.dumps(shape(event)) for event in ours]
    plain = kinds[1 if "chat" in name else 0]  # tokens that came together share an event, so their number may differ
    assert [kind for kind in said if kind != plain] == [kind for kind in kinds if kind != plain]


async def test_the_same_responses_stream() -> None:
    """`/v1/responses` streams vLLM's ten kinds of events, numbered from 0."""
    entry = CAPTURES["responses_stream200"]
    async with engine() as running:
        reply = await replay(running, entry)
    ours, theirs = sse_events(reply.text), sse_events(entry["body"])
    unique = list(dict.fromkeys(event["type"] for event in ours))
    assert unique == list(dict.fromkeys(event["type"] for event in theirs))
    assert [event["sequence_number"] for event in ours] == list(range(len(ours)))
    by_type = {event["type"]: shape(event) for event in theirs}
    for event in ours:
        assert shape(event) == by_type[event["type"]]


async def test_a_prompt_over_the_limit() -> None:
    """The text names one token over the limit, however long the prompt is; a stream gets it as plain JSON."""
    entry = CAPTURES["err_toolong400"]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello " * 9000}]}
    async with engine() as running:
        for stream in (False, True):
            reply = await running.client.post("/v1/chat/completions", json={**body, "stream": stream})
            assert (reply.status_code, reply.text) == (400, entry["body"])


async def test_a_raw_chat_stream_on_the_wire() -> None:
    """Head and chunked framing as a real server sends them."""
    captured = (FIXTURES / "vllm_http" / "chat_stream_raw.bin").read_bytes()
    head = captured.split(b"\r\n\r\n")[0].decode().lower()
    async with engine() as running:
        body = {**CAPTURES["chat_stream200"]["req"], "model": "tiny"}
        async with running.client.stream("POST", "/v1/chat/completions", json=body) as reply:
            names = {name.lower() for name in reply.headers}
            assert reply.headers["transfer-encoding"] == "chunked"
            assert "transfer-encoding: chunked" in head
            assert f"content-type: {reply.headers['content-type']}" in head
            assert "content-length" not in names
            await reply.aread()


async def test_metric_series_are_those_of_the_capture() -> None:
    """None is made up, and each has the capture's labels and label values."""
    async with engine() as running:
        await running.client.post("/v1/completions", json={"prompt": "Hello world", "max_tokens": 3})
        ours = _series((await running.client.get("/metrics")).text)
    theirs = _series((FIXTURES / "vllm_http" / "metrics.txt").read_text())
    assert ours <= theirs
    families = {one.partition("{")[0] for one in ours}
    assert ours == {one for one in theirs if one.partition("{")[0] in families}


def _series(text: str) -> set[str]:
    """Series names with their labels; the configuration is left out."""
    found = set()
    for line in text.splitlines():
        if not line.startswith("vllm:") or "_created" in line:
            continue
        if "_bucket{" in line and 'le="+Inf"' not in line:
            continue
        series = line.rsplit(" ", 1)[0]
        if series.startswith("vllm:cache_config_info"):
            continue
        found.add(series)
    return found
