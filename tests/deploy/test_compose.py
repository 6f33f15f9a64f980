"""deploy/compose.yaml: its parts fit each other, and the proxy's configuration in it loads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvproxy.operate.config.load import load_config
from kvproxy.operate.config.schema import Config

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
ENGINES = ("vllm-a", "vllm-b")


@pytest.fixture
def config() -> Config:
    """Return the proxy's configuration with the variables that Compose gives it."""
    given = SERVICES["kvproxy"]["environment"]
    return load_config((DEPLOY / "compose" / "kvproxy.yaml").read_text(), env=dict.fromkeys(given, "t0ken"))


def test_the_proxy_knows_exactly_the_engines(config: Config) -> None:
    """Endpoint ids are service names, and LMCache knows the engines by these ids."""
    endpoints = {e.id: e.url for e in config.clusters["default"].endpoints}
    assert endpoints == {name: f"http://{name}:8000" for name in ENGINES}
    for name in ENGINES:
        assert SERVICES[name]["environment"]["LMCACHE_LMCACHE_INSTANCE_ID"] == name
        assert "--port=8000" in SERVICES[name]["command"]


def test_the_proxy_asks_the_controller_where_it_listens(config: Config) -> None:
    """Host and port of lmcache_endpoint, and the ports engines report to."""
    (kvcache,) = (spec.settings for spec in config.filters if spec.name == "kvcache")
    command = SERVICES["lmcache-controller"]["command"]
    port = command[command.index("--port") + 1]
    assert kvcache.lmcache_endpoint == f"http://lmcache-controller:{port}"
    monitors = json.loads(command[command.index("--monitor-ports") + 1])
    for name in ENGINES:
        environment = SERVICES[name]["environment"]
        assert environment["LMCACHE_CONTROLLER_PULL_URL"] == f"lmcache-controller:{monitors['pull']}"
        assert environment["LMCACHE_CONTROLLER_REPLY_URL"] == f"lmcache-controller:{monitors['reply']}"


def test_controller_and_engines_hash_alike() -> None:
    """One image and one seed, or every lookup is empty."""
    hashing = [SERVICES[name] for name in (*ENGINES, "lmcache-controller")]
    assert len({service["image"] for service in hashing}) == 1
    assert len({service["environment"]["PYTHONHASHSEED"] for service in hashing}) == 1


def test_each_engine_has_a_gpu_of_its_own_and_tells_what_kvproxy_needs() -> None:
    """Reservations do not overlap; KV events and cached tokens are on."""
    devices = [SERVICES[name]["deploy"]["resources"]["reservations"]["devices"][0] for name in ENGINES]
    assert all(device["capabilities"] == ["gpu"] for device in devices)
    assert len({tuple(device["device_ids"]) for device in devices}) == len(ENGINES)
    for name in ENGINES:
        flags = dict(word.partition("=")[::2] for word in SERVICES[name]["command"] if word.startswith("--"))
        assert {"--enable-prefix-caching", "--enable-prompt-tokens-details"} <= set(flags)
        events = json.loads(flags["--kv-events-config"])
        assert (events["enable_kv_cache_events"], events["publisher"]) == (True, "zmq")
        assert json.loads(flags["--kv-transfer-config"])["kv_connector"] == "LMCacheConnectorV1"


def test_prometheus_scrapes_the_admin_listener_with_its_token(config: Config) -> None:
    """Job name of the rules, port of the configuration, one token for both."""
    prometheus = yaml.safe_load((DEPLOY / "compose" / "prometheus.yaml").read_text())
    jobs = {job["job_name"]: job for job in prometheus["scrape_configs"]}
    assert jobs["kvproxy"]["static_configs"] == [{"targets": [f"kvproxy:{config.admin.port}"]}]
    assert jobs["kvproxy"]["authorization"] == {"credentials_file": "/run/secrets/admin_token"}
    assert jobs["vllm"]["static_configs"] == [{"targets": [f"{name}:8000" for name in ENGINES]}]
    assert SERVICES["prometheus"]["secrets"] == ["admin_token"]
    assert COMPOSE["secrets"] == {"admin_token": {"environment": "KVPROXY_ADMIN_TOKEN"}}
    assert SERVICES["kvproxy"]["environment"]["KVPROXY_ADMIN_TOKEN"].startswith("${KVPROXY_ADMIN_TOKEN:?")
    assert config.admin.token is not None
    assert config.admin.token.get_secret_value() == "t0ken"


def test_mounted_files_exist_and_land_where_they_are_read() -> None:
    """Bind mounts of files in the repository, named volumes that are declared."""
    for service in SERVICES.values():
        for mount in service.get("volumes", []):
            source, target, *mode = mount.split(":")
            if source.startswith("./"):
                assert (DEPLOY / source).exists(), mount
                assert mode == ["ro"], mount
            else:
                assert source in COMPOSE["volumes"], mount
            assert target.startswith("/")
    mounts = " ".join(SERVICES["grafana"]["volumes"])
    provider = yaml.safe_load((DEPLOY / "compose/grafana/provisioning/dashboards/kvproxy.yaml").read_text())
    assert f":{provider['providers'][0]['options']['path']}/kvproxy.json" in mounts
    source = yaml.safe_load((DEPLOY / "compose/grafana/provisioning/datasources/prometheus.yaml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    rules = yaml.safe_load((DEPLOY / "compose" / "prometheus.yaml").read_text())["rule_files"]
    assert any(f":{rules[0]}:" in mount for mount in SERVICES["prometheus"]["volumes"])


def test_only_the_proxy_is_open_to_the_world() -> None:
    """Everything else is published on loopback or not at all; engines share no network with what is."""
    for name, service in SERVICES.items():
        for port in service.get("ports", []):
            assert name == "kvproxy" or port.startswith("127.0.0.1:"), port
    assert all("ports" not in SERVICES[name] and SERVICES[name]["networks"] == ["inside"] for name in ENGINES)


def test_every_service_says_whether_it_is_well() -> None:
    """A healthcheck in the file, or in the image we build; images are pinned; waits are for what exists."""
    for name, service in SERVICES.items():
        assert "healthcheck" in service or "build" in service, name
        assert service["restart"] == "unless-stopped"
        assert re.search(r":v?\d|:local", service["image"]), service["image"]
        assert set(service.get("depends_on", {})) <= set(SERVICES)
        assert set(service["networks"]) <= set(COMPOSE["networks"])


def test_read_only_services_have_no_secret_that_must_be_written() -> None:
    """Compose writes secrets that come from variables into the container, and refuses a read-only one."""
    written = {name for name, secret in COMPOSE["secrets"].items() if "file" not in secret}
    for name, service in SERVICES.items():
        assert not service.get("read_only") or not written & set(service.get("secrets", [])), name


def test_the_proxy_may_finish_its_streams(config: Config) -> None:
    """Compose waits longer than the drain."""
    assert int(SERVICES["kvproxy"]["stop_grace_period"].removesuffix("s")) > config.shutdown.drain


def test_no_port_is_open_to_other_machines() -> None:
    """Neither the clients' port nor the operators': the file has no API keys."""
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", ())]
    assert ports
    assert [port for port in ports if not port.startswith(("127.0.0.1:", "${KVPROXY_BIND:-127.0.0.1}:"))] == []
