"""Two lives of a service: what the second one knows of the first."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import AsyncIterator, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvproxy.base.types import EndpointId
from kvproxy.cache.overlap.last_served import LastServed
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cluster.cluster import Cluster
from kvproxy.embed.middleware import KVCacheMiddleware
from kvproxy.features.snapshot import restart as restart_module
from kvproxy.features.snapshot.restart import SnapshotFile, Store, WarmRestart
from kvproxy.features.snapshot.settings import SnapshotSettings
from kvproxy.operate.runtime import saved_state as contents
from kvproxy.operate.runtime.saved_state import Contents, Outcome, Saved, TablesKept
from tests.cache.overlap.test_last_served import held, request_of, served
from tests.cache.support import NOWHERE, A, B, Fake, Service, chat, cluster_of, engine, long_text, running, settings
from tests.support.asgi import Inner, call, http_scope
from tests.support.clock import FakeClock
from tests.support.loopback import serve
from tests.support.until import until

TURN, OTHER = long_text("w"), long_text("x")
URLS = {"a": NOWHERE, "b": "http://127.0.0.1:8"}
WALL = FakeClock(1_800_000_000.0)


def keeping(path: Path, **more: Any) -> KvCacheSettings:
    return settings(snapshot={"path": str(path / "snapshot"), **more})


@contextlib.asynccontextmanager
async def life(
    path: Path, cluster: Cluster | None = None, *, wall: FakeClock = WALL, **more: Any
) -> AsyncIterator[Service]:
    """Run a service from its start to its graceful end."""
    cluster = cluster or cluster_of(URLS, policy="kv_aware")
    async with running(keeping(path, **more), cluster, wall_clock=wall) as service:
        yield service


async def first_life(path: Path, **more: Any) -> None:
    """In which A got one chat and B another."""
    async with life(path, **more) as service:
        await service.serve(chat(TURN), A)
        await service.serve(chat(OTHER), B)


async def matched(service: Service, content: str = TURN) -> set[str]:
    """Return the endpoints believed to hold this chat."""
    return set((await service.ask(chat(content))).overlaps.by_endpoint)


async def test_the_next_life_knows_who_holds_what(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From its first request on; one line says so."""
    caplog.set_level(logging.INFO, "kvproxy.kvcache")
    await first_life(tmp_path)
    wall = FakeClock(WALL.now + 42)
    async with life(tmp_path, wall=wall) as service:
        assert (await service.ask(chat(TURN))).preferred == A
        assert (await service.ask(chat(OTHER))).preferred == B
        assert service.metric("kvproxy_kvcache_snapshot_restores_total", outcome="restored") == 1
        assert service.metric("kvproxy_kvcache_snapshot_bytes") == (tmp_path / "snapshot").stat().st_size
        assert 42 <= service.metric("kvproxy_kvcache_snapshot_age_seconds") < 60
    assert "warm start: " in caplog.text
    assert "2 endpoints from" in caplog.text


async def test_lengths_and_speeds_come_along(tmp_path: Path) -> None:
    """Lessons from engines: tokens of a prompt, seconds of a prefill."""
    async with life(tmp_path) as service:
        service.kv.state.bytes_per_token.observe_prompt("m", 6000, 1000)
        speeds = service.cluster.speeds
        assert speeds is not None
        for _ in range(20):
            speeds.observe(A, (1.0, 1000.0, 500_000.0, 0.0), 2.0, 0.0)
        taught = speeds.estimates(0.0)
    async with life(tmp_path) as service:
        assert service.kv.state.bytes_per_token.look_up("m") == 6.0
        assert service.cluster.speeds is not None
        assert service.cluster.speeds.estimates(0.0).tokens_per_s == taught.tokens_per_s


async def test_ranks_that_were_found_out_come_along(tmp_path: Path) -> None:
    """Each with what it holds, before the engine is asked again; not where it is at another address."""
    rank = EndpointId("a@1")
    async with life(tmp_path) as service:
        service.cluster.ranks.observe_ranks(service.cluster.engines[0], (0, 1), (0, 1))
        await service.serve(chat(TURN), rank)
    async with life(tmp_path) as service:
        assert [str(one.id) for one in service.cluster.endpoints] == ["a@0", "a@1", "b"]
        assert (await service.ask(chat(TURN))).preferred == rank
    moved = cluster_of({**URLS, "a": "http://127.0.0.1:7"}, policy="kv_aware")
    async with life(tmp_path, moved) as service:
        assert [str(one.id) for one in service.cluster.endpoints] == ["a", "b"]
        assert await matched(service) == set()


