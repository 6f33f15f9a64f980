"""From a request through a running proxy to its receipt, `kvproxy explain` and `kvproxy replay --receipts`."""

from __future__ import annotations

import asyncio
import json
from itertools import count
from pathlib import Path

import pytest
from starlette.types import Send

from kvproxy.cli import main
from kvproxy.operate.receipts.files import ReceiptReader
from kvproxy.operate.receipts.receipt import Receipt, decode_prefixes
from tests.support.fake_engine import Call, FakeEngine, answer_ok, event, start_stream
from tests.support.loopback import serve
from tests.support.proxy import chat, running_proxy
from tests.support.until import until

SECRET = "the merger is on Friday"


async def stream(engine: FakeEngine, call: Call, send: Send) -> None:
    """Two tokens and a usage."""
    await start_stream(send)
    await event(send, b'{"choices":[{"delta":{"content":"x"}}]}')
    usage = b'{"prompt_tokens":240,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":224}}'
    await event(send, b'{"choices":[],"usage":%s}' % usage)
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def record(path: Path, requests: int = 6, **config: object) -> None:
    """Streamed requests through a proxy over two engines; its receipts. Its clock ticks as often as it is read, so that
    no pause of this process counts as an engine's."""
    receipts = {"path": str(path)}
    clock = count(0.0, 0.0001).__next__
    async with serve(FakeEngine("a", stream)) as a, serve(FakeEngine("b", stream)) as b:
        settings = {"policy": "kv_aware", "receipts": receipts, **config}
        async with running_proxy({"a": a, "b": b}, clock=clock, **settings) as proxy:
            for number in range(requests):
                body = chat(f"{SECRET} " * 40, stream=True, user="alice@example.org")
                headers = {"x-request-id": f"request-{number}"}
                response = await proxy.client.post("/v1/chat/completions", json=body, headers=headers)
                assert response.status_code == 200


def receipts_in(path: Path) -> list[Receipt]:
    """All of them, the oldest first."""
    return list(ReceiptReader(path).oldest_first())


async def test_a_receipt_says_what_was_known_decided_and_done(tmp_path: Path) -> None:
    """Facts by endpoint and source, loads and costs of every candidate, and the engine's own counts."""
    path = tmp_path / "receipts.jsonl"
    await record(path)
    receipts = receipts_in(path)
    assert [one.request_id for one in receipts] == [f"request-{number}" for number in range(6)]
    last = receipts[-1]
    assert (last.kind, last.model, last.stream, last.status, last.end) == ("chat", "m", True, 200, "completed")
    assert (last.engine_prompt_tokens, last.cached_tokens, last.completion_tokens) == (240, 224, 2)
    assert last.ttft_s is not None
    assert 0 < last.ttft_s <= last.duration_s
    (attempt,) = last.attempts
    assert attempt.endpoint == last.endpoint
    assert (attempt.policy, attempt.failure, attempt.left_out) == ("kv_aware", None, 0)
    assert [one.id for one in attempt.candidates] == ["a", "b"]
    assert all(one.cost is not None and one.wait_s == 0.0 and one.in_flight == 0 for one in attempt.candidates)
    assert last.facts[attempt.endpoint].source == "approximate"
    assert last.facts[attempt.endpoint].device_tokens > 0
    assert last.prompt_blocks == len(decode_prefixes(last.prompt_blocks, last.prefixes)) > 2


async def test_nothing_on_a_receipt_tells_what_was_said_or_by_whom(tmp_path: Path) -> None:
    """No prompt text, and a session only as a hash that is the same for the same session of one run."""
    path = tmp_path / "receipts.jsonl"
    await record(path, 2)
    text = path.read_text()
    assert "merger" not in text
    assert "alice" not in text
    first, second = receipts_in(path)
    assert first.session == second.session != ""
    assert path.stat().st_mode & 0o077 == 0
    await record(path, 1)
    assert receipts_in(path)[-1].session != first.session


