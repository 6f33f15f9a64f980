"""A real vLLM that requires clients' certificates (`--ssl-cert-reqs 2`) behind kvproxy."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvproxy.base.types import EndpointId
from tests.operate.doctor.setup import visit
from tests.real.conftest import Saw, needs_memory
from tests.real.engines import vllm
from tests.real.engines.place import TINY
from tests.real.engines.program import flags
from tests.real.engines.vllm import BLOCK_TOKENS, Vllm
from tests.real.kvcache import with_kvcache
from tests.real.prompts import chat, text
from tests.support.certificates import Certificate, make_certificate
from tests.support.decision import predicted_at
from tests.support.proxy import running_proxy
from tests.support.until import until

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Certificate]:
    names = ("engine", "proxy", "stranger")
    return {name: make_certificate(tmp_path_factory.mktemp(name), "127.0.0.1") for name in names}


@pytest.fixture(scope="module")
def server(certificates: dict[str, Certificate], saw: Saw) -> Iterator[Vllm]:
    """Yield a vLLM that takes connections of the proxy's certificate alone."""
    needs_memory(gib=4)
    engine, own = certificates["engine"], certificates["proxy"]
    files: dict[str, Path | int] = {
        "--ssl-certfile": engine.certificate,
        "--ssl-keyfile": engine.private_key,
        "--ssl-ca-certs": own.certificate,
        "--ssl-cert-reqs": 2,
    }
    asks = ssl.create_default_context(cafile=str(engine.certificate))
    asks.load_cert_chain(own.certificate, own.private_key)
    saw("starting a vLLM server with --ssl-cert-reqs 2")
    one = Vllm("certificates", TINY, core=0, further=flags(files), tls=asks)
    with vllm.running([one]):
        yield one


def endpoint(server: Vllm, certificates: dict[str, Certificate], shown: str) -> dict[str, Any]:
    """Return the endpoint with this certificate of the proxy's own; none for an empty name."""
    found = {"id": "a", "url": server.url, "ca_file": str(certificates["engine"].certificate)}
    if shown:
        found |= {
            "cert_file": str(certificates[shown].certificate),
            "key_file": str(certificates[shown].private_key),
        }
    return found


async def test_everything_that_asks_the_engine_shows_the_certificate(
    server: Vllm, certificates: dict[str, Certificate], saw: Saw
) -> None:
    """Requests, the list of models, probes, metrics and tokens: nothing needs a connection without it."""
    config = {
        "health": {"active": True, "interval": "200ms"},
        "filters": with_kvcache(kv_events=True, request_timeout="20s", lookup_routing_timeout="20s"),
    }
    engine = endpoint(server, certificates, "proxy")
    async with running_proxy([engine], policy="kv_aware", **config) as proxy:
        cache = proxy.proxy.kvcache
        assert cache is not None
        indexes = cache.overlap.indexes["default"]
        await until(lambda: bool(indexes.exact))
        question = chat(TINY.name, text(300, seed="mine"), max_tokens=4)
        answers = []
        for _ in range(2):
            debug = {"x-kvproxy-debug": "1"}
            answers.append(await proxy.client.post("/v1/chat/completions", json=question, headers=debug))
            blocks = answers[0].json()["usage"]["prompt_tokens"] // BLOCK_TOKENS
            await until(lambda: indexes.precise.count_rows(EndpointId("a")) >= blocks)  # noqa: B023
            await until(lambda: proxy.metric("kvproxy_kvcache_tokenizes_total", outcome="ok"))  # after the answer
        assert [answer.status_code for answer in answers] == [200, 200]
        predicted, source = predicted_at(answers[1].headers)
        cached = answers[1].json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        saw(f"{predicted} tokens predicted by {source}, {cached} reused")
        assert (source, predicted) == ("precise", cached)
        models = await proxy.client.get("/v1/models")
        assert [model["id"] for model in models.json()["data"]] == [TINY.name]
        assert proxy.metric("kvproxy_endpoint_up", cluster="default", endpoint="a") == 1.0
    report = await visit({"endpoints": [engine]})
    assert [str(one) for one in report.findings if one.severity == "problem"] == []


@pytest.mark.parametrize("shown", ["", "stranger"], ids=["none", "of a stranger"])
async def test_without_the_right_certificate_the_engine_is_named_as_down(
    server: Vllm, certificates: dict[str, Certificate], shown: str, saw: Saw
) -> None:
    """Clients get 502 as from any engine that ends connections, and the doctor names the settings."""
    engine = endpoint(server, certificates, shown)
    async with running_proxy([engine]) as proxy:
        answer = await proxy.client.post("/v1/chat/completions", json=chat(TINY.name, "hello", max_tokens=1))
        assert answer.status_code == 502
    report = await visit({"endpoints": [engine]})
    (found, *_) = [one for one in report.findings if one.severity == "problem"]
    saw(str(found))
    assert "set `cert_file` and `key_file`" in found.fix
