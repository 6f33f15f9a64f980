"""The samples for Ray Serve and LiteLLM run as their READMEs say."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from secrets import token_hex
from typing import Any

import httpx
import pytest

from kvproxy.testing import simulated_engines
from tests.hosts.test_servers import served
from tests.support.ports import free_port
from tests.support.until import until_says

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("default"), pytest.mark.timeout(400)]
SAMPLES = Path(__file__).parents[2] / "samples"
CHAT = "/v1/chat/completions"
TURN = {
    "model": "my-model",
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "You review Python. Be brief. " * 40}],
}


async def second_turn(url: str, process: Any, headers: dict[str, str] | None = None) -> int:
    """Return how much of the second of two equal prompts was cached; wait for the server to start."""
    async with httpx.AsyncClient(timeout=60, headers=headers) as client:

        async def ask() -> int:
            assert process.poll() is None
            try:
                return (await client.post(url + CHAT, json=TURN)).status_code
            except httpx.TransportError:
                return 0

        await until_says(200, ask, within_s=200, pause_s=0.2)
        answer = await client.post(url + CHAT, json=TURN)
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_ray_serve_finds_a_prompt_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="make test-hosts installs it", exc_type=ImportError)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    port = free_port()
    config = (SAMPLES / "ray" / "serve.yaml").read_text()
    (tmp_path / "serve.yaml").write_text(config.replace("8000", str(port)))
    (tmp_path / "app.py").write_text((SAMPLES / "ray" / "app.py").read_text())
    with served(["serve", "run", "serve.yaml"], tmp_path) as process:
        url = f"http://127.0.0.1:{port}"
        assert await second_turn(url, process) > 500
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(url + CHAT, json={**TURN, "stream": True})
        assert answer.text.endswith("data: [DONE]\n\n")


async def test_litellms_router_finds_chats_where_they_were() -> None:
    pytest.importorskip("litellm", reason="make test-hosts installs it", exc_type=ImportError)
    program = [sys.executable, str(SAMPLES / "litellm" / "app.py")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = await asyncio.create_subprocess_exec(*program, stdout=asyncio.subprocess.PIPE, env=environment)
    printed = (await process.communicate())[0].decode()
    assert process.returncode == 0
    later = [line.split(": ")[1].split() for line in printed.splitlines() if line.startswith(("turn 2", "turn 3"))]
    assert len(later) == 8
    assert all(int(cached) > 0.9 * int(prompt) for cached, _, prompt, *_ in later), printed


async def test_litellms_proxy_finds_a_prompt_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("litellm.proxy.proxy_server", reason="test_apart.py runs it", exc_type=ImportError)
    async with simulated_engines(2) as engines:
        config = (SAMPLES / "litellm" / "config.yaml").read_text()
        for port, url in zip((8000, 8001), engines.values(), strict=True):
            config = config.replace(f"http://127.0.0.1:{port}", url)
        (tmp_path / "config.yaml").write_text(config)
        port = free_port()
        command = ["litellm", "--config", str(tmp_path / "config.yaml"), "--host", "127.0.0.1", "--port", str(port)]
        monkeypatch.setenv("LITELLM_MASTER_KEY", "sk-" + token_hex(32))
        headers = {"authorization": f"Bearer {os.environ['LITELLM_MASTER_KEY']}"}
        with served(command, tmp_path) as process:
            assert await second_turn(f"http://127.0.0.1:{port}", process, headers) > 500
