"""The light visit when the proxy starts."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from kvproxy.operate.doctor.checks import StartupDiagnosis
from kvproxy.operate.doctor.report import DoctorReport
from kvproxy.operate.doctor.tools import Tools
from tests.operate.doctor.setup import ENGINE, TIMEOUTS, cluster, parsed
from tests.support.loopback import serve
from tests.support.process import kvproxy_serve
from tests.support.until import until


async def ended(visit: StartupDiagnosis) -> DoctorReport | None:
    """Return the report of a visit that is over; None if it failed."""
    assert visit._task is not None
    await asyncio.wait([visit._task])
    return visit.report


async def report_of(visit: StartupDiagnosis) -> DoctorReport:
    """Wait for the report."""
    report = await ended(visit)
    assert report is not None
    return report


async def test_nothing_is_generated() -> None:
    """Reachability, models, event sources and instance ids are asked for; no engine computes anything."""
    async with cluster() as site, StartupDiagnosis(parsed(site.config()), tools=Tools(timeouts=TIMEOUTS)) as visit:
        report = await report_of(visit)
        for engine in site.fleet.engines.values():
            assert not engine.state.requests
            assert not [path for path in engine.state.calls if "tokenize" in path]
    assert [one for one in report.findings if one.check != "open files"] == []
    assert {one.check for one in report.passed} >= {"connection", "models", "kv event sources", "instance ids"}


async def test_findings_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Problems as warnings, each with its fix."""
    caplog.set_level(logging.INFO, logger="kvproxy.doctor")
    async with cluster({"a": ENGINE}) as site:
        endpoints = [{"id": "a", "url": site.urls["a"], "instance_id": "vllm-a"}]
        config = parsed(site.config(endpoints=endpoints))
        async with StartupDiagnosis(config, tools=Tools(timeouts=TIMEOUTS)) as visit:
            await report_of(visit)
    lines = [record for record in caplog.records if "instance ids" in record.getMessage()]
    assert [record.levelname for record in lines] == ["WARNING"]
    assert "fix: set `instance_id` to its own of a, or start its LMCache" in lines[0].getMessage()


async def test_the_report_is_handed_on() -> None:
    """The live page shows it."""
    told: list[DoctorReport] = []
    config = parsed({"endpoints": {"a": "http://127.0.0.1:1"}})
    async with StartupDiagnosis(config, on_report=told.append) as visit:
        report = await report_of(visit)
    assert told == [report]


async def test_leaving_ends_the_visit() -> None:
    """A proxy that stops does not wait for engines that do not answer."""
    asked, gone = asyncio.Event(), asyncio.Event()

    async def silent(scope: Any, receive: Any, send: Any) -> None:
        asked.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()

    async with serve(silent) as url:
        async with StartupDiagnosis(parsed({"endpoints": {"a": url}}), tools=Tools(timeouts=TIMEOUTS)) as visit:
            await asked.wait()
        assert visit.report is None
        async with asyncio.timeout(60):
            await gone.wait()


async def test_a_broken_visit_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The proxy works on."""

    class Broken(Tools):
        async def __aenter__(self) -> Broken:
            raise ZeroDivisionError

    async with StartupDiagnosis(parsed({"endpoints": {"a": "http://127.0.0.1:1"}}), tools=Broken()) as visit:
        assert await ended(visit) is None
    assert "the visit to the engines failed" in caplog.text


@pytest.mark.slow
async def test_serve_visits_when_it_listens() -> None:
    """`kvproxy serve` says what it finds, after it took up its work."""
    async with cluster({"a": ENGINE}, controller=None) as site:
        endpoints = ["--endpoint", f"a={site.urls['a']}", "--endpoint", "b=http://127.0.0.1:1"]
        async with kvproxy_serve("--port", "0", "--no-admin", *endpoints) as running:
            await until(lambda: any("[doctor] connection: endpoint b" in line for line in running.lines), within_s=60)
    assert sum("[doctor] connection: endpoint b" in line for line in running.lines) == 1
