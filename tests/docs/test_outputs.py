"""Output on the pages is that of the programs."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from starlette.types import Send

from kvproxy.base.types import EndpointId
from kvproxy.cache.clients.engine_metrics import EngineKind
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cli import _parser
from kvproxy.cluster.routing.policy import PRECISE, Overlap
from kvproxy.cluster.settings import PolicyName
from kvproxy.features.access_log.access_log import as_text, fields
from kvproxy.features.hygiene.command import Row, traffic_report
from kvproxy.features.hygiene.comparison import Cause
from kvproxy.lab.advise.advice import Advice, Confidence, Fit, Gain, NotGiven, Ratio, why_not_given
from kvproxy.lab.advise.adviser import PoolAdvice
from kvproxy.lab.advise.command import print_text
from kvproxy.lab.advise.engines import EngineSettingsSeen
from kvproxy.lab.advise.known import KnownFacts, advise_from_facts, spell_advice
from kvproxy.lab.advise.today import Today
from kvproxy.lab.advise.traffic import RecordedRequest, Traffic
from kvproxy.lab.planner.command import run as plan
from kvproxy.lab.replay.compare import PolicySpec
from kvproxy.lab.replay.report import ROW, LiveReport, ReplayReport
from kvproxy.lab.replay.results import Summary
from kvproxy.lab.replay.settings import IndexMode, ReplayFleet
from kvproxy.lab.replay.trace import Half
from kvproxy.operate.commands.configuration import format_problem
from kvproxy.operate.commands.logging_setup import log_to
from kvproxy.operate.commands.status import describe_adapters, describe_steps
from kvproxy.operate.config.changes import summarise_changes
from kvproxy.operate.config.load import check_config, load_config
from kvproxy.operate.doctor.flags import Setting
from kvproxy.operate.doctor.report import DoctorReport, Finding, Severity, SkippedCheck, print_table
from kvproxy.operate.log_lines import log_fields
from kvproxy.operate.receipts.explain import explain_receipt
from kvproxy.operate.receipts.receipt import Attempt, Receipt, ReceiptCandidate
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.settings import LogSettings
from tests.docs.blocks import ROOT, block, blocks
from tests.samples.test_samples import load, with_patience
from tests.support.fake_engine import Call, FakeEngine, reply
from tests.support.loopback import serve
from tests.support.proxy import chat, running_proxy

A, B = EndpointId("a"), EndpointId("b")


async def _access_log() -> str:
    exchange = Exchange(received_at=0.0)
    exchange.request_id, exchange.tenant = "5f0c9a...", "alice"
    outcome = exchange.outcome
    outcome.endpoint, outcome.attempts, outcome.ttft_s = A, 1, 0.1812
    outcome.prompt_tokens, outcome.cached_tokens, outcome.completion_tokens = 3120, 2944, 212
    asked: dict[str, Any] = {"method": "POST", "path": b"/v1/chat/completions", "status": 200, "sent_bytes": 18231}
    return as_text(fields(exchange, **asked, duration_s=2.3104, end="completed", word=str))


async def _check() -> str:
    text = "listen: 127.0.0.1:8888\nadmin: 127.0.0.1:8889\npolcy: kv_aware\nendpoints:\n"
    text += "  a: http://10.0.0.1:8000\n  b: http://10.0.0.2:8000/v1\n"
    _, problems = check_config(text, env={})
    return "".join(f"{format_problem(replace(one, file='config.yaml'))}\n" for one in problems)


async def _doctor() -> str:
    caching = "560 of 562 prompt tokens came from its cache the second time"
    unknown = "LMCache has no instance 'vllm-a': lookups never lead to this endpoint; it holds the engine's prompts "
    unknown += "under 'a'"
    findings = [
        Finding(Severity.OK, "endpoint a", caching, check="prefix caching"),
        Finding(Severity.OK, "endpoint a", "KV events arrive: blocks of 16 tokens, encoded as maps", check="kv events"),
        Finding(Severity.PROBLEM, "endpoint a", unknown, "set `instance_id: a`", check="instance ids"),
    ]
    out = io.StringIO()
    print_table(DoctorReport.of_findings(findings), out)
    return out.getvalue()


async def _traffic() -> str:
    row = Row(Cause.VOLATILE_HEADER, "claude-code", "", 88, 1_930_144, 214.5, "system block 1", "7f3c")
    out = io.StringIO()
    print_table(traffic_report([row], 400), out, verbose=True)
    return out.getvalue()


async def _advised() -> str:
    requests = [
        RecordedRequest(0.35 * n, 0.35 * n + 9, 0.35 * n + 1, EndpointId("e0"), "", "m", True, 900, 400, None, 0, 0, ())
        for n in range(1200)
    ]
    traffic = Traffic("default", ("m",), (EndpointId("e0"),), tuple(requests), ())
    engines = [
        EngineSettingsSeen(EndpointId(f"e{n}"), "default", EngineKind.VLLM, version="0.32.0", block_tokens=16,
                           capacity_tokens=65_536, publishes=False)
        for n in range(3)
    ]  # fmt: skip
    today = Today(
        ReplayFleet(capacity_tokens=65_536, max_sequences=4, index=IndexMode.APPROXIMATE),
        PolicySpec(PolicyName.KV_AWARE), 16, ("tokens a step",),
    )  # fmt: skip
    same, p99 = Ratio(1.0, 0.0), Ratio(0.02, 0.35)
    gain = Gain(Ratio(0.06, 0.54), p99, Ratio(1.07, 0.01), same, 10, Confidence.MEDIUM)
    ordered = Gain(Ratio(0.95, 0.19), same, same, same, 10, Confidence.LOW)
    pool = PoolAdvice(
        traffic.name, engines, traffic, today, Fit(1.83, 1.76, 0.7, None, 925, 340.0),
        advice=[
            *advise_from_facts(KnownFacts(engines, traffic, kvcache=KvCacheSettings())),
            Advice(Setting.SEQUENCES, "256 sequences at a time instead of 4",
                   spell_advice(Setting.SEQUENCES, engines, 256), gain=gain),
        ],
        not_given=[NotGiven(Setting.SCHEDULING, "engines order waiting requests by priority instead of arrival",
                            ordered, why_not_given(ordered))],
    )  # fmt: skip
    out = io.StringIO()
    print_text([pool], [], out, now=traffic.latest_at + 240.0)
    return out.getvalue()


async def _explained() -> str:
    busy = ReceiptCandidate(A, in_flight=9, pending_tokens=16384, cost=2.31, slowness=1.0, wait_s=2.1)
    idle = ReceiptCandidate(B, in_flight=3, cost=1.104, slowness=1.0, wait_s=0.0)
    decided = Attempt(0.0004, B, "kv_aware", "load", (busy, idle), seconds=(0.0, 0.52 / 4096, 0.0, 0.0))
    return explain_receipt(
        Receipt(
            "2026-01-02T12:00:01.250+00:00", "0f3c9a", "completed", 4.2, kind="chat", model="m", tenant="alice",
            session="e484e7bf21614dde", cluster="default", stream=True, prompt_tokens=4096,
            facts={A: Overlap(3584, (), PRECISE, 0.4)}, attempts=(decided,), endpoint=B, status=200,
            ttft_s=0.5401, engine_prompt_tokens=4102, cached_tokens=0, completion_tokens=211,
        )
    )  # fmt: skip


async def _log() -> str:
    before = load_config({"endpoints": {"a": "http://a:1", "b": "http://b:1"}})
    after = load_config({"endpoints": {"a": "http://a:1", "c": "http://c:1"}, "policy": "round_robin"})
    drained = {"action": "endpoint.drain", "from": "127.0.0.1", "cluster": "default", "endpoint": "a"}
    times = [f"2026-11-22T00:42:{second}+00:00" for second in ("53.123", "53.341", "54.006")]
    out = io.StringIO()
    logger = logging.getLogger("kvproxy.audit")
    logger.setLevel(logging.INFO)
    with log_to(LogSettings(), stream=out):
        logger.warning("%s/%s is unhealthy: probe %s", "default", "a", "unreachable")
        log_fields(logger, "admin", {**drained, "was_draining": False})
        logger.info("configuration reloaded: %s", summarise_changes(before, after))
    lines = out.getvalue().splitlines()
    return "\n".join(f"{time} {line.partition(' ')[2]}" for time, line in zip(times, lines, strict=True))


async def _decision_header() -> str:
    async with serve(FakeEngine("a")) as url, running_proxy({"a": url}, policy="kv_aware") as running:
        answer = await running.client.post("/v1/chat/completions", json=chat(), headers={"x-kvproxy-debug": "1"})
    return f"x-kvproxy-decision: {answer.headers['x-kvproxy-decision']}"


async def _live_replay() -> str:
    summary = Summary(
        requests=1200, failed=12, ttft_mean_s=0.412, ttft_p50_s=0.288, ttft_p90_s=0.93, ttft_p99_s=2.104,
        ttft_max_s=3.31, e2e_mean_s=3.271, e2e_p99_s=9.84, tpot_mean_s=0.0214, tpot_p99_s=0.0391, itl_p99_s=0.0617,
        goodput=0.951, session_mean_s=3.271, fairness=0.62, hit_rate=0.431, imbalance=1.08, wrong_share=0.0,
        requests_per_s=3.14,
    )  # fmt: skip
    endpoints = {
        name: {"requests": requests, "prompt_tokens": prompt, "cached_tokens": cached}
        for name, requests, prompt, cached in [("vllm-a", 611, 7912344, 3391200), ("vllm-b", 577, 7466120, 3242880)]
    }
    played = ReplayReport("conv", Half.BOTH, 2, 0.0, 1200, 0.47, None, ROW, {ROW: [summary]}, {})
    return LiveReport(played, 1200, endpoints, {"status 429": 12}, 0, False).render_table()


async def _pixius_checks() -> str:
    sample = load(ROOT / "samples" / "pixiu-mock" / "run.py")
    with TemporaryDirectory() as folder:
        sample.CONFIG = with_patience(sample.CONFIG, Path(folder))
        checks = await sample.run()
    return "\n".join(f"{'ok  ' if holds else 'FAIL'} {name}" for name, holds in checks.items())


async def _steps() -> str:
    return "\n".join(describe_steps([{"id": f"gpu-{n}", "cache": {"reuse_step_tokens": 4096}} for n in (1, 2)]))


async def _adapters() -> str:
    endpoints = [
        {"id": "a", "adapters": {"served": ["sql"], "loaded": ["sql"], "slots": 4}},
        {"id": "b", "adapters": {"served": ["law", "sql"], "loaded": [], "slots": 4}},
    ]
    return "\n".join(describe_adapters(endpoints))


async def _planned() -> str:
    out = io.StringIO()
    options = ["plan", "--model", "Llama-3.1-8B", "--gpu", "80GiB", "--host", "200GiB", "--disk", "2TiB"]
    assert plan(_parser().parse_args(options), out=out, err=out) == 0
    return out.getvalue()


#: Page, a text of the block, and what prints it.
PRINTED: dict[tuple[str, str], Callable[[], Any]] = {
    ("kvproxy/features/access_log/README.md", "POST /v1"): _access_log,
    ("docs/quickstart.md", "config.yaml:3:1"): _check,
    ("docs/doctor.md", "fix: set"): _doctor,
    ("kvproxy/features/hygiene/README.md", "volatile_header"): _traffic,
    ("docs/doctor.md", "Nothing was changed"): _advised,
    ("docs/engines.md", "never hit"): _steps,
    ("docs/engines.md", "slots loaded"): _adapters,
    ("docs/operations.md", "What happened"): _explained,
    ("docs/operations.md", "x-kvproxy-decision:"): _decision_header,
    ("docs/operations.md", "is unhealthy"): _log,
    ("docs/replay.md", "hit ceiling"): _live_replay,
    ("docs/sizing.md", "bytes a token"): _planned,
    ("samples/pixiu-mock/README.md", "engine a tokenized"): _pixius_checks,
}
#: Pictures (one is looked at below).
NOT_PRINTED = {("docs/concepts.md", "client ──"), ("docs/architecture.md", "clients  ")}


@pytest.mark.parametrize(("page", "containing"), PRINTED, ids=lambda text: text)
async def test_output_is_what_is_printed(page: str, containing: str) -> None:
    """To the character, for the case the page tells."""
    printed = await PRINTED[(page, containing)]()
    assert printed.strip() == block(page, containing).strip()


def test_there_are_no_others() -> None:
    """A new output needs a program that prints it."""
    known = {block(*one) for one in (*PRINTED, *NOT_PRINTED)}
    assert {found.where for found in blocks("", "text") if found.text not in known} == set()


def test_every_language_is_looked_at() -> None:
    """sh, yaml and python have tests of their own; toml is installed by tests/docs/test_documented_filter,
    and tests/features/shield sends the request of the page in `console`."""
    assert {found.language for found in blocks()} == {"sh", "yaml", "python", "json", "toml", "", "text", "console"}
    assert [found.page for found in blocks("json")] == [
        "docs/doctor.md",
        "kvproxy/features/ledger/README.md",
        "kvproxy/features/shield/README.md",
    ]
    assert [found.page for found in blocks("toml")] == ["docs/extending.md"]


def test_the_doctors_json_has_these_keys() -> None:
    """In every part, and no others."""
    shown = json.loads(block("docs/doctor.md", '"problems"'))
    found = Finding(Severity.PROBLEM, "endpoint a", "x", "y", (), "instance ids")
    report = DoctorReport((found,), skipped=(SkippedCheck("lookup", "endpoint b", "z"),)).as_dict()
    assert shown.keys() == report.keys()
    assert [one.keys() for one in shown["findings"]] == [one.keys() for one in report["findings"]]
    assert [one.keys() for one in shown["skipped"]] == [one.keys() for one in report["skipped"]]


async def test_a_line_of_the_ledger_is_as_shown(tmp_path: Path) -> None:
    """Its members in their order, and the price by the page's own rules."""
    counts = {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 64}}
    answer = json.dumps({"choices": [], "usage": counts}).encode()

    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        await reply(send, 200, answer)

    shown, path = json.loads(block("kvproxy/features/ledger/README.md", "request_id")), tmp_path / "ledger.jsonl"
    ledger = {**yaml.safe_load(block("kvproxy/features/ledger/README.md", "prices:"))["ledger"], "path": str(path)}
    async with serve(FakeEngine("a", behave)) as url, running_proxy({"a": url}, ledger=ledger) as proxy:
        assert (await proxy.client.post("/v1/chat/completions", json={**chat(), "model": "m"})).status_code == 200
    written = json.loads(path.read_bytes())
    assert list(written) == list(shown)
    for name in ("model", "cluster", "end", "uncached", "cached", "output", "price"):
        assert written[name] == shown[name], name


def test_the_picture_shows_the_default_chain() -> None:
    """Name by name, in order."""
    (listed,) = [line for line in block("docs/concepts.md", "client ──").splitlines() if "filters:" in line]
    config = load_config({"endpoints": ["http://127.0.0.1:8000"]})
    names = [name.strip() for name in listed.partition("filters:")[2].partition("──")[0].split(",")]
    assert names == [spec.name for spec in config.filters]
