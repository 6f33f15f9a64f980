"""Endpoints from etcd: one for each key below a prefix, as long as the key is there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import Random

import msgspec
from pydantic import ValidationError

from kvproxy.base.settings.addresses import url_fault
from kvproxy.base.types import Clock, Sleep
from kvproxy.cluster.discovery_settings import EtcdDiscoverySettings
from kvproxy.cluster.settings import EndpointSettings
from kvproxy.cluster.sources.mirror import Mirror
from kvproxy.features.etcd.client import EtcdPrefix


class EtcdDiscovery:
    """A key's value is the endpoint as JSON, or its URL alone; its id is the key after the prefix. A key with a lease
    ends with it. What is no endpoint is left out, and said."""

    def __init__(
        self, settings: EtcdDiscoverySettings, *, clock: Clock, rng: Random, sleep: Sleep = asyncio.sleep
    ) -> None:
        password = "" if settings.password is None else settings.password.get_secret_value()
        prefix = EtcdPrefix(
            settings.urls, settings.prefix, ca_file=settings.ca_file, user=settings.user, password=password
        )
        self._mirror = Mirror(prefix, clock=clock, rng=rng, sleep=sleep)
        self._models = settings.models

    async def endpoints(self) -> Sequence[EndpointSettings]:
        """Those there are now, listed."""
        await self._mirror.list_all()
        return self._found()[0]

    async def follow(self, tell: Callable[[Sequence[EndpointSettings] | None, str], Awaitable[None]]) -> None:
        """As of WatchedDiscovery."""

        async def changed() -> None:
            if self._mirror.listed:
                endpoints, fault = self._found()
                await tell(endpoints, self._mirror.trouble or fault)
            else:
                await tell(None, self._mirror.trouble)

        await self._mirror.follow(changed)

    def _found(self) -> tuple[tuple[EndpointSettings, ...], str]:
        found, fault = [], ""
        for name, value in sorted(self._mirror.items.items()):
            one = endpoint_of(name, value)
            if isinstance(one, str):
                fault = fault or f"key {name}: {one}"
            else:
                found.append(one if one.models else one.model_copy(update={"models": self._models}))
        return tuple(found), fault


def endpoint_of(name: str, value: bytes) -> EndpointSettings | str:
    """The endpoint, or what is wrong with it."""
    try:
        data = msgspec.json.decode(value) if value.startswith((b"{", b'"')) else value.decode()
        fields = {"url": data} if isinstance(data, str) else data
        endpoint = EndpointSettings.model_validate({"id": name, **fields})
    except ValidationError as error:
        return "; ".join(
            f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_input=False)[:3]
        )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError):
        return "neither a URL nor an object in JSON"
    return url_fault(endpoint.url) or endpoint
