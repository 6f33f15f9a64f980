"""LMCache: which service, whether it finds what was computed, what it can do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from starlette.requests import Request

from kvproxy.lab.simulator.json_app import JsonApp, detail_error
from kvproxy.lab.simulator.lmcache_chunks import WorkerSettings
from kvproxy.lab.simulator.lmcache_controller import ControllerSettings
from kvproxy.lab.simulator.lmcache_coordinator import CoordinatorSettings
from kvproxy.operate.doctor.report import DoctorReport, Severity
from kvproxy.operate.doctor.tools import VisitTimeouts
from tests.operate.doctor.setup import ENGINE, Cluster, cluster, only, visit
from tests.operate.doctor.test_engines import Front
from tests.support.loopback import serve

PLAIN = replace(ENGINE, kv_events=None)
P2P = tuple(WorkerSettings(name, p2p=True) for name in "ab")
NO_EVENTS = {"kv_events": False}


async def visit_plain(site: Cluster, **kvcache: Any) -> DoctorReport:
    """Without KV events, which these tests are not about."""
    return await visit(site.config(kvcache={**NO_EVENTS, **kvcache}))


async def test_a_coordinator() -> None:
    """The other service, recognised by itself."""
    async with cluster({"a": PLAIN, "b": PLAIN}, controller=None, coordinator=CoordinatorSettings()) as site:
        report = await visit_plain(site)
    assert report.findings == ()
    assert any(one.what == "LMCache's coordinator answers" for one in report.passed)


async def test_a_coordinator_with_another_model_name() -> None:
    """Its directory has vLLM's `--model`, the clients another name: found, with the setting that fixes it."""
    engine = replace(PLAIN, root="org/model")
    async with cluster({"a": engine}, controller=None, coordinator=CoordinatorSettings()) as site:
        found = only(await visit_plain(site))
        mended = await visit_plain(site, directory_model="org/model")
    assert (found.severity, found.check, found.where) == (Severity.PROBLEM, "lookup", "endpoint a")
    assert "`directory_model: org/model`" in found.fix
    assert mended.findings == ()


async def test_pixius_stand_in() -> None:
    """Objects instead of arrays: recognised, and not mistaken for LMCache."""
    async with cluster({"a": PLAIN}, controller=ControllerSettings(pixiu_shape=True)) as site:
        report = await visit_plain(site)
    assert report.findings == ()
    assert any("in Pixiu's shape" in one.what for one in report.passed)


async def test_another_service_than_configured() -> None:
    """`provider` says coordinator, and a controller answers."""
    async with cluster({"a": PLAIN}) as site:
        found = only(await visit_plain(site, provider="coordinator"))
    assert (found.severity, found.check) == (Severity.PROBLEM, "lmcache")
    assert "is a controller, not the coordinator" in found.what
    assert "`provider: controller`" in found.fix


async def test_no_lmcache_at_all() -> None:
    """The address of an engine: said once, the rest is skipped."""
    async with cluster({"a": PLAIN}, controller=None) as site:
        report = await visit_plain(site, lmcache_endpoint=site.urls["a"])
    found = only(report)
    assert (found.severity, found.check) == (Severity.PROBLEM, "lmcache")
    assert "neither LMCache's controller nor its coordinator" in found.what
    assert {one.check for one in report.skipped} == {"instance ids", "lookup", "chunk size", "lookup time", "actions"}


async def test_nobody_is_registered() -> None:
    """A controller that no engine has told of itself."""
    async with cluster({"a": PLAIN}) as site:
        assert site.fleet.controller is not None
        site.fleet.controller.workers.clear()
        site.fleet.engines["a"]._on_prefilled = None
        report = await visit_plain(site)
    found = only(report)
    assert (found.severity, found.check) == (Severity.PROBLEM, "instance ids")
    assert "no engine is registered" in found.what
    assert len(found.causes) == 3


async def test_an_instance_nobody_uses() -> None:
    """Registered, but no endpoint has it."""
    async with cluster({"a": PLAIN, "b": PLAIN}) as site:
        found = only(await visit(site.config(kvcache=NO_EVENTS, endpoints={"a": site.urls["a"]})))
    assert (found.severity, found.check) == (Severity.WARNING, "instance ids")
    assert "no endpoint has the registered instance(s) b" in found.what


async def test_nothing_is_stored() -> None:
    """The engine computes, LMCache's index stays empty: the connector, not the hashes."""
    async with cluster({"a": PLAIN}) as site:
        site.fleet.engines["a"]._on_prefilled = None
        found = only(await visit_plain(site))
    assert (found.severity, found.check) == (Severity.PROBLEM, "lookup")
    assert "index is empty" in found.what
    assert "--kv-transfer-config" in found.causes[0]


async def test_a_coordinator_that_does_not_find_it() -> None:
    """Its index has others' prompts only."""
    async with cluster({"a": PLAIN}, controller=None, coordinator=CoordinatorSettings()) as site:
        assert site.fleet.coordinator is not None
        site.fleet.coordinator.admit("a", range(1000), model_name="sim")
        site.fleet.engines["a"]._on_prefilled = None
        found = only(await visit_plain(site))
    assert "does not find a prompt" in found.what
    assert "`directory_model`" in found.causes[0]


