"""Active probing: paced, bounded, judged; over real sockets where the answer matters."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from starlette.types import Receive, Scope, Send

from kvproxy.base.background_task import TaskSet
from kvproxy.base.errors import ConnectError, FirstByteTimeout, NoDescriptors
from kvproxy.base.types import EndpointId
from kvproxy.base.upstream.pool import UpstreamPool
from kvproxy.cluster.endpoint import Condition
from kvproxy.cluster.engine import Engine as ClusterEngine
from kvproxy.cluster.prober import FIRST_PROBES_S, MAX_CONCURRENT, HttpProbe, ProbeOutcome, Prober
from kvproxy.cluster.settings import EndpointSettings, HealthCheckSettings
from tests.cluster.conftest import MakeCluster, configs
from tests.support.loopback import serve
from tests.support.until import until

SETTINGS = HealthCheckSettings(interval=5, timeout=0.02)


class Pauses:
    """A sleep that lasts until it is let go on; every pause is noted."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self._waiting: list[asyncio.Event] = []

    async def __call__(self, seconds: float) -> None:
        self.asked.append(seconds)
        event = asyncio.Event()
        self._waiting.append(event)
        await event.wait()

    def go_on(self) -> None:
        """End every pause that began so far."""
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            event.set()


async def turns(count: int = 20) -> None:
    """Let every task run as far as it can."""
    for _ in range(count):
        await asyncio.sleep(0)


