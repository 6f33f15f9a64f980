"""Reloads of a cluster that follows a file."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvproxy.cluster.settings import EndpointSettings
from kvproxy.cluster.sources.entries import Source
from tests.cluster.conftest import MakeCluster, configs
from tests.cluster.test_reconfigure import reconfigure
from tests.support.until import until


class Said:
    """A discovery that says what it is told to."""

    def __init__(self, *ids: str) -> None:
        self.ids = ids
        self.asked = 0

    async def endpoints(self) -> Sequence[EndpointSettings]:
        self.asked += 1
        return configs(*self.ids)


async def test_other_sources_are_asked_at_once(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """One of the same name keeps its endpoints until it answers; one that is gone takes them along."""
    never = asyncio.Event()

    async def sleep(seconds: float) -> None:
        await never.wait()

    old, gone = Said("a"), Said("x")
    sources = [Source("file", old, 1.0), Source("dns", gone, 1.0)]
    bench = make_cluster(with_={"sources": sources, "sleep": sleep})
    file = tmp_path / "endpoints.yaml"
    file.write_text("b: http://127.0.0.1:9\n")

    def ids() -> list[str]:
        return [str(endpoint.id) for endpoint in bench.cluster.endpoints]

    async with bench.cluster:
        assert sorted(ids()) == ["a", "x"]
        reconfigure(bench, discovery={"file": {"path": str(file)}})
        assert ids() == ["a"]
        await until(lambda: ids() == ["b"])
    assert (old.asked, gone.asked) == (1, 1)
    reconfigure(bench, discovery={})
    assert ids() == []
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("discovery")]


async def test_discovery_is_part_of_it(make_cluster: MakeCluster, tmp_path: Any) -> None:
    """Endpoints of a file that is no longer named leave; the static ones stay as they are."""
    file = tmp_path / "endpoints.yaml"
    file.write_text("x: http://127.0.0.1:9\n")
    bench = make_cluster("a")
    static = bench.endpoint("a")
    async with bench.cluster:
        reconfigure(bench, discovery={"file": {"path": str(file)}})
        await until(lambda: [each.id for each in bench.cluster.endpoints] == ["a", "x"])
        reconfigure(bench, discovery={})
        assert bench.cluster.endpoints == (static,)


async def test_a_cluster_that_is_closed_takes_every_endpoint_along(make_cluster: MakeCluster, tmp_path: Any) -> None:
    """Static ones, discovered ones and those of an operator, with their metric series; and no source is asked again."""
    file = tmp_path / "endpoints.yaml"
    file.write_text("x: http://127.0.0.1:9\n")
    bench = make_cluster("a", discovery={"file": {"path": str(file)}})
    async with bench.cluster:
        (added,) = configs("b")
        assert bench.cluster.operator.add_endpoint(added)
        assert [each.id for each in bench.cluster.endpoints] == ["a", "x", "b"]
        bench.cluster.close()
        assert bench.cluster.endpoints == ()
        assert not [name for endpoint in ("a", "b", "x") for name in bench.series(endpoint)]
        await until(lambda: not [task for task in asyncio.all_tasks() if task.get_name().startswith("discovery")])
