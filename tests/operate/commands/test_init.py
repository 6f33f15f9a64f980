"""`kvproxy init`: looks at engines, writes a file that loads, and asks only a terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from kvproxy.base.errors import ConfigError
from kvproxy.cluster.settings import PriorityOrder
from kvproxy.lab.simulator.fleet import Fleet, FleetSettings
from kvproxy.lab.simulator.kv_event_publisher import PublisherSettings
from kvproxy.lab.simulator.sglang_settings import EventSettings, SglangSettings
from kvproxy.operate.commands.init import InitOptions, list_flags, run
from kvproxy.operate.commands.survey import SeenEngine, SeenLmCache, look_at_all, write_config
from kvproxy.operate.config.load import load_config
from tests.cache.fleet import simulated
from tests.support.loopback import serve

GONE = "http://127.0.0.1:1"


class Typed(io.StringIO):
    """A terminal at which these lines are typed."""

    def isatty(self) -> bool:
        return True


def init(options: InitOptions, typed: str | None = None) -> tuple[int, str, str]:
    """Exit status and output."""
    out, err = io.StringIO(), io.StringIO()
    stdin = io.StringIO() if typed is None else Typed(typed)
    return run(options, stdin=stdin, out=out, err=err), out.getvalue(), err.getvalue()


async def test_visible_parts_of_a_setup() -> None:
    """Models, events and LMCache's service of what runs; what does not answer is said so."""
    async with simulated(engine={"kv_events": PublisherSettings()}) as place:
        seen, lmcache = await look_at_all({"a": place.engines["a"], "b": GONE}, place.lmcache)
    assert (seen[0].models, seen[0].events, seen[0].health_path) == (("tiny",), True, "/health")
    assert "serves tiny; publishes KV events" in seen[0].describe()
    assert seen[1].trouble
    assert "no connection" in seen[1].describe()
    assert lmcache is not None
    assert lmcache.describe().endswith("answers as the controller")


def test_without_a_terminal_nothing_is_asked(tmp_path: Path) -> None:
    """Engines that are down are written all the same; the next commands are told."""
    file = tmp_path / "config.yaml"
    status, out, _ = init(InitOptions([GONE, f"x={GONE}0/v1/"], output=file))
    assert status == 0
    endpoints = load_config(Path(file)).clusters["default"].endpoints
    assert [(one.id, one.url) for one in endpoints] == [("engine-1", GONE), ("x", f"{GONE}0")]
    for command in ("kvproxy check", "kvproxy doctor -c", "kvproxy serve -c"):
        assert command in out
    assert "  engine priority: `engine_priority: auto`" in out


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    """Unless it may be replaced: by the option, or by a word at the terminal."""
    file = tmp_path / "config.yaml"
    file.write_text("mine")
    status, _, err = init(InitOptions([GONE], output=file))
    assert status == 1
    assert "-o FILE writes another" in err
    assert init(InitOptions([GONE], output=file), "n\n")[0] == 1
    assert file.read_text() == "mine"
    assert init(InitOptions([GONE], output=file), "y\n\n\n")[0] == 0
    assert GONE in file.read_text()
    assert init(InitOptions([GONE], output=file, force=True))[0] == 0


