"""Data-parallel ranks: found and asked for, refused, not read, not known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvproxy.operate.doctor.check_engine_setup import judge_ranks
from kvproxy.operate.doctor.report import DoctorReport, Finding, Severity
from kvproxy.operate.doctor.trial import RankAnswers
from tests.operate.doctor.setup import ENGINE, cluster, only, visit
from tests.support.vllms.ranks import FrontEnd, RankedSettings

CHECK = "data-parallel ranks"


async def report_of(settings: RankedSettings, **data_parallel: Any) -> DoctorReport:
    """Return the report on one engine with these ranks, in this configuration."""
    async with cluster({"a": settings}, controller=None) as site:
        endpoint = {"id": "a", "url": site.urls["a"], "data_parallel": data_parallel}
        raw = site.config(kvcache={"lmcache_endpoint": ""}, endpoints=[endpoint])
        return await visit(raw)


def passed(report: DoctorReport) -> list[Finding]:
    return [one for one in report.passed if one.check == CHECK]


async def test_an_engine_whose_ranks_are_found_is_well() -> None:
    """Its prompts are tried on one rank, so caching and events show as on every engine."""
    report = await report_of(RankedSettings(ENGINE))
    assert report.findings == ()
    assert [one.what for one in passed(report)] == [
        "takes requests for each of its data-parallel ranks 0, 1, and for no other one"
    ]
    assert {one.check for one in report.passed} >= {"prefix caching", "kv events"}


@pytest.mark.parametrize("front_end", FrontEnd)
async def test_a_server_of_hybrid_balancing_is_asked_as_it_counts(front_end: FrontEnd) -> None:
    """Its place among the server's own ranks, or its number in the deployment."""
    report = await report_of(RankedSettings(ENGINE, first=4, front_end=front_end))
    assert report.findings == ()
    assert "4, 5" in passed(report)[0].what


async def test_a_rank_that_is_refused() -> None:
    """The configuration names one too many."""
    found = only(await report_of(RankedSettings(ENGINE), ranks=[0, 1, 2]))
    assert (found.severity, found.check, found.where) == (Severity.PROBLEM, CHECK, "endpoint a")
    assert found.what == "has no data-parallel rank 2, which is configured"
    assert found.fix == "set `data_parallel: {ranks: [0, 1]}` of the endpoint"


async def test_ranks_that_the_configuration_leaves_out() -> None:
    """Their memory and their processors are idle."""
    found = only(await report_of(RankedSettings(ENGINE, size=3), ranks=[0, 1]))
    assert "has the data-parallel ranks 0, 1, 2, and the configuration names 0, 1" in found.what


async def test_ranks_that_only_metrics_show() -> None:
    """Without event sources they are not asked for."""
    report = await report_of(RankedSettings(replace(ENGINE, kv_events=None)))
    found = [one for one in report.findings if one.check == CHECK]
    assert [one.severity for one in found] == [Severity.WARNING]
    assert "set `data_parallel: {ranks: [0, 1]}`" in found[0].fix


async def test_an_engine_that_balances_by_itself_is_left_alone() -> None:
    """And one without ranks is not mentioned."""
    report = await report_of(RankedSettings(ENGINE), steer=False)
    assert [one.what for one in passed(report)] == ["balances over its 2 data-parallel ranks by itself"]
    async with cluster(controller=None) as site:
        plain = await visit(site.config(kvcache={"lmcache_endpoint": ""}))
    assert passed(plain) == []


@pytest.mark.parametrize(
    ("answers", "what"),
    [
        (RankAnswers({0: 0, 1: 1}, (), reads=False), "does not read x-data-parallel-rank"),
        (RankAnswers({}, (0, 1), reads=True), "has no data-parallel rank 0, 1"),
    ],
)
def test_abilities_that_simulated_engines_lack(answers: RankAnswers, what: str) -> None:
    """One that ignores the header, one that knows no rank at all."""
    found = judge_ranks("endpoint a", answers, stated=(0, 1), shown=(), named=())
    assert what in found.what
    assert "steer: false" in found.fix
