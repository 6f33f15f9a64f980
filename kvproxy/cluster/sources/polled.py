"""Endpoints from a file and from DNS: sources that have to be asked again and again."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from kvproxy.base.errors import DiscoveryError
from kvproxy.base.settings.addresses import url_fault
from kvproxy.base.settings.paths import dotted_path
from kvproxy.base.settings.yaml_text import parse_yaml, substitute_variables
from kvproxy.cluster.discovery_settings import DnsDiscoverySettings
from kvproxy.cluster.settings import EndpointSettings

#: Larger endpoint files are refused unread.
MAX_FILE_BYTES = 4 * 1024 * 1024

_ENDPOINTS = TypeAdapter(tuple[EndpointSettings, ...])

Resolve = Callable[..., Awaitable[Sequence[tuple[Any, ...]]]]  # loop.getaddrinfo's shape


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
