"""A look at the engines and LMCache that an operator names, and the configuration that suits what they are."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx

from kvproxy.base.errors import ClientError, ConfigError, Problem
from kvproxy.base.installed import installed
from kvproxy.base.settings.addresses import API_PATHS, url_fault
from kvproxy.cache.clients.vllm import VllmClient
from kvproxy.operate.config.load import load_config
from kvproxy.operate.config.schema import Config
from kvproxy.operate.config.shorthand import parse_endpoint, split_address
from kvproxy.operate.config.yaml_text import parse_yaml_with_places
from kvproxy.operate.feature import Feature

_TIMEOUT_S = 3.0
_WORDS = {
    "ConnectError": "no connection",
    "ConnectTimeout": "no connection in time",
    "ReadTimeout": "nothing came in time",
    "RemoteProtocolError": "it does not speak plain http",
}
_MODELS = "/v1/models"
_READY = "/ready"
_WHY = {
    _MODELS: f"no /health, so {_MODELS} is probed",
    _READY: f"its /health generates a token, so {_READY} is probed",
}
_GENERATES = "SGLang's /health generates a token"


def parse_engines(given: Sequence[str], *, numbered: bool = True) -> Iterator[tuple[str, str]]:
    """Ids and base URLs; what people copy from a client (`.../v1`) is cut to the engine's own address.

    An engine without an id is named `engine-1` and so on, or after its host and port if not `numbered`. Raises
    ConfigError with every fault.
    """
    faults: list[Problem] = []
    ids: set[str] = set()
    for text in given:
        endpoint = parse_endpoint(text if "://" in text else _with_scheme(text))
        named = "=" in text.partition("://")[0]
        name = _name(len(ids)) if numbered and not named else endpoint["id"]
        url = base_of_copied(endpoint["url"])
        if "://" not in text and Path(text).is_file():
            faults.append(Problem("", f"{text} is a file, not an engine", f"-c {text}"))
        elif fault := url_fault(url):
            faults.append(Problem("", f"engine {name}: {fault}", "http://host:port"))
        elif not name:
            faults.append(Problem("", f"an engine without an id: {text!r}", "ID=http://host:port, or the URL alone"))
        elif name in ids:
            faults.append(Problem("", f"another engine has the id {name!r}", "ID=http://host:port gives another"))
        else:
            yield name, url
        ids.add(name)
    if faults:
        raise ConfigError(faults)


def _with_scheme(text: str) -> str:
    name, equals, address = text.rpartition("=")
    return f"{name}{equals}http://{address}"


def _name(number: int) -> str:
    return f"engine-{number + 1}"


@dataclass(frozen=True, slots=True)
class SeenEngine:
    """One engine as it presented itself. `trouble`: why it did not."""

    id: str
    url: str
    models: tuple[str, ...] = ()
    health_path: str = "/health"
    events: bool = False
    trouble: str = ""
    sglang: bool = False

    def describe(self) -> str:
        """One line for a person."""
        if self.trouble:
            return f"{self.id}  {self.url}: {self.trouble}"
        kind = "is an SGLang, " if self.sglang else ""
        events = "publishes KV events" if self.events else "publishes no KV events"
        health = "" if self.health_path == "/health" else f"; {_WHY[self.health_path]}"
        return f"{self.id}  {self.url}: {kind}serves {', '.join(self.models) or 'no model'}; {events}{health}"


@dataclass(frozen=True, slots=True)
class SeenLmCache:
    """LMCache's service."""

    url: str
    kind: str = ""
    trouble: str = ""

    def describe(self) -> str:
        """One line for a person."""
        return f"LMCache  {self.url}: {self.trouble or f'answers as the {self.kind}'}"


async def look_at_all(engines: Mapping[str, str], lmcache: str) -> tuple[list[SeenEngine], SeenLmCache | None]:
    """All of them at the same time, each within a few seconds; never raises for what they do."""
    async with httpx.AsyncClient(trust_env=False, timeout=_TIMEOUT_S) as http:
        seen = await asyncio.gather(*(_engine(http, name, url) for name, url in engines.items()))
        controller = await _lmcache(http, lmcache) if lmcache else None
    return list(seen), controller


async def _engine(http: httpx.AsyncClient, name: str, url: str) -> SeenEngine:
    client = VllmClient(http, url, timeout_s=_TIMEOUT_S)
    try:
        models = tuple(model.id for model in await client.list_models())
    except ClientError as error:
        return SeenEngine(name, url, trouble=f"no answer on /v1/models ({_short(error)})")
    try:
        events = bool(await client.kv_event_sources())
    except ClientError:
        events = False
    sglang = await _is_sglang(client)
    paths = (_READY, "/health") if sglang else ("/health",)
    answering = [path for path in paths if await _answers(http, f"{url}{path}")]
    return SeenEngine(name, url, models, next(iter(answering), _MODELS), events, sglang=sglang)


async def _is_sglang(client: VllmClient) -> bool:
    try:
        await client.sglang_info()
    except ClientError:
        return False
    return True


def _short(error: ClientError) -> str:
    """Without the path, which is named already, and in words."""
    why = str(error).rpartition(": ")[2]
    return _WORDS.get(why, why)


async def _answers(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(url)).is_success
    except httpx.HTTPError:
        return False


