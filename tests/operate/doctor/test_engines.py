"""Faults of engines besides the planted ones: keys, answers, clocks, versions, templates."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any

import pytest

from kvproxy.base.types import utc_seconds
from kvproxy.lab.simulator.fleet import Fleet, FleetSettings
from kvproxy.lab.simulator.kv_event_publisher import EventEncoding, PublisherSettings
from kvproxy.operate.doctor.report import DoctorReport, Severity
from tests.operate.doctor.setup import ENGINE, FAST, SHORT, cluster, only, visit
from tests.support.loop_time import ASYNCIO_ONLY, skipping_time
from tests.support.loopback import serve
from tests.support.until import until
from tests.support.vllms.hybrid import Checkpoints, make_hybrid

App = Callable[[Any, Any, Any], Awaitable[None]]
PLAIN = replace(ENGINE, kv_events=None)
#: What any Python service shows, and another engine's.
_OTHER_FIGURES = b"process_start_time_seconds 1.5e9\nllamacpp:kv_cache_usage_ratio 0.5\n"
QUIET: dict[str, Any] = {"filters": {"kvcache": {"lookup_min_tokens": 256, "kv_events": False}}}

Answer = tuple[int, Any]


class Front:
    """Stands before an engine and answers some of its routes itself."""

    def __init__(self, engine: App, answers: Mapping[str, Answer], *, date: str = "") -> None:
        self._engine = engine
        self._answers = answers
        self._date = date

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        answer = self._answers.get(scope["path"])
        if answer is None:
            await self._engine(scope, receive, send)
            return
        status, body = answer
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
        if self._date:
            headers.append((b"date", self._date.encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": raw})


async def visit_front(
    answers: Mapping[str, Answer], *, date: str = "", tools: Mapping[str, Any] | None = None, **endpoint: Any
) -> DoctorReport:
    """Return the doctor's report on one engine, `a`, that answers some routes in another way."""
    async with (
        Fleet(FleetSettings({"a": PLAIN}, None)) as fleet,
        serve(Front(fleet.engines["a"], answers, date=date)) as url,
    ):
        clock = {"wall_clock": lambda: 1e9} if date else {}
        return await visit({"endpoints": [{"id": "a", "url": url, **endpoint}], **QUIET}, **clock, **(tools or {}))


def error_body(message: str, code: int) -> dict[str, Any]:
    """As vLLM writes errors."""
    return {"error": {"message": message, "type": "x", "param": None, "code": code}}


REFUSAL = (400, error_body("no chat template", 400))


@pytest.mark.parametrize(
    ("answers", "check", "severity", "said"),
    [
        ({"/health": (503, b"")}, "health", Severity.PROBLEM, "reports that it is unhealthy (health 503)"),
        ({"/health": (401, b"")}, "health", Severity.PROBLEM, "asks for a key (401)"),
        ({"/v1/models": (401, error_body("Unauthorized", 401))}, "api", Severity.WARNING, "asks for a key (401)"),
        ({"/v1/models": (500, error_body("broken", 500))}, "api", Severity.PROBLEM, "/v1/models fails"),
        ({"/v1/models": (200, b"<html>")}, "api", Severity.PROBLEM, "/v1/models is not an engine's"),
        (
            {"/v1/chat/completions": (500, error_body("x", 500))},
            "generate",
            Severity.PROBLEM,
            "bad answer to a small prompt",
        ),
        (
            {"/v1/chat/completions": (200, {"no": "usage"})},
            "generate",
            Severity.PROBLEM,
            "bad answer to a small prompt",
        ),
        ({"/v1/chat/completions": (503, error_body("busy", 503))}, "generate", Severity.WARNING, "is too busy"),
        (
            {"/v1/chat/completions": REFUSAL, "/v1/completions": REFUSAL},
            "generate",
            Severity.WARNING,
            "generates nothing: vllm /v1/chat/completions: 400 no chat template",
        ),
        ({"/metrics": (404, {"detail": "Not Found"})}, "metrics", Severity.WARNING, "shows no metrics"),
        ({"/metrics": (200, b"a 1\n" * 60_000)}, "metrics", Severity.WARNING, "more than 50000 lines"),
        ({"/metrics": (200, _OTHER_FIGURES)}, "metrics", Severity.WARNING, "none of vLLM's or SGLang's figures"),
    ],
)
async def test_one_wrong_answer(answers: Mapping[str, Answer], check: str, severity: Severity, said: str) -> None:
    """One fault, one finding; what depends on it is skipped or known otherwise."""
    found = only(await visit_front(answers))
    assert (found.check, found.severity, found.where) == (check, severity, "endpoint a")
    assert said in found.what
    assert found.fix


