"""Keeps a number of workers running behind sockets that it bound once, until they shall end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvproxy.base.background_task import cancel_tasks
from kvproxy.base.errors import KvproxyError
from kvproxy.base.settings.compose import part_of
from kvproxy.base.types import Clock
from kvproxy.features.workers.assignment import Assignment, Change
from kvproxy.features.workers.process import COMMAND, WorkerProcess
from kvproxy.features.workers.settings import WorkersPlace
from kvproxy.operate.commands.last_resort import END_GRACE_S
from kvproxy.operate.config.schema import Config

log = logging.getLogger("kvproxy")

#: Before a worker that died is started again: doubling from one that lived for a while.
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 30.0
STEADY_S = 60.0
#: Failed starts in a row, while no worker serves, after which the supervisor gives up.
GIVE_UP_AFTER = 5
#: A worker that ends itself when its drain and grace are over is killed if it does not.
_KILL_S = END_GRACE_S + 5.0


class WorkersFailed(KvproxyError):
    """No worker can serve. The reason is in the log above."""


@dataclass(slots=True)
class Slot:
    """A worker's place: its number, its own socket, and the process that has it now."""

    index: int
    control: socket.socket
    path: Path
    file: int  # open descriptor of that path's file; -1 where a system has none that can be connected to
    process: WorkerProcess | None = None
    failures: int = 0  # in a row
    last_end: str = ""  # of the process before

    @property
    def address(self) -> str:
        """Path to connect to: what cleans up temporary folders may have removed the file."""
        return f"/proc/self/fd/{self.file}" if self.file >= 0 else str(self.path)

    @property
    def ready(self) -> bool:
        """True if a worker serves here."""
        return self.process is not None and self.process.ready

    @property
    def trouble(self) -> str:
        """Why no worker serves here; "" if one does."""
        if self.ready:
            return ""
        why = f": the last one ended, {self.last_end}" if self.last_end else ""
        again = f"; {self.failures} ended soon after their start in a row" if self.failures > 1 else ""
        return f"worker {self.index} does not serve{why}{again}"


@dataclass(slots=True)
class ServedConfig:
    """Configuration of the workers, and an operator's changes since the start."""

    config: Config
    changes: Sequence[Change] = ()
    number: int = 0
    """Counts its changes."""


