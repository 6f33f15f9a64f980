"""LiteLLM's Router with the choice of its deployments by cache."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import httpx
import pytest

from kvproxy.testing import simulated_engines
from tests.support.until import until

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("default")]
litellm = pytest.importorskip("litellm", reason="make test-hosts installs it", exc_type=ImportError)

MESSAGES = [{"role": "user", "content": "long beginning " * 100}]


def router_of(endpoints: dict[str, str], **options: Any) -> Any:
    """One group of deployments."""
    return litellm.Router(
        **options,
        model_list=[
            {
                "model_name": "m",
                "litellm_params": {"model": "hosted_vllm/sim", "api_base": f"{url}/v1", "api_key": "x"},
                "model_info": {"id": name},
            }
            for name, url in endpoints.items()
        ],
    )


@pytest.fixture
def routing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the callback, installed for one test."""
    from kvproxy.litellm import KVCacheRouting

    made = KVCacheRouting()
    monkeypatch.setattr(litellm, "callbacks", [made])
    return made


def in_flight(routing: Any) -> int:
    return sum(each.load.in_flight for each in routing._router.proxy.clusters["default"].endpoints)


def awaiting_first_token(routing: Any) -> int:
    return sum(each.load.pending_requests for each in routing._router.proxy.clusters["default"].endpoints)


def counted(routing: Any, name: str, **labels: str) -> float:
    return routing._router.proxy.metrics.registry.get_sample_value(name, labels) or 0.0


async def test_deployments_are_chosen_by_cache(routing: Any) -> None:
    """In one event loop: LiteLLM reports the end of requests from the first loop it ran in."""
    await later_turns_find_their_prefix(routing)
    await a_stream_gives_its_place_back_at_its_end(routing)
    await the_first_token_of_a_stream_is_seen_when_it_comes(routing)
    await a_call_that_is_dropped_gives_its_place_back(routing)
    await usage_of_streams_is_learned(routing)
    await a_deployment_that_cools_down_is_not_chosen(routing)
    await a_deployment_that_fails_is_left_to_litellms_retries(routing)


async def later_turns_find_their_prefix(routing: Any) -> None:
    """Six sessions of four turns on four engines: all turns but the first come to where their session was."""
    async with simulated_engines(4) as endpoints:
        router = router_of(endpoints)
        sessions = [[{"role": "user", "content": f"session {n} " + "long beginning " * 300}] for n in range(6)]
        cached = 0
        prompts = 0
        for turn in range(4):
            for session in sessions:
                answer = await router.acompletion(model="m", messages=session, max_tokens=8)
                if turn:
                    prompts += answer.usage.prompt_tokens
                    cached += answer.usage.prompt_tokens_details.cached_tokens
                session.append({"role": "assistant", "content": answer.choices[0].message.content})
                session.append({"role": "user", "content": "go on"})
        assert cached > 0.9 * prompts
        await until(lambda: in_flight(routing) == 0, within_s=20)


async def a_stream_gives_its_place_back_at_its_end(routing: Any) -> None:
    async with simulated_engines(2) as endpoints:
        router = router_of(endpoints)
        messages = [{"role": "user", "content": "long beginning " * 100}]
        stream = await router.acompletion(model="m", messages=messages, max_tokens=8, stream=True)
        assert in_flight(routing) == 1
        async for _ in stream:
            pass
        await until(lambda: in_flight(routing) == 0, within_s=20)


async def the_first_token_of_a_stream_is_seen_when_it_comes(routing: Any) -> None:
    """Count a request whose prompt is computed no longer as work, though its answer goes on."""
    async with simulated_engines(2) as endpoints:
        router = router_of(endpoints)
        messages = [{"role": "user", "content": "long beginning " * 100}]
        stream = await router.acompletion(model="m", messages=messages, max_tokens=400, stream=True)
        await anext(stream)
        await until(lambda: awaiting_first_token(routing) == 0, within_s=20)
        assert in_flight(routing) == 1
        await stream.aclose()
    assert not routing._streams


async def a_call_that_is_dropped_gives_its_place_back(routing: Any) -> None:
    """LiteLLM reports no end of a call that was cancelled, nor of a stream that was left."""

    async def leave(router: Any) -> None:
        stream = await router.acompletion(model="m", messages=MESSAGES, max_tokens=2000, stream=True)
        async for _ in stream:
            return

    async def cancel(router: Any, *, stream: bool) -> None:
        asking = asyncio.create_task(router.acompletion(model="m", messages=MESSAGES, max_tokens=2000, stream=stream))
        await until(lambda: in_flight(routing) == 1)
        asking.cancel()
        await asyncio.wait([asking])

    async with simulated_engines(2) as endpoints:
        router = router_of(endpoints)
        await cancel(router, stream=False)
        await until(lambda: gc.collect() >= 0 and in_flight(routing) == 0)
        await cancel(router, stream=True)
        await until(lambda: gc.collect() >= 0 and in_flight(routing) == 0)
        await leave(router)
        await until(lambda: gc.collect() >= 0 and in_flight(routing) == 0)
        assert not routing._streams


async def usage_of_streams_is_learned(routing: Any) -> None:
    """Tokens that the engine found in its cache."""
    async with simulated_engines(2) as endpoints:
        router = router_of(endpoints)
        messages = [{"role": "user", "content": "another long beginning " * 100}]
        before = counted(routing, "kvproxy_cached_tokens_total", cluster="default")
        for _ in range(2):
            options = {"include_usage": True}
            stream = await router.acompletion(
                model="m", messages=messages, max_tokens=4, stream=True, stream_options=options
            )
            async for _ in stream:
                pass
        await until(lambda: counted(routing, "kvproxy_cached_tokens_total", cluster="default") > before, within_s=20)


async def a_deployment_that_cools_down_is_not_chosen(routing: Any) -> None:
    """Not even for the session that it holds."""
    async with simulated_engines(2) as endpoints, httpx.AsyncClient() as http:
        router = router_of(endpoints, allowed_fails=0, cooldown_time=60, num_retries=1)
        messages = [{"role": "user", "content": "a third long beginning " * 100}]

        async def ask() -> str:
            answer = await router.acompletion(model="m", messages=messages, max_tokens=2)
            return str(answer._hidden_params["model_id"])

        first = await ask()
        await until(lambda: in_flight(routing) == 0, within_s=20)  # LiteLLM reports the end behind the answer
        assert await ask() == first
        await http.post(f"{endpoints[first]}/sim/faults", json={"fail_next": 1})
        assert await ask() != first
        assert await ask() != first


async def a_deployment_that_fails_is_left_to_litellms_retries(routing: Any) -> None:
    async with simulated_engines(1) as endpoints:
        router = router_of({**endpoints, "dead": "http://127.0.0.1:9"})
        for turn in range(6):
            messages = [{"role": "user", "content": f"{turn} " + "long beginning " * 50}]
            answer = await router.acompletion(model="m", messages=messages, max_tokens=2)
            assert answer.choices
        await until(lambda: in_flight(routing) == 0, within_s=20)
