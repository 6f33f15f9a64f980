"""The Dockerfile, read as Docker reads it; what the container would run is run here as processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvproxy.operate.config.schema import AdminSettings
from kvproxy.proxy.settings import ListenerSettings

ROOT = Path(__file__).parents[2]
PATH = f"{Path(sys.executable).parent}:/usr/bin:/bin"


def instructions() -> list[tuple[str, str]]:
    """Every instruction with its arguments, continuation lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines if line.strip())]


def all_of(name: str) -> list[str]:
    return [rest for found, rest in instructions() if found == name]


def final_stage() -> list[tuple[str, str]]:
    last = max(index for index, (name, _) in enumerate(instructions()) if name == "FROM")
    return instructions()[last:]


def command(name: str) -> list[str]:
    """Return an instruction's command; only the exec form is JSON."""
    (text,) = (rest for found, rest in final_stage() if found == name)
    words: list[str] = json.loads(text[text.index("[") :])
    return words


def environment() -> dict[str, str]:
    """ENV of the final stage, PATH aside."""
    pairs = [pair.partition("=") for name, rest in final_stage() if name == "ENV" for pair in shlex.split(rest)]
    return {name: value for name, _, value in pairs if name != "PATH"}


def test_the_base_is_pinned_to_a_minor_version_and_a_distribution() -> None:
    """A new Python or Debian comes by a change of this file."""
    (version,) = all_of("ARG")
    assert re.fullmatch(r"PYTHON=3\.1[1-9]-slim-[a-z]+", version)
    assert all("${PYTHON}" in base for base in all_of("FROM"))


def test_it_runs_as_nobody_in_particular() -> None:
    """A numeric user, so that Kubernetes can tell that it is not root."""
    (user,) = all_of("USER")
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", user)


def test_copied_paths_exist_and_are_not_ignored() -> None:
    """The build context has it."""
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    sources = {source for rest in all_of("COPY") if "--from" not in rest for source in rest.split()[:-1]}
    assert {source.removeprefix("./") for source in sources} <= allowed
    assert all((ROOT / source).exists() for source in sources)


def test_nothing_is_left_behind_by_an_installer() -> None:
    """No cache in a layer, no pip in the image."""
    installs = [rest for rest in all_of("RUN") if " install " in rest]
    assert installs
    assert all("--no-cache-dir" in rest for rest in installs)
    assert any("--without-pip" in rest for rest in all_of("RUN"))


def test_its_ports_are_the_defaults() -> None:
    """EXPOSE says what the configuration means when it names no port."""
    assert all_of("EXPOSE") == [f"{ListenerSettings().port} {AdminSettings().port}"]
    assert environment()["KVPROXY_HEALTH_URL"] == f"http://127.0.0.1:{AdminSettings().port}/healthz"


@asynccontextmanager
async def container(config: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """ENTRYPOINT and CMD as a process with the image's environment and this configuration; and the admin's URL."""
    arguments = [str(config) if word == "/etc/kvproxy/config.yaml" else word for word in command("CMD")]
    assert str(config) in arguments
    process = await asyncio.create_subprocess_exec(
        *command("ENTRYPOINT"), *arguments, env={**environment(), "PATH": PATH}, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        text = ""
        async with asyncio.timeout(60):
            while not re.search(r"kvproxy \S+ on http", text):
                line = (await process.stderr.readline()).decode()
                assert line, text
                text += line
        (admin,) = re.findall(r"admin listener on (http\S+)", text)
        yield process, admin
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def health(url: str) -> int:
    """Exit status of HEALTHCHECK."""
    env = {**environment(), "PATH": PATH, "KVPROXY_HEALTH_URL": url, "http_proxy": "http://127.0.0.1:9"}
    process = await asyncio.create_subprocess_exec(*command("HEALTHCHECK"), env=env, stderr=asyncio.subprocess.DEVNULL)
    return await asyncio.wait_for(process.wait(), 60)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
async def test_the_container_serves_is_healthy_and_ends_when_told(tmp_path: Path) -> None:
    """ENTRYPOINT, CMD, HEALTHCHECK and STOPSIGNAL as they stand; unhealthy once there is no answer."""
    config = tmp_path / "config.yaml"
    config.write_text("listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nendpoints: [http://127.0.0.1:9]\n")
    async with container(config) as (process, admin):
        assert await health(f"{admin}/healthz") == 0
        process.send_signal(signal.Signals[all_of("STOPSIGNAL")[0]])
        assert await asyncio.wait_for(process.wait(), 60) == 0
        assert await health(f"{admin}/healthz") != 0
