"""Every sample runs as its README says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import httpx
import pytest
import yaml

from kvproxy.features.picker.settings import PickerSettings
from tests.cache.fleet import simulated
from tests.cache.support import long_text
from tests.support.loopback import serve

SAMPLES = Path(__file__).parents[2] / "samples"


def load(path: Path) -> ModuleType:
    """Return the script as a module."""
    spec = importlib.util.spec_from_file_location(f"sample_{path.parent.name.replace('-', '_')}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_patience(config: Path, folder: Path) -> Path:
    """Return a copy that waits longer for LMCache: a busy machine may need more than 80 ms."""
    text = config.read_text()
    copy = folder / config.name
    copy.write_text(text.replace("lookup_routing_timeout: 80ms", "lookup_routing_timeout: 60s"))
    assert copy.read_text() != text
    return copy


async def test_pixius_five_checks_hold_with_engines_that_answer_at_once(tmp_path: Path) -> None:
    """Nothing is hidden by waiting: background work survives the response that caused it."""
    sample = load(SAMPLES / "pixiu-mock" / "run.py")
    sample.CONFIG = with_patience(sample.CONFIG, tmp_path)
    for _ in range(3):
        checks = await sample.run()
        assert len(checks) == 5
        assert all(checks.values()), checks


def test_pixius_demonstration_prints_what_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample = load(SAMPLES / "pixiu-mock" / "run.py")
    sample.CONFIG = with_patience(sample.CONFIG, tmp_path)
    assert sample.main() == 0
    assert capsys.readouterr().out.count("ok  ") == 5


async def test_the_middleware_sample_keeps_a_chat_on_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain Starlette gateway in front of two simulated engines."""
    async with simulated() as place:
        monkeypatch.setenv("ENGINE_A", place.engines["a"])
        monkeypatch.setenv("ENGINE_B", place.engines["b"])
        monkeypatch.setenv("LMCACHE", place.lmcache)
        sample = load(SAMPLES / "middleware" / "app.py")
        async with serve(sample.app, lifespan="on") as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
            history = [{"role": "user", "content": long_text("w")}]
            engines = []
            for turn in range(4):
                answer = await client.post(
                    "/v1/chat/completions", json={"model": "tiny", "max_tokens": 1, "messages": history}
                )
                assert answer.status_code == 200
                engines.append(answer.headers["x-engine"])
                history += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": f"and {turn}?"}]
    assert len(set(engines)) == 1


def test_the_gateways_files_name_the_same_picker() -> None:
    """Pool, service, deployment and the picker's default port fit together."""
    parts = {one["kind"]: one for one in yaml.safe_load_all((SAMPLES / "envoy" / "inferencepool.yaml").read_text())}
    named = parts["InferencePool"]["spec"]["endpointPickerRef"]
    (port,) = parts["Service"]["spec"]["ports"]
    (container,) = parts["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert named["name"] == parts["Service"]["metadata"]["name"]
    probes = [container[f"{kind}Probe"]["grpc"]["port"] for kind in ("liveness", "readiness")]
    assert {named["port"]["number"], port["port"], *probes} == {PickerSettings().port}
    (backend,) = parts["HTTPRoute"]["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", parts["InferencePool"]["metadata"]["name"])