async def test_where_sessions_and_responses_were_served_comes_along(tmp_path: Path) -> None:
    """A chat whose history only its engine has goes on there, in the next life and in the one after; not where the
    engine is another one now, and an hour after it was served no more."""
    async with life(tmp_path) as service:
        served(service, request_of("s"), A, tokens=3000)
        served(service, request_of(), B, tokens=8000, answer=100, response="resp_1")
    first, second = request_of("s", previous_response_id="unknown"), request_of(previous_response_id="resp_1")
    for age_s in (60.0, 120.0):
        async with life(tmp_path, wall=FakeClock(WALL.now + age_s)) as service:
            assert held(service, first)[A].tokens == 3000
            assert held(service, second)[B].tokens == 8000
    moved = cluster_of({**URLS, "a": "http://127.0.0.1:7"}, policy="kv_aware")
    async with life(tmp_path, moved, wall=FakeClock(WALL.now + 180)) as service:
        assert held(service, first) == {}
        assert held(service, second)[B].tokens == 8000
    async with life(tmp_path, wall=FakeClock(WALL.now + 180 + 3500)) as service:
        assert held(service, second) == {}


async def test_an_engine_that_restarted_meanwhile_has_no_histories(tmp_path: Path) -> None:
    """The start of its life before is known from the events."""
    async with life(tmp_path) as service:
        service.kv.overlap.indexes["default"].process_started(A, 100.0)
        served(service, request_of("s"), A, tokens=3000)
    asked = request_of("s", previous_response_id="unknown")
    async with life(tmp_path) as service:
        assert held(service, asked)[A].tokens == 3000
        assert service.kv.overlap.indexes["default"].process_started(A, 200.0)
        assert held(service, asked) == {}


async def test_the_step_in_which_an_engine_reuses_comes_along(tmp_path: Path) -> None:
    """Learned or told; it goes on being learned from there. An endpoint that is gone takes its own with it."""
    async with life(tmp_path) as service:
        steps = service.kv.state.indexes["default"].steps
        for number in range(8):
            steps.observe_reuse(
                A, held_tokens=1000 + number % 2 * 512, cached_tokens=512 + number % 2 * 512, blocks=[number]
            )
        steps.tell_block_size(B, 256)
        assert steps.known == {A: 512, B: 256}
    async with life(tmp_path, cluster_of({**URLS, "b": "http://127.0.0.1:7"}, policy="kv_aware")) as service:
        assert service.kv.state.indexes["default"].steps.known == {A: 512}
    async with life(tmp_path) as service:
        steps = service.kv.state.indexes["default"].steps
        steps.tell_block_size(A, 16)
        assert steps.known == {A: 512}
        for _ in range(2):
            steps.observe_reuse(A, held_tokens=768, cached_tokens=768, blocks=[1])
        assert steps.known == {A: 256}


def _unreadable(tables: LastServed, now: float, *, max_bytes: int) -> Generator[None, None, TablesKept]:
    yield
    return TablesKept([b"\x91\x01"], [])


async def test_sessions_that_cannot_be_read_do_not_hold_up_the_rest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later version may write them otherwise."""
    caplog.set_level(logging.INFO, "kvproxy.kvcache")
    async with life(tmp_path) as service:
        await service.serve(chat(TURN), A)
        monkeypatch.setattr(contents, "dump_served", _unreadable)
    monkeypatch.undo()
    async with life(tmp_path) as service:
        assert await matched(service) == {A}
    assert "sessions of cluster default are not all taken over" in caplog.text


async def test_a_policy_that_learns_nothing_has_nothing_to_keep(tmp_path: Path) -> None:
    """And a later one that does starts from its priors."""
    await first_life(tmp_path, cluster=cluster_of(URLS, policy="round_robin"))
    async with life(tmp_path) as service:
        assert await matched(service) == {A}
        assert service.cluster.speeds is not None
        assert service.cluster.speeds.estimates(0.0).samples == 0


async def test_speeds_that_cannot_be_taken_over_do_not_hold_up_the_rest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another version may have other priors."""
    caplog.set_level(logging.INFO, "kvproxy.kvcache")
    cluster = cluster_of(URLS, policy="kv_aware")
    assert cluster.speeds is not None
    cluster.speeds._scale = (1.0, 1.0, 1.0)
    await first_life(tmp_path, cluster=cluster)
    async with life(tmp_path) as service:
        assert await matched(service) == {A}
    assert "other priors" in caplog.text