class Results:
    """A prober's results."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, ProbeOutcome]] = []
        self.new = asyncio.Event()

    def __call__(self, engine: ClusterEngine, outcome: ProbeOutcome) -> None:
        self.seen.append((str(engine.id), outcome))
        self.new.set()


@contextlib.asynccontextmanager
async def prober_of(
    probe: Callable[[ClusterEngine], Awaitable[bool]] | None,
    results: Results,
    pauses: Pauses,
    settings: HealthCheckSettings = SETTINGS,
) -> AsyncIterator[Prober]:
    """With the set its tasks are in."""
    async with TaskSet() as tasks:
        yield Prober("c", settings, probe=probe, tasks=tasks, on_result=results, rng=random.Random(1), sleep=pauses)


async def well(_engine: ClusterEngine) -> bool:
    return True


async def test_every_endpoint_is_probed_at_its_own_pace(make_cluster: MakeCluster) -> None:
    """First probes are spread over a second, later ones jittered around the interval."""
    results, pauses = Results(), Pauses()
    bench = make_cluster(*"abcdefgh")
    async with prober_of(well, results, pauses) as prober:
        prober.probe_engines(bench.cluster.engines)
        await turns()
        assert results.seen == []
        first = list(pauses.asked)
        assert len(set(first)) == 8
        assert all(0 <= pause <= FIRST_PROBES_S for pause in first)
        assert max(first) - min(first) > 0.3
        for rounds in (1, 2):
            pauses.go_on()
            await turns()
            assert len(results.seen) == 8 * rounds
        later = pauses.asked[8:]
        assert len(set(later)) == 16
        assert all(4.5 <= pause <= 5.5 for pause in later)
        assert min(later) < 5.0 < max(later)


async def test_an_endpoint_probed_elsewhere_is_skipped_once(make_cluster: MakeCluster) -> None:
    """And of no more: when that process is gone the next turn asks again."""
    results, pauses = Results(), Pauses()
    cluster = make_cluster("a", "b").cluster
    async with prober_of(well, results, pauses) as prober:
        prober.probe_engines(cluster.engines)
        await turns()
        cluster.verdicts.receive_probe(EndpointId("a"), ProbeOutcome.OK)
        cluster.verdicts.receive_probe(EndpointId("gone"), ProbeOutcome.OK)
        for expected in (["b"], ["b", "a", "b"]):
            pauses.go_on()
            await turns()
            assert sorted(name for name, _ in results.seen) == sorted(expected)


async def test_probes_of_another_process_count_as_ones_own(make_cluster: MakeCluster) -> None:
    """For the verdict: as many failed ones in a row take an engine out, and bring it back. They are counted, told and
    logged where they were made."""
    bench = make_cluster("a", health=HealthCheckSettings(unhealthy_threshold=2, healthy_threshold=2))
    verdicts, told = bench.cluster.verdicts, list[tuple[str, ProbeOutcome]]()
    verdicts.send_probe = lambda engine, outcome: told.append((engine, outcome))
    health, (engine,) = bench.endpoint("a").health, bench.cluster.engines
    verdicts.record_probe(engine, ProbeOutcome.OK)
    verdicts.record_probe(engine, ProbeOutcome.NOT_SENT)
    verdicts.record_probe(engine, ProbeOutcome.FAILED)
    verdicts.receive_probe(EndpointId("a"), ProbeOutcome.TIMEOUT)
    assert not health.is_healthy
    verdicts.receive_probe(EndpointId("a"), ProbeOutcome.OK)
    verdicts.record_probe(engine, ProbeOutcome.OK)
    assert health.is_healthy
    assert told == [("a", ProbeOutcome.OK), ("a", ProbeOutcome.FAILED), ("a", ProbeOutcome.OK)]


async def test_a_few_are_probed_at_once(make_cluster: MakeCluster) -> None:
    """A large fleet does not send all its probes in one go."""
    running, most = 0, 0
    let_go = asyncio.Event()

    async def slow(_engine: ClusterEngine) -> bool:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await let_go.wait()
        running -= 1
        return True

    results, pauses = Results(), Pauses()
    names = [f"e{number}" for number in range(40)]
    async with prober_of(slow, results, pauses, HealthCheckSettings(timeout=60)) as prober:
        prober.probe_engines(make_cluster(*names).cluster.engines)
        await turns()
        pauses.go_on()
        await turns()
        assert running == MAX_CONCURRENT
        let_go.set()
        await turns(200)
    assert most == MAX_CONCURRENT
    assert len(results.seen) == 40


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ConnectError("refused"), ProbeOutcome.UNREACHABLE),
        (ConnectionResetError(), ProbeOutcome.UNREACHABLE),
        (FirstByteTimeout("slow"), ProbeOutcome.TIMEOUT),
        (NoDescriptors("too many open files"), ProbeOutcome.NOT_SENT),
        (KeyError("a bug in a probe"), ProbeOutcome.FAILED),
    ],
)
async def test_errors_are_outcomes(make_cluster: MakeCluster, error: Exception, outcome: ProbeOutcome) -> None:
    """Not even a broken probe ends the probing."""

    async def failing(_engine: ClusterEngine) -> bool:
        raise error

    results, pauses = Results(), Pauses()
    async with prober_of(failing, results, pauses, HealthCheckSettings(timeout=60)) as prober:
        prober.probe_engines(make_cluster("a").cluster.engines)
        for _ in range(3):
            await turns()
            pauses.go_on()
        await turns()
    assert results.seen == [("a", outcome)] * 3


async def test_a_probe_that_hangs_ends_at_its_timeout(make_cluster: MakeCluster) -> None:
    """And is a failed one."""

    async def hang(_engine: ClusterEngine) -> bool:
        await asyncio.Event().wait()
        return True

    results, pauses = Results(), Pauses()
    async with prober_of(hang, results, pauses) as prober:
        prober.probe_engines(make_cluster("a").cluster.engines)

        def is_over() -> bool:
            pauses.go_on()
            return ("a", ProbeOutcome.TIMEOUT) in results.seen

        await until(is_over)  # on a busy machine this process itself may stand still for so long
    assert {outcome for _, outcome in results.seen} <= {ProbeOutcome.TIMEOUT, ProbeOutcome.STALLED}


async def test_a_probe_during_which_this_process_stood_still_says_nothing(make_cluster: MakeCluster) -> None:
    """The answer came in time, and its timeout was over when it could be read: neither here nor elsewhere the engine is
    blamed for that."""

    async def answer_soon(_engine: ClusterEngine) -> bool:
        asyncio.get_running_loop().call_soon(time.sleep, 2 * SETTINGS.timeout)
        await asyncio.sleep(0.1 * SETTINGS.timeout)  # a timer, as the probe's limit is: both are due after the stall
        return True

    results, pauses, told = Results(), Pauses(), list[ProbeOutcome]()
    bench = make_cluster("a", health=SETTINGS)
    engine, verdicts = bench.cluster.engines[0], bench.cluster.verdicts
    verdicts.send_probe = lambda name, outcome: told.append(outcome)
    async with prober_of(answer_soon, results, pauses) as prober:
        prober.probe_engines([engine])
        await turns()
        pauses.go_on()
        await asyncio.wait_for(results.new.wait(), 60)
    assert results.seen == [("a", ProbeOutcome.STALLED)]
    verdicts.record_probe(engine, ProbeOutcome.STALLED)
    assert (engine.health.is_healthy, engine.health.failed_probes, told) == (True, 0, [])
    assert bench.endpoint("a").metrics.last_probe == "stalled"


async def test_tasks_follow_the_endpoints(make_cluster: MakeCluster) -> None:
    """One named task each; none for an endpoint that left; none before the cluster runs, and none after it."""

    def names() -> set[str]:
        return {task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("probe ")}

    bench = make_cluster("a", "b", with_={"probe": well, "sleep": Pauses()}, health=SETTINGS)
    await turns()
    assert names() == set()
    for _ in range(2):
        async with bench.cluster:
            assert names() == {"probe c/a", "probe c/b"}
            bench.cluster.apply_endpoints(configs("b", "d"))
            await turns()
            assert names() == {"probe c/b", "probe c/d"}
            bench.cluster.apply_endpoints(configs("a", "b"))
        assert names() == set()


@pytest.mark.parametrize("probe", [None, well])
async def test_without_a_probe_or_with_probing_off_nothing_runs(
    make_cluster: MakeCluster, probe: Callable[[ClusterEngine], Awaitable[bool]] | None
) -> None:
    """`active: false`."""
    pauses = Pauses()
    async with prober_of(probe, Results(), pauses, HealthCheckSettings(active=probe is None)) as prober:
        prober.probe_engines(make_cluster("a").cluster.engines)
        await turns()
    assert pauses.asked == []


async def test_probes_decide_about_endpoints(make_cluster: MakeCluster) -> None:
    """The cluster takes the verdict over, counts it, and forgets it when the probe answers again."""
    sick: set[str] = {"a"}
    asked = asyncio.Event()

    async def probe(engine: ClusterEngine) -> bool:
        asked.set()
        return str(engine.id) not in sick

    health = {"interval": 0.002, "unhealthy_threshold": 2, "healthy_threshold": 1}
    bench = make_cluster("a", "b", health=health, with_={"probe": probe})
    endpoint = bench.endpoint("a")

    async def until(condition: Condition) -> None:
        while endpoint.condition(bench.clock()) is not condition:
            asked.clear()
            await asked.wait()

    async with bench.cluster:
        await asyncio.wait_for(until(Condition.UNHEALTHY), 60)
        assert bench.ids() == {"b"}
        assert bench.sample("kvproxy_ejections_total", cluster="c", endpoint="a", reason="probes") == 1
        assert bench.sample("kvproxy_endpoint_up", cluster="c", endpoint="a") == 0
        sick.clear()
        await asyncio.wait_for(until(Condition.UP), 60)
        assert bench.ids() == {"a", "b"}
    assert (bench.sample("kvproxy_health_probes_total", cluster="c", endpoint="a", outcome="ok") or 0) >= 1
    assert (bench.sample("kvproxy_health_probes_total", cluster="c", endpoint="a", outcome="failed") or 0) >= 1


class Engine:
    """Answers its health path with a status and notes what it was asked."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.asked: list[tuple[str, str | None]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        self.asked.append((scope["path"], headers.get(b"authorization", b"").decode() or None))
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"" if self.status == 204 else b"x" * 100_000})


