"""A client that breaks its prefix, from its requests to the operator: receipt, metric, admin listener, doctor."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Send

from kvproxy.cli import main
from kvproxy.features.hygiene.command import TrafficOptions, print_traffic, rows_of, rows_of_receipts, traffic_report
from kvproxy.features.hygiene.comparison import Cause
from kvproxy.features.hygiene.note import NOTE, PrefixBreak
from kvproxy.operate.commands.operate import AdminAddress
from kvproxy.operate.receipts.explain import explain_receipt
from kvproxy.operate.receipts.files import ReceiptReader
from kvproxy.operate.receipts.receipt import decode_receipt, note_of
from kvproxy.proxy.listener.server import Server
from tests.features.hygiene.test_prefix_changes import agent, dated, edited
from tests.support.fake_engine import Call, FakeEngine, reply
from tests.support.loopback import serve
from tests.support.proxy import RunningProxy, running_proxy
from tests.support.until import until

HEADERS = {"x-claude-code-session-id": "5e55", "user-agent": "claude-cli/2.1.90 (external, cli)"}


async def reuses_nothing(engine: FakeEngine, call: Call, send: Send) -> None:
    """Answer every prompt with a whole prefill."""
    tokens = len(call.body) // 4
    usage = {"input_tokens": tokens, "output_tokens": 1, "cache_read_input_tokens": 0}
    await reply(send, 200, json.dumps({"type": "message", "content": [], "usage": usage}).encode())


@pytest.fixture
async def broken(tmp_path: Path) -> AsyncIterator[RunningProxy]:
    """Yield a proxy that has served a session whose system prompt has the time."""
    receipts = {"path": str(tmp_path / "receipts.jsonl")}
    async with (
        serve(FakeEngine("a", reuses_nothing)) as url,
        running_proxy({"a": url}, policy="kv_aware", receipts=receipts) as proxy,
    ):
        for turn in range(8, 11):
            body = edited(agent(turn), "system.0.text", dated(f"2026-09-01 12:{turn:02}"))
            headers = {**HEADERS, "x-request-id": f"request-{turn}"}
            answer = await proxy.client.post("/v1/messages", json={**body, "max_tokens": 1}, headers=headers)
            assert answer.status_code == 200
        yield proxy


async def shown(command: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return a command's output, beside the proxy's own loop."""
    assert await asyncio.to_thread(main, command) == 0
    return " ".join(capsys.readouterr().out.split())


async def test_a_running_proxy_says_what_breaks_prefixes(
    broken: RunningProxy, capsys: pytest.CaptureFixture[str]
) -> None:
    """By cause and client, with the part, the cost, and what helps."""
    async with Server(broken.proxy.admin, drain_s=0.2) as admin:
        said = await shown(["doctor", "--traffic", "--url", admin.url], capsys)
        as_json = json.loads(await shown(["doctor", "--traffic", "--json", "--url", admin.url], capsys))
    assert "0 of 2 returning turns were reused as far as their last prompt went" in said
    assert (
        "client claude-code: date_or_id: a date, a time or an id in front of the conversation changes: 2 times" in said
    )
    assert "latest: system block 1, line 3, request request-10" in said
    assert "fix: have the client put changing text into its last message" in said
    assert [one["where"] for one in as_json["findings"]] == ["client claude-code"]
    tokens = broken.metric("kvproxy_prefix_break_tokens_total", cause="date_or_id", client="claude-code")
    assert tokens > 1000
    assert f"{tokens:,.0f} tokens" in said


async def test_the_admin_listener_lists_them(broken: RunningProxy) -> None:
    """Totals and the latest; the live page has the dearest."""
    async with Server(broken.proxy.admin, drain_s=0.2) as admin:
        broken.client.base_url = admin.url
        found: dict[str, Any] = (await broken.client.get("/cache/breaks")).json()
        live: dict[str, Any] = (await broken.client.get("/live")).json()
    (row,) = found["causes"]
    assert (row["cause"], row["client"], row["breaks"], row["part"]) == (
        "date_or_id", "claude-code", 2, "system block 1, line 3",
    )  # fmt: skip
    assert [one["request_id"] for one in found["latest"]] == ["request-10", "request-9"]
    assert (found["returned"], found["sessions"]) == (2, 1)
    assert live["cache"]["breaks"]["causes"][0]["tokens"] == row["tokens"]
    assert "role7" not in json.dumps(found)  # no text of any prompt


async def test_receipts_say_it_too(broken: RunningProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One by one in `explain`, all together in the doctor."""
    path = tmp_path / "receipts.jsonl"
    await until(lambda: len(list(ReceiptReader(path).oldest_first())) == 3)
    first, _, last = ReceiptReader(path).oldest_first()
    found = note_of(last, NOTE, PrefixBreak)
    assert found is not None
    assert (note_of(first, NOTE, PrefixBreak), first.client) == (None, "claude-code")
    assert (found.cause, found.part) == (Cause.DATE_OR_ID, "system block 1, line 3")
    text = explain_receipt(last)
    assert "its session's last prompt was not reused: a date, a time or an id" in text
    said = await shown(["doctor", "--traffic", "--receipts", str(path)], capsys)
    assert "client claude-code: date_or_id" in said
    assert "0 of 2 returning turns" in said


def test_no_proxy_and_no_receipts(tmp_path: Path) -> None:
    """Exit 1 and why."""
    for options in (
        TrafficOptions(AdminAddress("http://127.0.0.1:9")),
        TrafficOptions(AdminAddress("http://127.0.0.1:9"), tmp_path / "none.jsonl"),
    ):
        out, err = io.StringIO(), io.StringIO()
        assert print_traffic(options, out=out, err=err) == 1
        assert err.getvalue().startswith("kvproxy doctor --traffic: n")


def test_receipts_of_a_later_version() -> None:
    """A cause that is not known here is shown as it is, and left out of the sums."""
    line = (
        b'{"time":"t","request_id":"r","end":"completed","duration_s":1,"cached_tokens":0,"session":"s","prefix_break":'
    )
    receipt = decode_receipt(line + b'{"cause":"moonlight","part":"tool 1","tokens":9}}')
    assert "was not reused: moonlight (tool 1): 9 tokens again" in explain_receipt(receipt)
    assert rows_of_receipts([receipt, receipt]) == ([], 1)


def test_nothing_to_compare_yet() -> None:
    """Says so, and is no problem."""
    report = traffic_report(rows_of({"causes": [{"cause": "of a later version"}]}), 0)
    assert report.findings == ()
    assert "no session has returned yet" in report.passed[0].what
