"""`kvproxy init`: asks where the engines are, looks at them, writes a configuration that suits what it saw."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import httpx

from kvproxy.base.errors import ClientError, ConfigError, Problem
from kvproxy.base.settings.addresses import base_of_copied, split_address, url_fault
from kvproxy.cache.clients.engine_metrics import EngineKind
from kvproxy.cache.clients.lmcache_controller import LMCacheControllerClient
from kvproxy.cache.clients.lmcache_coordinator import LMCacheCoordinatorClient
from kvproxy.cache.clients.tokens import token_array
from kvproxy.cache.clients.vllm import VllmClient
from kvproxy.cache.lmcache_services import is_coordinator
from kvproxy.lab.advise.advice import Setting, spell_flag
from kvproxy.operate.commands.serving import run_loop
from kvproxy.operate.config.load import check_config
from kvproxy.operate.config.shorthand import parse_endpoint

_DEFAULT_ENGINE = "http://127.0.0.1:8000"
_DEFAULT_LISTEN = "127.0.0.1:8888"
_TIMEOUT_S = 3.0
_WORDS = {
    "ConnectError": "it cannot be connected to",
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
_HEAD = """\
# Written by `kvproxy init`. Every setting: docs/configuration.md. After a change: kvproxy check
"""


@dataclass(frozen=True, slots=True)
class InitOptions:
    """What the command line says; what it leaves out is asked, or defaulted with `yes`."""

    engines: Sequence[str] = ()
    lmcache: str | None = None
    listen: str | None = None
    output: Path = Path("config.yaml")
    yes: bool = False
    force: bool = False


class _Answers:
    """Questions on a terminal; without one, or with --yes, the defaults."""

    def __init__(self, stdin: TextIO, out: TextIO, *, asking: bool) -> None:
        self._stdin = stdin
        self._out = out
        self.asking = asking

    def text(self, question: str, default: str) -> str:
        """One line; the default when it is empty."""
        if not self.asking:
            return default
        print(f"{question} [{default or 'none'}]: ", end="", flush=True, file=self._out)
        line = self._stdin.readline()
        if not line:
            raise KeyboardInterrupt
        return line.strip() or default


def main(args: argparse.Namespace) -> int:
    """`kvproxy init`."""
    options = InitOptions(args.engine, args.lmcache, args.listen, Path(args.output), args.yes, args.force)
    return run(options, stdin=sys.stdin, out=sys.stdout, err=sys.stderr)


def run(options: InitOptions, *, stdin: TextIO, out: TextIO, err: TextIO) -> int:
    """Write the file; 1 when it is not written. Raises ConfigError for addresses that are none."""
    answers = _Answers(stdin, out, asking=stdin.isatty() and not options.yes)
    if not options.engines and not answers.asking and not options.yes:
        hint = "give --engine URL once per engine, or --yes for one at http://127.0.0.1:8000"
        raise ConfigError([Problem("", "there is no terminal to ask", hint)])
    if options.output.exists() and not options.force:
        replace = answers.text(f"{options.output} exists. Replace it? y or n", "n")
        if replace.casefold() not in ("y", "yes"):
            how = "--force replaces it, -o FILE writes another"
            print(f"kvproxy init: {options.output} exists and stays as it is ({how})", file=err)
            return 1
    given = options.engines or answers.text("Engines, as URLs with spaces between", _DEFAULT_ENGINE).split()
    engines = dict(_engines(given))
    asked = options.lmcache is None and answers.asking
    lmcache = answers.text("LMCache controller or coordinator, as a URL", "") if asked else options.lmcache or ""
    if lmcache and (fault := url_fault(lmcache)):
        raise ConfigError([Problem("--lmcache", fault)])
    listen = options.listen or answers.text("Where clients connect", _DEFAULT_LISTEN)
    return _finish(options, engines, lmcache, listen, out)


def _finish(options: InitOptions, engines: dict[str, str], lmcache: str, listen: str, out: TextIO) -> int:
    """Look, write, and say what comes next."""
    found: list[tuple[list[SeenEngine], SeenLmCache | None]] = []

    async def visit() -> int:
        found.append(await look_at_all(engines, lmcache))
        return 0

    run_loop(visit)
    seen, controller = found[0]
    for one in (*seen, *([controller] if controller is not None else ())):
        print(f"  {one.describe()}", file=out)
    text = write_config(seen, controller, listen=listen)
    _, problems = check_config(text, env={})
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        raise ConfigError(errors)
    _write(options.output, text)
    usual = options.output == Path("config.yaml")
    file, given = ("", "") if usual else (f" {shlex.quote(str(options.output))}",) * 2
    print(f"\nwrote {options.output}. Next:\n", file=out)
    print(
        f"  kvproxy doctor{' -c' if given else ''}{given}    # looks closer, with two or three tiny requests", file=out
    )
    print(f"  kvproxy check{file}     # after every change of the file", file=out)
    print(f"  kvproxy serve{' -c' if given else ''}{given}", file=out)
    if flags := list(list_flags(seen)):
        print("\nWorth adding to the engines' command lines:\n", file=out)
        for engines_named, flag in flags:
            print(f"  # {engines_named}\n  {flag}", file=out)
    return 0


def list_flags(seen: Sequence[SeenEngine]) -> Iterator[tuple[str, str]]:
    """For vLLM and for SGLang engines: which ones, and the flags that kvproxy gains by, on one line to paste."""
    for sglang, kind in ((False, EngineKind.VLLM), (True, EngineKind.SGLANG)):
        members = [one for one in seen if one.models and one.sglang is sglang]
        if not members:
            continue
        settings = [Setting.CACHE_REPORT, Setting.SCHEDULING]
        if not all(one.events for one in members):
            settings.append(Setting.KV_EVENTS)
        flags = [spell_flag(one, kind) for one in settings]
        yield ", ".join(one.id for one in members), " ".join(flags + (["--enable-metrics"] if sglang else []))


def _engines(given: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Ids and base URLs; what people copy from a client (`.../v1`) is cut to the engine's own address."""
    faults: list[Problem] = []
    ids: set[str] = set()
    for text in given:
        endpoint = parse_endpoint(text if "://" in text else _with_scheme(text))
        name = endpoint["id"] if "=" in text.partition("://")[0] else _name(len(ids))
        url = base_of_copied(endpoint["url"])
        if fault := url_fault(url):
            faults.append(Problem(text, fault, "http://host:port"))
        elif name in ids:
            faults.append(Problem(text, f"another engine has the id {name!r}"))
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


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


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
            return f"{self.id}  {self.url}: {self.trouble}; written all the same"
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
    try:
        if await is_coordinator(LMCacheCoordinatorClient(http, url, lookup_timeout_s=_TIMEOUT_S)):
            return SeenLmCache(url, "coordinator")
        await LMCacheControllerClient(http, url, lookup_timeout_s=_TIMEOUT_S).lookup(token_array([]))
    except ClientError as error:
        return SeenLmCache(url, trouble=f"no answer as LMCache's ({_short(error)}); written all the same")
    return SeenLmCache(url, "controller")


