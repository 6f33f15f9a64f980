"""Five checks of Pixiu's kvcache demonstration, against kvproxy: `python samples/pixiu-mock/run.py`.

Starts two engines, a KV controller in Pixiu's shape and the proxy on free ports, sends the same chat twice and looks
at which did what. The engines answer at once, so nothing is hidden by waiting. Exit status 0: all five hold.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx

from kvproxy.app import Proxy
from kvproxy.operate.config.load import load_config
from kvproxy.proxy.listener.server import Server

CONFIG = Path(__file__).parent / "config.yaml"
PROMPT = "Explain in three sentences what a key-value cache is good for."
Receive = Any
Send = Any


class Mock:
    """A JSON-over-HTTP program with a counter a path. Unknown paths are 404."""

    def __init__(self, name: str, routes: dict[str, Any]) -> None:
        self.name = name
        self.calls: Counter[str] = Counter()
        self._routes = routes

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        path = scope["path"]
        self.calls[path] += 1
        route = self._routes.get(path)
        status, answer = (404, {"detail": "Not Found"}) if route is None else (200, route(json.loads(body or b"{}")))
        raw = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": raw})


def tokenize(request: dict[str, Any]) -> dict[str, Any]:
    """One token a word."""
    text = request.get("prompt") or " ".join(message["content"] for message in request["messages"])
    tokens = [len(word) for word in text.split()]
    return {"count": len(tokens), "max_model_len": 4096, "tokens": tokens}


def engine(name: str, *, tokenizes: bool) -> Mock:
    """Return an engine that answers with its name; only one of the two can tokenize."""

    def chat(_: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": f"answered by {name}"}
        return {"id": "1", "object": "chat.completion", "choices": [{"index": 0, "message": message}]}

    routes: dict[str, Any] = {"/v1/chat/completions": chat, "/health": lambda _: {}}
    return Mock(name, routes | ({"/tokenize": tokenize} if tokenizes else {}))


def controller() -> Mock:
    """Pixiu's idea of LMCache's controller: objects in layout_info, and more tokens at b whatever the prompt."""

    def lookup(request: dict[str, Any]) -> dict[str, Any]:
        tokens = len(request["tokens"])
        layout = {"mock-llm-a": {"0": "ram-a", "1": tokens // 2}, "mock-llm-b": {"0": "ram-b", "1": tokens}}
        return {"event_id": "lookup", "layout_info": layout}

    def done(request: dict[str, Any]) -> dict[str, Any]:
        return {"event_id": "done", "num_tokens": len(request.get("tokens", []))}

    return Mock("controller", {"/lookup": lookup, "/pin": done, "/compress": done, "/evict": done})


async def run() -> dict[str, bool]:
    """Run the five checks; results by name."""
    a, b, lmcache = engine("mock-llm-a", tokenizes=True), engine("mock-llm-b", tokenizes=False), controller()
    async with AsyncExitStack() as stack:
        ports = {}
        for variable, mock in (("ENGINE_A_PORT", a), ("ENGINE_B_PORT", b), ("CONTROLLER_PORT", lmcache)):
            ports[variable] = str((await stack.enter_async_context(Server(mock))).port)
        config = load_config(CONFIG.read_text(), env={**ports, "PROXY_PORT": "0", "METRICS_PORT": "0"})
        proxy = await stack.enter_async_context(Proxy(config))
        server = await stack.enter_async_context(Server(proxy))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=server.url, timeout=10))
        body = {"model": "mock-model", "messages": [{"role": "user", "content": PROMPT}]}
        served = []
        for _ in range(2):
            answer = await client.post("/v1/chat/completions", json=body)
            answer.raise_for_status()
            served.append(answer.headers["x-kvproxy-endpoint"])
    # Leaving the block drained the work that goes on after responses.
    return {
        "engine a tokenized (>= 1)": a.calls["/tokenize"] >= 1,
        "the controller was asked who holds the prompt (>= 2)": lmcache.calls["/lookup"] >= 2,
        "the hot prompt was pinned (>= 1)": lmcache.calls["/pin"] >= 1,
        "the second request went to the preferred engine": served[1] == "mock-llm-b",
        "engine b was called (>= 1)": b.calls["/v1/chat/completions"] >= 1,
    }


def main() -> int:
    """Print the checks; 0 when all hold."""
    checks = asyncio.run(run())
    for name, holds in checks.items():
        print(f"{'ok  ' if holds else 'FAIL'} {name}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
