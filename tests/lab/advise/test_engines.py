"""Settings that engines report, vLLM by its metrics and SGLang by its server info."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from kvproxy.base.types import EndpointId
from kvproxy.cache.clients.engine_metrics import EngineKind
from kvproxy.lab.advise.engines import EngineSettingsSeen, ask_engines, engines_of
from kvproxy.operate.config.load import load_config
from kvproxy.operate.doctor.tools import Tools, VisitTimeouts
from tests.support.fake_engine import reply
from tests.support.loopback import serve

VLLM = (
    b"""
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",gpu_memory_utilization="0.9",%s} 1.0
vllm:iteration_tokens_total_bucket{engine="0",le="1024.0"} 10.0
vllm:iteration_tokens_total_bucket{engine="0",le="2048.0"} 90.0
vllm:iteration_tokens_total_bucket{engine="0",le="4096.0"} 91.0
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf"} 91.0
vllm:num_preemptions_total{engine="0"} 7.0
"""
    % b'kv_offloading_size="None",num_gpu_blocks="1000"'
)
SGLANG = b"""
sglang:num_running_reqs{tp_rank="0"} 1.0
"""
INFO = b"""{"max_running_requests": 48, "chunked_prefill_size": 8192, "page_size": 64, "max_total_num_tokens": 300000,
"mem_fraction_static": 0.85, "enable_priority_scheduling": false, "enable_cache_report": false,
"disable_radix_cache": true, "kv_events_config": null, "version": "0.5.9", "api_key": "sesame"}"""


async def ask(answers: dict[str, bytes]) -> EngineSettingsSeen:
    """One engine with these paths and no others."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            found = answers.get(scope["path"])
            await reply(send, 404 if found is None else 200, b"{}" if found is None else found)

    async with serve(app) as url:
        (seen,) = await ask_engines(load_config({"endpoints": {"a": url}}), tools=Tools(timeouts=VisitTimeouts(2.0)))
    return seen


async def test_a_vllm_shows_memory_blocks_and_its_largest_steps() -> None:
    """A step that came once is an accident; what it does not show is not known."""
    seen = await ask({"/metrics": VLLM})
    assert (seen.kind, seen.error, seen.capacity_tokens, seen.block_tokens) == (EngineKind.VLLM, "", 16_000, 16)
    assert (seen.step_tokens, seen.preemptions, seen.memory_share) == (2048, 7, 0.9)
    assert (seen.prefix_caching, seen.offloads, seen.sequences, seen.publishes) == (True, False, None, None)


async def test_a_sglang_tells_its_arguments() -> None:
    """Those that matter; nothing else of them is kept."""
    seen = await ask({"/metrics": SGLANG, "/server_info": INFO})
    assert (seen.kind, seen.version, seen.sequences, seen.step_tokens) == (EngineKind.SGLANG, "0.5.9", 48, 8192)
    assert (seen.by_priority, seen.cache_report, seen.prefix_caching, seen.publishes) == (False, False, False, False)
    assert (seen.capacity_tokens, seen.block_tokens) == (300_000, 64)
    assert "sesame" not in repr(seen)


async def test_an_engine_without_metrics_is_not_known() -> None:
    """Why is said."""
    seen = await ask({})
    assert seen.kind is EngineKind.UNKNOWN
    assert "404" in seen.error


async def test_recorded_ranks_are_those_of_their_engine() -> None:
    """Each with its own figures; an endpoint that is gone, or a rank that the engine has no more, is left out."""
    page = b"".join(
        b'vllm:num_requests_running{engine="%d"} %d\n' % (rank, rank + 5)
        + b'vllm:cache_config_info{block_size="16",engine="%d",num_gpu_blocks="%d"} 1\n' % (rank, 100 + rank)
        for rank in (0, 1)
    )
    seen = await ask({"/metrics": page})
    assert seen.capacity_tokens == 3216
    names = [EndpointId(name) for name in ("a@1", "a@0", "a@2", "a", "host@10.0.0.1", "gone")]
    found = engines_of([seen], "default", names)
    assert [(one.id, one.rank_of, one.capacity_tokens, one.metrics.running) for one in found] == [
        ("a@1", "a", 1616, 6),
        ("a@0", "a", 1600, 5),
        ("a", None, 3216, 11),
    ]
