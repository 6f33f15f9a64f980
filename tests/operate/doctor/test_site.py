"""Targets of a visit: discovery, switched-off filters, this host's limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvproxy.base.settings.compose import composed
from kvproxy.base.types import utc_seconds
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.operate.config.schema import find_kvcache_settings
from kvproxy.operate.doctor.check_configuration import check_certificates, check_public_paths
from kvproxy.operate.doctor.checks import diagnose_setup
from kvproxy.operate.doctor.deployment import survey_deployment
from kvproxy.operate.doctor.report import Severity
from kvproxy.operate.doctor.tools import Tools
from tests.operate.doctor.setup import ENGINE, cluster, only, parsed, visit
from tests.support.certificates import make_certificate

PUBLIC = "clients reach inference, the models and tokenizing"
PLAIN = replace(ENGINE, kv_events=None)


#: Nothing is to be said of engines that publish none.
EVENTS_OFF = {"kvcache": {"kv_events": False}}


async def test_discovered_endpoints_are_visited(tmp_path: Path) -> None:
    """As they are at the moment."""
    file = tmp_path / "endpoints.yaml"
    async with cluster({"a": PLAIN}, controller=None) as site:
        file.write_text(yaml.safe_dump([{"id": "a", "url": site.urls["a"]}]))
        report = await visit({"discovery": {"file": {"path": str(file)}}, "filters": EVENTS_OFF})
    assert report.findings == ()
    assert any(one.where == "endpoint a" for one in report.passed)


async def test_a_discovery_that_fails(tmp_path: Path) -> None:
    """A problem of the configuration, with its place."""
    file = tmp_path / "endpoints.yaml"
    file.write_text("nonsense")
    found = only(await visit({"discovery": {"file": {"path": str(file)}}}))
    assert (found.severity, found.where) == (Severity.PROBLEM, "cluster default")
    assert "clusters.default.discovery.file" in found.fix


async def test_open_files() -> None:
    """Fewer than the configured connections: a warning with the number needed."""
    async with cluster({"a": PLAIN}, controller=None) as site:
        raw = {"endpoints": site.urls, "limits": {"connections": 100}, "pool": {"max_connections": 50}}
        config = parsed({**raw, "filters": EVENTS_OFF})
        few = await diagnose_setup(config, tools=Tools(), open_files=256)
        enough = await diagnose_setup(config, tools=Tools(), open_files=278)
        unlimited = await diagnose_setup(config, tools=Tools(), open_files=-1)
    found = only(few)
    assert (found.severity, found.check) == (Severity.WARNING, "open files")
    assert "256 open files are allowed, 278 needed" in found.what
    assert "LimitNOFILE=278" in found.fix
    assert enough.findings == unlimited.findings == ()


def test_settings_of_the_kvcache_filter() -> None:
    """Its own, its defaults, or none at all."""
    endpoints = {"a": "http://127.0.0.1:8000"}
    chain = ["inference_request", {"kvcache": {"kv_events": True}}, "router"]
    kind = composed(KvCacheSettings)
    assert find_kvcache_settings(parsed({"endpoints": endpoints, "filters": chain})) == kind(kv_events=True)
    assert find_kvcache_settings(parsed({"endpoints": endpoints})) == kind()
    assert find_kvcache_settings(parsed({"endpoints": endpoints, "policy": "random", "filters": ["router"]})) is None
    off = ["inference_request", {"kvcache": {"enabled": False}}, "router"]
    assert find_kvcache_settings(parsed({"endpoints": endpoints, "filters": off})) is None


async def test_this_process_tells_its_own_limit() -> None:
    """Asked for where no setting says it."""
    async with Tools() as tools:
        site = await survey_deployment(parsed({"endpoints": {"a": "http://127.0.0.1:8000"}}), tools=tools)
    assert site.open_files == -1 or site.open_files > 0


async def test_the_default_model_must_be_served() -> None:
    """A body without a model is sent to it."""
    async with cluster({"a": PLAIN}, controller=None) as site:
        chain = ["inference_request", {"kvcache": {"default_model": "llama", "kv_events": False}}, "router"]
        found = only(await visit({"endpoints": site.urls, "filters": chain}))
    assert "no engine serves 'llama'" in found.what


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, [f"{PUBLIC}; no other path of an engine"]),
        (
            {"filters": {"router": {"paths": ["/version"]}}, "routes": [{"prefix": "/tts"}]},
            [f"{PUBLIC}, and /tts, /tts/, /version; no other path of an engine"],
        ),
        ({"filters": {"router": {"paths": "all"}}}, []),
    ],
)
async def test_which_paths_are_public_is_said(more: dict[str, Any], said: list[str]) -> None:
    """That all of them are is a warning of the configuration."""
    found = await check_public_paths(parsed({"endpoints": ["http://127.0.0.1:8000"], **more})).collect()
    assert [one.what for one in found] == said


async def test_certificates_of_its_own_that_expire_soon(tmp_path: Path) -> None:
    """Of each listener, and towards engines. One that lasts is well."""
    files = make_certificate(tmp_path, "127.0.0.1")  # until tomorrow
    tls = {"certificate": str(files.certificate), "private_key": str(files.private_key)}
    engine = {"id": "a", "url": "https://127.0.0.1:1", "cert_file": tls["certificate"], "key_file": tls["private_key"]}
    config = parsed({"endpoints": [engine], "listen": {"tls": tls}})
    found = await check_certificates(config, utc_seconds).collect()
    places = ["listen.tls.certificate", "default/a cert_file"]
    assert [(one.severity, one.where) for one in found] == [(Severity.WARNING, place) for place in places]
    assert {one.what for one in found} == {"the certificate expires in 1.0 days"}
    (well,) = await check_certificates(config, lambda: utc_seconds() - 30 * 86_400).collect()
    assert well.severity is Severity.OK
    assert not await check_certificates(parsed({"endpoints": ["http://h:1"]}), utc_seconds).collect()
