"""A request that Envoy carries waits for its copy as one that the proxy carries does."""

from __future__ import annotations

import asyncio
from typing import Any

from kvproxy.base.types import EndpointId
from tests.cache.support import Fake, controller, copying, long_text, tokenize
from tests.features.picker.support import chat, destination, running_picker
from tests.support.loopback import serve
from tests.support.until import until

#: It takes many seconds to compute: on no machine its copy is not worth a wait.
PROMPT, HELD = long_text("p", 60_000), 59_904


async def test_the_endpoint_is_named_when_the_copy_is_there() -> None:
    end = asyncio.Event()

    async def move(asked: dict[str, Any]) -> dict[str, Any]:
        await end.wait()
        return {"event_id": "x", "num_tokens": len(asked["tokens"])}

    service = controller(lambda tokens: {"a": ["LocalCPUBackend", HELD]} if len(tokens) > HELD else {}, move=move)
    engines = [Fake({"/tokenize": tokenize}) for _ in "ab"]
    async with serve(service) as url, serve(engines[0]) as a, serve(engines[1]) as b:
        kvcache = copying(url, max_wait="60s", timeout="60s", tokens_per_second=100_000)
        filters: Any = ["inference_request", {"kvcache": kvcache}, "router"]
        async with running_picker(endpoints={"a": a, "b": b}, queue={}, filters=filters) as picker:
            cluster, kv = picker.proxy.clusters["default"], picker.proxy.kvcache
            assert kv is not None
            await until(lambda: kv.overlap.store.possible)
            cluster.operator.drain_endpoint(EndpointId("a"))
            envoy = picker.ask()
            asked = asyncio.create_task(envoy.pick(chat(PROMPT)))
            await until(lambda: service.calls["/move"] == 1)
            assert (asked.done(), picker.in_flight()) == (False, {"a": 0, "b": 1})
            end.set()
            assert destination(await asked) == [b.removeprefix("http://")]
            assert picker.metric("kvproxy_kvcache_transfers_on_demand_total", result="done") == 1
            assert picker.metric("kvproxy_kvcache_transfer_wait_seconds_count") == 1
            await envoy.answer()
            await envoy.finish()
