"""The doctor's findings about an SGLang."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvproxy.lab.simulator.fleet import Fleet, FleetSettings
from kvproxy.lab.simulator.sglang_settings import EventForm, EventSettings, SglangSettings
from kvproxy.operate.doctor.report import DoctorReport, Severity
from tests.operate.doctor.setup import FAST, only, visit
from tests.operate.doctor.test_engines import Front
from tests.support.loopback import serve

SGLANG = SglangSettings(engine=FAST, kv_events=EventSettings(), health_step_s=0.0)
EVENTS: dict[str, Any] = {"filters": ["inference_request", {"kvcache": {"kv_events": True}}, "router"]}


async def visited(settings: SglangSettings = SGLANG, **changes: Any) -> DoctorReport:
    """Return the report on one engine, whose probes have time on a busy machine."""
    async with Fleet(FleetSettings({"a": settings}, None)) as fleet, serve(fleet.engines["a"]) as url:
        return await visit({"endpoints": {"a": url}, "health": {"timeout": 60.0}, **EVENTS, **changes})


@pytest.mark.parametrize("form", EventForm)
@pytest.mark.parametrize("algorithm", [None, "EAGLE"])
async def test_nothing_is_wrong(form: EventForm, algorithm: str | None) -> None:
    """Its events arrive in either form, with pairs too."""
    engine = replace(SGLANG, kv_events=EventSettings(form=form), speculative_algorithm=algorithm)
    report = await visited(engine, health={"path": "/ready"})
    assert report.findings == ()
    said = {one.check: one.what for one in report.passed}
    assert said["kv events"].startswith("KV events arrive: blocks of 16 tokens")
    assert said["sglang"].startswith("SGLang 0.5.23, pages of 16 token(s)")
    assert ("pairs of tokens" in said["sglang"]) is (algorithm is not None)
    assert "came from its cache the second time" in said["prefix caching"]
    assert "prompt" in said["tokenize"] or "agrees" in said["tokenize"]


@pytest.mark.parametrize("events", [EventSettings(), None])
async def test_its_data_parallel_ranks(events: EventSettings | None) -> None:
    """Both take requests and no third does; that they may be asked for its arguments say, with KV events or without."""
    report = await visited(replace(SGLANG, dp_size=2, kv_events=events), filters={"kvcache": {"kv_events": False}})
    assert report.findings == ()
    assert "its data-parallel ranks 0, 1, and for no other" in next(
        one.what for one in report.passed if one.check == "data-parallel ranks"
    )


@pytest.mark.parametrize(
    ("engine", "changes", "check", "said", "fix"),
    [
        (replace(SGLANG, health_step_s=0.3), {"health": {"timeout": 0.5}}, "sglang", "generates a token", "/ready"),
        (replace(SGLANG, enable_metrics=False), {}, "metrics", "shows no metrics", "--enable-metrics"),
        (
            replace(SGLANG, enable_cache_report=False),
            {},
            "prefix caching",
            "does not report how much",
            "--enable-cache-report",
        ),
        (replace(SGLANG, kv_events=None), {}, "kv event sources", "publishes no KV events", '{"publisher": "zmq"'),
        (
            replace(SGLANG, engine=replace(FAST, block_size=1, capacity_blocks=8192)),
            {},
            "sglang",
            "pages of 1 token(s)",
            "--page-size",
        ),
        (replace(SGLANG, tokenizes_chats=False), {}, "tokenize", "takes no chats", "older SGLangs"),
    ],
)
async def test_one_thing_is_wrong(
    engine: SglangSettings, changes: dict[str, Any], check: str, said: str, fix: str
) -> None:
    """One fault, one finding, and its fix in SGLang's own words."""
    report = await visited(engine, **changes)
    found = next(one for one in report.findings if one.check == check)
    assert said in found.what
    assert fix in found.fix
    assert {one.check for one in report.findings} <= {check, "kv events"}


async def test_the_order_of_priorities() -> None:
    """SGLang admits the highest first, vLLM the lowest: the wrong sign turns every order around."""
    queue = {"policy": "kv_aware", "engine_priority": "on", "queue": {"limit": 10}}
    told = {"engine_priority_order": "highest_first"}
    ordered = replace(SGLANG, enable_priority_scheduling=True)
    assert (await visited(ordered, **queue, **told)).findings == ()
    found = only(await visited(ordered, **queue))
    assert (found.severity, found.fix) == (Severity.PROBLEM, "set `engine_priority_order: highest_first`")
    turned = replace(ordered, schedule_low_priority_values_first=True)
    assert (await visited(turned, **queue)).findings == ()
    assert "lowest" in only(await visited(turned, **queue, **told)).what
    assert "--enable-priority-scheduling" in only(await visited(SGLANG, **queue, **told)).fix


async def test_an_order_of_which_no_use_is_made() -> None:
    """An engine that admits by priority is named while `engine_priority` is not written down and the policy could send
    one: `off` is an answer."""
    ordered = replace(SGLANG, enable_priority_scheduling=True)
    found = only(await visited(ordered))
    assert (found.severity, found.check) == (Severity.WARNING, "sglang")
    assert "`engine_priority: auto` and `engine_priority_order: highest_first`" in found.fix
    turned = replace(ordered, schedule_low_priority_values_first=True)
    assert "`engine_priority_order: lowest_first`" in only(await visited(turned)).fix
    assert (await visited(ordered, engine_priority="off")).findings == ()
    assert (await visited(ordered, policy="lmetric")).findings == ()
    assert (await visited(SGLANG)).findings == ()


async def test_a_cache_that_is_off() -> None:
    """By its own word; a path that cannot be probed is another check's business."""
    info = {"version": "0.5.23", "page_size": 16, "disable_radix_cache": True}
    async with (
        Fleet(FleetSettings({"a": replace(SGLANG, kv_events=None)}, None)) as fleet,
        serve(Front(fleet.engines["a"], {"/server_info": (200, info)})) as url,
    ):
        report = await visit({"endpoints": {"a": url}})
    found = next(one for one in report.findings if one.check == "sglang")
    assert (found.what, "--disable-radix-cache" in found.fix) == ("reuses no prefixes", True)


async def test_an_engine_that_sleeps_is_asked_nothing() -> None:
    """A prompt would wake nothing, and fail."""
    asleep = b'vllm:engine_sleep_state{sleep_state="awake"} 0\nvllm:engine_sleep_state{sleep_state="discard_all"} 1\n'
    async with Fleet(FleetSettings({"a": SGLANG}, None)) as fleet:
        front = Front(fleet.engines["a"], {"/metrics": (200, asleep)})
        async with serve(front) as url:
            report = await visit({"endpoints": {"a": url}})
    found = only(report)
    assert "sleeps" in found.what
    assert "/wake_up" in found.fix
    assert not fleet.engines["a"].calls["POST /v1/chat/completions"]
