"""Displays of the engines' known faults for operators."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from kvproxy.features.shield.findings import find_open_faults
from kvproxy.features.shield.rules import ADVISORIES, Rule
from kvproxy.features.shield.settings import ShieldMode
from kvproxy.operate.doctor.report import Severity
from tests.docs.blocks import ROOT, block
from tests.operate.admin.support import admin_of, proxy_of
from tests.operate.doctor.setup import ENGINE, cluster, visit
from tests.support.clock import FakeClock
from tests.support.proxy import running_proxy

CHAIN: dict[str, Any] = {"policy": "round_robin", "filters": ["inference_request", "router"]}
PAGE = "kvproxy/features/shield/README.md"
THREE = {name: f"http://127.0.0.1:{port}" for port, name in enumerate("abc", start=9)}


@pytest.mark.parametrize(("mode", "done"), [(ShieldMode.WARN, "and pass"), (ShieldMode.REFUSE, "are refused")])
def test_the_page_names_what_is_open(mode: ShieldMode, done: str) -> None:
    """Engines with their versions, the field, the harm, and the release to upgrade to."""
    proxy = proxy_of(clock=FakeClock(), endpoints=THREE)
    engines = proxy.clusters["default"].engines
    for engine, software in zip(engines, ("vLLM 0.18.1", "vLLM 0.29.0", ""), strict=True):
        engine.software = software
    found = list(find_open_faults(proxy.clusters, mode))
    [huge] = [one for one in found if "huge number" in one.what]
    assert huge.what.startswith("a (vLLM 0.18.1): n: ")
    assert done in huge.what
    assert "0.19.0 or later (GHSA-3mwp-wvh9-7528" in huge.fix
    [scores] = [one for one in found if "x-request-id" in one.what]
    assert scores.what.startswith("a, b (vLLM 0.18.1, vLLM 0.29.0)")
    [unknown] = [one for one in found if "is not known" in one.what]
    assert unknown.what.startswith("the version of c ")


def test_the_page_says_nothing_of_engines_that_were_not_asked_or_are_well() -> None:
    """Nor of a fault that no release has mended."""
    proxy = proxy_of(clock=FakeClock(), endpoints=THREE)
    for engine, software in zip(proxy.clusters["default"].engines, ("vLLM 0.32.0", "SGLang", None), strict=True):
        engine.software = software
    assert list(find_open_faults(proxy.clusters, ShieldMode.WARN)) == []


async def test_the_live_page_shows_them() -> None:
    """Unless the shield is off."""
    for shield, shown in (("warn", True), ("off", False)):
        proxy = proxy_of(clock=FakeClock(), endpoints=THREE, shield=shield)
        for engine in proxy.clusters["default"].engines:
            engine.software = "vLLM 0.18.1"
        async with admin_of(proxy) as client:
            findings = (await client.get("/live")).json()["findings"]
        assert any("huge number" in one["what"] for one in findings) is shown


async def test_doctor_names_what_is_open() -> None:
    """A warning for each fault, and a good word where there is none."""
    old = replace(ENGINE, version="0.18.0")
    async with cluster({"a": old}, controller=None) as site:
        report = await visit({"endpoints": site.urls, **CHAIN})
        found = [one for one in report.findings if one.check == "shield"]
        assert {one.severity for one in found} == {Severity.WARNING}
        assert any("a (vLLM 0.18.0): n:" in one.what for one in found)
        proxy = proxy_of(clock=FakeClock(), endpoints=site.urls)
        proxy.clusters["default"].engines[0].software = "vLLM 0.18.0"
        shown = [(one.where, one.what) for one in find_open_faults(proxy.clusters, ShieldMode.WARN)]
        assert shown == [(one.where, one.what) for one in found]  # the page shows them once
        off = await visit({"endpoints": site.urls, **CHAIN, "shield": "off"})
        assert not [one for one in (*off.findings, *off.passed) if one.check == "shield"]
    async with cluster({"a": ENGINE}, controller=None) as site:
        report = await visit({"endpoints": site.urls, **CHAIN})
        [good] = [one for one in report.passed if one.check == "shield"]
        assert "no known fault" in good.what


async def test_the_example_of_the_page() -> None:
    """Body and answer as they stand there, at a simulated engine of the version that they name."""
    shell, answer = (
        block(PAGE, "curl -s"),
        block(PAGE, '"code":"shield"'),
    )
    version, body = re.findall(r"--engine-version (\S+)|-d '([^']*)'", shell)
    async with (
        cluster({"a": replace(ENGINE, version=version[0])}, controller=None) as site,
        running_proxy(site.urls, shield="refuse") as proxy,
    ):
        headers = {"content-type": "application/json"}
        refused = await proxy.client.post("/v1/completions", content=body[1], headers=headers)
    assert (refused.status_code, refused.text) == (400, answer.strip())


def test_the_page_has_each_rule() -> None:
    """With the release that the table of the code names."""
    page = (ROOT / PAGE).read_text()
    for rule, row in ADVISORIES.items():
        fixed = "none yet" if row.fixed is None else ".".join(map(str, row.fixed[:3]))
        assert re.search(rf"^\| `{rule.value}` \|[^|]*\|[^|]*\| {re.escape(fixed)}", page, re.MULTILINE), rule


def test_rules_are_named_as_metrics_label_them() -> None:
    """Closed: nothing of a request becomes a label."""
    assert all(rule.value.isidentifier() for rule in Rule)
