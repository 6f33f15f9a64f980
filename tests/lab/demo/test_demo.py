"""The demo as a process: it stays when asked to, its lines work, and Ctrl-C ends everything."""

from __future__ import annotations

import asyncio
import io
import re
import signal
import sys

import httpx
import pytest

from kvproxy.cli import main as run_cli
from kvproxy.lab.demo.demo import DemoOptions, print_table, run
from kvproxy.lab.demo.demo_traffic import DemoReply
from tests.support.until import until_says

pytestmark = pytest.mark.slow


async def _until_a_trickle(page: str) -> None:
    """Wait until the page is printed before the proxy's own address, has the demo's requests, and more come."""
    async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
        assert "<html" in (await client.get(page)).text
        first = (await client.get(f"{page}/decisions")).json()["decisions"]
        assert len(first) >= 6

        async def more_came() -> bool:
            newest = (await client.get(f"{page}/decisions")).json()["decisions"][0]
            return bool(newest["request_id"] != first[0]["request_id"])

        await until_says(True, more_came)


def test_nothing_streamed_is_no_traceback() -> None:
    """One conversation may have only whole answers: there is no first token to compare then."""
    out = io.StringIO()
    whole = [DemoReply(1, "a", False, 0.1, 10, 5)]
    print_table({"round_robin": whole, "kv_aware": whole}, out)
    assert "0 of 2 requests were streamed" in out.getvalue()
    assert "nan" not in out.getvalue()


@pytest.mark.parametrize("load", [0.0, 1000.0])
def test_tokens_are_compared_first_and_times_only_on_a_machine_that_is_not_busy(load: float) -> None:
    """Engines of the demo share the machine: a ratio of times would be its load."""
    out = io.StringIO()
    plain = [DemoReply(1, "a", True, 0.1, 100, 20)]
    aware = [DemoReply(1, "a", True, 0.139, 100, 60)]
    print_table({"round_robin": plain, "kv_aware": aware}, out, load=lambda: (load, 0.0, 0.0))
    said = out.getvalue()
    assert "kv_aware: 0.50 x the prompt tokens that round_robin computed" in said
    assert ("1.39 x round_robin's" in said) == (not load)
    assert ("This machine is busy (load 1000" in said) == bool(load)


def test_with_sglang() -> None:
    """The proxy knows by their events what the engines hold: later turns find what earlier ones computed."""
    out = io.StringIO()
    assert run(DemoOptions(2, 2, 2, stay=False, kind="sglang"), out=out) == 0
    said = out.getvalue()
    assert "in front of 2 simulated SGLang engines" in said
    assert "follows the events" in said
    assert re.search(r"^kv_aware +sim-0:\d+ sim-1:\d+ +[1-9]\d?%", said, re.MULTILINE)


def test_prefill_apart_from_decode(capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts are computed at one half of the engines, and answered at the other."""
    assert run_cli(["demo", "--disaggregated", "--engines", "2", "--sessions", "6", "--turns", "1"]) == 0
    said = capsys.readouterr().out
    assert "2 simulated vLLM engines with NIXL" in said
    assert re.search(r"^apart +sim-1:6 ", said, re.MULTILINE)
    assert re.search(r"^apart: sim-0 prefill, sim-1 decode\. [1-6] of 6 prompts were computed at$", said, re.MULTILINE)
    pauses = re.findall(
        r"^(together|apart): longest pause within an answer: p50 (\d+) ms, p99 (\d+) ms$", said, re.MULTILINE
    )
    assert [policy for policy, _, _ in pauses] == ["together", "apart"]
    assert all(0 < int(p50) <= int(p99) for _, p50, p99 in pauses)
    assert run_cli(["demo", "--disaggregated", "--tiers"]) == 2


def test_with_data_parallel_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """A plain proxy leaves them to the engine, kv_aware asks for one: each is an endpoint of the table. Simulated vLLM
    engines of the demo have none."""
    out = io.StringIO()
    assert run(DemoOptions(1, 2, 2, stay=False, kind="sglang", ranks=2), out=out) == 0
    said = out.getvalue()
    assert "1 simulated SGLang engines with 2 data-parallel ranks each" in said
    assert re.search(r"^round_robin +sim-0:\d+ ", said, re.MULTILINE)
    assert re.search(r"^kv_aware +sim-0@0:\d+ sim-0@1:\d+ +[1-9]\d?%", said, re.MULTILINE)
    assert run_cli(["demo", "--ranks", "2"]) == 2
    assert "--engine sglang" in capsys.readouterr().err


def test_with_tiers(capsys: pytest.CaptureFixture[str]) -> None:
    """The same policy twice, once without hearing of host memory; SGLang's engines of the demo have none."""
    out = io.StringIO()
    assert run(DemoOptions(1, 4, 2, stay=False, tiers=True, pause_s=0.05), out=out) == 0
    said = out.getvalue()
    assert "1 simulated vLLM engines with host memory" in said
    assert re.search(r"bring\none up from there takes 39 ms, to compute it again 628 ms", said)
    rows = re.findall(r"^tier-(blind|aware) +sim-0:8 +[1-9]\d?%", said, re.MULTILINE)
    assert rows == ["blind", "aware"]
    assert re.search(r"^  tier-aware: \d+ of \d+ prompt tokens computed, first token after \d+ ms", said, re.MULTILINE)
    assert run_cli(["demo", "--tiers", "--engine", "sglang"]) == 2
    assert "--engine vllm" in capsys.readouterr().err


async def test_it_stays_until_ctrl_c() -> None:
    """The printed address answers the official client; after SIGINT nothing listens there any more."""
    import openai  # takes a second

    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-u", "-m", "kvproxy", "demo", "--engines", "2", "--sessions", "3", "--turns", "2", "--stay"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        url = page = ""
        async with asyncio.timeout(60):
            while not url:
                line = (await process.stdout.readline()).decode()
                assert line, "the demo ended"
                found = re.search(r"stays on (\S+) ", line)
                url = found[1] if found else ""
                page = line.split()[2] if line.startswith("Live page: ") else page
        await _until_a_trickle(page)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(
                model="sim", messages=[{"role": "user", "content": "Hello"}], stream=True, max_tokens=4
            )
            assert [part async for part in stream]
        process.send_signal(signal.SIGINT)
        rest = (await asyncio.wait_for(process.stdout.read(), 60)).decode()
        assert await asyncio.wait_for(process.wait(), 60) == 0
        assert rest.endswith("ended\n")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