@pytest.mark.parametrize("age_s", [3601, -61])
async def test_a_snapshot_that_is_too_old_is_not_used(tmp_path: Path, age_s: float) -> None:
    """Nor one from the future."""
    await first_life(tmp_path)
    async with life(tmp_path, wall=FakeClock(WALL.now + age_s)) as service:
        assert await matched(service) == set()
        kept = service.kv.observers.find(WarmRestart)
        assert kept is not None
        assert kept.restored is Outcome.TOO_OLD


async def test_only_endpoints_that_are_still_there_come_back(tmp_path: Path) -> None:
    """Another address under the same id is another engine."""
    await first_life(tmp_path)
    async with life(tmp_path, cluster_of({"a": "http://127.0.0.1:7", "b": URLS["b"]})) as service:
        assert await matched(service) == set()
        assert await matched(service, OTHER) == {B}
        kept = service.kv.observers.find(WarmRestart)
        assert kept is not None
        assert kept.status()["restored_endpoints"] == 1


async def test_a_snapshot_of_other_endpoints_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Most likely a wrong path: two proxies with one file."""
    await first_life(tmp_path)
    async with life(tmp_path, cluster_of({"c": NOWHERE})) as service:
        assert service.metric("kvproxy_kvcache_snapshot_restores_total", outcome="other_endpoints") == 1
    assert "not at those addresses" in caplog.text


@pytest.mark.parametrize(
    ("spoil", "outcome"),
    [
        (lambda data: data[:-40], Outcome.CORRUPT),
        (lambda data: b"", Outcome.FOREIGN),
        (lambda data: data[:8] + b"\x63\0" + data[10:], Outcome.OTHER_VERSION),
        (lambda data: data + bytes(1 << 20), Outcome.TOO_LARGE),
    ],
)
async def test_a_spoilt_file_is_a_warning(
    tmp_path: Path, spoil: Any, outcome: Outcome, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line; the proxy starts empty, and the next snapshot replaces the file."""
    monkeypatch.setattr(restart_module, "MAX_BYTES", 1 << 20)
    await first_life(tmp_path)
    file = tmp_path / "snapshot"
    file.write_bytes(spoil(file.read_bytes()))
    async with life(tmp_path) as service:
        assert await matched(service) == set()
        assert service.metric("kvproxy_kvcache_snapshot_restores_total", outcome=outcome.value) == 1
        assert len([one for one in caplog.records if one.levelno >= logging.WARNING]) == 1
        await service.serve(chat(TURN), B)
    async with life(tmp_path) as service:
        assert await matched(service) == {B}


async def test_an_unreadable_file_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It belongs to another program, or is no file."""
    (tmp_path / "snapshot").mkdir()
    async with life(tmp_path) as service:
        assert service.metric("kvproxy_kvcache_snapshot_restores_total", outcome="unreadable") == 1
        assert await matched(service) == set()
    assert "starting empty" in caplog.text
    assert "no snapshot at" in caplog.text  # at the end it cannot be written either


async def test_columns_that_cannot_be_are_found_before_anything_changes(tmp_path: Path) -> None:
    """A whole file with a good checksum, written by a faulty proxy."""
    path = tmp_path / "snapshot"
    await first_life(tmp_path)
    store = SnapshotFile(path, max_bytes=1 << 20, wall_clock=WALL)
    snapshot = store.read()
    hashes = [bytes(one) + bytes(8) for one in snapshot.hashes]
    async with life(tmp_path, cluster_of({"z": NOWHERE})) as service:
        restart = restart_of(service, Faulty(Saved(snapshot.kept, [memoryview(one) for one in hashes], 0)))
        async with restart:
            assert restart.restored is Outcome.OTHER_ENDPOINTS
    async with running(settings(), cluster_of(URLS)) as service:
        restart = restart_of(service, Faulty(Saved(snapshot.kept, [memoryview(one) for one in hashes], 0)))
        async with restart:
            assert restart.restored is Outcome.CORRUPT
        assert service.kv.overlap.indexes["default"].approximate.counts.entries == 0


class Faulty:
    """A store on a failing disk; `fails` are the errors of the next writes."""

    def __init__(self, content: Saved | Exception, *fails: Exception | None) -> None:
        self.content = content
        self.fails = list(fails)
        self.writes: list[int] = []

    def read(self) -> Saved:
        if isinstance(self.content, Exception):
            raise self.content
        return self.content

    def write(self, pieces: Sequence[bytes]) -> int:
        error = self.fails.pop(0) if self.fails else None
        if error is not None:
            raise error
        self.writes.append(sum(map(len, pieces)))
        return self.writes[-1]


class Ticks:
    """A sleep that ends when the test says so."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self._go_on = asyncio.Semaphore(0)

    async def __call__(self, seconds: float) -> None:
        self.asked.append(seconds)
        if seconds >= 1:
            await self._go_on.acquire()

    def tick(self) -> None:
        self._go_on.release()