async def test_a_refused_key_is_never_shown() -> None:
    """The endpoint's own key is wrong; it is in no text of the report."""
    report = await visit_front({"/v1/models": (401, error_body("Bad key s3cr3t-key", 401))}, api_key="s3cr3t-key")
    found = only(report)
    assert "refuses the endpoint's key" in found.what
    assert "s3cr3t-key" not in json.dumps(report.as_dict())


async def test_a_model_the_endpoint_declares_is_tried_before_a_routed_one() -> None:
    """Routes name models of the whole cluster; of this engine its own declaration says more."""
    rows = [{"id": name, "object": "model", "root": name, "parent": None} for name in ("elsewhere", "sim")]
    async with (
        Fleet(FleetSettings({"a": PLAIN}, None)) as fleet,
        serve(Front(fleet.engines["a"], {"/v1/models": (200, {"object": "list", "data": rows})})) as url,
    ):
        endpoints = [{"id": "a", "url": url, "models": ["sim"]}]
        report = await visit({"endpoints": endpoints, "routes": [{"model": "elsewhere"}, {}], **QUIET})
    assert "generate" in {one.check for one in report.passed}, report.findings


async def test_an_adapter_is_not_the_model_to_try() -> None:
    """It may be listed first; with it tokens and caching are tried of another model than the clients'."""
    adapter = {"id": "adapter", "object": "model", "root": "x", "parent": "sim"}
    base = {"id": "sim", "object": "model", "root": "sim", "parent": None, "max_model_len": 8192}
    report = await visit_front({"/v1/models": (200, {"object": "list", "data": [adapter, base]})})
    assert report.findings == (), "the simulated engine has no such adapter"
    assert "generate" in {one.check for one in report.passed}


async def test_an_engine_without_chat() -> None:
    """A base model without a template is tried with a text completion."""
    report = await visit_front({"/v1/chat/completions": REFUSAL})
    assert report.findings == ()
    assert any("text completion (it refuses chats)" in one.what for one in report.passed)


async def test_an_engine_without_tokenize() -> None:
    """Fine as long as nothing needs it, and comparisons leave it out."""
    report = await visit_front({"/tokenize": (404, {"detail": "Not Found"})})
    assert report.findings == ()
    assert any(one.what == "has no /tokenize, which nothing needs" for one in report.passed)


@pytest.mark.parametrize(
    ("date", "said"),
    [
        ("Sun, 09 Sep 2001 01:46:40 GMT", "agrees with ours"),
        ("Sun, 09 Sep 2001 02:46:40 GMT", "s ahead of ours"),
        ("Sun, 09 Sep 2001 00:46:40 -0000", "s behind ours"),
    ],
)
async def test_clocks_by_the_date_header(date: str, said: str) -> None:
    """The header against our own wall clock (which says 2001-09-09 01:46:40 here)."""
    report = await visit_front({"/health": (200, b"")}, date=date)
    clocks = [one for one in (*report.findings, *report.passed) if one.check == "clock"]
    assert [said in one.what for one in clocks] == [True], clocks


