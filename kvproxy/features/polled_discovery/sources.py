"""Endpoints from a file and from DNS: sources that have to be polled."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvproxy.base.background_task import in_slices
from kvproxy.base.errors import BadResponse, DiscoveryError, Problem
from kvproxy.base.settings.addresses import url_fault
from kvproxy.base.settings.paths import dotted_path
from kvproxy.base.timed_thread import TimedThread, read_file
from kvproxy.cluster.settings import EndpointSettings
from kvproxy.cluster.sources.entries import Answer, LeftOut, Source, read_entry
from kvproxy.cluster.sources.watched import MAX_ITEMS, check_count
from kvproxy.features.polled_discovery.settings import DnsDiscoverySettings, PolledPlace
from kvproxy.operate.config.yaml_text import parse_yaml, substitute_variables

#: Interval of looks at a file.
FILE_INTERVAL_S = 2.0
#: Larger endpoint files are refused unread.
MAX_FILE_BYTES = 4 * 1024 * 1024

#: Bound on reading files and resolving names, below that of the poll.
_TIMEOUT_S = 8.0

Resolve = Callable[..., Awaitable[Sequence[tuple[Any, ...]]]]  # loop.getaddrinfo's shape


class FileDiscovery:
    """A YAML or JSON file with a list of endpoints, or a mapping `id: url`; read off the event loop.

    With `credentials` `${VAR}` and `${VAR:-default}` in its values are taken from `env`, as in the configuration.
    """

    def __init__(self, path: str | Path, *, env: Mapping[str, str] = os.environ, credentials: bool = False) -> None:
        self._path = Path(path)
        self._env = env
        self._credentials = credentials
        self._text: bytes | None = None
        self._parsed: Answer = ()  # from that text
        self._fault = ""  # likewise
        self._thread = TimedThread("endpoints file")

    async def endpoints(self) -> Answer:
        """Return the file's endpoints; it is parsed only when its text changed."""
        try:
            return await self._thread.call(self._read, timeout_s=_TIMEOUT_S)
        except TimeoutError as error:
            raise DiscoveryError(f"{self._path} cannot be read within {_TIMEOUT_S:g} s") from error

    def _read(self) -> Answer:
        text = read_file(self._path, max_bytes=MAX_FILE_BYTES)
        if len(text) > MAX_FILE_BYTES:
            raise DiscoveryError(f"{self._path} is larger than {MAX_FILE_BYTES} bytes")
        if text != self._text:
            self._parsed, self._fault = self._parse(text)
            self._text = text
        if self._fault:
            raise DiscoveryError(self._fault)
        return self._parsed

    def _parse(self, text: bytes) -> tuple[Answer, str]:
        """Return the answer and its fault: a large file that is wrong costs one parse, too."""
        try:
            return parse_endpoints(text, env=self._env, credentials=self._credentials), ""
        except (DiscoveryError, BadResponse) as error:
            return (), str(error)


def parse_endpoints(
    text: bytes, *, env: Mapping[str, str] = MappingProxyType({}), credentials: bool = False
) -> tuple[EndpointSettings | LeftOut, ...]:
    """Read endpoints from YAML or JSON as the configuration is read; each that is not a good one is left out.
    DiscoveryError for anything that is not a list of them."""
    try:
        data, faults = _parse_text(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DiscoveryError(f"not readable as YAML or JSON: {' '.join(str(error).split())}") from error
    if faults:
        raise DiscoveryError("not readable as YAML or JSON: " + "; ".join(map(str, faults)))
    places: Iterable[str] = ()
    if isinstance(data, Mapping):
        places = list(map(str, data))
        data = [{"id": key, "url": url} for key, url in data.items()]
    if not data or not isinstance(data, list):
        raise DiscoveryError("expected a list of endpoints, and not an empty one")
    check_count(len(data), "endpoints in a file")
    named = zip(places or (f"[{index}]" for index in range(len(data))), data, strict=True)
    return tuple(_read_item(place, item, env, credentials=credentials) for place, item in named)


def _parse_text(text: str) -> tuple[Any, list[Problem]]:
    """Return the data, and the faults. JSON without any is read by the faster parser: 0.03 s for 20,000 endpoints,
    where YAML takes 2 s and half a kilobyte for each value, and is given up after as many as are kept."""
    with suppress(ValueError, RecursionError):
        return json.loads(text, object_pairs_hook=_named_once), []
    return parse_yaml(text, max_entries=MAX_ITEMS)


def _named_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. ValueError for a key that comes twice, whose place YAML's parser finds."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice")
    return found


def _read_item(place: str, item: object, env: Mapping[str, str], *, credentials: bool) -> EndpointSettings | LeftOut:
    values, missing = substitute_variables(item, env if credentials else {}, dotted_path)
    if missing and not credentials:
        return LeftOut(place, "names an environment variable, which this source may not: set `credentials: true` there")
    if missing:
        return LeftOut(place, "; ".join(f"{one.path}: {one.message}" for one in missing))
    one = read_entry(place, values, credentials=credentials)
    fault = "" if isinstance(one, LeftOut) else url_fault(one.url)
    return LeftOut(place, fault) if fault else one


class DnsDiscovery:
    """One endpoint for each address of a name, id `name@address`, LMCache instance `address:port`."""

    def __init__(self, settings: DnsDiscoverySettings, *, resolve: Resolve | None = None) -> None:
        self._settings = settings
        self._resolve = resolve
        self._thread = TimedThread("resolver")
        self._made: dict[str, EndpointSettings | LeftOut] = {}  # of the last answer, by address

    async def endpoints(self) -> Answer:
        """Every address, in a stable order; resolved off the event loop. Addresses named before keep their endpoint."""
        settings = self._settings
        resolve = self._resolve or self._ask_system
        try:
            found = await resolve(settings.host, settings.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        except TimeoutError as error:
            raise DiscoveryError(f"the name {settings.host!r} is not resolved within {_TIMEOUT_S:g} s") from error
        except socket.gaierror as error:
            why = error.strerror or error
            raise DiscoveryError(f"the name {settings.host!r} cannot be resolved: {why}") from error
        addresses = sorted({str(entry[4][0]) for entry in found})
        check_count(len(addresses), "addresses of a name")
        made: dict[str, EndpointSettings | LeftOut] = {}
        async for address in in_slices(addresses):
            made[address] = self._made.get(address) or self._endpoint(address)
        self._made = made
        return tuple(made.values())

    async def _ask_system(self, host: str, port: int, **how: Any) -> Sequence[tuple[Any, ...]]:
        return await self._thread.call(partial(socket.getaddrinfo, host, port, **how), timeout_s=_TIMEOUT_S)

    def _endpoint(self, address: str) -> EndpointSettings | LeftOut:
        settings = self._settings
        host = f"[{address}]" if ":" in address else address
        fields = {
            "id": f"{settings.host}@{address}",
            "url": f"{settings.scheme}://{host}:{settings.port}",
            "instance_id": f"{host}:{settings.port}",
            "models": settings.models,
            "server_name": settings.host,
            "ca_file": settings.ca_file,
            "cert_file": settings.cert_file,
            "key_file": settings.key_file,
        }
        return read_entry(f"address {address}", fields, credentials=True)  # all fields are the operator's


def list_sources(settings: PolledPlace) -> list[Source]:
    """Return a source for each section."""
    sources = []
    if settings.file is not None:
        file = FileDiscovery(settings.file.path, credentials=settings.file.credentials)
        sources.append(Source("file", file, FILE_INTERVAL_S))
    if settings.dns is not None:
        sources.append(Source("dns", DnsDiscovery(settings.dns), settings.dns.interval))
    return sources