def restart_of(service: Service, store: Store, **more: Any) -> WarmRestart:
    """Beside the service's own, with a store of the test's."""
    contents = Contents(service.kv.state, clusters=service.kv.clusters, clock=FakeClock(), wall_clock=WALL)
    made = {"fresh": True, "metrics": service.metrics, "clock": FakeClock(), **more}
    return WarmRestart(SnapshotSettings(path="/kept/here"), contents, store, **made)


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_failures_to_write_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """And that they are over; each is counted."""
    caplog.set_level(logging.INFO, "kvproxy.kvcache")
    async with running(settings(), cluster_of(URLS)) as service:
        store, ticks = Faulty(OSError("gone"), FULL, FULL, ValueError("a bug"), None, FULL), Ticks()
        restart = restart_of(service, store, sleep=ticks)
        async with restart:
            assert restart.restored is Outcome.UNREADABLE
            for count in range(1, 6):
                ticks.tick()
                await until(partial(settled, service, count))
            assert writes(service) == (1, 4)
            assert restart.status()["failing"] is True
            assert ticks.asked.count(60.0) == 6
        assert restart.status()["failing"] is False
    said = [one.message for one in caplog.records if "no snapshot at /kept/here" in one.message]
    assert said == ["[kvcache] no snapshot at /kept/here: No space left on device"] * 2
    assert caplog.text.count("are written again") == 2


def writes(service: Service) -> tuple[float, float]:
    """Written and failed."""
    written, failed = (
        service.metric("kvproxy_kvcache_snapshot_writes_total", outcome=outcome) for outcome in ("written", "failed")
    )
    return written, failed


def settled(service: Service, count: int) -> bool:
    return sum(writes(service)) == count


async def test_whatever_reading_raises_the_proxy_starts(caplog: pytest.LogCaptureFixture) -> None:
    """A fault of ours must not keep it down; the trace says where."""
    async with (
        running(settings(), cluster_of(URLS)) as service,
        restart_of(service, Faulty(KeyError("a bug"))) as restart,
    ):
        assert restart.restored is Outcome.CORRUPT
    assert "KeyError" in caplog.text


async def test_the_end_is_written_too(tmp_path: Path) -> None:
    """Between two intervals, after the last request; an interval that failed takes nothing away."""
    async with running(settings(), cluster_of(URLS)) as service:
        store = Faulty(OSError("gone"))
        async with restart_of(service, store):
            await service.serve(chat(TURN), A)
        assert len(store.writes) == 1


async def test_others_run_between_the_steps() -> None:
    """However large the index: the loop is left alone after every slice."""
    async with running(settings(), cluster_of(URLS)) as service:
        for number in range(50):
            await service.serve(chat(long_text(f"w{number}", 50)), A)
        ticking, ticks = FakeClock(), Ticks()

        def clock() -> float:
            ticking.advance(0.0002)
            return ticking.now

        store = Faulty(OSError("gone"))
        async with restart_of(service, store, clock=clock, sleep=ticks, fresh=False) as restart:
            assert restart.restored is None
            await restart.write()
        assert 10 < ticks.asked.count(0.005) <= 60
        assert store.writes[0] > 0


