"""Real vLLM engines that are killed under chats with reasoning and tool calls: the rest is generated and parsed by
another engine, and clients get what they get undisturbed."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvproxy.base.types import EndpointId
from tests.features.resume.said import Said
from tests.real.conftest import Saw, needs_memory
from tests.real.engines.place import HERE, TINY, VLLM, Model
from tests.real.engines.vllm import Vllm
from tests.real.pair import Pair, running_pair
from tests.real.prompts import chat, text
from tests.real.resume.conftest import FURTHER
from tests.real.resume.test_resume import count_resumed, kill, read_chunks
from tests.support.proxy import running_proxy
from tests.support.until import until

pytestmark = pytest.mark.real

STREAMS = 24
SCRIPT = (
    "<think>\nI may{40}.\n</think>\n\nLet me look:{30}.\n"
    '<tool_call>\n{"name": "search", "arguments": {"words": "by{30}", "most": 5}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": {"at": "the{20}"}}\n</tool_call>'
)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("search", "look")
]


@pytest.fixture(scope="module")
def pair(saw: Saw, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two engines that think and call tools by a script, whose words the model chooses."""
    needs_memory(gib=6)
    inside = HERE / "inside"
    folder = tmp_path_factory.mktemp("thinking")
    subprocess.run([VLLM.python, inside / "scripted_answers.py", TINY.folder, folder], check=True)
    saw("starting two vLLM servers that think and call tools")
    scripted: tuple[str, ...] = ("--enable-scale-out", "--reasoning-parser", "qwen3")
    scripted += ("--logits-processors", "scripted_answers:ScriptedAnswers")
    environment = {"PYTHONPATH": str(inside), "SCRIPTED_ANSWER": SCRIPT}
    servers = (
        Vllm(f"tools-{name}", _Thinking(folder), core=core, further=(*FURTHER, *scripted), environment=environment)
        for core, name in enumerate("ab")
    )
    with running_pair(*servers) as it:
        yield it


class _Thinking(Model):
    """The tiny model with the marks of models that think."""

    def __init__(self, folder: Path) -> None:
        super().__init__("tiny", max_tokens=TINY.max_tokens)
        self.folder = folder


class Stream:
    """One answer as its client got it."""

    def __init__(self) -> None:
        self.said = Said()
        self.chunks = 0
        self.usage: dict[str, Any] = {}
        self.error = ""

    @property
    def all(self) -> tuple[Any, ...]:
        """The answer and its counts."""
        counts = (self.usage.get("prompt_tokens"), self.usage.get("completion_tokens"))
        return (*self.said.all, *counts, self.error)

    async def read(self, http: httpx.AsyncClient, body: dict[str, Any]) -> None:
        """Read to the end."""
        async for chunk in read_chunks(http, body, self):
            self.chunks += 1
            for choice in chunk["choices"]:
                self.said.add(choice)


async def read_all(http: httpx.AsyncClient, bodies: list[dict[str, Any]], streams: list[Stream]) -> None:
    """Read all at once, each begun a little later than the one before, so that each is at another place."""

    async def read(number: int) -> None:
        await asyncio.sleep(number * 0.1)
        await streams[number].read(http, bodies[number])

    await asyncio.gather(*(read(number) for number in range(len(bodies))))


@pytest.mark.parametrize("how", ["core", "server"])
async def test_calls_and_reasoning_go_on(pair: Pair, saw: Saw, how: str) -> None:
    """Wherever the streams are: in reasoning, text, names or arguments."""
    pair.revive()
    bodies = [
        chat(TINY.name, text(30, seed=f"tools {how} {number}"), max_tokens=400, stream=True, tools=TOOLS,
             stream_options={"include_usage": True})
        for number in range(STREAMS)
    ]  # fmt: skip
    config: dict[str, Any] = {
        "filters": [{"inference_request": {}}, {"router": {}}],
        "routes": [{"resume": "exact"}],
        "retry": {"min_per_second": 1000},
    }
    undisturbed = [Stream() for _ in bodies]
    streams = [Stream() for _ in bodies]
    limits = httpx.Limits(max_connections=STREAMS + 8, max_keepalive_connections=0)  # engines reset idle ones
    async with (
        running_proxy(pair.urls, **config) as proxy,
        httpx.AsyncClient(base_url=proxy.url, limits=limits) as http,
        httpx.AsyncClient(base_url=pair.b.url, limits=limits) as direct,
    ):
        await read_all(direct, bodies, undisturbed)
        saw(f"undisturbed: {undisturbed[0].all}")
        assert [stream.said.finishes for stream in undisturbed] == [["tool_calls"]] * STREAMS
        assert all(len(stream.said.calls) == 2 for stream in undisturbed)
        operator = proxy.proxy.clusters["default"].operator
        operator.drain_endpoint(EndpointId("b"))
        await Stream().read(http, bodies[0])  # the proxy finds out that the engine derenders
        await until(lambda: not any(task.get_name() == "ask about resuming" for task in asyncio.all_tasks()))
        done = asyncio.ensure_future(read_all(http, bodies, streams))
        # By the time that all have begun, the first ones may have ended.
        await until(lambda: sum(one.chunks >= 8 and not one.usage for one in streams) >= STREAMS // 4, within_s=240)
        operator.drain_endpoint(EndpointId("b"), draining=False)
        at = sorted(stream.chunks for stream in streams)
        kill(pair.a, how)
        await done
        same = sum(one.all == other.all for one, other in zip(streams, undisturbed, strict=True))
        saw(
            f"{how}: killed behind {at[0]} to {at[-1]} chunks; {same} of {STREAMS} as undisturbed; "
            f"{count_resumed(proxy)}; errors {sorted({one.error for one in streams})}"
        )
        wrong = [(one.all, other.all) for one, other in zip(streams, undisturbed, strict=True) if one.all != other.all]
        assert not wrong, wrong[0]
        assert proxy.metric("kvproxy_streams_resumed_total", cluster="default", grade="exact") >= STREAMS // 8
