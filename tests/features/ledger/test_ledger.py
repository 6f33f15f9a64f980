"""The ledger: what was used, by whom, at what price; never more than the engine said."""

from __future__ import annotations

import io
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from kvproxy.app import Proxy
from kvproxy.base.settings.compose import part_of
from kvproxy.cli import main
from kvproxy.features.ledger import command
from kvproxy.features.ledger.ledger import Ledger, LedgerReader, price_of
from kvproxy.features.ledger.settings import LedgerPlace, LedgerPrice
from kvproxy.features.workers.assignment import take_share
from kvproxy.operate.config.load import check_config, load_config
from kvproxy.operate.receipts.files import RotatingFile, list_files
from tests.support.fake_engine import Call, FakeEngine, event, reply, start_stream
from tests.support.loopback import serve
from tests.support.proxy import chat, running_proxy

PRICES = [
    {"model": "small*", "uncached": 1.0, "cached": 0.1, "output": 2.0},
    {"uncached": 10, "cached": 1, "output": 20},
]
RULES = tuple(LedgerPrice.model_validate(one) for one in PRICES)
NOVEMBER = datetime(2026, 11, 1, tzinfo=UTC).timestamp()
DAY_S = 86_400.0


@pytest.mark.parametrize(
    ("model", "counts", "price"),
    [
        ("small-1", (1_000_000, 0, 0), 1.0),
        ("small-1", (0, 1_000_000, 0), 0.1),
        ("large", (500_000, 500_000, 100_000), 5 + 0.5 + 2),
        ("", (3, 0, 0), 0.00003),
    ],
)
def test_the_first_rule_for_the_model_counts(model: str, counts: tuple[int, int, int], price: float) -> None:
    assert price_of(RULES, model, *counts) == pytest.approx(price, abs=1e-12)
    assert price_of(RULES[:1], "large", *counts) is None


def entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


async def test_each_answered_request_is_one_line(tmp_path: Path) -> None:
    """With the engine's counts; a cached count that it leaves out is none, and its prompt is billed as computed."""
    path, usages = tmp_path / "ledger.jsonl", iter(
        [b'{"prompt_tokens":100,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":64}}',
         b'{"prompt_tokens":100,"completion_tokens":7}', b"null"]
    )  # fmt: skip

    async def behave(engine: FakeEngine, call: Call, send: Any) -> None:
        await reply(send, 200, b'{"choices":[],"usage":%s}' % next(usages))

    async with (
        serve(FakeEngine("a", behave)) as url,
        running_proxy({"a": url}, ledger={"path": str(path), "prices": PRICES}) as proxy,
    ):
        for _ in range(3):
            sent = await proxy.client.post(
                "/v1/chat/completions", json=chat("a secret"), headers={"authorization": "Bearer sk-hidden"}
            )
            assert sent.status_code == 200
    assert proxy.metric("kvproxy_ledger_entries_total", result="written") == 3
    first, second, third = entries(path)
    assert (first["uncached"], first["cached"], first["output"], first["price"]) == (36, 64, 7, 0.000564)
    assert (second["uncached"], second["cached"], second["price"]) == (100, None, 0.00114)
    assert (third["uncached"], third["cached"], third["output"], third["price"]) == (None, None, None, None)
    assert (first["model"], first["tenant"], first["end"]) == ("m", "", "completed")
    assert b"hidden" not in path.read_bytes()
    assert b"secret" not in path.read_bytes()
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(("bills", "counts", "price"), [(False, (1000, None), 10.14), (True, (0, 1000), 1.14)])
async def test_a_prediction_is_marked_and_priced_only_if_configured(
    tmp_path: Path, bills: bool, counts: tuple[int, int | None], price: float
) -> None:
    """A count of the engine's beside it never is."""
    path, prompt, usage = tmp_path / "ledger.jsonl", "Once more, the same. " * 300, b'"completion_tokens":7'
    told = iter([b"", b"", b',"prompt_tokens_details":{"cached_tokens":64}'])

    async def behave(engine: FakeEngine, call: Call, send: Any) -> None:
        await reply(send, 200, b'{"usage":{"prompt_tokens":1000,%s%s}}' % (usage, next(told)))

    settings = {"path": str(path), "prices": [{"uncached": 10_000, "cached": 1000, "output": 20_000}]}
    async with (
        serve(FakeEngine("a", behave)) as url,
        running_proxy(
            {"a": url},
            ledger={**settings, "bill_predicted": bills},
            filters=["inference_request", "kvcache", {"router": {"cached_tokens": "predicted"}}],
        ) as proxy,
    ):
        for _ in range(3):
            assert (await proxy.client.post("/v1/chat/completions", json=chat(prompt))).status_code == 200
    first, second, third = entries(path)
    assert first["predicted"] == 0
    predicted = second["predicted"]
    assert predicted > 800
    left = 1000 - predicted
    assert (second["uncached"], second["cached"]) == ((left, predicted) if bills else counts)
    assert second["price"] == pytest.approx(price + (9 * left / 1000 if bills else 0))
    assert (third["uncached"], third["cached"], third.get("predicted")) == (936, 64, None)
    reader = LedgerReader(path)
    assert reader.read()["", "m"].predicted == predicted
    out = io.StringIO()
    assert command.run(path, since=None, until=None, form="", out=out, err=out) == 0
    assert f"{predicted:,} cached tokens as predicted" in out.getvalue()


