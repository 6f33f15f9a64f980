"""Keeping workers running: processes that stand in for them, started for real."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import pytest

from kvproxy.features.workers import process as process_module
from kvproxy.features.workers import supervisor as module
from kvproxy.features.workers.assignment import remove_left_folder, shared_folder
from kvproxy.features.workers.supervisor import ServedConfig, Slot, Supervisor, WorkersFailed, describe_exit
from kvproxy.operate.config.load import load_config
from kvproxy.proxy.listener.server import bind_sockets
from tests.support.until import until

STAND_IN = Path(__file__).with_name("stand_in.py")
CONFIG = load_config({"endpoints": {"a": "http://127.0.0.1:1"}, "shutdown": {"drain": "1s"}, "worker_timeout": 0})


@contextlib.asynccontextmanager
async def supervised(
    folder: Path, behaviour: str = "serve", *, count: int = 2, on_hung: Callable[[], object] = lambda: None
) -> AsyncIterator[Supervisor]:
    """One that runs, with stand-ins for workers; ended at the end."""
    command = (sys.executable, "-S", "-E", str(STAND_IN), behaviour)
    public = await bind_sockets("127.0.0.1", 0)
    supervisor = Supervisor(
        ServedConfig(CONFIG), count=count, public=public, folder=folder, command=command, on_hung=on_hung
    )
    running = asyncio.create_task(supervisor.run())
    try:
        async with asyncio.timeout(60):
            await supervisor.all_ready.wait()
            yield supervisor
            supervisor.drain()
            supervisor.hurry()
            await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def pids(supervisor: Supervisor) -> list[int]:
    """Of the workers that serve."""
    return [slot.process.pid for slot in supervisor.slots if slot.process is not None and slot.ready]


def told(slot: Slot) -> int:
    """Up to which of the news its worker knows all, where it serves."""
    return slot.process.told if slot.process is not None and slot.ready else 0


def runs(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_dead_worker_is_started_again(tmp_path: Path) -> None:
    """Another process takes its place, and the other worker goes on."""
    async with supervised(tmp_path) as supervisor:
        first, second = pids(supervisor)
        gone: list[int] = []
        supervisor.on_ended.append(gone.append)
        os.kill(first, signal.SIGKILL)
        await until(lambda: len(pids(supervisor)) == 2 and pids(supervisor)[0] != first)
        assert gone == [0]
        assert pids(supervisor)[1] == second


async def test_a_worker_that_says_nothing_any_more_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As soon as silence is limited: a reload may say so. Until then it may be silent."""
    monkeypatch.setattr(process_module, "BEAT_S", 0.01)
    hung: list[int] = []
    async with supervised(tmp_path, "deaf", count=1, on_hung=lambda: hung.append(1)) as supervisor:
        first = pids(supervisor)
        supervisor.served.config = CONFIG.model_copy(update={"worker_timeout": 0.04})
        await until(lambda: pids(supervisor) and pids(supervisor) != first)
        supervisor.served.config = CONFIG
    assert hung
    assert f"worker 0 (pid {first[0]}) hangs: it is killed" in caplog.text
    assert not runs(first[0])


@pytest.fixture
async def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Supervisor]:
    """Yield a running one, of whose two workers none comes to serve in time until there is a file `allowed`."""
    monkeypatch.setattr(process_module, "BEAT_S", 0.01)
    monkeypatch.setattr(module, "LONGEST_PAUSE_S", 0.01)
    config = CONFIG.model_copy(update={"worker_start_timeout": 0.2})
    command = (sys.executable, "-S", "-E", str(STAND_IN), f":{tmp_path / 'allowed'}")
    public = await bind_sockets("127.0.0.1", 0)
    supervisor = Supervisor(ServedConfig(config), count=2, public=public, folder=tmp_path, command=command)
    yield supervisor
    assert not any(slot.process for slot in supervisor.slots)


