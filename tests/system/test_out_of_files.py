"""A process that can open no further file: its own trouble, and no engine's."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from collections.abc import Iterator
from typing import Any

import pytest

from kvproxy.cluster.prober import ProbeOutcome
from kvproxy.operate.commands.serving import fit_connections
from kvproxy.proxy.listener.server import Server
from tests.support.fake_engine import FakeEngine
from tests.support.proxy import chat, running_proxy
from tests.support.until import until


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": request.param}


@contextlib.contextmanager
def no_free_descriptor() -> Iterator[None]:
    """Every descriptor is taken for the length of the block."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open("/dev/null", os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken[0] + 1, 64), before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in taken:
            os.close(descriptor)


async def test_no_engine_is_blamed_for_it(caplog: pytest.LogCaptureFixture) -> None:
    """Requests get 503 meanwhile, probes say nothing, no endpoint is taken out, no breaker opens; it is counted."""
    engine = FakeEngine("a")
    health = {"active": True, "interval": "500ms", "timeout": "5s", "unhealthy_threshold": 1, "eject_after": 1}
    filters = ["inference_request", {"kvcache": {"engine_metrics_interval": 0, "kv_events": False}}, "router"]
    settings = {"health": health, "pool": {"idle_timeout": 0}, "filters": filters}
    async with Server(engine) as server, running_proxy({"a": server.url}, **settings) as proxy:
        endpoint = proxy.proxy.clusters["default"].endpoints[0]

        def probes(outcome: ProbeOutcome) -> float:
            return proxy.metric("kvproxy_health_probes_total", cluster="default", endpoint="a", outcome=outcome)

        assert (await proxy.client.post("/v1/chat/completions", json=chat())).status_code == 200
        good = probes(ProbeOutcome.OK)
        await until(lambda: probes(ProbeOutcome.OK) > good and not server.connections)  # none is under way
        with no_free_descriptor():
            for _ in range(3):
                refused = await proxy.client.post("/v1/chat/completions", json=chat())
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_file_descriptors")
            await until(lambda: probes(ProbeOutcome.NOT_SENT) >= 1)
        assert proxy.metric("kvproxy_endpoint_up", cluster="default", endpoint="a") == 1
        assert (endpoint.health.failures, endpoint.breaker.state) == (0, "closed")
        assert probes(ProbeOutcome.UNREACHABLE) == 0
        assert proxy.metric("kvproxy_upstream_connects_total", outcome="no_file_descriptors") >= 3
        assert (await proxy.client.post("/v1/chat/completions", json=chat())).status_code == 200
    warnings = [record for record in caplog.records if record.name == "kvproxy.base.upstream.pool"]
    assert len(warnings) <= 2  # of the pool for requests and of the one for probes; readings are off
    assert "open files" in warnings[0].getMessage()


@pytest.mark.parametrize(
    ("wanted", "open_files", "fit"),
    [
        (10_000, 1_048_576, 10_000),
        (10_000, -1, 10_000),
        (10_000, 1024, 451),
        (10_000, 256, 90),
        (50, 256, 50),
        (9, 10, 1),
    ],
)
def test_client_connections_leave_room_for_the_engines(
    wanted: int, open_files: int, fit: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Two sockets a request, some for refusals, and 64 files for all else; said once at the start."""
    with caplog.at_level(logging.WARNING):
        assert fit_connections(wanted, open_files=open_files) == fit
    assert bool(caplog.records) == (fit < wanted)
    assert fit == 1 or fit == wanted or 2 * fit + fit // 8 + 64 <= open_files
