"""Requests that go on from a response of any engine, over a whole proxy."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Send

from kvproxy.base.errors import ConfigError
from kvproxy.base.json_scan import MAX_DECODED_BYTES
from kvproxy.features.stored_responses import filter as filters
from kvproxy.operate.config.load import load_config
from tests.lab.simulator.support import engine
from tests.support.fake_engine import Call, FakeEngine, reply
from tests.support.loopback import serve
from tests.support.proxy import RunningProxy, running_proxy

PATH = "/v1/responses"
FIRST = {"model": "tiny", "input": "one two three", "max_output_tokens": 4}
KEYS = {"auth": {"keys": [{"name": "a", "key": "sk-a"}, {"name": "b", "key": "sk-b"}]}}


def filters_of(folder: Path, **more: Any) -> dict[str, Any]:
    """Return the chain with its answers kept in this folder."""
    return {"kvcache": {"engine_metrics_interval": 0}, "stored_responses": {"path": str(folder)}, **more}


def files_in(folder: Path) -> list[Path]:
    """Return what is kept."""
    return sorted(folder.iterdir())


def then(response: dict[str, Any], text: str = "four", **fields: Any) -> dict[str, Any]:
    """Return the request that goes on from a response."""
    return {**FIRST, "input": text, "previous_response_id": response["id"], **fields}


@contextlib.asynccontextmanager
async def two_engines(folder: Path, **config: Any) -> AsyncIterator[RunningProxy]:
    """Yield a proxy that sends each request to another engine than the one before."""
    chain = {"filters": filters_of(folder), **config}
    async with (
        engine() as a,
        engine() as b,
        running_proxy({"a": a.url, "b": b.url}, **chain) as running,
    ):
        yield running


async def post(running: RunningProxy, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the response, and the engine that gave it."""
    answer = await running.client.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json(), answer.headers["x-kvproxy-endpoint"]


def counted(running: RunningProxy, result: str) -> float:
    """Return the answers with this result."""
    return running.metric("kvproxy_stored_responses_total", result=result)


async def test_any_engine_goes_on_from_a_response(tmp_path: Path) -> None:
    """With the prompt of the whole conversation, as a client that sends all of it has."""
    async with two_engines(tmp_path) as running:
        first, one = await post(running, FIRST)
        second, other = await post(running, then(first))
        third, _ = await post(running, then(second, "five"))
        said = [{"role": "user", "content": "one two three"}, *first["output"], {"role": "user", "content": "four"}]
        whole, _ = await post(running, {**FIRST, "input": said})
        said += [*second["output"], {"role": "user", "content": "five"}]
        longer, _ = await post(running, {**FIRST, "input": said})
    assert one != other
    assert second["usage"]["input_tokens"] == whole["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    assert third["usage"]["input_tokens"] == longer["usage"]["input_tokens"]


async def test_a_streamed_response_is_kept_before_its_end(tmp_path: Path) -> None:
    """The next request finds it at once; streamed and whole ones go on from each other."""
    async with two_engines(tmp_path) as running:
        streamed = await running.client.post(PATH, json={**FIRST, "stream": True})
        last = [line for line in streamed.text.splitlines() if line.startswith("data: ")][-1]
        first = json.loads(last[6:])["response"]
        second, _ = await post(running, then(first))
        again = await running.client.post(PATH, json=then(second, stream=True))
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    assert "response.completed" in again.text or "response.incomplete" in again.text


async def test_a_history_is_known_to_the_index_of_prompts(tmp_path: Path) -> None:
    """The prompt that is matched is the whole one, and the engine that computed its beginning is known to hold it."""
    async with (
        engine() as a,
        running_proxy({"a": a.url}, policy="kv_aware", filters=filters_of(tmp_path)) as running,
    ):
        first, _ = await post(running, {**FIRST, "input": "word " * 2000})
        second, _ = await post(running, then(first))
        recent = next(iter(running.proxy.recent.latest()))
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > 1000
    assert recent.matched_tokens > 1000


async def test_a_replica_with_the_same_folder_goes_on(tmp_path: Path) -> None:
    """So does a proxy after a restart."""
    async with two_engines(tmp_path) as running:
        first, _ = await post(running, FIRST)
    async with two_engines(tmp_path) as other:
        second, _ = await post(other, then(first))
        assert other.metric("kvproxy_stored_response_lookups_total", result="found") == 1
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]


