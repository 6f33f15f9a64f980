"""The configuration that serves, and how another one takes its place."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

from kvproxy.base.installed import installed
from kvproxy.base.tls.watch import CertificateWatch
from kvproxy.operate.admin.operated import Reloaded
from kvproxy.operate.companion import Companion
from kvproxy.operate.config.schema import Config
from kvproxy.operate.feature import Feature
from kvproxy.operate.runtime.generation import Generation, Reloader, Shared, StateStore


class Generations:
    """An async context manager: inside it `current` serves. `companions` follow it; they are set before.

    A reload has two halves: `prepare` may fail, and `adopt` takes its generation into use, or `discard` ends it.
    """

    def __init__(self, config: Config, shared: Shared, *, certificates: CertificateWatch) -> None:
        self.shared = shared
        self.companions: Sequence[Companion] = ()
        self._certificates = certificates
        self._states = StateStore()
        self._reloader = Reloader(clock=shared.clock, patience_s=config.shutdown.drain)
        self.current = Generation(config, shared, self._states)
        self._running: AsyncExitStack | None = None
        self._tried = False  # to start

    @property
    def ended(self) -> int:
        """Generations that were replaced and have ended."""
        return self._reloader.ended

    async def prepare(self, config: Config) -> Generation:
        """Return a generation whose parts run. Raises ConfigError, and whatever a new part raises when it starts; then
        nothing has changed."""
        await self._certificates.look()
        after = Generation(config, self.shared, self._states)
        await self._reloader.begin_generation(after)
        await asyncio.sleep(0)  # thousands of endpoints take long enough without the build in the same turn
        return after

    def adopt(self, after: Generation) -> Reloaded:
        """Serve by it from now on; running requests finish by the one before."""
        before = self.current
        lost = after.begin_serving()
        self.current = after
        self._follow()
        self._reloader.retire_generation(before)
        return Reloaded(after_restart=tuple(_needs_restart(before.config, after.config)), lost=lost)

    def discard(self, after: Generation) -> None:
        """End one that was prepared."""
        self._reloader.retire_generation(after)

    async def __aenter__(self) -> Generations:
        before = self.current
        after = self._renew_parts(before) if self._tried else before
        self._tried = True
        async with AsyncExitStack() as starting:  # a part that cannot start ends those before it
            await starting.enter_async_context(self._reloader)
            await self._reloader.begin_generation(after)
            if after is not before:
                before.states.release_states()
            self.current = after
            after.begin_serving()
            self._follow()
            for companion in self.companions:
                await starting.enter_async_context(companion)
            self._running = starting.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        running = self._running
        self._running = None
        if running is not None:
            await running.aclose()

    def _renew_parts(self, before: Generation) -> Generation:
        """Make the parts again, since most run once; what was learned goes on. Clusters do too, unless they were never
        ended, because their event loop is gone."""
        gone = self._running is not None
        kept = () if gone else tuple(before.clusters.values())
        self._running = None
        self._states.forget_states([part for part in before.parts if part not in kept])
        self._reloader = Reloader(clock=self.shared.clock, patience_s=before.config.shutdown.drain)
        return Generation(before.config, self.shared, self._states)

    def _follow(self) -> None:
        for companion in self.companions:
            companion.follow(self.current)


def _needs_restart(old: Config, new: Config) -> list[str]:
    """Return changed settings that take effect only at the next start of the process, by path."""
    names = ("listen", "admin", "limits", "pool", "shutdown", "log", "receipts")
    of_features = (name for feature in installed(Feature) for name in feature.read_at_start)
    return [name for name in (*names, *of_features) if getattr(old, name) != getattr(new, name)]