@pytest.mark.parametrize(("status", "verdict"), [(200, True), (204, True), (301, False), (404, False), (503, False)])
async def test_any_2xx_is_well(make_cluster: MakeCluster, status: int, verdict: bool) -> None:
    """On the configured path below the endpoint's base path, with the endpoint's own credential."""
    engine = Engine(status)
    async with serve(engine) as url, UpstreamPool(max_idle=0) as pool:
        endpoint = make_cluster(endpoints=(EndpointSettings(id="a", url=f"{url}/base", api_key="k"),)).endpoint("a")
        assert await HttpProbe(pool, HealthCheckSettings(path="/healthz"))(endpoint.engine) is verdict
    assert engine.asked == [("/base/healthz", "Bearer k")]


async def test_an_http_probe_of_nobody_is_unreachable(make_cluster: MakeCluster) -> None:
    """A refused connection is an outcome like another."""
    async with serve(Engine(200)) as url:
        pass
    results, pauses = Results(), Pauses()
    async with UpstreamPool() as pool:
        probe = HttpProbe(pool, HealthCheckSettings())
        async with prober_of(probe, results, pauses, HealthCheckSettings(timeout=5)) as prober:
            prober.probe_engines(make_cluster(endpoints=(EndpointSettings(id="a", url=url),)).cluster.engines)
            await turns()
            pauses.go_on()
            await asyncio.wait_for(results.new.wait(), 60)
    assert results.seen == [("a", ProbeOutcome.UNREACHABLE)]