async def test_a_worker_that_hangs_before_it_serves_is_killed_and_started_again(
    late: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether or not it says that it is there. That ends the start only once it is of no use."""
    monkeypatch.setattr(module, "GIVE_UP_AFTER", 1000)
    running = asyncio.create_task(late.run())
    await until(lambda: all(slot.failures for slot in late.slots))
    assert "does not come to serve: it is killed" in caplog.text
    late.served.config = CONFIG
    (tmp_path / "allowed").touch()
    await until(lambda: running.done() or late.all_ready.is_set())
    late.drain()
    await asyncio.wait_for(running, 60)


async def test_workers_that_always_hang_before_they_serve_end_the_start(
    late: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those that die again and again."""
    monkeypatch.setattr(module, "GIVE_UP_AFTER", 2)
    with pytest.raises(WorkersFailed, match="no further worker can be started"):
        await asyncio.wait_for(late.run(), 60)


async def test_each_start_has_twice_the_time_of_the_failed_one_before(
    late: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow machine workers come to serve in the end."""
    limits: list[float] = []

    async def hang_at_once(_: object, *, start_s: Callable[[], float], silent_s: object) -> None:
        limits.append(start_s())

    monkeypatch.setattr(process_module.WorkerProcess, "until_hung", hang_at_once)
    monkeypatch.setattr(module, "GIVE_UP_AFTER", 3)
    with pytest.raises(WorkersFailed):
        await asyncio.wait_for(late.run(), 60)
    assert set(limits) == {0.2, 0.4, 0.8}


async def test_a_worker_whose_end_is_cut_short_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended by itself, and all are ended while it is being cleared away."""
    clearing, over = asyncio.Event(), []

    async def never_done(_: Iterable[asyncio.Task[None]]) -> None:
        clearing.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(module, "cancel_tasks", never_done)
    command = (sys.executable, "-S", "-E", str(STAND_IN), "serve")
    public = await bind_sockets("127.0.0.1", 0)
    supervisor = Supervisor(ServedConfig(CONFIG), count=1, public=public, folder=tmp_path, command=command)
    supervisor.on_ended.append(over.append)
    [slot] = supervisor.slots
    process = process_module.WorkerProcess(supervisor._assignment(slot), command)
    life = asyncio.create_task(supervisor._one_life(slot, process))
    await until(lambda: process.ready)
    process.kill()
    await clearing.wait()
    life.cancel()
    with pytest.raises(asyncio.CancelledError):
        await life
    supervisor._close()
    assert process._line is not None
    assert process._line.fileno() == -1
    assert over == [0]


async def test_a_drain_ends_a_worker_that_hangs_before_it_serves(
    late: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hang for as long as it likes otherwise."""
    monkeypatch.setattr(module, "_KILL_S", -1.0)
    late.served.config = CONFIG.model_copy(update={"worker_start_timeout": 0})
    running = asyncio.create_task(late.run())
    await until(lambda: all(slot.process is not None and slot.process.pid for slot in late.slots))
    late.drain()
    await asyncio.wait_for(running, 60)


def test_a_folder_that_a_killed_supervisor_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the next start; that of one that lives stays, and what is none of ours."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, other = tmp_path / "kvproxy-left", tmp_path / "kvproxy-notes"
    for folder, name in ((left, "supervisor"), (other, "notes.txt")):
        folder.mkdir()
        (folder / name).touch()
    (tmp_path / "kvproxy-link").symlink_to(other)
    with shared_folder() as first, shared_folder() as second:
        assert {one.name for one in tmp_path.iterdir()} == {first.name, second.name, "kvproxy-notes", "kvproxy-link"}
        remove_left_folder(first)
        assert first.exists()
    assert {one.name for one in tmp_path.iterdir()} == {"kvproxy-notes", "kvproxy-link"}


async def test_a_worker_that_dies_before_it_serves_ends_the_start(tmp_path: Path) -> None:
    """Nothing is started again and again that cannot work; the others end too."""
    command = (sys.executable, "-S", "-E", str(STAND_IN), "die")
    public = await bind_sockets("127.0.0.1", 0)
    supervisor = Supervisor(ServedConfig(CONFIG), count=2, public=public, folder=tmp_path, command=command)
    with pytest.raises(WorkersFailed, match="ended before all served"):
        await asyncio.wait_for(supervisor.run(), 60)
    assert not pids(supervisor)
    assert all(one.fileno() == -1 for one in public)


async def test_a_command_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    """As an error of the supervisor, not a traceback."""
    supervisor = Supervisor(
        ServedConfig(CONFIG), count=1, public=[], folder=tmp_path, command=(str(tmp_path / "none"),)
    )
    with pytest.raises(WorkersFailed):
        await asyncio.wait_for(supervisor.run(), 60)


async def test_the_supervisor_gives_up_when_nothing_serves_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then whatever supervises it knows better; until then pauses grow."""
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.001)
    allowed = tmp_path / "allowed"
    allowed.touch()
    public = await bind_sockets("127.0.0.1", 0)
    command = (sys.executable, "-S", "-E", str(STAND_IN), str(allowed))
    supervisor = Supervisor(ServedConfig(CONFIG), count=1, public=public, folder=tmp_path, command=command)
    running = asyncio.create_task(supervisor.run())
    await until(supervisor.all_ready.is_set)
    allowed.unlink()
    os.kill(pids(supervisor)[0], signal.SIGKILL)
    with pytest.raises(WorkersFailed, match="no further worker can be started"):
        await asyncio.wait_for(running, 60)


async def test_a_worker_that_dies_at_every_start_is_tried_after_longer_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other serves on, and what is shown to the operator has the reason and the count."""
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.001)
    caplog.set_level(logging.INFO)
    allowed = tmp_path / "allowed"
    allowed.touch()
    async with supervised(tmp_path, str(allowed)) as supervisor:
        first, second = pids(supervisor)
        assert [slot.trouble for slot in supervisor.slots] == ["", ""]
        allowed.unlink()
        os.kill(first, signal.SIGKILL)
        await until(lambda: supervisor.slots[0].failures >= 4)
        slot = supervisor.slots[0]
        often = f"{slot.failures} ended soon after their start in a row"
        assert slot.trouble == f"worker 0 does not serve: the last one ended, exit status 3; {often}"
        assert pids(supervisor) == [second]
        pauses = [record.args[1] for record in caplog.records if "is started again" in record.msg]
        assert [pause <= 0.001 * 2**number for number, pause in enumerate(pauses, 1)] == [True] * len(pauses)
        allowed.touch()
        await until(lambda: len(pids(supervisor)) == 2)
        assert slot.trouble == ""


@pytest.mark.parametrize("failures", [5, 5000])
async def test_one_worker_that_fails_for_hours_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """It is tried again as long as another serves, however often it failed."""
    monkeypatch.setattr(module, "LONGEST_PAUSE_S", 0.01)
    async with supervised(tmp_path) as supervisor:
        first, second = pids(supervisor)
        supervisor.slots[0].failures = failures
        os.kill(first, signal.SIGKILL)
        await until(lambda: len(pids(supervisor)) == 2 and pids(supervisor)[0] != first)
        assert pids(supervisor)[1] == second
        assert supervisor.slots[0].failures == failures + 1


async def test_a_worker_that_served_for_long_has_not_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its death is the first, whatever was before it: it is started again after the shortest pause."""
    monkeypatch.setattr(module, "STEADY_S", 0.0)
    async with supervised(tmp_path) as supervisor:
        first, _ = pids(supervisor)
        supervisor.slots[0].failures = 3
        os.kill(first, signal.SIGKILL)
        await until(lambda: len(pids(supervisor)) == 2 and pids(supervisor)[0] != first)
        assert supervisor.slots[0].failures == 0


async def test_a_worker_that_ended_serves_no_more(tmp_path: Path) -> None:
    """Nor is it asked anything between its end and the end of what was kept for it."""
    async with supervised(tmp_path, count=1) as supervisor:
        (process,) = (slot.process for slot in supervisor.slots if slot.process is not None)
        assert process.ready
        os.kill(process.pid, signal.SIGKILL)
        assert await process.until_ended() == -signal.SIGKILL
        assert not process.ready
        await until(lambda: bool(pids(supervisor)))


async def test_a_drain_closes_the_listening_sockets_and_ends_all(tmp_path: Path) -> None:
    """New connections are refused at once, and go nowhere."""
    async with supervised(tmp_path) as supervisor:
        workers = pids(supervisor)
        supervisor.drain()
        await until(lambda: not pids(supervisor))
        assert all(one.fileno() == -1 for one in supervisor._public)
    assert not any(map(runs, workers))


async def test_a_hurry_reaches_workers_that_drain(tmp_path: Path) -> None:
    """A worker that still has requests ends on the second word."""
    async with supervised(tmp_path, "deaf") as supervisor:
        workers = pids(supervisor)
        supervisor.drain()
        assert all(map(runs, workers))
        supervisor.hurry()
        await until(lambda: not pids(supervisor))


async def test_a_worker_that_outlives_the_drain_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it hangs, the end comes."""
    monkeypatch.setattr(module, "_KILL_S", -1.0)
    async with supervised(tmp_path, "deaf", count=1) as supervisor:
        (worker,) = pids(supervisor)
        supervisor.drain()
        await until(lambda: not runs(worker))


async def test_workers_that_do_not_know_the_news_are_started_again(tmp_path: Path) -> None:
    """One that heard of it stays; the other one comes back knowing."""
    async with supervised(tmp_path) as supervisor:
        first, second = pids(supervisor)
        supervisor.note_news(told=[0])
        await until(lambda: len(pids(supervisor)) == 2 and pids(supervisor)[1] != second)
        assert pids(supervisor)[0] == first
        assert not supervisor.slots[1].failures


async def test_news_that_come_while_workers_start_do_not_end_the_start(tmp_path: Path) -> None:
    """A worker that began with what is old is let go and started again, whether or not all served by then."""
    public = await bind_sockets("127.0.0.1", 0)
    command = (sys.executable, "-S", "-E", str(STAND_IN), "serve")
    supervisor = Supervisor(
        ServedConfig(CONFIG), count=2, public=public, folder=tmp_path, command=command, first_alone=True
    )
    running = asyncio.create_task(supervisor.run())
    await until(lambda: supervisor.slots[0].process is not None)
    supervisor.note_news(told=[])
    await until(lambda: supervisor.all_ready.is_set() or running.done())
    await until(lambda: running.done() or all(told(slot) == 1 for slot in supervisor.slots))
    supervisor.drain()
    await asyncio.wait_for(running, 60)
    assert supervisor.all_ready.is_set()
    assert not supervisor.slots[0].failures


async def test_the_others_may_follow_on_the_first(tmp_path: Path) -> None:
    """Where it restores what they ask it for; a drain before that ends all the same."""
    public = await bind_sockets("127.0.0.1", 0)
    command = (sys.executable, "-S", "-E", str(STAND_IN), str(tmp_path / "allowed"))
    supervisor = Supervisor(
        ServedConfig(CONFIG), count=2, public=public, folder=tmp_path, command=command, first_alone=True
    )
    running = asyncio.create_task(supervisor.run())
    await until(lambda: supervisor.slots[0].process is not None)
    assert supervisor.slots[1].process is None
    supervisor.drain()
    await asyncio.wait_for(running, 60)


@pytest.mark.parametrize(("status", "said"), [(1, "exit status 1"), (-9, "SIGKILL"), (-99, "signal 99")])
def test_an_end_is_described(status: int, said: str) -> None:
    """As a shell's user knows it."""
    assert describe_exit(status) == said