async def test_the_bound_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the index holds; each cluster has its share."""
    monkeypatch.setattr(restart_module, "MAX_BYTES", 4096)
    async with life(tmp_path) as service:
        for number in range(50):
            await service.serve(chat(long_text(f"w{number}")), A)
    assert 2000 < (tmp_path / "snapshot").stat().st_size <= 4096
    async with life(tmp_path) as service:
        assert await matched(service, long_text("w49")) == {A}
        assert await matched(service, long_text("w0")) == set()


async def test_a_service_that_follows_another_is_not_filled_again(tmp_path: Path) -> None:
    """It has the running index, and what the file says is older."""
    await first_life(tmp_path)
    cluster = cluster_of(URLS)
    async with life(tmp_path, cluster) as before:
        before.kv.overlap.indexes["default"].forget_endpoint(A)
        async with running(keeping(tmp_path), cluster, state=before.kv.state) as after:
            assert await matched(after) == set()
            assert await matched(after, OTHER) == {B}
            await after.serve(chat(TURN), A)
            assert await matched(before) == {A}
            assert after.metric("kvproxy_kvcache_snapshot_restores_total", outcome="restored") == 0


async def test_a_file_that_another_service_keeps_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of two middlewares with one path the last to end would overwrite what the first has learned."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "snapshot")
    async with life(tmp_path) as first:
        await first.serve(chat(TURN), A)
        async with running(settings(snapshot={"path": str(link)}), cluster_of(URLS, policy="kv_aware")) as second:
            await second.serve(chat(OTHER), B)
            assert second.metric("kvproxy_kvcache_snapshot_restores_total", outcome="in_use") == 1
        assert not link.exists()
    assert f"no snapshot at {link}: another proxy or middleware of this process keeps it" in caplog.text
    async with life(tmp_path) as third:
        assert await matched(third) == {A}
        assert await matched(third, OTHER) == set()


def test_a_middleware_whose_loop_was_closed_keeps_no_file(tmp_path: Path) -> None:
    """Test clients end a loop without ending what ran in it."""
    make = partial(KVCacheMiddleware, Inner(), endpoints=URLS, settings={"snapshot": {"path": str(tmp_path / "s")}})
    left = make()
    asyncio.run(call(left, http_scope("/v1/chat/completions", method="POST"), body=b"{}"))

    async def serve_by_another() -> None:
        async with make():
            pass

    asyncio.run(serve_by_another())
    assert (tmp_path / "s").exists()
    assert left.status()["requests"] == 1


def showing(started_at: float) -> Fake:
    """Return an engine whose metrics have its start time."""
    return engine(metrics=lambda _: f"process_start_time_seconds {started_at}\n".encode())


@pytest.mark.parametrize(("began_s", "knows"), [(0.0, {A}), (500.0, set())])
async def test_an_engine_that_restarted_meanwhile_holds_nothing(
    tmp_path: Path, began_s: float, knows: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Its own start time says so: no clocks of two machines are compared."""
    caplog.set_level(logging.INFO, "kvproxy.kvcache")
    engine_at = showing(1_000.0)
    async with serve(engine_at) as url:
        async with life(tmp_path, cluster_of({"a": url})) as service:
            await service.kv.scraper.scrape_all()
            await service.serve(chat(TURN), A)
        engine_at.routes["/metrics"] = showing(1_000.0 + began_s).routes["/metrics"]
        async with life(tmp_path, cluster_of({"a": url})) as service:
            assert await matched(service) == {A}
            await service.kv.scraper.scrape_all()
            assert await matched(service) == knows
    assert ("default/a is a new process" in caplog.text) == (not knows)


@pytest.mark.parametrize(("began_s", "knows"), [(-1.0, {A}), (10.0, set())])
async def test_a_start_time_nobody_saw_is_held_against_the_snapshots(
    tmp_path: Path, began_s: float, knows: set[str]
) -> None:
    """The proxy ended before it read the engine's metrics."""
    async with serve(showing(WALL.now + began_s)) as url:
        async with life(tmp_path, cluster_of({"a": url})) as service:
            await service.serve(chat(TURN), A)
        async with life(tmp_path, cluster_of({"a": url})) as service:
            await service.kv.scraper.scrape_all()
            assert await matched(service) == knows