async def _lmcache(http: httpx.AsyncClient, url: str) -> SeenLmCache:
    for feature in installed(Feature):
        try:
            if kind := await feature.find_store_kind(http, url):
                return SeenLmCache(url, kind)
        except ClientError as error:
            return SeenLmCache(url, trouble=f"no answer as LMCache's ({_short(error)})")
    return SeenLmCache(url, trouble="no installed feature uses it")


def survey_engines(given: Sequence[str], *, listen: str, policy: str) -> tuple[Config, list[Problem]]:
    """Return the configuration of engines named on a command line, after a look at them, and the findings. URLs are
    taken literally. Not to be called within an event loop. Raises ConfigError with every error."""
    engines = dict(parse_engines(given, numbered=False))
    seen, _ = asyncio.run(look_at_all(engines, ""))
    raw, _, _ = parse_yaml_with_places(write_config(seen, None, listen=listen, policy=policy).replace("$", "$$"))
    config = load_config(cast("dict[str, Any]", raw), env={})
    return config, [*_notes(seen, config)]


def _notes(seen: Sequence[SeenEngine], config: Config) -> Iterator[Problem]:
    count = f"{len(seen)} engine{'s' if len(seen) > 1 else ''}"
    yield Problem("", f"no file: {count} of the command line", "`kvproxy init` writes one", severity="note")
    models = sum(len(cluster.endpoints) > 0 for cluster in config.clusters.values())
    for one in seen:
        if not one.trouble:
            yield Problem("", one.describe(), severity="note")
        elif models > 1:
            hint = "a reload (SIGHUP) looks again"
            yield Problem("", f"{one.describe()}; taken for one of the first engines' model", hint, "warning")
        else:
            yield Problem("", f"{one.describe()}; served as soon as it answers", severity="warning")


def write_config(
    seen: Sequence[SeenEngine], lmcache: SeenLmCache | None, *, listen: str, policy: str = "kv_aware"
) -> str:
    """One cluster for engines that serve the same models; else one for each, with routes by model."""
    clusters = _clusters(seen)
    policy = policy if policy == "kv_aware" else json.dumps(policy)
    lines = [f"listen: {json.dumps(listen)}", f"admin: 127.0.0.1:{_admin_port(listen)}    # the live page", ""]
    if len(clusters) == 1:
        lines += [f"policy: {policy}", *_endpoints(seen, "")]
    else:
        lines.append("clusters:")
        for name, members in clusters.items():
            lines += [f"  {name}:    # {_model(members)}", f"    policy: {policy}", *_endpoints(members, "    ")]
        lines += ["", "routes:"]
        lines += [
            f"  - {{model: {json.dumps(model)}, cluster: {name}}}"
            for name, members in clusters.items()
            for model in dict.fromkeys(model for one in members for model in one.models)
        ]
    if lmcache is not None:
        lines += ["", "filters:", f"  kvcache: {{lmcache_endpoint: {json.dumps(lmcache.url)}}}"]
    return "\n".join(lines) + "\n"


def _clusters(seen: Sequence[SeenEngine]) -> dict[str, list[SeenEngine]]:
    """Group engines by the models they serve; engines that did not answer go with the first."""
    groups: dict[frozenset[str], list[SeenEngine]] = {}
    for one in seen:
        if one.models:
            groups.setdefault(frozenset(one.models), []).append(one)
    silent = [one for one in seen if not one.models]
    members = list(groups.values()) or [[]]
    members[0] = [*members[0], *silent]
    names: dict[str, list[SeenEngine]] = {}
    for number, group in enumerate(members, start=1):
        slug = re.sub(r"[^a-z0-9]+", "-", _model(group).rpartition("/")[2].casefold()).strip("-")[:40]
        name = slug or f"cluster-{number}"
        names[f"{name}-{number}" if name in names else name] = group
    return names


def _model(members: Sequence[SeenEngine]) -> str:
    return next((model for one in members for model in one.models), "")


def _endpoints(members: Sequence[SeenEngine], indent: str) -> Iterator[str]:
    paths = {one.health_path for one in members if one.models}
    if paths == {_READY}:
        yield f"{indent}health: {{path: {_READY}}}    # {_GENERATES}"
    elif _MODELS in paths:
        yield f"{indent}health: {{path: {_MODELS}}}    # there is no /health"
    elif any(one.sglang for one in members):
        yield f"{indent}health: {{timeout: 5s}}    # {_GENERATES}"
    kinds = {one.sglang for one in members if one.models}
    if kinds == {True}:
        yield f"{indent}engine_priority_order: highest_first    # SGLang's; for engine_priority, which is off"
    yield f"{indent}endpoints:"
    for one in members:
        yield f"{indent}  {json.dumps(one.id) if not one.id[0].isalpha() else one.id}: {json.dumps(one.url)}"


def _admin_port(listen: str) -> int:
    """Return the next port; 8889 if the listener's port is not known; a free one beside a free one."""
    try:
        port = split_address(listen)[1]
    except ValueError:
        return 8889
    return port + 1 if 0 < port < 65535 else 0 if port == 0 else 8889


def base_of_copied(url: str) -> str:
    """Return the engine's own address in what people copy from a client: without `/v1` and the paths below it."""
    url = url.rstrip("/")
    for end in API_PATHS:
        url = url.removesuffix(end)
    return url.removesuffix("/v1").rstrip("/")
