"""A reader's surroundings for a command: engines, LMCache, a proxy in front of them, and its files."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from kvproxy.app import Proxy
from kvproxy.operate.commands.configuration import ConfigSource
from kvproxy.operate.commands.reload import FileReloader
from kvproxy.proxy.listener.server import Server
from tests.cache.fleet import simulated
from tests.docs.blocks import ROOT, block
from tests.support.ports import free_port

MODEL = "tiny"


@dataclass(frozen=True)
class World:
    """Where the documentation's addresses and files are."""

    folder: Path
    places: Mapping[str, str]
    environment: Mapping[str, str]
    proxy: str

    def told(self, text: str) -> str:
        """Return a text of the documentation with its addresses, files and ids made those of this world."""
        pattern = "|".join(re.escape(there) for there in sorted(self.places, key=len, reverse=True))
        return re.sub(pattern, lambda found: self.places[found[0]], text)


@contextlib.asynccontextmanager
async def world(folder: Path, *, own_gateway: bool = False, programs: Path | None = None) -> AsyncIterator[World]:
    """Two simulated engines and LMCache's controller; a proxy with the README's configuration that has answered one
    request and written its receipt. Port 8888 is the proxy's, or that of what the commands start themselves
    (`own_gateway`). `programs`: a folder whose programs come before all others."""
    level = logging.getLogger().level
    async with simulated() as place, contextlib.AsyncExitStack() as stack:
        places = {
            **_engines(place.engines["a"], place.engines["b"]),
            "http://10.0.0.9:9000": place.lmcache,
            "http://127.0.0.1:9000": place.lmcache,
            "my-model": MODEL,
            '"model": "m"': f'"model": "{MODEL}"',
            "--workers 4": "--workers 2",
            "/var/log/kvproxy": str(folder),
            "/run/secrets/kvproxy-admin": str(folder / "token"),
        }
        given = World(folder, places, {}, "")
        text = given.told(block("README.md", "# config.yaml"))
        text = re.sub(r"127\.0\.0\.1:888\d", "127.0.0.1:0", text)
        (folder / "config.yaml").write_text(text)
        (folder / "token").write_text("secret\n")
        receipts = f"receipts: {{path: {folder}/receipts.jsonl}}\n"
        (folder / "proxy.yaml").write_text(text + receipts)
        source = ConfigSource(path=str(folder / "proxy.yaml"))
        proxy = await stack.enter_async_context(Proxy(source.load()[0]))
        await stack.enter_async_context(FileReloader(proxy, source, interval_s=0.0))
        public, admin = Server(proxy, drain_s=0.2), Server(proxy.admin, drain_s=0.2)
        for server in (public, admin):
            await stack.enter_async_context(server)
        stack.callback(logging.getLogger().setLevel, level)
        places |= _listeners(public.url, admin.url) | {"0f3c9a…": await _request(public.url)}
        if own_gateway:
            port = free_port()
            places |= {"http://127.0.0.1:8888": f"http://127.0.0.1:{port}", "--port 8888": f"--port {port}"}
        yield World(folder, places, _environment(folder, programs), public.url)


def _engines(a: str, b: str) -> dict[str, str]:
    return {
        "http://10.0.0.1:8000": a, "http://10.0.0.2:8000": b, "http://127.0.0.1:8000": a, "http://127.0.0.1:8001": b,
        "http://host:8000": a, "http://host:8001": b,
    }  # fmt: skip


def _listeners(public: str, admin: str) -> dict[str, str]:
    return {
        "http://127.0.0.1:8888": public, "http://proxy:8888": public, "http://127.0.0.1:8889": admin,
        "http://10.0.0.5:8889": admin, "localhost:8889": admin.removeprefix("http://"),
        "kvproxy init": "kvproxy init --force --listen 127.0.0.1:0",
        **{f"kvproxy {command}": f"kvproxy {command} --url {admin}"
           for command in ("status --watch", "status", "drain", "undrain", "reload", "explain")},
    }  # fmt: skip


async def _request(url: str) -> str:
    """Asks once; the request's id."""
    body = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "Hello"}]}
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-request-id"]


def _environment(folder: Path, programs: Path | None) -> dict[str, str]:
    """Of a shell: our commands on the PATH, and a curl that fails when the answer is an error."""
    (folder / ".curlrc").write_text("fail-with-body\nmax-time = 20\n")
    path = f"{programs or folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"PATH": path, "CURL_HOME": str(folder), "KVPROXY_ADMIN_TOKEN": "secret", "PYTHONPATH": str(ROOT)}
    return {**os.environ, **own, "PYTHONUNBUFFERED": "1"}