async def test_failed_attempts_are_told_apart(tmp_path: Path) -> None:
    """Each placement with its own candidates, and why it failed."""
    path = tmp_path / "receipts.jsonl"
    dead = "http://127.0.0.1:1"
    async with (
        serve(FakeEngine("b")) as b,
        running_proxy({"dead": dead, "b": b}, receipts={"path": str(path)}) as proxy,
    ):
        await proxy.client.post("/v1/chat/completions", json=chat())
    (receipt,) = receipts_in(path)
    assert [(one.endpoint, one.failure) for one in receipt.attempts] == [("dead", "connect_error"), ("b", None)]
    assert [one.id for one in receipt.attempts[1].candidates] == ["b"]
    assert receipt.endpoint == "b"


async def test_a_request_nobody_could_take_has_a_receipt_too(tmp_path: Path) -> None:
    """With the reasons why."""
    path = tmp_path / "receipts.jsonl"
    endpoints = [{"id": "a", "url": "http://127.0.0.1:1", "models": ["other"]}]
    async with running_proxy(endpoints, receipts={"path": str(path)}) as proxy:
        response = await proxy.client.post("/v1/chat/completions", json=chat())
    (receipt,) = receipts_in(path)
    assert receipt.refusals == ("model_not_served",)
    assert (receipt.attempts, receipt.endpoint, response.status_code) == ((), None, 404)


async def test_a_client_that_leaves_is_on_its_receipt(tmp_path: Path) -> None:
    """The receipt is written whatever the end."""
    path = tmp_path / "receipts.jsonl"

    async def hang(engine: FakeEngine, call: Call, send: Send) -> None:
        await call.gone.wait()

    engine = FakeEngine("a", hang)
    async with serve(engine) as a, running_proxy({"a": a}, receipts={"path": str(path)}) as proxy:
        asking = asyncio.ensure_future(proxy.client.post("/v1/chat/completions", json=chat(stream=True)))
        await until(lambda: engine.calls)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: proxy.metric("kvproxy_receipts_total", result="written"))
    (receipt,) = receipts_in(path)
    assert (receipt.end, receipt.ttft_s) == ("client_disconnected", None)


async def test_only_a_share_is_followed(tmp_path: Path) -> None:
    """`sample: 0` follows no request; without a path there is nothing at all."""
    await record(tmp_path / "none.jsonl", receipts={"path": str(tmp_path / "none.jsonl"), "sample": 0})
    assert (tmp_path / "none.jsonl").read_text() == ""
    await record(tmp_path / "off.jsonl", receipts={})
    assert not (tmp_path / "off.jsonl").exists()


async def test_a_path_that_cannot_be_written_is_an_error_at_start(tmp_path: Path) -> None:
    """Not a silence that is noticed the day a receipt is needed."""
    with pytest.raises(FileNotFoundError):
        await record(tmp_path / "missing" / "receipts.jsonl")


