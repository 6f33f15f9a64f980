"""Where endpoints come from besides the configuration: two sources shipped here, asked again and again."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from kvproxy.background_task import TaskSet
from kvproxy.config.addresses import url_fault
from kvproxy.config.cluster_schema import DiscoverySettings, DnsDiscoverySettings, EndpointSettings
from kvproxy.config.paths import dotted_path
from kvproxy.config.yaml_text import parse_yaml, substitute_variables
from kvproxy.errors import DiscoveryError
from kvproxy.metrics.catalog import Metrics
from kvproxy.types import Sleep

log = logging.getLogger(__name__)

#: Larger endpoint files are refused unread.
MAX_FILE_BYTES = 4 * 1024 * 1024
#: A source that takes longer to answer is asked again later.
POLL_TIMEOUT_S = 10.0
#: No source is asked more often, whatever its interval says.
MIN_INTERVAL_S = 0.05

_ENDPOINTS = TypeAdapter(tuple[EndpointSettings, ...])

Resolve = Callable[..., Awaitable[Sequence[tuple[Any, ...]]]]  # loop.getaddrinfo's shape


class Discovery(Protocol):
    """Answers with every endpoint it knows at present, or raises DiscoveryError or OSError."""

    async def endpoints(self) -> Sequence[EndpointSettings]: ...


@dataclass(frozen=True, slots=True)
class Source:
    """A discovery with the name it goes by and how often it is asked."""

    name: str
    discovery: Discovery
    interval_s: float


class FileDiscovery:
    """A YAML or JSON file with a list of endpoints, or a mapping `id: url`; read off the event loop.

    `${VAR}` and `${VAR:-default}` in its values are taken from `env`, as in the configuration itself.
    """

    def __init__(self, path: str | Path, *, env: Mapping[str, str] = os.environ) -> None:
        self._path = Path(path)
        self._env = env
        self._text = b""
        self._parsed: tuple[EndpointSettings, ...] = ()

    async def endpoints(self) -> Sequence[EndpointSettings]:
        """The file's endpoints; it is parsed only when its text changed."""
        text = await asyncio.to_thread(self._read)
        if text != self._text or not self._parsed:
            self._parsed = await asyncio.to_thread(parse_endpoints, text, env=self._env)
            self._text = text
        return self._parsed

    def _read(self) -> bytes:
        with self._path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise DiscoveryError(f"{self._path} is larger than {MAX_FILE_BYTES} bytes")
        return text


def parse_endpoints(text: bytes, *, env: Mapping[str, str] = MappingProxyType({})) -> tuple[EndpointSettings, ...]:
    """Endpoints from YAML or JSON, read as the configuration is; DiscoveryError for anything that is not a list of good
    ones with distinct ids, and for a variable that `env` has not."""
    try:
        data, faults = parse_yaml(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DiscoveryError(f"not readable as YAML or JSON: {' '.join(str(error).split())}") from error
    if faults:
        raise DiscoveryError("not readable as YAML or JSON: " + "; ".join(map(str, faults)))
    data, missing = substitute_variables(data, env, dotted_path)
    if missing:
        raise DiscoveryError("; ".join(f"{problem.path}: {problem.message}" for problem in missing))
    if isinstance(data, Mapping):
        data = [{"id": key, "url": url} for key, url in data.items()]
    if not data or not isinstance(data, list):
        raise DiscoveryError("expected a list of endpoints, and not an empty one")
    try:
        endpoints = _ENDPOINTS.validate_python(data)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_input=False))
        raise DiscoveryError("; ".join(problems)) from None  # the cause would show the input, keys included
    ids = [endpoint.id for endpoint in endpoints]
    if len(set(ids)) < len(ids):
        raise DiscoveryError(f"endpoint ids occur twice: {', '.join(sorted({i for i in ids if ids.count(i) > 1}))}")
    for endpoint in endpoints:
        if fault := url_fault(endpoint.url):
            raise DiscoveryError(f"{endpoint.id}: {fault}")
    return endpoints


