"""Runs another module in virtual time: python -m benchmarks.virtual MODULE ARGUMENT ...

Programs that are compared run as they are, and a busy machine changes nothing: in an event loop of `VirtualLoop` time
passes only while all of it waits. CPU is not counted in these times. Needs the package time-machine, for programs that
read the wall clock.
"""

from __future__ import annotations

import asyncio
import runpy
import selectors
import sys
import time
from collections.abc import Coroutine
from typing import Any

#: Real seconds that data on a loopback socket, or another thread, may take before time moves on.
_GRACE_S = 0.0005
_EPOCH = 1_800_000_000.0


class VirtualClock:
    """Seconds since the start, for everything in this process that reads a clock."""

    def __init__(self) -> None:
        import time_machine

        self.now = 0.0
        self.outside = 0  # calls under way whose end is no timer of the loop
        self._wall = time_machine.travel(_EPOCH, tick=False).start()

    def install(self) -> None:
        """Replace the clocks of this process; before anything is imported that takes them as defaults."""
        for name in ("monotonic", "perf_counter"):
            setattr(time, name, self._read)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        self._wall.move_to(_EPOCH + self.now)

    def _read(self) -> float:
        return self.now


class _Selector(selectors.DefaultSelector):
    """Waits for sockets only as long as data on its way needs, then lets time pass."""

    clock: VirtualClock

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        found = super().select(_GRACE_S)
        if not found and not self.clock.outside:
            self.clock.advance(timeout)
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop whose timers are of a virtual clock."""

    def __init__(self, clock: VirtualClock) -> None:
        selector = _Selector()
        selector.clock = clock
        self._virtual = clock
        super().__init__(selector)

    def time(self) -> float:
        return self._virtual.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]  # not generic
        """Hold time while a thread works."""
        future = super().run_in_executor(executor, func, *args)
        self._virtual.outside += 1
        future.add_done_callback(self._back)
        return future

    def _back(self, _: object) -> None:
        self._virtual.outside -= 1


#: Of this process, when it runs in virtual time.
CLOCK: list[VirtualClock] = []


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run in virtual time."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(CLOCK[0])) as runner:
        return runner.run(main)


if __name__ == "__main__":
    from benchmarks import virtual  # this module by its name, for the module that is run

    virtual.CLOCK.append(VirtualClock())
    virtual.CLOCK[0].install()
    module, sys.argv = sys.argv[1], sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