async def test_lookups_that_are_late() -> None:
    """LookupClient take longer than the routing deadline allows."""
    async with cluster({"a": PLAIN}, controller=ControllerSettings(lookup_s=0.002)) as site:
        found = only(await visit_plain(site, lookup_routing_timeout="1ms"))
    assert (found.severity, found.check) == (Severity.PROBLEM, "lookup time")
    assert "never in time" in found.what


@pytest.mark.parametrize(
    ("pixiu", "strategy", "said"),
    [
        (False, {"enable_eviction": True}, "has no /evict"),
        (True, {"enable_eviction": True}, ""),
        (False, {"enable_pinning": True, "pin_location": "lmcache"}, "has no location 'lmcache'"),
        (False, {"enable_pinning": True}, ""),
    ],
)
async def test_strategies(pixiu: bool, strategy: dict[str, Any], said: str) -> None:
    """An action that a controller lacks is reported before it fails."""
    async with cluster({"a": PLAIN}, controller=ControllerSettings(pixiu_shape=pixiu)) as site:
        report = await visit_plain(site, cache_strategy=strategy)
    if not said:
        assert report.findings == ()
        assert any(one.check == "actions" for one in report.passed)
        return
    found = only(report)
    assert (found.severity, found.check) == (Severity.WARNING, "actions")
    assert said in found.what


async def test_compression_at_a_coordinator() -> None:
    """It has none."""
    async with cluster({"a": PLAIN}, controller=None, coordinator=CoordinatorSettings()) as site:
        found = only(await visit_plain(site, cache_strategy={"enable_compression": True}))
    assert "the coordinator has no compression" in found.what


class OldController(JsonApp):
    """Answers lookups as told, and lists instances as told; nothing else."""

    def __init__(self, *, lookup: Any, listing: int = 404) -> None:
        super().__init__()
        self._found = lookup
        self._listing = listing
        self.answer("POST", "/lookup", self._lookup)
        self.answer("GET", "/controller/key-stats", self._stats)

    async def _lookup(self, request: Request) -> Any:
        tokens = (await request.json())["tokens"]
        if isinstance(self._found, int) and tokens:
            raise detail_error(self._found, "broken")
        return self._found if tokens else {"layout_info": {}}

    async def _stats(self, _request: Request) -> Any:
        raise detail_error(self._listing, "Not Found" if self._listing == 404 else "broken")


@pytest.mark.parametrize(
    ("service", "said"),
    [
        (OldController(lookup={"layout_info": {"a": ["LocalCPUBackend", 512]}}), {"cannot list its instances"}),
        (OldController(lookup={"layout_info": {"a": "here"}}), {"cannot list its instances", "in an unknown shape"}),
        (OldController(lookup=500), {"cannot list its instances", "does not answer lookups"}),
        (OldController(lookup={"layout_info": {}}, listing=500), {"does not list its instances", "does not find"}),
        (OldController(lookup={"layout_info": {}}), {"cannot list its instances", "does not find a prompt"}),
    ],
)
async def test_controllers_that_answer_otherwise(service: OldController, said: set[str]) -> None:
    """Old versions without a listing, and answers that are none."""
    async with cluster({"a": PLAIN}, controller=None) as site, serve(service) as url:
        report = await visit_plain(site, lmcache_endpoint=url)
    assert len(report.findings) == len(said), report.findings
    assert all(any(text in one.what for one in report.findings) for text in said)


async def test_a_service_that_connects_and_says_nothing() -> None:
    """It takes calls and answers none in time."""

    async def silent(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    timeouts = VisitTimeouts(exchange_s=1.0, event_s=0.05, lookup_tries=1)
    async with serve(silent) as url:
        raw = {
            "endpoints": {"a": url},
            "filters": ["inference_request", {"kvcache": {"lmcache_endpoint": url}}, "router"],
        }
        report = await visit(raw, timeouts=timeouts)
    assert {(one.where, one.check) for one in report.findings} == {
        ("lmcache_endpoint", "lmcache"),
        ("endpoint a", "health"),
        ("endpoint a", "api"),
    }


async def test_prompts_that_no_chunk_fits_into() -> None:
    """The model's whole context is shorter than two chunks: half of it is less than one."""
    async with cluster({"a": replace(PLAIN, max_model_len=300)}) as site:
        found = only(await visit_plain(site))
    assert (found.severity, found.check) == (Severity.PROBLEM, "chunk size")
    assert "larger than the prompts this model takes (300 tokens with their answers)" in found.what


async def test_chunks_without_metrics() -> None:
    """Nothing is known of the prompts that come; the chunk size is told all the same."""
    async with cluster({"a": PLAIN}, controller=ControllerSettings()) as site:
        front = Front(site.fleet.engines["a"], {"/metrics": (404, {"detail": "Not Found"})})
        async with serve(front) as url:
            report = await visit(site.config(kvcache=NO_EVENTS, endpoints={"a": url}))
    assert only(report).check == "metrics"
    assert any("chunks have 256 tokens" in one.what for one in report.passed)
