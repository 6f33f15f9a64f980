"""Findings of the doctor about the discovery from Kubernetes."""

from __future__ import annotations

from kvproxy.operate.doctor.report import Severity
from tests.operate.doctor.setup import only, visit
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.loopback import serve


async def test_an_account_that_may_not_watch() -> None:
    """Whether it may not even list, or only not watch: what it needs, and where that is told."""
    fake = FakeKubernetes()
    fake.forbid = frozenset({"watch"})
    async with serve(fake) as url:
        settings = {"discovery": {"kubernetes": {"service": "vllm", "namespace": "models", "api": {"url": url}}}}
        watching = only(await visit(settings))
        fake.forbid = frozenset({"list", "watch"})
        listing = only(await visit(settings))
    for found in (watching, listing):
        assert (found.severity, found.where) == (Severity.PROBLEM, "cluster default")
        assert "get, list and watch endpointslices in namespace models" in found.what
        assert "Role" in found.fix


async def test_a_source_that_knows_no_endpoint() -> None:
    """Scaled to zero, or a name that fits nothing: worth a word."""
    async with serve(FakeKubernetes()) as url:
        settings = {"discovery": {"kubernetes": {"service": "vllm", "namespace": "models", "api": {"url": url}}}}
        found = only(await visit(settings))
    assert (found.severity, found.what) == (Severity.WARNING, "the kubernetes discovery lists no endpoint")
