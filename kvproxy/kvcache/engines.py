"""The engines' own APIs (tokenize, metrics, event sources), one client an engine, over connections of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

from kvproxy.clients.vllm import VllmClient
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.engine import Engine
from kvproxy.upstream.pool import UpstreamPool
from kvproxy.upstream.transport import HttpClients


class Engines:
    """Clients by engine, made on first use. `tokenizer_url` is an engine that tokenizes for all of them.

    A context manager: leaving it closes the clients, not the pool they ride on.
    """

    def __init__(self, pool: UpstreamPool, *, timeout_s: float, tokenizer_url: str = "") -> None:
        self.http = HttpClients(pool)
        self._timeout_s = timeout_s
        self._clients: dict[Engine, VllmClient] = {}
        self._unable: set[Engine] = set()  # answered that they cannot tokenize
        self._tokenizer = VllmClient(self.http.client(), tokenizer_url, timeout_s=timeout_s) if tokenizer_url else None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    def client(self, engine: Engine) -> VllmClient:
        """The engine's API, with its own credential and no other."""
        client = self._clients.get(engine)
        if client is None:
            origin, key = engine.origin, engine.authorization
            authorization = key.decode("latin-1") if key else None
            client = VllmClient(self.http.client(origin), str(origin), authorization, timeout_s=self._timeout_s)
            self._clients[engine] = client
        return client

    def tokenizer(self, endpoints: Sequence[Endpoint]) -> tuple[VllmClient, Endpoint | None] | None:
        """The engine that tokenizes for these: the configured one, else the least busy of those that may be able to."""
        if self._tokenizer is not None:
            return self._tokenizer, None
        able = [
            endpoint for endpoint in endpoints if endpoint.engine not in self._unable and endpoint.health.is_healthy
        ]
        if not able:
            return None
        endpoint = min(able, key=lambda one: one.load.in_flight)
        return self.client(endpoint.engine), endpoint

    def cannot_tokenize(self, endpoint: Endpoint) -> None:
        """The engine has no `/tokenize`: it is not asked again."""
        self._unable.add(endpoint.engine)

    def keep(self, engines: Iterable[Engine]) -> None:
        """Forget the clients of all others."""
        kept = set(engines)
        self._unable &= kept
        self._clients = {engine: client for engine, client in self._clients.items() if engine in kept}
