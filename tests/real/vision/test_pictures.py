"""A real vLLM with a vision model: what is predicted of chats with pictures is what the engine reuses."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvproxy.features.kv_events.reported_prompts import ReportedPrompts
from tests.cache.media.samples import picture_part, png
from tests.real.conftest import Saw, needs_memory
from tests.real.engines import vllm
from tests.real.engines.place import HERE, TINY, VLLM, Model
from tests.real.engines.vllm import BLOCK_TOKENS, Vllm
from tests.real.kvcache import Asked, ask, following
from tests.real.pair import warm_up
from tests.real.prompts import text
from tests.support.proxy import RunningProxy

pytestmark = pytest.mark.real
STUB = HERE / "inside" / "vision_stub"
FURTHER = ("--load-format", "dummy", "--skip-mm-profiling", "--limit-mm-per-prompt", '{"image": 8}')
WORDS = 500


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, saw: Saw) -> Iterator[Vllm]:
    needs_memory(gib=4)
    folder = tmp_path_factory.mktemp("vision")
    make_model(folder, TINY.folder)
    one = vision_server(folder)
    saw("starting a vLLM server with a vision model")
    with vllm.running([one]):
        warm_up(one)
        yield one


def make_model(folder: Path, tiny: Path) -> None:
    script = HERE / "inside" / "vision_model.py"
    subprocess.run([VLLM.python, script, folder, tiny, str(TINY.max_tokens)], check=True)


def vision_server(folder: Path) -> Vllm:
    model = Model("vision", max_tokens=TINY.max_tokens)
    model.folder = folder
    return Vllm("vision", model, core=0, further=FURTHER, environment={"PYTHONPATH": str(STUB)})


def chat(*content: Any, before: str = "") -> dict[str, Any]:
    """Return a chat of texts and pictures in one message."""
    parts = [{"type": "text", "text": one} if isinstance(one, str) else picture_part(one) for one in content]
    system = [{"role": "system", "content": before}] if before else []
    messages = [*system, {"role": "user", "content": parts}]
    return {"model": "vision", "messages": messages, "max_tokens": 1, "temperature": 0}


def next_turn(body: dict[str, Any], answer: str, *content: Any) -> dict[str, Any]:
    further = chat(*content)["messages"]
    return {**body, "messages": [*body["messages"], {"role": "assistant", "content": answer}, *further]}


def is_right(asked: Asked) -> bool:
    """Within 5 %, and a block, of what was reused."""
    return abs(asked.predicted - asked.cached_tokens) <= max(0.05 * asked.prompt_tokens, BLOCK_TOKENS)


async def send_all(proxy: RunningProxy, saw: Saw, *, seed: str) -> dict[str, Asked]:
    """Send new and repeated pictures, in front of and behind text; returns the answers by name of the case."""
    before, behind = text(WORDS, seed=f"{seed} before"), text(WORDS, seed=f"{seed} behind")
    first, second, large = png(64, 64, seed=1, size_bytes=9000), png(64, 64, seed=2), png(640, 480, seed=3)
    system = text(WORDS, seed=f"{seed} system")
    one = chat(before, first, behind)
    cases = {
        "text": chat(before, behind),
        "text again": chat(before, behind),
        "new picture": one,
        "the same again": one,
        "another picture": chat(before, second, behind),
        "a large one": chat(before, large, behind),
        "the large one with another text": chat(before, large, text(WORDS, seed=f"{seed} other")),
        "next turn": next_turn(one, "yes", "and now?"),
        "next turn with a picture": next_turn(next_turn(one, "yes", "and now?"), "no", second, "this one?"),
        "pictures behind a system prompt": chat(first, second, behind, before=system),
        "these in another order": chat(second, first, behind, before=system),
        "these again": chat(first, second, behind, before=system),
        "new text": chat(text(WORDS, seed=f"{seed} new"), "and more"),
    }
    found = {}
    for name, body in cases.items():
        found[name] = await ask(proxy.client, body)
        asked = found[name]
        saw(f"{name}: {asked.prompt_tokens} tokens, predicted {asked.predicted}, reused {asked.cached_tokens}")
    return found


@pytest.mark.parametrize("events", [False, True], ids=["routed", "KV events"])
async def test_predicted_picture_tokens_are_reused(server: Vllm, saw: Saw, *, events: bool) -> None:
    """New and repeated ones, whatever their size in bytes; of another picture nothing behind it."""
    async with following(server.url, events=events) as (proxy, kvcache):
        for number in range(8):  # what a token is in bytes, and a picture in tokens
            await ask(proxy.client, chat(text(WORDS, seed=f"{events} learn {number}"), png(64, 64, seed=50 + number)))
        found = await send_all(proxy, saw, seed=f"{events}")
    if events:
        reported = kvcache.overlap.indexes["default"].followed.reported
        assert isinstance(reported, ReportedPrompts)
        saw(f"{len(reported)} beginnings of prompts with pictures by the engine's names")
        for name in ("the same again", "these again"):
            assert (found[name].source, found[name].predicted) == ("precise", found[name].cached_tokens)
    assert {name for name, asked in found.items() if not is_right(asked)} == set()
    assert found["another picture"].cached_tokens < found["the same again"].cached_tokens
