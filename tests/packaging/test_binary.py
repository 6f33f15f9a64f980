"""The standalone binary, where there is no Python: an empty environment, an empty PATH."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import httpx
import pytest

from kvproxy import __version__
from kvproxy.proxy.listener.server import serve
from tests.packaging.support import CONFIG, ROOT, run, serving
from tests.support.fake_engine import FakeEngine
from tests.support.proxy import chat

pytestmark = pytest.mark.packaging

#: `env -i`, and nowhere to find a Python.
NOTHING = {"PATH": "/nonexistent"}
#: A size that says that something large came in by accident.
LIMIT_BYTES = 60 * 1024 * 1024


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the command of `make binary`, into a temporary directory."""
    folder = tmp_path_factory.mktemp("binary")
    (recipe,) = re.findall(r"^binary:.*\n\t\$\(BIN\)/python (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    words = shlex.split(recipe)
    words[words.index("--workpath") + 1] = str(folder / "build")
    words[words.index("--distpath") + 1] = str(folder)
    run(sys.executable, *words, cwd=ROOT)
    return folder / "kvproxy"


def test_it_is_one_file_of_reasonable_size(binary: Path) -> None:
    """One executable and nothing beside it."""
    assert [path.name for path in binary.parent.iterdir() if path.name != "build"] == ["kvproxy"]
    assert os.access(binary, os.X_OK)
    assert binary.stat().st_size < LIMIT_BYTES
    (said,) = re.findall(r"`dist/kvproxy` \((\d+) MB\)", (ROOT / "docs" / "deployment.md").read_text())
    assert abs(binary.stat().st_size / 1e6 - int(said)) < 3, "the page says another size"


def test_it_says_its_version(binary: Path, tmp_path: Path) -> None:
    """The version of the source it was built from."""
    assert run(binary, "--version", cwd=tmp_path, env=NOTHING).strip() == f"kvproxy {__version__}"


def test_it_checks_a_configuration(binary: Path, tmp_path: Path) -> None:
    """Good ones and bad ones; the schema has the settings' descriptions, which come from their source."""
    (tmp_path / "good.yaml").write_text(CONFIG % "http://127.0.0.1:9")
    assert "good" in run(binary, "check", "good.yaml", cwd=tmp_path, env=NOTHING)
    assert "How an endpoint is chosen." in run(binary, "check", "--schema", cwd=tmp_path, env=NOTHING)
    (tmp_path / "bad.yaml").write_text("endpoints: [http://127.0.0.1:9]\npolcy: random\n")
    with pytest.raises(AssertionError, match="did you mean 'policy'"):
        run(binary, "check", "bad.yaml", cwd=tmp_path, env=NOTHING)


async def test_it_serves(binary: Path, tmp_path: Path) -> None:
    """A request through the default chain with every filter's parts, KV events and tracing included."""
    engine = FakeEngine("a")
    filters = "filters: [tracing, request_id, access_log, inference_request, {kvcache: {kv_events: true}}, router]\n"
    async with serve(engine) as url:
        (tmp_path / "config.yaml").write_text(CONFIG % url + filters)
        command = [binary, "serve", "-c", "config.yaml"]
        env = {**NOTHING, "OTEL_EXPORTER_OTLP_ENDPOINT": url}
        async with (
            serving(command, cwd=tmp_path, env=env) as proxy,
            httpx.AsyncClient(base_url=proxy, timeout=30) as client,
        ):
            answer = await client.post("/v1/chat/completions", json=chat())
            assert (answer.status_code, answer.headers["x-kvproxy-endpoint"]) == (200, "a")
    paths = [call.path for call in engine.calls]
    assert "/v1/chat/completions" in paths
    assert "/v1/traces" in paths


def test_it_demonstrates(binary: Path, tmp_path: Path) -> None:
    """The simulated engines are in it too."""
    out = run(binary, "demo", "--engines", "2", "--sessions", "2", "--turns", "1", cwd=tmp_path, env=NOTHING)
    assert "kv_aware" in out