def write_config(seen: Sequence[SeenEngine], lmcache: SeenLmCache | None, *, listen: str) -> str:
    """One cluster for engines that serve the same models; else one for each, with routes by model."""
    clusters = _clusters(seen)
    lines = [_HEAD + f"listen: {json.dumps(listen)}", f"admin: 127.0.0.1:{_admin_port(listen)}    # the live page", ""]
    if len(clusters) == 1:
        lines += ["policy: kv_aware", *_endpoints(seen, "")]
    else:
        lines.append("clusters:")
        for name, members in clusters.items():
            lines += [f"  {name}:    # {_model(members)}", "    policy: kv_aware", *_endpoints(members, "    ")]
        lines += ["", "routes:"]
        lines += [
            f"  - {{model: {json.dumps(model)}, cluster: {name}}}"
            for name, members in clusters.items()
            for model in dict.fromkeys(model for one in members for model in one.models)
        ]
    known = [] if lmcache is None else [f"lmcache_endpoint: {json.dumps(lmcache.url)}"]
    known += ["kv_events: true"] if any(one.events for one in seen) else []
    if known:
        lines += _filters(", ".join(known))
    return "\n".join(lines) + "\n"


def _clusters(seen: Sequence[SeenEngine]) -> dict[str, list[SeenEngine]]:
    """By the models they serve; engines that reported nothing go with the first."""
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


def _filters(kvcache: str) -> list[str]:
    return [
        "",
        "filters:",
        "  - request_id",
        "  - access_log",
        "  - inference_request",
        f"  - kvcache: {{{kvcache}}}",
        "  - router",
    ]


def _admin_port(listen: str) -> int:
    """Return the next one; 8889 where the listener's port is not known; a free one beside a free one."""
    try:
        port = split_address(listen)[1]
    except ValueError:
        return 8889
    return port + 1 if 0 < port < 65535 else 0 if port == 0 else 8889