async def test_an_answer_that_took_long_may_have_been_written_at_any_moment_of_it() -> None:
    """Each look at our clock is 20 s after the one before: 9 s between theirs and ours are no finding."""
    ticks = itertools.count(0.0, 20.0)
    late = {"clock": lambda: next(ticks)}
    report = await visit_front({"/health": (200, b"")}, date="Sun, 09 Sep 2001 01:46:59 GMT", tools=late)
    assert "its clock agrees with ours" in [one.what for one in report.passed]


async def test_batches_that_waited_make_no_clock_wrong() -> None:
    """The Date header decides: it agrees with our clock, by which all events are half a minute late."""
    ours = float(int(utc_seconds()) + 30)
    date = format_datetime(datetime.fromtimestamp(ours, UTC), usegmt=True)
    async with (
        Fleet(FleetSettings({"a": ENGINE}, None)) as fleet,
        serve(Front(fleet.engines["a"], {"/health": (200, b"")}, date=date)) as url,
    ):
        raw = {"endpoints": {"a": url}, "filters": {"kvcache": {"kv_events": True}}}
        report = await visit(raw, wall_clock=lambda: ours)
    assert "its clock agrees with ours" in [one.what for one in report.passed]


async def test_a_date_that_is_none() -> None:
    """Nothing is said about a clock that cannot be read."""
    report = await visit_front({"/health": (200, b"")}, date="yesterday")
    assert not any(one.check == "clock" for one in (*report.findings, *report.passed))


async def test_a_clock_by_event_time_stamps() -> None:
    """KV events carry the engine's time exactly."""
    async with cluster({"a": ENGINE}, controller=None) as site:
        report = await visit(site.config(), wall_clock=lambda: 1e9)
    found = only(report)
    assert found.check == "clock"
    assert "ahead of ours" in found.what


async def test_versions_that_differ() -> None:
    """Named one by one."""
    async with cluster({"a": PLAIN, "b": replace(PLAIN, version="0.32.1")}, controller=None) as site:
        found = only(await visit({"endpoints": site.urls, **QUIET}))
    assert (found.severity, found.check) == (Severity.WARNING, "version")
    assert "a 0.32.0, b 0.32.1" in found.what


@pytest.mark.parametrize(
    ("encoding", "said"), [(EventEncoding.V0_11, "encoded as arrays"), (EventEncoding.V0_24, "encoded as maps")]
)
async def test_event_encodings(encoding: EventEncoding, said: str) -> None:
    """Of old engines and new ones, their replays included."""
    engine = replace(ENGINE, kv_events=PublisherSettings(encoding=encoding))
    async with cluster({"a": engine}, controller=None) as site:
        report = await visit(site.config())
    assert report.findings == ()
    assert any(said in one.what for one in report.passed)


async def test_events_without_replay() -> None:
    """Events arrive, but a gap could not be filled."""
    async with cluster({"a": replace(ENGINE, kv_events_replay=False)}, controller=None) as site:
        found = only(await visit(site.config()))
    assert (found.severity, found.check) == (Severity.WARNING, "kv events")
    assert "`replay_endpoint`" in found.fix


async def test_an_event_that_was_missed_is_asked_for_again() -> None:
    """The first batches are lost on the way: another prompt is sent before anything is concluded."""
    async with cluster({"a": ENGINE}, controller=None) as site:
        engine = site.fleet.engines["a"]
        assert engine.state.publisher is not None
        engine.state.publisher.lose_next = 1
        report = await visit(site.config())
        assert [request["path"] for request in engine.state.requests].count("/v1/chat/completions") == 3
    assert report.findings == ()


async def test_an_engine_too_old_to_tell_its_event_sources() -> None:
    """Its events cannot be found; that is no problem of the engine's."""
    async with Fleet(FleetSettings({"a": ENGINE}, None)) as fleet:
        front = Front(fleet.engines["a"], {"/kv_event_sources": (404, {"detail": "Not Found"})})
        async with serve(front) as url:
            raw = {
                "endpoints": {"a": url},
                "filters": ["inference_request", {"kvcache": {"kv_events": True}}, "router"],
            }
            found = only(await visit(raw, timeouts=SHORT))
    assert (found.severity, found.check) == (Severity.WARNING, "kv event sources")


