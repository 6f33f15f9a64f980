"""Text and pictures mixed: how well text prompts are predicted, which chats stay known, and what a picture costs.

python -m benchmarks.media > benchmarks/reports/media.md
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import struct
import time
import zlib
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any

import httpx
from blake3 import blake3
from xxhash import xxh3_128_hexdigest

from benchmarks.markdown import table
from kvproxy.app import Proxy
from kvproxy.base.types import RequestKind
from kvproxy.cache.overlap.index_state import FollowedEvents, IndexState
from kvproxy.cache.overlap.local_indexes import LocalIndexes
from kvproxy.lab.simulator.engine_io import EngineSettings
from kvproxy.lab.simulator.fleet import Fleet, FleetSettings, clone_engines
from kvproxy.lab.simulator.kv_event_publisher import PublisherSettings
from kvproxy.lab.simulator.sglang_server import SglangApp
from kvproxy.lab.simulator.sglang_settings import EventSettings, SglangSettings
from kvproxy.lab.simulator.timing import EngineTiming
from kvproxy.lab.simulator.vllm_server import VllmApp
from kvproxy.lab.simulator.vllm_settings import VllmSettings
from kvproxy.operate.config.load import load_config
from kvproxy.proxy.forward.body_guard import BodySanitizer, is_guarded
from kvproxy.proxy.listener.server import Server
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.parse import scan_body
from kvproxy.proxy.request.session import NO_CALLER

CHATS, REQUESTS, LEARNED = 20, 80, 10
PICTURE_BYTES = 600_000
WORDS = 1000
ROUNDS = 15
TAUGHT_CHATS, SYSTEM_WORDS, EVICTING = 6, 600, 9
#: KV memory of the engines whose events are followed: not all chats and the others' prompts fit.
KEPT_BLOCKS = 900
ENGINE = VllmSettings(
    engine=EngineSettings(40_000, 16, token_outputs=True, timing=EngineTiming(time_scale=0.001)), root="sim"
)


def _event_vllm(blocks: int) -> VllmApp:
    timing = EngineTiming(time_scale=0.001)
    engine = EngineSettings(blocks, 16, token_outputs=True, timing=timing)
    return VllmApp(VllmSettings(engine=engine, root="sim", kv_events=PublisherSettings()), rng=random.Random(1))


def _event_sglang(blocks: int) -> SglangApp:
    engine = EngineSettings(blocks, 16, token_outputs=True, timing=EngineTiming(time_scale=0.001))
    return SglangApp(SglangSettings(engine=engine, kv_events=EventSettings()), rng=random.Random(1))


EVENT_ENGINES: dict[str, Callable[[int], Any]] = {"vLLM": _event_vllm, "SGLang": _event_sglang}


def png(rng: random.Random, width: int, height: int, size_bytes: int) -> bytes:
    """Return a PNG of this size, most of it in a chunk that decoders skip."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = (b"\0" + rng.randbytes(3) * width) * height
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    more = chunk(b"teXt", b"note\0" + rng.randbytes(size_bytes))
    return b"\x89PNG\r\n\x1a\n" + head + more + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def words(rng: random.Random, count: int = WORDS) -> str:
    return " ".join(rng.choices(("people", "water", "number", "answer", "country", "river", "mountain"), k=count))


def chat(*content: str | bytes) -> dict[str, Any]:
    """One message of texts and pictures."""
    parts: list[dict[str, Any]] = []
    for one in content:
        if isinstance(one, str):
            parts.append({"type": "text", "text": one})
        else:
            url = f"data:image/png;base64,{base64.b64encode(one).decode()}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
    return {"model": "sim", "max_tokens": 1, "messages": [{"role": "user", "content": parts}]}


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[int, int, int]:
    """Predicted tokens of the prompt and of its cached beginning, and the engine's count."""
    reply = await client.post("/v1/chat/completions", json=body, headers={"x-kvproxy-debug": "1"})
    reply.raise_for_status()
    said = dict(part.split("=", 1) for part in reply.headers["x-kvproxy-decision"].split("; "))
    matched = said["matched"].partition("/")[0].partition(":")[2]  # "none", or endpoint:tokens/source
    return int(said["prompt_tokens"]), int(matched or 0), int(reply.json()["usage"]["prompt_tokens"])