async def test_explain_tells_the_whole_decision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where it went, why, what the alternatives would have cost, what was predicted, what happened."""
    path = tmp_path / "receipts.jsonl"
    await record(path)
    assert await asyncio.to_thread(main, ["explain", "request-5", "--file", str(path)]) == 0
    text = capsys.readouterr().out
    went = receipts_in(path)[-1].endpoint
    assert text.startswith("Request request-5, ended 20")
    assert "policy kv_aware, reason overlap (no other endpoint holds more of this prompt)" in text
    assert f"\n  >  {went} " in text
    assert "approximate, " in text
    assert " would have cost " in text
    assert "tokens cached, first token " in text
    assert f"What happened: {went}, status 200, completed, after 1 attempt\n" in text
    assert "cached by the engine's count: 224 of 240 tokens" in text


async def test_explain_of_the_json_and_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` is the receipt; an unknown id and a missing file are failures with a reason."""
    path = tmp_path / "receipts.jsonl"
    await record(path, 1)
    assert await asyncio.to_thread(main, ["explain", "request-0", "--file", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["request_id"] == "request-0"
    assert await asyncio.to_thread(main, ["explain", "request-9", "--file", str(path)]) == 1
    assert "no receipt of request-" in capsys.readouterr().err
    assert await asyncio.to_thread(main, ["explain", "x", "--file", str(tmp_path / "no.jsonl")]) == 1
    assert "no receipts at" in capsys.readouterr().err


async def test_recorded_decisions_are_decided_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same policy decides nearly the same; another one differs, and pays by the recorded one's own measure."""
    path, figures = tmp_path / "receipts.jsonl", tmp_path / "figures.json"
    await record(path, 8)
    arguments = ["replay", "--receipts", str(path), "--policy", "kv_aware,round_robin", "--json", str(figures)]
    assert await asyncio.to_thread(main, arguments) == 0
    table = capsys.readouterr().out
    assert "8 decisions of 8 requests by kv_aware" in table
    review = json.loads(figures.read_text())
    assert review["recorded"]["real_ttft_mean_s"] > 0
    assert review["policies"]["kv_aware"]["different"] <= 1  # the first has nothing to go by
    assert review["policies"]["round_robin"]["different"] >= 3
    assert review["policies"]["round_robin"]["regret_mean"] is None
    assert review["policies"]["round_robin"]["hit_rate"] < review["recorded"]["hit_rate"]


async def test_a_queue_cannot_be_replayed_from_receipts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Receipts say where, not when. Nor is there anything to replay without a file, or with both."""
    path = tmp_path / "receipts.jsonl"
    await record(path, 1)
    for wrong in (
        ["--receipts", str(path), "--policy", "kv_aware+queue"],
        ["--receipts", str(path), "trace.jsonl"],
        ["--receipts", str(tmp_path / "none.jsonl")],
        [],
    ):
        assert await asyncio.to_thread(main, ["replay", *wrong]) == 1
        assert capsys.readouterr().err.startswith("kvproxy replay: ")
    assert await asyncio.to_thread(main, ["replay", "--receipts", str(path)]) == 0


async def test_answers_that_are_not_streamed_are_recorded_too(tmp_path: Path) -> None:
    """Their first token is hidden, so they teach no speed."""
    path = tmp_path / "receipts.jsonl"
    async with (
        serve(FakeEngine("a", answer_ok)) as a,
        running_proxy({"a": a}, receipts={"path": str(path)}) as proxy,
    ):
        await proxy.client.post("/v1/chat/completions", json=chat())
    (receipt,) = receipts_in(path)
    assert not receipt.stream
    assert receipt.cached_tokens == 4


async def test_prefixes_are_noted_unless_they_are_not_wanted(tmp_path: Path) -> None:
    """Under a policy that asks for no facts, too; without `receipts.prefixes` the rest of a receipt is as ever."""
    path = tmp_path / "receipts.jsonl"
    await record(path, 1, policy="round_robin")
    await record(path, 1, receipts={"path": str(path), "prefixes": False})
    noted, without = receipts_in(path)
    assert len(decode_prefixes(noted.prompt_blocks, noted.prefixes)) == 3
    assert (without.prefixes, without.prompt_blocks, without.status) == ("", 3, 200)


async def test_a_receipt_has_the_length_of_a_prompt_that_nothing_looked_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without `kvcache` the length is estimated, and nothing is reported as predicted."""
    path = tmp_path / "receipts.jsonl"
    await record(path, 2, policy="least_request", filters=["request_id", "inference_request", "router"])
    last = receipts_in(path)[-1]
    assert last.prompt_tokens == pytest.approx(240, rel=0.2)
    assert (last.searched, last.facts) == (False, {})
    assert await asyncio.to_thread(main, ["explain", "request-1", "--file", str(path)]) == 0
    shown = capsys.readouterr().out
    assert f"prompt of about {last.prompt_tokens} tokens" in shown
    assert "redicted" not in shown
    assert "224 of 240 tokens" in shown
