"""`kvproxy warm`: prompt templates to the endpoints that should hold them, while these have nothing else to do."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import httpx

from kvproxy.app import Proxy
from kvproxy.base.errors import KvproxyError
from kvproxy.base.settings.compose import without_features
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.features.warming.settings import WarmingPlace
from kvproxy.operate.commands.configuration import ConfigSource, find_usual_file
from kvproxy.operate.commands.operate import AdminAddress
from kvproxy.operate.commands.progress import ProgressBar
from kvproxy.operate.config.schema import Config, ReceiptSettings
from kvproxy.proxy.settings import FilterSpec

#: Of the file.
MAX_PROMPTS = 10_000
MAX_LINE_BYTES = 8 << 20
#: Between two looks at endpoints that are busy.
PAUSE_S = 0.25
_TIMEOUT_S = 600.0
#: Results after which the endpoint holds the prefix, as far as can be known.
_GOOD = ("done", "unverified")


class WarmError(KvproxyError):
    """The prompts cannot be read, or no server takes them; the text names the place and the remedy."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line: the request that its clients send."""

    line: int
    path: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class WarmOptions:
    """Prompts, targets, and patience with busy engines."""

    prompts: Path
    replicas: int = 1
    wait_s: float = 60.0


def read_prompts(path: Path) -> list[Prompt]:
    """Every line, checked before anything is sent. Raises WarmError with the line that is wrong."""
    prompts = []
    with path.open("rb") as file:
        for number in range(1, sys.maxsize):
            text = file.readline(MAX_LINE_BYTES + 1)
            if not text:
                break
            if text.strip():
                prompts.append(_prompt(text, number, path))
            if len(prompts) > MAX_PROMPTS:
                raise WarmError(f"{path}, line {number}: more than {MAX_PROMPTS} prompts; divide the file")
    if not prompts:
        raise WarmError(f"{path}: no prompts; a line is a chat or completion request, as clients send it")
    return prompts


def _prompt(text: bytes, number: int, path: Path) -> Prompt:
    def wrong(what: str) -> WarmError:
        return WarmError(f"{path}, line {number}: {what}")

    if len(text) > MAX_LINE_BYTES:
        raise wrong(f"longer than {MAX_LINE_BYTES >> 20} MiB")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise wrong(f"not JSON: {error}") from None
    if not isinstance(body, dict) or not ("messages" in body) ^ ("prompt" in body):
        raise wrong('must be an object with "messages" or "prompt", as clients send it')
    return Prompt(number, "/v1/chat/completions" if "messages" in body else "/v1/completions", body)


def main(args: argparse.Namespace) -> int:
    """`kvproxy warm`."""
    options = WarmOptions(args.prompts, args.replicas, args.wait)
    return asyncio.run(_main(args, options))


async def _main(args: argparse.Namespace, options: WarmOptions) -> int:
    if args.url:
        token = AdminAddress(args.url, args.token_file).connect().headers.get("authorization", "")
        headers = {"authorization": token} if token else {}
        async with httpx.AsyncClient(base_url=args.url, headers=headers, timeout=_TIMEOUT_S, trust_env=False) as client:
            return await run(options, client, out=sys.stdout, err=sys.stderr)
    source = ConfigSource(path=args.config or find_usual_file(sys.stderr), lenient=args.lenient)
    async with own_proxy(source.load()[0]) as client:
        return await run(options, client, out=sys.stdout, err=sys.stderr)


@asynccontextmanager
async def own_proxy(config: Config) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of the admin routes of a proxy that lives in this process, listens nowhere and writes no file."""
    filters = tuple(_quiet(spec) for spec in config.filters)
    admin = config.admin.model_copy(update={"token": None})
    quiet = without_features(config, Config).model_copy(
        update={"filters": filters, "receipts": ReceiptSettings(), "admin": admin}
    )
    async with Proxy(quiet) as proxy:
        transport = httpx.ASGITransport(proxy.admin)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=_TIMEOUT_S) as client:
            yield client


def _quiet(spec: FilterSpec) -> FilterSpec:
    """Return the kvcache filter without other features: what this process learns is not the proxy's to keep."""
    if not isinstance(spec.settings, KvCacheSettings):
        return spec
    settings = without_features(spec.settings, KvCacheSettings, WarmingPlace)
    return spec.model_copy(update={"settings": settings})


async def run(options: WarmOptions, client: httpx.AsyncClient, *, out: TextIO, err: TextIO) -> int:
    """Warms one prompt after the other; 1 where not every endpoint that was chosen holds what it should."""
    try:
        prompts = read_prompts(options.prompts)
        bar = ProgressBar(len(prompts), out=err)
        results = Counter[str]()
        cached = 0
        bar.begin(f"{len(prompts)} prompts")
        for done, prompt in enumerate(prompts, 1):
            for each in await _warm(prompt, options, client):
                results[each["result"]] += 1
                cached += each["cached_tokens"]
                if each["result"] not in _GOOD:
                    print(f"line {prompt.line}: {each['endpoint']}: {each['result']}", file=err)
            bar.advance(done)
        bar.close()
    except KvproxyError as error:
        print(f"kvproxy warm: {error}", file=err)
        return 1
    counted = ", ".join(f"{count} {name}" for name, count in sorted(results.items()))
    print(f"{len(prompts)} prompts, {options.replicas} replicas: {counted}; {cached} tokens found cached", file=out)
    return 0 if set(results) <= set(_GOOD) else 1


async def _warm(prompt: Prompt, options: WarmOptions, client: httpx.AsyncClient) -> Sequence[dict[str, Any]]:
    """Where it is now; while an endpoint is busy it is asked again."""
    until = time.monotonic() + options.wait_s
    while True:
        endpoints = await _ask(prompt, options, client)
        if all(each["result"] != "busy" for each in endpoints) or time.monotonic() >= until:
            return endpoints
        await asyncio.sleep(PAUSE_S)


async def _ask(prompt: Prompt, options: WarmOptions, client: httpx.AsyncClient) -> Sequence[dict[str, Any]]:
    try:
        question = {"path": prompt.path, "request": prompt.body}
        answer = await client.post(f"/warm?limit={options.replicas}", json=question)
        data = answer.json()
    except httpx.HTTPError as error:
        raise WarmError(f"{client.base_url}: {error or type(error).__name__}: is it the admin listener?") from None
    except ValueError:
        raise WarmError(f"{client.base_url} is not an admin listener of kvproxy (--url)") from None
    if answer.status_code != 200:
        problems = "; ".join(f"{one['where']}: {one['what']} ({one['fix']})" for one in data.get("problems", ()))
        raise WarmError(f"line {prompt.line}: {problems or answer.status_code}")
    found: Sequence[dict[str, Any]] = data["endpoints"]
    return found