async def test_stored_responses_are_shown_and_deleted(tmp_path: Path) -> None:
    """By their ids, as the engine gave them."""
    async with two_engines(tmp_path) as running:
        first, _ = await post(running, FIRST)
        where = f"{PATH}/{first['id']}"
        assert (await running.client.get(where)).json() == first
        deleted = await running.client.delete(where)
        assert deleted.json() == {"id": first["id"], "object": "response", "deleted": True}
        assert (await running.client.get(where)).status_code == 404
        assert (await running.client.delete(where)).status_code == 404
    assert not files_in(tmp_path)


async def test_another_tenant_does_not_find_a_response(tmp_path: Path) -> None:
    """Nor can it read or delete it."""
    async with two_engines(tmp_path, filters=filters_of(tmp_path, **KEYS)) as running:
        client = running.client
        a, b = ({"authorization": f"Bearer sk-{name}"} for name in "ab")
        first = (await client.post(PATH, json=FIRST, headers=a)).json()
        where = f"{PATH}/{first['id']}"
        assert (await client.get(where, headers=b)).status_code == 404
        assert (await client.delete(where, headers=b)).status_code == 404
        other = (await client.post(PATH, json=then(first), headers=b)).json()
        own = (await client.post(PATH, json=then(first), headers=a)).json()
    assert other["usage"]["input_tokens"] < own["usage"]["input_tokens"]


