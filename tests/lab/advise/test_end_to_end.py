"""Simulated engines that were started with the wrong flags, a proxy before them, and `kvproxy doctor --advise`."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvproxy.lab.advise.command import print_advice
from kvproxy.lab.simulator.engine_io import EngineSettings
from kvproxy.lab.simulator.kv_event_publisher import PublisherSettings
from kvproxy.lab.simulator.timing import EngineTiming
from kvproxy.lab.simulator.vllm_settings import VllmSettings
from kvproxy.operate.commands.doctor import DoctorOptions
from tests.operate.doctor.setup import cluster
from tests.support.proxy import RunningProxy, chat, running_proxy
from tests.support.vllms.scale_out import add_scale_out

pytestmark = pytest.mark.slow

#: Answers without cached tokens, no KV events, no rendering. (Slots that are too few are in test_adviser.py, where no
#: busy machine blurs who waited for what.)
BAD = VllmSettings(
    model="m",
    engine=EngineSettings(4096, 16, token_outputs=True, timing=EngineTiming(time_scale=0.01)),
    enable_prompt_tokens_details=False,
)
GOOD = add_scale_out(replace(BAD, enable_prompt_tokens_details=True, kv_events=PublisherSettings()))


@asynccontextmanager
async def fleet(settings: VllmSettings, receipts: Path) -> AsyncIterator[tuple[RunningProxy, dict[str, Any]]]:
    """Yield a proxy that writes receipts, and its configuration."""
    async with cluster({"a": settings, "b": settings}, controller=None) as engines:
        config = {
            "policy": "kv_aware",
            "filters": ["inference_request", {"kvcache": {"kv_events": True}}, "router"],
            "receipts": {"path": str(receipts)},
        }
        async with running_proxy(engines.urls, **config) as proxy:
            yield proxy, {"endpoints": engines.urls, **config}


async def talk(proxy: RunningProxy) -> None:
    """Chats that grow: most of each prompt was sent before."""

    async def one(number: int) -> None:
        text = f"You are a helpful assistant. {'Rules come first. ' * 90} Question {number}: "
        for turn in range(4):
            text += f"and then {turn}? " * 20
            body = chat(text, stream=True, max_tokens=4, stream_options={"include_usage": True})
            response = await proxy.client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200

    await asyncio.gather(*(one(number) for number in range(16)))


async def run_adviser(config: dict[str, Any], folder: Path, **options: Any) -> tuple[int, str]:
    """Return the command, beside the engines that this loop serves: its status and output."""
    file = folder / "config.yaml"
    file.write_text(json.dumps(config))
    out = io.StringIO()
    status = await asyncio.to_thread(
        print_advice, DoctorOptions(str(file), budget="0s", **options), out=out, err=io.StringIO()
    )
    return status, out.getvalue()


@pytest.mark.parametrize("good", [False, True])
async def test_flags_that_are_missing_are_named(tmp_path: Path, *, good: bool) -> None:
    """All of them with engines set up badly, none with good ones."""
    async with fleet(GOOD if good else BAD, tmp_path / "receipts.jsonl") as (proxy, config):
        await talk(proxy)
        status, text = await run_adviser(config, tmp_path, as_json=True)
    assert status == 0
    (pool,) = json.loads(text)["pools"]
    flags = {flag["flag"].split()[0] for advice in pool["advice"] for flag in advice["flags"]}
    wanted = {"--enable-prompt-tokens-details", "--kv-events-config", "--enable-scale-out"}
    assert flags & wanted == (set() if good else wanted)


async def test_engines_that_are_down_do_not_end_it(tmp_path: Path) -> None:
    """Advice from the receipts remains."""
    async with fleet(BAD, tmp_path / "receipts.jsonl") as (proxy, config):
        await talk(proxy)
    status, text = await run_adviser(config, tmp_path)
    assert status == 0
    assert text.count("no answer from endpoint") == 2
    assert "Nothing was changed." in text
