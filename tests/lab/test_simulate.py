"""Simulated engines on ports of their own, and in place of those that a configuration names."""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from kvproxy.app import Proxy
from kvproxy.base.errors import ConfigError
from kvproxy.cli import _parser
from kvproxy.cli import main as run_cli
from kvproxy.lab.simulate import move_addresses, plan_from_config, plan_from_options, read_fault, start
from kvproxy.operate.commands.configuration import ConfigSource
from kvproxy.operate.config.load import load_config
from kvproxy.proxy.listener.server import Server
from tests.support.proxy import chat

FILE = """
endpoints:
  a: http://10.0.0.1:8000   # rack 1
  b: {url: "http://10.0.0.2:8000", models: [m, n]}
policy: kv_aware
filters:
  - inference_request
  - kvcache: {kv_events: true, lmcache_endpoint: "http://lmcache:9000"}
  - router
"""


def options(*words: str) -> argparse.Namespace:
    """As the command line has them."""
    return _parser().parse_args(["simulate", *words])


@asynccontextmanager
async def serving(config: str) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a proxy by this configuration."""
    async with (
        Proxy(load_config(config)) as proxy,
        Server(proxy, drain_s=0.2) as public,
        httpx.AsyncClient(base_url=public.url, timeout=20) as client,
    ):
        yield client


async def test_a_file_for_engines_elsewhere_serves() -> None:
    """Every endpoint has a stand-in with its models, and prompts are found again by events and LMCache."""
    plan = plan_from_config(load_config(FILE), options("-c", "x"))
    async with start(plan) as simulation:
        text = move_addresses(FILE, plan, simulation)
        assert "# rack 1" in text
        assert "10.0.0" not in text
        async with serving(text) as client:
            for model, endpoint in (("n", "b"), ("n", "b")):
                answer = await client.post("/v1/chat/completions", json=chat("word " * 600, model=model))
                assert (answer.status_code, answer.headers["x-kvproxy-endpoint"]) == (200, endpoint)
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 500
        async with httpx.AsyncClient() as lmcache:
            assert (await lmcache.get(f"{simulation.lmcache}/sim/state")).status_code == 200


async def test_faults_are_in_force_from_the_start() -> None:
    """Of one engine, or of all."""
    plan = plan_from_options(options("--port", "0", "--fault", "sim-1:fail_next=1", "--fault", "no_tokenize"))
    async with start(plan) as simulation, httpx.AsyncClient() as client:
        found = [
            (await client.post(f"{url}/v1/chat/completions", json=chat(model="sim"))).status_code
            for url in simulation.engines.values()
        ]
        assert found == [200, 500]
        for url in simulation.engines.values():
            assert (await client.post(f"{url}/tokenize", json={"model": "sim", "prompt": "x"})).status_code == 404


@pytest.mark.parametrize("text", ["sim-1:", "a:b=x", ":x=1", "1=2"])
def test_a_fault_that_cannot_be_read(text: str) -> None:
    """Is named with an example."""
    with pytest.raises(ConfigError, match="--fault"):
        read_fault(text)


async def test_unknown_engines_and_faults_are_refused() -> None:
    """With those there are."""
    for words, known in (("sim-9:fail_next=1", "engines: sim-0, sim-1"), ("nonsense=1", "stall_head_s")):
        with pytest.raises(ConfigError, match=known):
            async with start(plan_from_options(options("--port", "0", "--fault", words))):
                raise AssertionError("it started")


def test_addresses_elsewhere_need_a_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is started and nothing written without `-o`."""
    file = tmp_path / "config.yaml"
    file.write_text(FILE)
    assert run_cli(["simulate", "-c", str(file)]) == 1
    assert "http://10.0.0.1:8000 is not on this machine" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.slow
async def test_the_command_serves_what_it_prints(tmp_path: Path) -> None:
    """The configuration on its output loads, with the engines in it; SIGTERM ends all."""
    words = ["simulate", "--port", "0", "--engines", "3", "--engine", "sglang", "--kv-events"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvproxy", *words, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    said = (await process.stdout.readuntil(b"Ctrl-C")).decode()
    try:
        found = re.search(r"# config.yaml\n(.*?)\n\n", said, re.DOTALL)
        assert found is not None
        file = tmp_path / "config.yaml"
        file.write_text(found[1])
        config, problems = ConfigSource(path=str(file)).load()
        assert not [one for one in problems if one.severity == "error"]
        async with httpx.AsyncClient() as client:
            for one in config.clusters["default"].endpoints:
                assert (await client.get(f"{one.url}/v1/models")).json()["data"][0]["id"] == "sim"
    finally:
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