async def test_events_nobody_asked_for() -> None:
    """An engine that publishes is mentioned, not blamed."""
    async with cluster({"a": ENGINE}, controller=None) as site:
        report = await visit({"endpoints": site.urls, **QUIET})
    assert report.findings == ()
    assert any("`kv_events: auto` of the kvcache filter would follow them" in one.what for one in report.passed)


async def test_a_routed_model_that_nobody_serves() -> None:
    """An alias that leads to a name no engine has."""
    async with cluster({"a": PLAIN}, controller=None) as site:
        routes = [{"model": "gpt", "upstream_model": "llama", "cluster": "default"}, {"cluster": "default"}]
        found = only(await visit({"endpoints": site.urls, "routes": routes, **QUIET}))
    assert (found.severity, found.check) == (Severity.PROBLEM, "models")
    assert "no engine serves 'llama', which is routed here" in found.what


async def test_an_engine_with_adapters_only_is_tried_with_what_is_declared() -> None:
    """A declared LoRA is what the trial asks for."""
    async with cluster({"a": replace(PLAIN, loras=("lora-a",))}, controller=None) as site:
        endpoints = [{"id": "a", "url": site.urls["a"], "models": ["lora-a"]}]
        report = await visit({"endpoints": endpoints, **QUIET})
        assert {request["model"] for request in site.fleet.engines["a"].state.requests} == {"lora-a"}
    assert report.findings == ()


async def test_the_engine_that_tokenizes_for_all() -> None:
    """`vllm_endpoint` is visited too, and compared with the engines it tokenizes for."""
    other = replace(PLAIN, word_pieces=False)
    async with cluster({"a": PLAIN, "t": other}, controller=None) as site:
        kvcache = {"kvcache": {"vllm_endpoint": site.urls["t"], "kv_events": False}}
        raw = {"endpoints": {"a": site.urls["a"]}, "filters": ["inference_request", kvcache, "router"]}
        found = only(await visit(raw))
    assert (found.check, found.where) == ("tokenizers", "vllm_endpoint of kvcache")


async def test_a_tokenizing_engine_that_cannot() -> None:
    """It has no `/tokenize`."""
    async with (
        Fleet(FleetSettings({"a": PLAIN}, None)) as fleet,
        serve(fleet.engines["a"]) as a,
        serve(Front(fleet.engines["a"], {"/tokenize": (404, {"detail": "Not Found"})})) as t,
    ):
        kvcache = {"kvcache": {"vllm_endpoint": t, "kv_events": False}}
        found = only(await visit({"endpoints": {"a": a}, "filters": ["inference_request", kvcache, "router"]}))
    assert (found.severity, found.check) == (Severity.PROBLEM, "tokenizer")


async def test_clusters_are_told_apart() -> None:
    """The same id in two clusters is two endpoints, named with their cluster."""
    async with cluster({"a": PLAIN, "b": replace(PLAIN, model="other")}, controller=None) as site:
        clusters = {"one": {"endpoints": {"x": site.urls["a"]}}, "two": {"endpoints": {"x": site.urls["b"]}}}
        routes = [{"model": "sim", "cluster": "one"}, {"model": "other", "cluster": "two"}]
        report = await visit({"clusters": clusters, "routes": routes, **QUIET})
    assert report.findings == ()
    assert {one.where for one in report.passed} >= {"endpoint one/x", "endpoint two/x", "cluster one", "cluster two"}


async def test_an_engine_that_serves_nothing() -> None:
    """No model yet: nothing can be tried, and that is told."""
    report = await visit_front({"/v1/models": (200, {"object": "list", "data": []})})
    found = only(report)
    assert (found.severity, found.check, found.what) == (Severity.PROBLEM, "api", "serves no model")
    assert {one.check for one in report.skipped} >= {"generate", "prefix caching"}