class Supervisor:
    """`run` it once. It owns `public`, which it closes when a drain begins, and the workers' own sockets in `folder`.

    A worker that dies before all serve ends the start; later ones are started again after a pause. With `first_alone`
    the others are started once the first one serves, and can send them its state."""

    def __init__(
        self,
        served: ServedConfig,
        *,
        count: int,
        public: Sequence[socket.socket],
        folder: Path,
        command: Sequence[str] = COMMAND,
        clock: Clock = time.monotonic,
        on_restart: Callable[[], object] = lambda: None,
        on_hung: Callable[[], object] = lambda: None,
        first_alone: bool = False,
    ) -> None:
        self.served = served
        self.all_ready = asyncio.Event()
        self.ending = asyncio.Event()
        self._may_follow = asyncio.Event()
        if not first_alone:
            self._may_follow.set()
        self.on_ended: list[Callable[[int], object]] = []  # called with the number of a worker that is gone
        self.slots = [_slot(index, folder) for index in range(count)]
        self._public = public
        self._folder = folder
        self._command = command
        self._clock = clock
        self._on_restart = on_restart
        self._on_hung = on_hung
        self._receipts_key = os.urandom(16)

    async def run(self) -> None:
        """Until `drain`, or until no worker can serve (WorkersFailed)."""
        try:
            async with asyncio.TaskGroup() as group:
                for slot in self.slots:
                    group.create_task(self._keep(slot), name=f"keep worker {slot.index}")
        except* WorkersFailed as failed:
            raise failed.exceptions[0] from None
        finally:
            self._close()

    def drain(self) -> None:
        """No new requests; running ones have the drain time."""
        self.ending.set()
        self._may_follow.set()
        for one in self._public:
            one.close()
        for process in self._processes():
            process.drain()

    def hurry(self) -> None:
        """End the drain."""
        for process in self._processes():
            process.hurry()

    def note_news(self, *, told: Collection[int]) -> None:
        """Note a change that these workers already have. Other serving workers are restarted, which loses none of their
        requests."""
        self.served.number += 1
        for process in self._processes():
            if process.assignment.index in told:
                process.told = self.served.number
            elif process.ready:
                process.drain()

    def _processes(self) -> list[WorkerProcess]:
        return [slot.process for slot in self.slots if slot.process is not None]

    async def _keep(self, slot: Slot) -> None:
        if slot.index:
            await self._may_follow.wait()
        while not self.ending.is_set():
            began = self._clock()
            process = WorkerProcess(self._assignment(slot), self._command)
            process.told = self.served.number
            served = await self._one_life(slot, process)
            if self.ending.is_set():
                return
            if process.told != self.served.number:
                continue  # it was released, to restart with the news
            if not self.all_ready.is_set() and not process.hung:
                raise WorkersFailed(f"worker {slot.index} ended before all served")
            steady = served and self._clock() - began >= STEADY_S
            slot.failures = 0 if steady else slot.failures + 1
            if slot.failures >= GIVE_UP_AFTER and not any(one.ready for one in self.slots):
                raise WorkersFailed("no further worker can be started")
            await self._pause(slot)
            self._on_restart()

    async def _one_life(self, slot: Slot, process: WorkerProcess) -> bool:
        """From start to end; whether it came to serve."""
        slot.process = process
        watching: list[asyncio.Task[None]] = []
        try:
            await process.begin()
            watching.append(asyncio.create_task(self._end_hung(process, slot.failures)))
            watching.append(asyncio.create_task(self._end_late(process)))
            served = await process.until_ready()
            if served:
                log.info("worker %d serves (pid %d)", slot.index, process.pid)
                self._note_ready(process)
            status = await process.until_ended()
        except OSError as error:  # no process, no memory, no descriptors
            log.error("worker %d cannot be started: %s", slot.index, error)
            slot.last_end = str(error)
            return False
        finally:
            slot.process = None
            try:
                await cancel_tasks(watching)
            finally:  # it may be cancelled there
                await process.close()
                for call in self.on_ended:
                    call(slot.index)
        if not self.ending.is_set() and process.told == self.served.number:
            slot.last_end = describe_exit(status)
            log.error("worker %d (pid %d) ended: %s", slot.index, process.pid, slot.last_end)
        return served

    def _note_ready(self, process: WorkerProcess) -> None:
        self._may_follow.set()
        if all(one.ready for one in self.slots):
            self.all_ready.set()
        if process.told != self.served.number:
            process.drain()

    async def _end_late(self, process: WorkerProcess) -> None:
        """Kill a process that outlives the drain."""
        await self.ending.wait()
        process.drain()  # again: it may have been starting when all were notified
        await asyncio.sleep(self.served.config.shutdown.drain + _KILL_S)
        log.error("worker %d is killed: it outlived the drain", process.assignment.index)
        process.kill()

    async def _end_hung(self, process: WorkerProcess, failures: int) -> None:
        """Kill a process that hangs. Each start has twice the time of the failed one before, since a machine may be
        slow."""
        served = self.served
        factor = 2 ** min(failures, GIVE_UP_AFTER)
        await process.until_hung(
            start_s=lambda: factor * part_of(served.config, WorkersPlace).worker_start_timeout,
            silent_s=lambda: part_of(served.config, WorkersPlace).worker_timeout,
        )
        hangs = "hangs" if process.ready else "does not come to serve"
        log.error("worker %d (pid %d) %s: it is killed", process.assignment.index, process.pid, hangs)
        self._on_hung()
        await process.kill_hung()

    async def _pause(self, slot: Slot) -> None:
        """Before the next start; the end cuts it short."""
        doublings = min(slot.failures, 16)  # after thousands of failures the power would overflow
        longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**doublings)
        pause_s = longest * random.uniform(0.5, 1.0)
        log.info("worker %d is started again in %.1f s", slot.index, pause_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ending.wait(), pause_s)

    def _assignment(self, slot: Slot) -> Assignment:
        return Assignment(
            index=slot.index,
            count=len(self.slots),
            config=self.served.config,
            changes=self.served.changes,
            public=tuple(one.fileno() for one in self._public),
            control=slot.control.fileno(),
            folder=self._folder,
            receipts_key=self._receipts_key,
        )

    def _close(self) -> None:
        for one in (*self._public, *(slot.control for slot in self.slots)):
            one.close()
        for slot in self.slots:
            if slot.file >= 0:
                os.close(slot.file)


def _slot(index: int, folder: Path) -> Slot:
    """Its socket outlives the worker: what is asked meanwhile waits for the next one."""
    path = folder / f"worker-{index}"
    return Slot(index, *bind_control(path))


def bind_control(path: Path) -> tuple[socket.socket, Path, int]:
    """Return a worker's own socket, its path, and the descriptor of its file."""
    control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    control.bind(str(path))
    control.listen(128)
    control.setblocking(False)
    can_stay = hasattr(os, "O_PATH") and os.path.isdir("/proc/self/fd")
    return control, path, os.open(path, os.O_PATH) if can_stay else -1


def describe_exit(status: int) -> str:
    """`exit status 1`, `SIGKILL`."""
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"