async def test_unanswered_requests_are_not_billed(tmp_path: Path) -> None:
    """Refusals, failures of engines and of clients; an answer that broke off is, with what is known of it."""
    path, calls = tmp_path / "ledger.jsonl", iter([400, 500, 200])

    async def behave(engine: FakeEngine, call: Call, send: Any) -> None:
        status = next(calls)
        if status == 200:
            await start_stream(send)
            await event(send, b'{"choices":[{"delta":{"content":"x"}}]}')
            raise ConnectionResetError
        await reply(send, status, b'{"error":{"message":"no"},"usage":{"prompt_tokens":5}}')

    async with (
        serve(FakeEngine("a", behave)) as url,
        running_proxy({"a": url}, ledger={"path": str(path)}, retry={"attempts": 1}) as proxy,
    ):
        for _ in range(3):
            await proxy.client.post("/v1/chat/completions", json=chat(stream=True))
        await proxy.client.get("/v1/models")
    [broken] = entries(path)
    assert (broken["end"], broken["uncached"], broken["price"]) == ("upstream_died", None, None)


async def test_a_full_queue_drops_and_counts(tmp_path: Path) -> None:
    """The disk is slow: requests go on."""
    path = tmp_path / "ledger.jsonl"
    os.mkfifo(path)  # opening it for writing alone would wait for a reader
    keep = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    async with serve(FakeEngine("a")) as url, running_proxy({"a": url}, ledger={"path": str(path)}) as proxy:
        [ledger] = [one for one in proxy.proxy.observers if isinstance(one, Ledger)]
        ledger._writer._limit = 0
        assert (await proxy.client.post("/v1/chat/completions", json=chat())).status_code == 200
        assert proxy.metric("kvproxy_ledger_entries_total", result="dropped") == 1
        assert proxy.metric("kvproxy_queue_limit", queue="ledger") == 100_000
    os.close(keep)


def test_a_file_holds_one_day(tmp_path: Path) -> None:
    """Of UTC, over a restart too; the number of files is bounded."""
    now, path = [NOVEMBER + 10.0], tmp_path / "l"

    def opened() -> RotatingFile:
        return RotatingFile(path, max_bytes=1000, max_files=3, period_s=DAY_S, wall_clock=lambda: now[0])

    file = opened()
    for day in range(5):
        for _ in range(2):
            file.write_lines([b"day %d\n" % day])
            now[0] += DAY_S / 2
    file.close()
    os.utime(path, (now[0] - DAY_S, now[0] - DAY_S))
    file = opened()
    file.write_lines([b"day 5\n"])
    file.close()
    assert [one.read_bytes() for one in list_files(path)] == [b"day 5\n", b"day 4\n" * 2, b"day 3\n" * 2]


def written(path: Path, *rows: tuple[str, str, int | None, int | None, int, float | None], day: int = 1) -> None:
    with path.open("ab") as file:
        for tenant, model, uncached, cached, output, price in rows:
            row = {"time": f"2026-11-{day:02}T12:00:00.000+00:00", "request_id": "r", "tenant": tenant, "model": model,
                   "cluster": "default", "end": "completed", "uncached": uncached, "cached": cached, "output": output,
                   "price": price}  # fmt: skip
            file.write(json.dumps(row).encode() + b"\n")