class DnsDiscovery:
    """One endpoint for each address of a name, id `name@address`, LMCache instance `address:port`."""

    def __init__(self, settings: DnsDiscoverySettings, *, resolve: Resolve | None = None) -> None:
        self._settings = settings
        self._resolve = resolve

    async def endpoints(self) -> Sequence[EndpointSettings]:
        """Every address, in a stable order; resolved off the event loop."""
        settings = self._settings
        resolve = self._resolve or asyncio.get_running_loop().getaddrinfo
        try:
            found = await resolve(settings.host, settings.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        except socket.gaierror as error:
            why = error.strerror or error
            raise DiscoveryError(f"the name {settings.host!r} cannot be resolved: {why}") from error
        addresses = sorted({str(entry[4][0]) for entry in found})
        return tuple(self._endpoint(address) for address in addresses)

    def _endpoint(self, address: str) -> EndpointSettings:
        settings = self._settings
        host = f"[{address}]" if ":" in address else address
        return EndpointSettings(
            id=f"{settings.host}@{address}",
            url=f"{settings.scheme}://{host}:{settings.port}",
            instance_id=f"{host}:{settings.port}",
            models=settings.models,
            server_name=settings.host,
            ca_file=settings.ca_file,
        )


def sources_of(settings: DiscoverySettings) -> list[Source]:
    """The sources a cluster's configuration names."""
    file, dns = settings.file, settings.dns
    sources = [] if file is None else [Source("file", FileDiscovery(file.path), file.interval)]
    return sources if dns is None else [*sources, Source("dns", DnsDiscovery(dns), dns.interval)]


class Poller:
    """One task a source, among `tasks`.

    A source that fails, or knows no endpoint at all, changes nothing: its last good answer (`known`) stands, and the
    reason is logged when it is a new one. `on_update` gets a source's name and its whole new answer; ValueError
    refuses it.
    """

    def __init__(
        self,
        cluster: str,
        sources: Sequence[Source],
        *,
        tasks: TaskSet,
        known: Callable[[str], Sequence[EndpointSettings] | None],
        on_update: Callable[[str, Sequence[EndpointSettings]], None],
        metrics: Metrics,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._cluster = cluster
        self.sources = sources
        self._tasks = tasks
        self._known = known
        self._on_update = on_update
        self._sleep = sleep
        self._updates = metrics.endpoint.discovery
        self._complaints: dict[str, str] = {}
        self._asking: list[asyncio.Task[None]] = []

    async def ask_all(self) -> None:
        """Each source once, so that the first request finds endpoints."""
        await asyncio.gather(*(self._poll(source) for source in self.sources))

    def start(self, *, at_once: bool) -> None:
        """Ask each source again and again, the first time now or after its interval."""
        self._asking = [
            self._tasks.start(self._run(source, at_once=at_once), name=f"discovery {self._cluster}/{source.name}")
            for source in self.sources
        ]

    def stop(self) -> None:
        """No source is asked any more."""
        for task in self._asking:
            task.cancel()

    async def _run(self, source: Source, *, at_once: bool) -> None:
        if at_once:
            await self._poll(source)
        while True:
            await self._sleep(max(source.interval_s, MIN_INTERVAL_S))
            await self._poll(source)

    async def _poll(self, source: Source) -> None:
        try:
            async with asyncio.timeout(POLL_TIMEOUT_S):
                answer = tuple(await source.discovery.endpoints())
            if not answer:
                raise DiscoveryError("it knows no endpoint")
            changed = answer != self._known(source.name)
            if changed:
                self._on_update(source.name, answer)
        except (DiscoveryError, OSError, ValueError) as error:
            self._failed(source, str(error) or type(error).__name__)
            return
        except Exception as error:
            log.exception("discovery %s/%s is broken", self._cluster, source.name)
            self._failed(source, repr(error))
            return
        self._updates.labels(self._cluster, "changed" if changed else "unchanged").inc()
        if self._complaints.pop(source.name, None) is not None:
            log.info("discovery %s/%s answers again", self._cluster, source.name)

    def _failed(self, source: Source, reason: str) -> None:
        self._updates.labels(self._cluster, "failed").inc()
        if self._complaints.get(source.name) != reason:
            self._complaints[source.name] = reason
            log.warning("discovery %s/%s: %s; its last endpoints stay", self._cluster, source.name, reason)