def test_at_a_terminal_it_asks(tmp_path: Path) -> None:
    """Engines without a scheme, LMCache, the listener; empty lines are the defaults."""
    file = tmp_path / "config.yaml"
    status, out, _ = init(InitOptions(output=file), f"127.0.0.1:1 b=127.0.0.1:2\n{GONE}3\n0.0.0.0:9000\n")
    assert status == 0
    assert "Engines, as URLs with spaces between [http://127.0.0.1:8000]: " in out
    config = load_config(Path(file))
    assert [(one.id, one.url) for one in config.clusters["default"].endpoints] == [
        ("engine-1", GONE),
        ("b", "http://127.0.0.1:2"),
    ]
    assert (config.listen.host, config.listen.port, config.admin.port) == ("0.0.0.0", 9000, 9001)
    assert any(getattr(spec.settings, "lmcache_endpoint", "") == f"{GONE}3" for spec in config.filters)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (InitOptions(["ftp://x"]), "the scheme must be http or https"),
        (InitOptions([f"a={GONE}", "a=http://h:2"]), "another engine has the id 'a'"),
        (InitOptions(["http://h:2", "engine-1=http://h:1"]), "another engine has the id 'engine-1'"),
        (InitOptions([GONE], lmcache="nonsense"), "--lmcache: must start with http"),
        (InitOptions([GONE], listen="nonsense"), "listen: expected host:port"),
        (InitOptions(), "there is no terminal to ask (give --engine URL once per engine"),
    ],
)
def test_unwritable_configurations(
    options: InitOptions, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before a file is made."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        init(options)
    assert said in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_two_models_are_two_clusters() -> None:
    """With a route for each; an engine without /health is probed where it answers."""
    seen = [
        SeenEngine("a", "http://h:1", ("org/Llama-3", "lora")),
        SeenEngine("b", "http://h:2", ("qwen",), health_path="/v1/models"),
        SeenEngine("c", "http://h:3", trouble="no answer"),
    ]
    config = load_config(write_config(seen, SeenLmCache("http://h:9"), listen="127.0.0.1:8888"), env={})
    assert {name: [one.id for one in cluster.endpoints] for name, cluster in config.clusters.items()} == {
        "llama-3": ["a", "c"],
        "qwen": ["b"],
    }
    assert [(one.model, one.cluster) for one in config.routes] == [
        ("org/Llama-3", "llama-3"),
        ("lora", "llama-3"),
        ("qwen", "qwen"),
    ]
    assert config.clusters["qwen"].health.path == "/v1/models"


@pytest.mark.parametrize("has_ready", [True, False])
async def test_an_sglang(has_ready: bool) -> None:
    """It is recognised: probes that generate nothing or have time, the order of its priorities, its KV events."""
    engine = SglangSettings(model="tiny", kv_events=EventSettings(), has_ready=has_ready, health_step_s=0.01)
    async with Fleet(FleetSettings({"a": engine}, None)) as fleet, serve(fleet.engines["a"]) as url:
        seen, _ = await look_at_all({"a": url}, "")
    assert "is an SGLang, serves tiny; publishes KV events" in seen[0].describe()
    config = load_config(write_config(seen, None, listen="127.0.0.1:8888"), env={})
    cluster = config.clusters["default"]
    assert cluster.engine_priority_order is PriorityOrder.HIGHEST_FIRST
    assert (cluster.health.path, cluster.health.timeout) == (("/ready", 2.0) if has_ready else ("/health", 5.0))
    assert [spec.settings.kv_events for spec in config.filters if spec.name == "kvcache"] == ["auto"]


async def test_an_engine_that_does_not_answer_is_said_in_words() -> None:
    """Not by the name of an exception."""
    seen, _ = await look_at_all({"b": GONE}, "")
    assert seen[0].trouble == "no answer on /v1/models (no connection)"


async def test_engines_of_all_kinds_are_looked_at() -> None:
    """One without events and health, one that breaks off there, and an LMCache that is none."""

    async def engine(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/v1/models":
            answer = JSONResponse({"object": "list", "data": [{"id": "tiny", "object": "model"}]})
        else:
            answer = JSONResponse({"error": "no"}, status_code=500)
        await answer(scope, receive, send)

    async with serve(engine) as url:
        (seen, absent), controller = await look_at_all({"a": url, "b": "http://127.0.0.1:1"}, url)
    assert (seen.models, seen.health_path, seen.events) == (("tiny",), "/v1/models", False)
    assert "no answer on /v1/models" in absent.trouble
    assert controller is not None
    assert controller.trouble in controller.describe()
    assert controller.trouble


def test_flags_worth_setting_are_printed_on_one_line() -> None:
    """For each kind of engine, without what the engines do already."""
    seen = [
        SeenEngine("a", "http://a:1", ("m",)),
        SeenEngine("b", "http://b:1", ("m",), events=True),
        SeenEngine("s", "http://s:1", ("m",), events=True, sglang=True),
        SeenEngine("gone", "http://g:1", trouble="no answer"),
    ]
    (vllm, flags), (sglang, others) = list_flags(seen)
    assert (vllm, sglang) == ("a, b", "s")
    assert flags.startswith("--enable-prompt-tokens-details --scheduling-policy priority --kv-events-config '{")
    assert "--kv-events-config" not in others
    assert others.startswith("--enable-cache-report")