def test_sums_are_by_tenant_and_model_over_all_files(tmp_path: Path) -> None:
    """Rotated ones and those of other workers; lines that are none are counted."""
    path = tmp_path / "l"
    written(
        path, ("alice", "m", 100, 50, 10, 1.5), ("bob", "m", 10, None, 1, 0.25), ("alice", "m", None, None, 0, None)
    )
    written(tmp_path / "l.1", ("alice", "m", 1, 1, 1, 0.5), day=2)
    written(tmp_path / "l.worker-1", ("alice", "other", 7, 0, 1, 0.125))
    (tmp_path / "l.1").write_bytes((tmp_path / "l.1").read_bytes() + b'{"time": "2026\n\n')
    for wrong in (b'"soon"', b'"\xff"', b'"9999-12-31T23:59:59-23:00"'):
        line = path.read_bytes().splitlines()[0].replace(b'"2026-11-01T12:00:00.000+00:00"', wrong)
        path.write_bytes(path.read_bytes() + line + b"\n")
    reader = LedgerReader(path)
    sums = reader.read()
    alice = sums["alice", "m"]
    assert (alice.requests, alice.uncached, alice.cached, alice.output, alice.price) == (3, 101, 51, 11, 2.0)
    assert (alice.uncounted, alice.unpriced, reader.broken) == (1, 1, 4)
    assert sums["alice", "other"].price == 0.125
    since = LedgerReader(path).read(since=datetime(2026, 11, 2, tzinfo=UTC))
    assert list(since) == [("alice", "m")]
    assert LedgerReader(path).read(until=datetime(2026, 11, 1, tzinfo=UTC)) == {}


def test_the_command_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "l"
    written(path, ("alice", "m", 1_234_567, 50, 10, 1.5), ("bob", "\x1b[2J", 10, None, 1, None))
    assert main(["ledger", str(path)]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[1].split() == ["alice", "m", "1", "1,234,567", "50", "10", "1.5000"]
    assert "\x1b" not in said
    assert "1 without a price" in said
    assert main(["ledger", str(path), "--json", "--since", "2026-11-01"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 2
    written(path, ("", "=1+1", 3, 0, 1, 0.5))
    assert main(["ledger", str(path), "--csv"]) == 0
    header, first, formula, _ = capsys.readouterr().out.splitlines()
    assert header == "tenant,model,requests,uncached,cached,output,price,uncounted,unpriced,predicted"
    assert first == "alice,m,1,1234567,50,10,1.5,0,0,0"
    assert formula.startswith(",'=1+1,1,3,")


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    err = io.StringIO()
    assert command.run(tmp_path / "no", since=None, until=None, form="", out=io.StringIO(), err=err) == 1
    assert "no" in err.getvalue()
    with pytest.raises(SystemExit):
        main(["ledger", "x", "--since", "yesterday"])
    assert "2026-11-01" in capsys.readouterr().err


def test_workers_have_a_ledger_each(tmp_path: Path) -> None:
    """Budgets of leases are whole in each: their book is one for all of them."""
    kvcache = {"lmcache_endpoint": "http://127.0.0.1:2", "leases": {"enabled": True, "tenant_tokens": 1001}}
    config = load_config({
        "endpoints": ["http://127.0.0.1:1"], "ledger": {"path": str(tmp_path / "l")},
        "filters": ["inference_request", {"kvcache": kvcache}, "router"],
    })  # fmt: skip
    shares = [take_share(config, index, 4) for index in range(4)]
    assert len({part_of(one, LedgerPlace).ledger.path for one in shares}) == 4
    assert {one.filters[1].settings.leases.tenant_tokens for one in shares} == {1001}


ROUTER = "filters: [inference_request, kvcache: {}, router: {cached_tokens: %s}]"


@pytest.mark.parametrize(("chain", "fine"), [("", False), (ROUTER % "engine", False), (ROUTER % "predicted", True)])
def test_predictions_are_billed_only_where_there_are_any(chain: str, fine: bool) -> None:
    """The router predicts, and only if its settings ask for it."""
    text = f"endpoints: [http://127.0.0.1:1]\nledger: {{path: l, bill_predicted: true}}\n{chain}"
    faults = [one for one in check_config(text, env={})[1] if "bill_predicted" in str(one)]
    assert [one.severity for one in faults] == ([] if fine else ["error"])


async def test_a_reload_names_what_needs_a_restart(tmp_path: Path) -> None:
    """The ledger is opened once, at the start."""
    first = {"endpoints": ["http://127.0.0.1:1"]}
    async with Proxy(load_config(first)) as proxy:
        reloaded = await proxy.reload(load_config({**first, "ledger": {"path": str(tmp_path / "l")}}))
    assert reloaded.after_restart == ("ledger",)
    assert not (tmp_path / "l").exists()