@pytest.mark.parametrize("fields", [{"store": False}, {"conversation": "c1"}, {"background": True}])
async def test_a_response_that_is_not_to_be_kept_is_not(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Because the client says so, or since the engine has to keep it in any case."""
    async with two_engines(tmp_path) as running:
        await post(running, {**FIRST, **fields})
    assert not files_in(tmp_path)


async def test_a_response_in_the_background_goes_on_from_what_is_kept_here(tmp_path: Path) -> None:
    """Its engine has not the history; it keeps the answer itself, which is asked for later."""
    fake = responding({"id": "resp_1", "output": []}, {"id": "resp_2", "output": []})
    async with one_engine(fake, tmp_path) as running:
        await post(running, FIRST)
        await post(running, then({"id": "resp_1"}, background=True))
    sent = json.loads(fake.calls[1].body)
    assert [one["content"] for one in sent["input"]] == ["one two three", "four"]
    assert (sent["background"], "store" in sent, "previous_response_id" in sent) == (True, False, False)
    assert len(files_in(tmp_path)) == 1


def responding(*bodies: dict[str, Any] | bytes, content_type: bytes = b"application/json") -> FakeEngine:
    """Return an engine that answers with these, in turn, the last one ever again."""
    left = list(bodies)

    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        body = left.pop(0) if len(left) > 1 else left[0]
        await reply(send, 200, body if isinstance(body, bytes) else json.dumps(body).encode(), content_type)

    return FakeEngine("a", behave)


@contextlib.asynccontextmanager
async def one_engine(fake: FakeEngine, folder: Path, **config: Any) -> AsyncIterator[RunningProxy]:
    """Yield a proxy over it."""
    async with serve(fake) as url, running_proxy({"a": url}, filters=filters_of(folder), **config) as running:
        yield running


@pytest.mark.parametrize("asked", ["one", [{"role": "user", "content": "one"}]])
async def test_an_engine_keeps_nothing_itself(tmp_path: Path, asked: str | list[Any]) -> None:
    """Or it would go on from it, and show it, for any tenant that knows the id."""
    fake = responding({"id": "resp_1", "output": []})
    async with one_engine(fake, tmp_path) as running:
        await post(running, {**FIRST, "input": asked})
        await post(running, then({"id": "resp_1"}, store=True))
    assert [json.loads(call.body)["store"] for call in fake.calls] == [False, False]
    assert len(files_in(tmp_path)) == 1


async def test_a_history_that_is_not_here_is_the_engines(tmp_path: Path) -> None:
    """The request passes as it is, and its answer is not kept: its beginning would be missing."""
    fake = responding({"id": "resp_1", "output": []})
    async with one_engine(fake, tmp_path) as running:
        await post(running, then({"id": "resp_0"}))
        assert running.metric("kvproxy_stored_response_lookups_total", result="missing") == 1
    assert json.loads(fake.calls[0].body)["previous_response_id"] == "resp_0"
    assert not files_in(tmp_path)


async def test_reasoning_is_no_part_of_the_next_prompt(tmp_path: Path) -> None:
    """As engines that keep responses do it; calls of tools are."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    fake = responding({"id": "resp_1", "output": [{"type": "reasoning", "summary": []}, call]}, {"id": "resp_2"})
    async with one_engine(fake, tmp_path) as running:
        await post(running, FIRST)
        output = {"type": "function_call_output", "call_id": "c", "output": "7"}
        await post(running, {**then({"id": "resp_1"}), "input": [output], "instructions": "be brief"})
    sent = json.loads(fake.calls[1].body)
    assert sent["input"] == [{"type": "message", "role": "user", "content": "one two three"}, call, output]
    assert sent["instructions"] == "be brief"
    assert "previous_response_id" not in sent


async def test_a_history_beyond_the_limit_of_bodies_is_refused(tmp_path: Path) -> None:
    """As the whole conversation in one request would be."""
    fake = responding({"id": "resp_1", "output": [{"type": "message", "content": "x" * 3000}]})
    async with one_engine(fake, tmp_path, limits={"body": 2048}) as running:
        await post(running, FIRST)
        answer = await running.client.post(PATH, json=then({"id": "resp_1"}))
    assert answer.status_code == 413
    assert len(fake.calls) == 1


@pytest.mark.parametrize("body", [b"no json", b'{"output": []}', {"id": "", "output": []}, {"id": "r", "output": [1]}])
async def test_an_unreadable_answer_reaches_the_client_all_the_same(
    tmp_path: Path, body: dict[str, Any] | bytes
) -> None:
    """It is counted."""
    async with one_engine(responding(body), tmp_path) as running:
        assert (await running.client.post(PATH, json=FIRST)).status_code == 200
        assert counted(running, "unreadable") == 1


async def test_a_too_large_answer_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is counted, and goes to the client whole."""
    monkeypatch.setattr(filters, "MAX_BYTES", 100)
    long = b"event: response.created\ndata: " + b"x" * 1000
    async with one_engine(responding(long, content_type=b"text/event-stream"), tmp_path) as running:
        answer = await running.client.post(PATH, json={**FIRST, "stream": True})
        assert answer.content == long
        assert counted(running, "too_large") == 1


async def test_a_folder_that_cannot_be_used_fails_no_request(tmp_path: Path) -> None:
    """It is counted: answers are not kept, and histories are the engine's."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    fake = responding({"id": "resp_1", "output": []})
    async with one_engine(fake, blocked) as running:
        await post(running, FIRST)
        await post(running, then({"id": "resp_1"}))
        assert (await running.client.get(f"{PATH}/resp_1")).status_code == 200  # the engine's own
        assert (await running.client.delete(f"{PATH}/resp_1")).status_code == 200
        assert counted(running, "failed") == 1
        assert running.metric("kvproxy_stored_response_lookups_total", result="failed") == 2


async def test_a_damaged_file_fails_no_request(tmp_path: Path) -> None:
    """It counts as failed."""
    fake = responding({"id": "resp_1", "output": []})
    async with one_engine(fake, tmp_path) as running:
        await post(running, FIRST)
        (file,) = files_in(tmp_path)
        file.write_text("{")
        await post(running, then({"id": "resp_1"}))
        assert running.metric("kvproxy_stored_response_lookups_total", result="failed") == 1


async def test_a_request_beyond_what_is_kept_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not even parsed."""
    monkeypatch.setattr(filters, "MAX_ENTRY_BYTES", 10)
    async with one_engine(responding({"id": "resp_1", "output": []}), tmp_path) as running:
        await post(running, FIRST)
    assert not files_in(tmp_path)


async def test_other_requests_pass(tmp_path: Path) -> None:
    """Invalid ones, those of other APIs, and questions with a query."""
    fake = responding({"id": "resp_1", "output": []})
    async with one_engine(fake, tmp_path) as running:
        first = await running.client.post(PATH, json=FIRST)
        for body in (b"[]", b'{"model": "m"}', b'{"model": "m", "input": 1, "previous_response_id": 7}'):
            await running.client.post(PATH, content=body)
        await running.client.post("/v1/chat/completions", json={"messages": []})
        await running.client.get(f"{PATH}/resp_1?stream=true")
    assert first.status_code == 200
    assert len(fake.calls) == 6


async def test_a_history_too_long_to_be_parsed_at_once_is_sent_whole(tmp_path: Path) -> None:
    """It is scanned instead."""
    long = "x" * (MAX_DECODED_BYTES + 1)
    fake = responding({"id": "resp_1", "output": [{"type": "message", "content": long}]}, {"id": "resp_2"})
    async with one_engine(fake, tmp_path) as running:
        await post(running, FIRST)
        await post(running, then({"id": "resp_1"}))
    sent = json.loads(fake.calls[1].body)
    assert [one["content"] for one in sent["input"]] == ["one two three", long, "four"]


async def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    """They hold prompts."""
    folder = tmp_path / "deep" / "er"
    async with one_engine(responding({"id": "resp_1", "output": []}), folder) as running:
        await post(running, FIRST)
    (file,) = files_in(folder)
    assert oct(os.stat(file).st_mode & 0o777) == "0o600"
    assert oct(os.stat(folder).st_mode & 0o777) == "0o700"


@pytest.mark.parametrize(
    "filters",
    [
        [{"stored_responses": {"path": "/x"}}, {"router": {}}],
        [{"stored_responses": {"path": "/x"}}, {"inference_request": {}}, {"router": {}}],
        [{"inference_request": {}}, {"stored_responses": {}}, {"router": {}}],
    ],
)
def test_a_chain_that_cannot_work_is_refused(filters: list[dict[str, Any]]) -> None:
    """With the place of the fault."""
    with pytest.raises(ConfigError, match="stored_responses"):
        load_config({"endpoints": ["http://127.0.0.1:9"], "filters": filters})


async def test_a_compressed_answer_is_not_kept(tmp_path: Path) -> None:
    """It could not be read."""
    reader = filters.AnswerReader()
    reader.begin(200, [(b"content-type", b"application/json"), (b"content-encoding", b"gzip")])
    reader.add(b"x", last=True)
    assert reader.whole is None


def test_an_event_may_come_in_any_pieces() -> None:
    """Every byte on its own."""
    reader = filters.AnswerReader()
    reader.begin(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
    stream = b'event: response.created\ndata: {}\n\nevent: response.completed\ndata: {"response": {"id": "r"}}\n\n'
    for at in range(len(stream)):
        reader.add(stream[at : at + 1], last=False)
    assert reader.whole == b'{"id": "r"}'
    reader.whole = None
    reader.add(b"event: response.completed\ndata: {\n\n", last=True)
    assert reader.whole is None
