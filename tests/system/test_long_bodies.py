"""A long body is looked at in several turns of the event loop, between which other requests go on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kvproxy.cache.overlap.prompt_hashes import PromptHashes
from kvproxy.proxy.filters.inference_request import InferenceRequestFilter
from kvproxy.proxy.forward import body_guard
from kvproxy.proxy.forward.body_guard import BodySanitizer
from kvproxy.proxy.request.body import LONG_BYTES
from tests.support.fake_engine import FakeEngine
from tests.support.loopback import serve
from tests.support.proxy import chat, running_proxy

CHAIN = ["inference_request", "kvcache", "router"]


@contextlib.asynccontextmanager
async def counted_turns() -> AsyncIterator[Callable[[], int]]:
    """How many turns the event loop has made."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count(), name="turns")
    try:
        yield lambda: turns
    finally:
        counting.cancel()


async def test_the_looks_at_a_long_body_are_in_turns_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsed, hashed and guarded; those at a short one are in one turn, since waiting for a turn costs time too."""
    seen: dict[str, int] = {}
    async with counted_turns() as turn, serve(FakeEngine("a")) as url:

        def noting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def look(*args: Any, **kwargs: Any) -> Any:
                seen.setdefault(name, turn())
                return real(*args, **kwargs)

            return look

        monkeypatch.setattr(InferenceRequestFilter, "_parse", noting("parse", InferenceRequestFilter._parse))
        monkeypatch.setattr(PromptHashes, "hash_prompt", noting("hash", PromptHashes.hash_prompt))
        monkeypatch.setattr(BodySanitizer, "passes", noting("guard", BodySanitizer.passes))
        async with running_proxy({"a": url}, policy="kv_aware") as proxy:
            for length, turns in ((1000, 1), (LONG_BYTES, 3)):
                seen.clear()
                answer = await proxy.client.post("/v1/chat/completions", json=chat("x" * length))
                assert answer.status_code == 200
                assert list(seen) == ["parse", "hash", "guard"]
                assert len(set(seen.values())) == turns


async def test_the_names_in_a_tenants_long_body_are_read_once_beside_its_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A salt comes in front of nearly every body of an isolated tenant, whatever its length."""
    read: list[int] = []
    decode = body_guard._decode
    monkeypatch.setattr(body_guard, "_decode", lambda body: read.append(len(body)) or decode(body))
    auth = {"auth": {"keys": [{"name": "t", "key": "secret-key"}], "isolate_tenants": True}}
    engine = FakeEngine("a")
    async with (
        serve(engine) as url,
        running_proxy({"a": url}, policy="kv_aware", filters=[auth, *CHAIN], engine_priority="on") as proxy,
    ):
        body, key = chat("x" * 100_000), {"authorization": "Bearer secret-key"}
        answer = await proxy.client.post("/v1/chat/completions", json=body, headers=key)
        assert answer.status_code == 200
    assert engine.calls[0].body.startswith(b'{"priority":')
    assert b'"cache_salt":"' in engine.calls[0].body[:60]
    assert len(read) == 1
    assert read[0] < 1000
