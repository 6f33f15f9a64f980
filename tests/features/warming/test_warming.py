"""Warmer: when an engine may be warmed, and the results."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import EndpointId
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.features.warming.warming import Warmed, Warmer
from kvproxy.operate.config.load import check_config
from tests.cache.support import Fake, Service, engine, world
from tests.support.clock import FakeClock

PATH = "/v1/completions"
BODY = msgspec.json.encode({"model": "m", "prompt": [1, 2, 3], "max_tokens": 1})


class Engine:
    """An engine that counts a prompt's tokens as cached once it was sent them."""

    def __init__(self, *, says_cached: bool = True, keeps: bool = True, status: int = 200) -> None:
        self.load = (0, 0)  # running and waiting
        self.says_cached = says_cached
        self.keeps = keeps
        self.status = status
        self.sent = 0
        self.app: Fake = engine()
        self.app.routes |= {"/metrics": self._metrics, PATH: self._complete}

    def _metrics(self, _: dict[str, Any]) -> bytes:
        running, waiting = self.load
        return f"vllm:num_requests_running {running}\nvllm:num_requests_waiting {waiting}\n".encode()

    def _complete(self, asked: dict[str, Any]) -> Any:
        if self.status != 200:
            return self.status, {"error": {"message": "no"}}
        tokens = len(asked["prompt"])
        cached = tokens if self.sent and self.keeps else 0
        self.sent += 1
        details = {"prompt_tokens_details": {"cached_tokens": cached}} if self.says_cached else {}
        return {"usage": {"prompt_tokens": tokens, **details}}


def warmer_of(service: Service) -> tuple[Warmer, Endpoint]:
    """Return a warmer, and the endpoint that it may warm."""
    kv = service.kv
    warmer = Warmer(engines=kv.engines, metrics=Metrics(), clock=FakeClock())
    return warmer, next(one for one in service.cluster.endpoints if one.id == EndpointId("b"))


@pytest.mark.parametrize(
    ("behaviour", "warmed", "sent"),
    [
        ({}, Warmed("done", 3, 3), 2),
        ({"says_cached": False}, Warmed("unverified", 3), 2),
        ({"keeps": False}, Warmed("no_effect", 3), 2),
        ({"status": 500}, Warmed("refused"), 0),
    ],
)
async def test_a_second_send_verifies_the_first(behaviour: dict[str, Any], warmed: Warmed, sent: int) -> None:
    """By the engine's own count of cached tokens; a failed call has its reason."""
    b = Engine(**behaviour)
    async with world({"b": b.app}, clock=FakeClock()) as service:
        warmer, endpoint = warmer_of(service)
        assert (await warmer.warm_body(endpoint, PATH, BODY), b.sent) == (warmed, sent)


async def test_a_busy_engine_is_left_alone() -> None:
    """By its own count, or by requests of this proxy, whatever the engine reported last."""
    b = Engine()
    async with world({"b": b.app}, clock=FakeClock()) as service:
        warmer, endpoint = warmer_of(service)
        b.load = (7, 2)
        assert await warmer.warm_body(endpoint, PATH, BODY) == Warmed("busy")
        b.load = (7, 1)
        assert await warmer.is_idle(endpoint)
        endpoint.load.in_flight = 9
        assert await warmer.warm_body(endpoint, PATH, BODY) == Warmed("busy")
    assert b.sent == 0


def test_automatic_warming_is_a_setting_that_is_gone() -> None:
    """The rest of the section is used."""
    warming = {"enabled": True, "tokens_per_minute": 1, "uses_per_replica": 1, "export": "hashes"}
    filters = ["inference_request", {"kvcache": {"warming": warming}}, "router"]
    config, problems = check_config({"endpoints": ["http://127.0.0.1:1"], "filters": filters})
    assert config is not None
    gone = {one.path.rpartition(".")[2]: one.severity for one in problems if "no longer a setting" in one.message}
    assert gone == dict.fromkeys(("enabled", "tokens_per_minute", "uses_per_replica"), "warning")