async def mix(every: int) -> list[object]:
    """One row: requests of which every such one has a picture."""
    rng = random.Random(every)
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(Fleet(FleetSettings(clone_engines(ENGINE, 1), controller=None)))
        engine = await stack.enter_async_context(Server(fleet.engines["sim-0"]))
        config = {"endpoints": {"sim-0": engine.url}, "policy": "kv_aware", "health": {"active": False}}
        proxy = await stack.enter_async_context(Proxy(load_config(config)))
        front = await stack.enter_async_context(Server(proxy))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=front.url, timeout=60, trust_env=False))
        chats = [words(rng) for _ in range(CHATS)]
        for text in chats:
            await ask(client, chat(text))
        texts: list[float] = []
        pictures: list[float] = []
        for number in range(REQUESTS):
            pictured = number % every == 0
            content = (words(rng), png(rng, 1280, 960, PICTURE_BYTES)) if pictured else (words(rng),)
            expected, _, counted = await ask(client, chat(*content))
            if number >= LEARNED:
                (pictures if pictured else texts).append(expected / counted)
        lost = 0
        for text in chats:
            _, matched, counted = await ask(client, chat(text, "and now?"))
            lost += matched < 0.9 * (counted - 20)
    return [f"one in {every}", len(texts), _span(texts), len(pictures), _span(pictures), f"{lost} of {CHATS}"]


async def taught(kind: str, *, events: bool) -> list[list[object]]:
    """Rows: how far predicted reuse is from the engine's, of chats with a picture behind a common system prompt."""
    rng = random.Random(3)
    async with AsyncExitStack() as stack:
        app = EVENT_ENGINES[kind](KEPT_BLOCKS)
        await stack.enter_async_context(app)
        engine = await stack.enter_async_context(Server(app))
        config = {
            "endpoints": {"sim-0": engine.url},
            "policy": "kv_aware",
            "health": {"active": False},
            "filters": {"kvcache": {"kv_events": events}},
        }
        proxy = await stack.enter_async_context(Proxy(load_config(config)))
        front = await stack.enter_async_context(Server(proxy))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=front.url, timeout=60, trust_env=False))
        direct = await stack.enter_async_context(httpx.AsyncClient(base_url=engine.url, timeout=60, trust_env=False))
        kvcache = proxy.kvcache
        assert kvcache is not None
        while events and not kvcache.overlap.indexes["default"].exact:  # noqa: ASYNC110 - a benchmark waits
            await asyncio.sleep(0.01)
        system = {"role": "system", "content": words(rng, SYSTEM_WORDS)}
        chats = [chat(words(rng, 100), png(rng, 1120, 840, 2000), words(rng, 200)) for _ in range(TAUGHT_CHATS)]
        for one in chats:
            one["messages"].insert(0, system)
        rows: list[list[object]] = []

        async def send_all(name: str) -> None:
            errors = [await _error(client, one) for one in chats]
            rows.append([kind, "followed" if events else "not followed", name, f"{max(errors):.3f}"])

        for _ in range(3):  # what a token of text is in bytes
            (await client.post("/v1/chat/completions", json=chat(words(rng)))).raise_for_status()
        await send_all("new")
        await send_all("the same again")
        for _ in range(EVICTING):  # from another proxy
            body = {**chat(words(rng)), "messages": [system, *chat(words(rng))["messages"]]}
            (await direct.post("/v1/chat/completions", json=body)).raise_for_status()
        await asyncio.sleep(0.2)
        await send_all("after other proxies' prompts have evicted their pictures")
        for one in chats:
            one["messages"] += [{"role": "assistant", "content": "yes"}, *chat(words(rng, 50))["messages"]]
        await send_all("next turn")
        return rows


