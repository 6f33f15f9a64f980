"""Endpoints from etcd: one for each key below a prefix, as long as the key is there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

import msgspec

from kvproxy.base.settings.addresses import url_fault
from kvproxy.base.timed_thread import TimedThread
from kvproxy.base.types import Clock, Sleep
from kvproxy.cluster.settings import EndpointSettings
from kvproxy.cluster.sources.entries import Answer, LeftOut, read_entry
from kvproxy.cluster.sources.mirror import Mirror
from kvproxy.features.etcd.client import EtcdPrefix
from kvproxy.features.etcd.settings import EtcdDiscoverySettings

#: Files that its endpoints name are read away from the event loop.
_FILES_S = 5.0


class EtcdDiscovery:
    """Discovery from etcd. A key's value is the endpoint as JSON, or its URL alone; its id is the key after the prefix.
    A key with a lease ends with it. Invalid values are left out, with a warning."""

    def __init__(
        self, settings: EtcdDiscoverySettings, *, clock: Clock, rng: Random, sleep: Sleep = asyncio.sleep
    ) -> None:
        password = "" if settings.password is None else settings.password.get_secret_value()
        prefix = EtcdPrefix(
            settings.urls, settings.prefix, ca_file=settings.ca_file, user=settings.user, password=password
        )
        self._mirror = Mirror(prefix, clock=clock, rng=rng, sleep=sleep)
        self._models = settings.models
        self._credentials = settings.credentials
        self._thread = TimedThread("etcd endpoints")

    async def endpoints(self) -> Answer:
        """Those there are now, listed."""
        await self._mirror.list_all()
        return await self._found()

    async def follow(self, tell: Callable[[Answer | None, str], Awaitable[None]]) -> None:
        """As of a watched `Source`."""

        async def changed() -> None:
            if self._mirror.listed:
                await tell(await self._found(), self._mirror.trouble)
            else:
                await tell(None, self._mirror.trouble)

        await self._mirror.follow(changed)

    async def _found(self) -> Answer:
        items = sorted(self._mirror.items.items())

        def read() -> Answer:
            return tuple(self._entry(name, value) for name, value in items)

        return await self._thread.call(read, timeout_s=_FILES_S) if self._credentials else read()

    def _entry(self, name: str, value: bytes) -> EndpointSettings | LeftOut:
        one = endpoint_of(name, value, credentials=self._credentials)
        return one if isinstance(one, LeftOut) or one.models else one.model_copy(update={"models": self._models})


def endpoint_of(name: str, value: bytes, *, credentials: bool = False) -> EndpointSettings | LeftOut:
    """Return the endpoint of a key, or what is wrong with it."""
    key = f"key {name}"
    try:
        data = msgspec.json.decode(value) if value.startswith((b"{", b'"')) else value.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return LeftOut(key, "neither a URL nor an object in JSON")
    fields = {"url": data} if isinstance(data, str) else data
    one = read_entry(key, {"id": name, **fields}, credentials=credentials)
    fault = "" if isinstance(one, LeftOut) else url_fault(one.url)
    return LeftOut(key, fault) if fault else one