@ASYNCIO_ONLY
async def test_an_engine_that_takes_the_prompt_and_never_answers() -> None:
    """It lists its models and is well, but its core is stuck."""
    async with cluster({"a": PLAIN}, controller=None) as site:
        engine = site.fleet.engines["a"]
        engine.state.faults.update({"stall_head_s": 1e6})
        prompts = 0
        with skipping_time() as skip:
            visiting = asyncio.create_task(visit({"endpoints": site.urls, **QUIET}, timeouts=SHORT))
            while not visiting.done():
                await until(lambda: visiting.done() or engine.calls["POST /v1/chat/completions"] > prompts)  # noqa: B023
                prompts = engine.calls["POST /v1/chat/completions"]
                await skip(SHORT.exchange_s)
            report = await visiting
        engine.state.faults.update({"reset": True})
    found = next(one for one in report.findings if one.check == "generate")
    assert found.severity is Severity.PROBLEM
    assert "does not answer a small prompt" in found.what
    assert "--timeout" in found.fix


async def test_a_hybrid_model_is_no_fault() -> None:
    """A short prompt sent twice is computed twice, a long one is not: its KV events can be followed all the same."""
    settings = make_hybrid(replace(ENGINE, engine=replace(FAST, capacity_blocks=2048)), Checkpoints(1024))
    async with cluster({"a": settings}, controller=None) as place:
        report = await visit(place.config())
    assert report.findings == ()
    found = {one.check: one.what for one in report.passed}
    assert "and none of " in found["prefix caching"]
    assert "reuses in steps: " in found["prefix caching"]
    assert "KV events arrive" in found["kv events"]


async def test_adapters_need_not_be_everywhere() -> None:
    """Requests go where they are listed: no fault, and it is said where."""
    async with cluster({"a": replace(ENGINE, loras=("x", "y")), "b": replace(ENGINE, loras=("y",))}) as place:
        report = await visit(place.config())
    assert report.findings == ()
    said = {one.what for one in report.passed if one.check == "models"}
    assert {"adapter x at a", "adapter y at a, b"} <= said


async def test_an_adapter_nobody_serves() -> None:
    """Endpoints promise it, or a route leads there: named once, with what to do."""
    async with cluster({"a": ENGINE, "b": replace(ENGINE, loras=("x",))}) as place:
        promised = [{"id": name, "url": url, "models": ["sim", "gone"]} for name, url in place.urls.items()]
        found = only(await visit(place.config(endpoints=promised)))
        assert (found.where, found.severity) == ("endpoints a, b", Severity.PROBLEM)
        assert found.what == "no engine serves 'gone', by the `models` of all of them"
        assert "load that adapter" in found.fix
        assert "served: sim, x" in found.fix
        routed = only(await visit(place.config(routes=[{"model": "gone"}, {}])))
        assert routed.what == "no engine serves 'gone', which is routed here"


class Browsable:
    """Stands before an engine that was started with `--allowed-origins`."""

    def __init__(self, engine: App) -> None:
        self._engine = engine

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            headers = [(b"access-control-allow-origin", b"https://app.example")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"OK"})
        else:
            await self._engine(scope, receive, send)


@pytest.mark.parametrize("filtered", [False, True])
async def test_an_engine_with_cors_of_its_own(filtered: bool) -> None:
    """Its fields do not cover what the proxy answers; with the filter there is nothing to report."""
    config: dict[str, Any] = {"filters": dict(QUIET["filters"])}
    if filtered:
        config["filters"]["cors"] = {"allow_origins": ["*"]}
    async with Fleet(FleetSettings({"a": PLAIN}, None)) as fleet, serve(Browsable(fleet.engines["a"])) as url:
        report = await visit({"endpoints": {"a": url}, **config})
    assert [one.check for one in report.findings] == ([] if filtered else ["cors"])
