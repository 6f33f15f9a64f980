"""One worker process as its supervisor has it, from its start to its end; a restarted one is another."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Sequence

from kvproxy.base.background_task import cancel_tasks
from kvproxy.features.workers.assignment import BEAT_S, DRAIN, HURRY, READY, Assignment, send_assignment

log = logging.getLogger("kvproxy")

#: A fresh interpreter, and not a fork: the supervisor has an event loop, threads and locks, which a fork would copy in
#: the middle of whatever they do, and each worker makes a TLS context of its own. In the standalone binary the
#: interpreter is kvproxy itself.
COMMAND = (sys.executable, *(() if getattr(sys, "frozen", False) else ("-m", "kvproxy")), "worker")

#: Least number of checks without a heartbeat that are silence; and how long a worker has to write its stacks before it
#: is killed.
_LOOKS = 4
_STACKS_S = 1.0


class WorkerProcess:
    """Begin it, then wait for `until_ready` and `until_ended`."""

    def __init__(self, assignment: Assignment, command: Sequence[str] = COMMAND) -> None:
        self.assignment = assignment
        self.told = 0  # number of the latest news it has in full
        self.ready = self.hung = False
        self._command = command
        self._line: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None
        self._came_up = asyncio.Event()  # or never will
        self._silent = 0  # checks since the start, or since the last heartbeat once it serves

    @property
    def pid(self) -> int:
        """0: not begun."""
        return 0 if self._process is None else self._process.pid

    async def begin(self) -> None:
        """Start the process and send its assignment."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._line = ours
        assignment = self.assignment
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), assignment.control, *assignment.public),
            )
        with contextlib.suppress(OSError, TimeoutError):  # it is gone, or will never be ready: both are seen there
            await send_assignment(ours, assignment)
        self._listening = asyncio.create_task(self._listen(), name=f"worker {assignment.index}")

    async def until_ready(self) -> bool:
        """Wait until it serves; False: it ended before."""
        await self._came_up.wait()
        return self.ready

    async def until_ended(self) -> int:
        """Its exit status, negative the signal that ended it."""
        assert self._process is not None
        try:
            return await self._process.wait()
        finally:
            self.ready = False

    async def until_hung(self, *, start_s: Callable[[], float], silent_s: Callable[[], float]) -> None:
        """Return when it does not serve within `start_s` after its start, or serves but sent no heartbeat for
        `silent_s` (0: no bound)."""
        while True:  # not timed: heartbeats sent while this process stood still are read between two checks
            await asyncio.sleep(BEAT_S)
            self._silent += 1
            longest_s = silent_s() if self.ready else start_s()
            if longest_s and self._silent >= max(longest_s / BEAT_S, _LOOKS):
                return

    async def kill_hung(self) -> None:
        """Let it write to its log where it stands, and end it at once."""
        assert self._process is not None
        self.hung = True
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
        await asyncio.sleep(_STACKS_S)
        self.kill()

    def kill(self) -> None:
        """End it at once."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def drain(self) -> None:
        """No new requests; those it has have the drain time."""
        self._say(DRAIN)

    def hurry(self) -> None:
        """End the drain."""
        self._say(HURRY)

    async def close(self) -> None:
        """Kill it if it still runs, and forget it."""
        async with contextlib.AsyncExitStack() as stack:
            if self._line is not None:
                stack.callback(self._line.close)
            if self._listening is not None:
                stack.push_async_callback(cancel_tasks, [self._listening])
            if self._process is not None and self._process.returncode is None:
                self._process.kill()
                await self._process.wait()

    async def _listen(self) -> None:
        assert self._line is not None
        try:
            while words := await asyncio.get_running_loop().sock_recv(self._line, 64):
                if READY in words:
                    self.ready = True
                    self._came_up.set()
                if self.ready:
                    self._silent = 0
        except OSError:
            pass
        finally:
            self._came_up.set()

    def _say(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # it ended by itself
            if self._line is not None:
                self._line.send(word)
