"""Collects the keys of the admin listener's JSON answers, with every capability off and on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from starlette.types import Send

from tests.operate.admin.support import admin_of
from tests.support.fake_engine import Call, FakeEngine, event, start_stream
from tests.support.loopback import serve
from tests.support.proxy import RunningProxy, chat, running_proxy
from tests.support.until import until

PATHS = (
    "/live", "/endpoints", "/routing", "/cache/status", "/cache/hot", "/cache/leases",
    "/cache/breaks", "/cache/priorities", "/decisions", "/decisions/1", "/sync", "/config", "/log",
)  # fmt: skip

#: Keys that are names of the configuration here, or ids, and so no keys of the answer.
NAMES = {"a", "b", "default", "m", "kv_aware", "least_request"}
#: Mappings whose keys are what happened.
COUNTS = {"tokenizes", "lookups", "actions", "results", "breakers", "released"}

#: Keys that are there once a second has passed.
TIMED = ("GET /live: clusters.", "GET /live: findings[].")

ON: dict[str, Any] = {
    "shadow_policy": "least_request",
    "client_policies": ["least_request"],
    "queue": {},
    "engine_priority": "on",
    "filters": [
        "request_id",
        "access_log",
        "inference_request",
        {"normalize": {"rules": ["sort_tools"]}},
        {
            "kvcache": {
                "lmcache_endpoint": "http://127.0.0.1:9",
                "kv_events": True,
                "leases": {"enabled": True},
                "warming": {"export": "hashes"},
                "transfers": {"on_demand": True},
            }
        },
        "router",
    ],
}


async def _answer(engine: FakeEngine, call: Call, send: Send) -> None:
    """Two tokens and a usage, streamed."""
    await start_stream(send)
    await event(send, b'{"choices":[{"delta":{"content":"x"}}]}')
    usage = b'{"prompt_tokens":240,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":224}}'
    await event(send, b'{"choices":[],"usage":%s}' % usage)
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def collect_answers(**settings: Any) -> set[str]:
    """`GET /live: endpoints[].id`."""
    async with (
        serve(FakeEngine("a", _answer)) as a,
        serve(FakeEngine("b", _answer)) as b,
        running_proxy({"a": a, "b": b}, **{"policy": "kv_aware", **settings}) as proxy,
        admin_of(proxy.proxy) as admin,
    ):
        await _ask(proxy)
        keys = {f"GET {path}: {key}" for path in PATHS for key in _keys((await admin.get(path)).json(), "")}
        return {key for key in keys if not key.startswith(TIMED)}


async def _ask(proxy: RunningProxy) -> None:
    """Send turns of one session, and one request that no engine answers."""
    for turn in range(4):
        body = chat("the same beginning " * 40 + f"turn {turn}", stream=True)
        answer = await proxy.client.post("/v1/chat/completions", json=body, headers={"x-session-id": "s"})
        assert answer.status_code == 200
    assert (await proxy.client.post("/v1/nothing", json={})).status_code == 404
    await until(lambda: len(proxy.proxy.recent) >= 4)


def _keys(value: Any, at: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, below in value.items():
            here = f"{at}.{'NAME' if key in NAMES else key}".removeprefix(".")
            yield here
            if key not in COUNTS:
                yield from _keys(below, here)
    elif isinstance(value, list):
        for below in value:
            yield from _keys(below, f"{at}[]")
