"""The engines' own APIs (tokenize, metrics, event sources), one client an engine, over connections of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

from kvproxy.clients.vllm import VllmClient
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.upstream.pool import UpstreamPool
from kvproxy.upstream.transport import HttpClients


class Engines:
    """Clients by endpoint, made on first use. `tokenizer_url` is an engine that tokenizes for all of them.

    A context manager: leaving it closes the clients, not the pool they ride on.
    """

    def __init__(self, pool: UpstreamPool, *, timeout_s: float, tokenizer_url: str = "") -> None:
        self.http = HttpClients(pool)
        self._timeout_s = timeout_s
        self._clients: dict[Endpoint, VllmClient] = {}
        self._unable: set[Endpoint] = set()  # answered that they cannot tokenize
        self._tokenizer = VllmClient(self.http.client(), tokenizer_url, timeout_s=timeout_s) if tokenizer_url else None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    def client(self, endpoint: Endpoint) -> VllmClient:
        """The engine's API, with the endpoint's own credential and no other."""
        client = self._clients.get(endpoint)
        if client is None:
            origin, key = endpoint.origin, endpoint.authorization
            authorization = key.decode("latin-1") if key else None
            client = VllmClient(self.http.client(origin), str(origin), authorization, timeout_s=self._timeout_s)
            self._clients[endpoint] = client
        return client

    def tokenizer(self, endpoints: Sequence[Endpoint]) -> tuple[VllmClient, Endpoint | None] | None:
        """The engine that tokenizes for these: the configured one, else the least busy of those that may be able to."""
        if self._tokenizer is not None:
            return self._tokenizer, None
        able = [endpoint for endpoint in endpoints if endpoint not in self._unable and endpoint.health.is_healthy]
        if not able:
            return None
        endpoint = min(able, key=lambda one: one.load.in_flight)
        return self.client(endpoint), endpoint

    def cannot_tokenize(self, endpoint: Endpoint) -> None:
        """The engine has no `/tokenize`: it is not asked again."""
        self._unable.add(endpoint)

    def keep(self, endpoints: Iterable[Endpoint]) -> None:
        """Forget the clients of all others."""
        kept = set(endpoints)
        self._unable &= kept
        self._clients = {endpoint: client for endpoint, client in self._clients.items() if endpoint in kept}
