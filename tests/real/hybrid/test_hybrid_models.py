"""A real vLLM with hybrid models: what it reuses is what its events, by group of layers, predict.

It keeps the last window of a prompt's blocks, or the state of its linear attention, at few places: a prompt that leaves
another one in between finds all of its attention layers' blocks, and reuses up to the last such place.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvproxy.base.types import EndpointId
from tests.real.conftest import Saw, needs_memory
from tests.real.engines import vllm
from tests.real.engines.place import HERE, TINY, VLLM, Model
from tests.real.engines.vllm import BLOCK_TOKENS, Vllm
from tests.real.kvcache import ask, following
from tests.real.pair import warm_up
from tests.support.proxy import RunningProxy
from tests.support.until import until

pytestmark = pytest.mark.real
A = EndpointId("a")
WINDOW = 256
STEP_TOKENS = 160  # blocks are as long where there are states


@pytest.fixture(scope="module", params=[WINDOW, 0], ids=["sliding window", "linear attention"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, saw: Saw) -> Iterator[Vllm]:
    needs_memory(gib=4)
    folder, window = tmp_path_factory.mktemp("hybrid"), str(request.param)
    script, size = HERE / "inside" / "hybrid_model.py", str(TINY.max_tokens)
    subprocess.run([VLLM.python, script, folder, TINY.folder, size, window], check=True)
    further = () if request.param else ("--mamba-cache-mode", "align")
    one = Vllm("hybrid", _model(folder), core=0, further=further)
    saw(f"starting a vLLM server with a model of {request.node.name}")
    with vllm.running([one]):
        warm_up(one)
        yield one


def _model(folder: Path) -> Model:
    model = Model(TINY.name, max_tokens=TINY.max_tokens)
    model.folder = folder
    return model


async def send(proxy: RunningProxy, tokens: list[int]) -> tuple[int, str, int]:
    """Send a prompt; returns the predicted tokens, their source, and the reused ones."""
    asked = await ask(proxy.client, {"model": TINY.name, "prompt": tokens, "max_tokens": 1})
    return asked.predicted, asked.source, asked.cached_tokens


def tokens_of(count: int, *, seed: object) -> list[int]:
    rng = random.Random(repr(seed))
    return [rng.randrange(1000, 100_000) for _ in range(count)]


async def test_events_by_group_predict_what_is_reused(server: Vllm, saw: Saw) -> None:
    """To a block: of the same prompt again, of a longer one, and of prompts that leave it where no window is kept."""
    async with following(server.url, events=True) as (proxy, service):
        index = service.overlap.indexes["default"].precise
        base, rows = tokens_of(3000, seed="base"), 0
        for length in (200, 700, 1500, 2900):
            await send(proxy, base[:length])
            await until(lambda rows=rows: index.count_rows(A) > rows, within_s=20)  # type: ignore[misc]
            rows = index.count_rows(A)
            predicted, source, cached = await send(proxy, base[:length])
            saw(f"{length} tokens again: {predicted} predicted ({source}), {cached} reused")
            assert source == "precise"
            assert cached > length - 2 * STEP_TOKENS
            assert abs(predicted - cached) <= BLOCK_TOKENS
        shorter = 0
        for cut in (150, 400, 1000, 1490, 2200):
            predicted, source, cached = await send(proxy, base[:cut] + tokens_of(200, seed=cut))
            saw(f"another after {cut} tokens: {predicted} predicted ({source}), {cached} reused")
            assert abs(predicted - cached) <= BLOCK_TOKENS
            shorter += cached < cut - 2 * STEP_TOKENS
        assert shorter >= 2  # else nothing was put to the test


async def test_predictions_without_events(server: Vllm, saw: Saw) -> None:
    """By routed requests: of the same prompts again it is right, of one that leaves them it is too much, once."""
    async with following(server.url, events=False) as (proxy, _):
        base = tokens_of(2000, seed="without events")
        await send(proxy, base)
        predicted, source, cached = await send(proxy, base)
        saw(f"2000 tokens again: {predicted} predicted ({source}), {cached} reused")
        assert source == "approximate"
        assert abs(predicted - cached) <= STEP_TOKENS
        other = base[:1200] + tokens_of(200, seed="other")
        predicted, _, cached = await send(proxy, other)
        saw(f"another after 1200 tokens: {predicted} predicted, {cached} reused")
        assert cached < predicted - STEP_TOKENS
        predicted, _, cached = await send(proxy, other)
        saw(f"the same again: {predicted} predicted, {cached} reused")
        assert abs(predicted - cached) <= STEP_TOKENS
