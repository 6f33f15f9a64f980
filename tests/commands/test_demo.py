"""The demo as a process: it stays when asked to, its lines work, and Ctrl-C ends everything."""

from __future__ import annotations

import asyncio
import re
import signal
import sys

import openai


async def test_it_stays_until_ctrl_c() -> None:
    """The printed address answers the official client; after SIGINT nothing listens there any more."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-u", "-m", "kvproxy", "demo", "--engines", "2", "--sessions", "3", "--turns", "2", "--stay"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        url = ""
        async with asyncio.timeout(60):
            while not url:
                line = (await process.stdout.readline()).decode()
                assert line, "the demo ended"
                found = re.search(r"stays on (\S+) ", line)
                url = found[1] if found else ""
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