async def _error(client: httpx.AsyncClient, body: dict[str, Any]) -> float:
    """Return how far predicted reuse is from the engine's, by the prompt's tokens."""
    reply = await client.post("/v1/chat/completions", json=body, headers={"x-kvproxy-debug": "1"})
    reply.raise_for_status()
    await asyncio.sleep(0.03)
    said = dict(part.split("=", 1) for part in reply.headers["x-kvproxy-decision"].split("; "))
    matched = int(said["matched"].partition("/")[0].partition(":")[2] or 0)
    usage = reply.json()["usage"]
    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return float(abs(matched - cached) / usage["prompt_tokens"])


def _span(ratios: list[float]) -> str:
    return f"{min(ratios):.3f} to {max(ratios):.3f}"


async def least_ms(call: Callable[[], Coroutine[Any, Any, object]]) -> float:
    """CPU milliseconds, the least of some rounds: what others do on the machine only adds."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        await call()
        rounds.append(1e3 * (time.process_time() - began))
    return min(rounds)


async def costs() -> list[list[object]]:
    """Return the costs of a body of 2 MB of pictures, beside hashing the pictures once."""
    rng = random.Random(1)
    shots = [png(rng, 1280, 960, 500_000) for _ in range(4)]
    body = json.dumps(chat(words(rng), *shots)).encode()
    encoded = [base64.b64encode(shot) for shot in shots]

    async def hash_as_engines() -> None:
        for one in encoded:
            blake3(base64.b64decode(one)).hexdigest()

    async def hash_text() -> None:
        for one in encoded:
            xxh3_128_hexdigest(one)

    async def read() -> None:
        exchange = Exchange(received_at=0.0, body=body)
        request, exchange.members = await scan_body(
            RequestKind.CHAT, body, NO_CALLER, pace=asyncio.Lock(), also=is_guarded
        )
        exchange.inference = request
        assert request is not None
        LocalIndexes(IndexState(), FollowedEvents()).prompts.hash_prompt(request, "sim")
        assert BodySanitizer().passes(body, exchange)

    once = await least_ms(hash_as_engines)
    rows: list[list[object]] = []
    for name, call in (
        ("base64 decoded and hashed once, as an engine does (BLAKE3)", hash_as_engines),
        ("base64 hashed once (xxh3)", hash_text),
        ("the proxy: parsed, cut, hashed, searched for names of media", read),
    ):
        ms = await least_ms(call)
        rows.append([name, f"{ms:.2f}", f"{ms / once:.2f}"])
    return rows


_HEAD = """# Text and pictures mixed

`python -m benchmarks.media`, %s, one simulated engine, default settings.

%d chats of %d words, then %d new prompts, some with a screenshot of 1280 x 960 pixels and %d KB, then the next turn of
each chat. Predicted prompt tokens over the engine's count, from request %d on; a chat is lost if less than 90 %% of its
first turn is predicted as cached.
"""

_TAUGHT = """
%d chats with a picture behind a system prompt of %d words, at engines with little KV memory. Predicted reuse less the
engine's own, by the prompt's tokens. Another proxy's prompts evict the pictures and leave the system prompt.
Three text prompts come first. Where pictures alone come to a cold start, text cannot be told from pictures without
events or counts: so SGLang not followed was 0.208 off when new, and 0.504 the same again.
"""


async def main() -> None:
    print(_HEAD % (datetime.now(UTC).date(), CHATS, WORDS, REQUESTS, PICTURE_BYTES // 1000, LEARNED))
    heads = ("pictures", "text prompts", "predicted / counted", "with picture", "predicted / counted", "chats lost")
    print("\n".join(table(heads, [await mix(10), await mix(2)])))
    print(_TAUGHT % (TAUGHT_CHATS, SYSTEM_WORDS))
    columns = ("engine", "KV events", "chats", "largest error")
    rows = [row for kind in EVENT_ENGINES for events in (True, False) for row in await taught(kind, events=events)]
    print("\n".join(table(columns, rows)))
    print("\nCPU of a chat with four screenshots of 0.5 MB, in milliseconds:\n")
    print("\n".join(table(("work", "ms", "of hashing once"), await costs())))


if __name__ == "__main__":
    asyncio.run(main())
