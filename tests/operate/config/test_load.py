"""Native configurations: short forms, types, and where things come from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvproxy.base.errors import ConfigError
from kvproxy.base.settings.compose import composed
from kvproxy.base.settings.model import Model
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cluster.settings import PolicyName
from kvproxy.features.access_control.settings import RateLimitSettings
from kvproxy.features.access_log.settings import AccessLogSettings
from kvproxy.operate.config.load import check_config, load_config
from kvproxy.operate.config.schema import Config
from kvproxy.proxy.filter_settings import RouterSettings

ROOT = Path(__file__).parents[3]
URL = "http://127.0.0.1:8000"


def load(text: str, **env: str) -> Config:
    return load_config(text, env=env)


def endpoints(config: Config, cluster: str = "default") -> list[tuple[str, str]]:
    return [(endpoint.id, endpoint.url) for endpoint in config.clusters[cluster].endpoints]


def test_the_config_at_the_top_starts_two_engines() -> None:
    """It is short, valid without any warning, and says what the README says."""
    config, problems = check_config(ROOT / "config.yaml", env={})
    assert config is not None
    assert problems == []
    assert endpoints(config) == [("vllm-a", "http://127.0.0.1:8000"), ("vllm-b", "http://127.0.0.1:8001")]
    assert len((ROOT / "config.yaml").read_text().splitlines()) <= 20


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (f"[{URL}]", [("127.0.0.1:8000", URL)]),
        (f"[a={URL}, 'b = {URL}/base']", [("a", URL), ("b", f"{URL}/base")]),
        ("['http://[::1]:8000']", [("0::1:8000", "http://[::1]:8000")]),
        ("['https://api.example.com/v1']", [("api.example.com", "https://api.example.com/v1")]),
        (f"{{a: {URL}, 1: {{url: 'http://127.0.0.1:8001', weight: 2}}}}", [("a", URL), ("1", "http://127.0.0.1:8001")]),
        (f"[{{url: {URL}}}, {{id: b, url: 'http://127.0.0.1:8001'}}]", [("127.0.0.1:8000", URL), ("b", "http://127.0.0.1:8001")]),
        ("['http://h:1/?a=b']", None),
    ],
)  # fmt: skip
def test_forms_of_endpoints(written: str, expected: list[tuple[str, str]] | None) -> None:
    """Lists of urls, of `id=url` and of mappings, and mappings of ids."""
    if expected is None:
        with pytest.raises(ConfigError, match="query"):
            load(f"endpoints: {written}")
    else:
        assert endpoints(load(f"endpoints: {written}")) == expected


@pytest.mark.parametrize(
    ("written", "host", "port"),
    [
        ("127.0.0.1:9", "127.0.0.1", 9), (":9", "0.0.0.0", 9), ("'[::1]:9'", "::1", 9), ("9", "127.0.0.1", 9),
        ("'9'", "127.0.0.1", 9), ("{port: 9}", "127.0.0.1", 9), ("{host: localhost, port: '9'}", "localhost", 9),
        ('"${H}:${P}"', "127.0.0.2", 9), ("${P}", "127.0.0.1", 9),
    ],
)  # fmt: skip
def test_forms_of_listen(written: str, host: str, port: int) -> None:
    """`host:port`, `:port` on every interface, IPv6 in brackets, a bare port."""
    config = load(f"endpoints: [{URL}]\nlisten: {written}", H="127.0.0.2", P="9")
    assert (config.listen.host, config.listen.port) == (host, port)


@pytest.mark.parametrize("written", ["h:p", "h:99999", "::1:9", "'[]:9'", "true", "[1]", "''", "'h:'"])
def test_invalid_addresses(written: str) -> None:
    """Refused at `listen`."""
    with pytest.raises(ConfigError, match=r"^listen: "):
        load(f"endpoints: [{URL}]\nlisten: {written}")


@pytest.mark.parametrize("written", ["false", "off", '"${ADMIN:-false}"'])
def test_admin_off(written: str) -> None:
    """One word turns it off."""
    assert not load(f"endpoints: [{URL}]\nadmin: {written}").admin.enabled


def test_the_top_level_is_short_for_the_default_cluster() -> None:
    """Every field of a cluster, and merged with what `clusters.default` says."""
    config = load(
        f"endpoints: [{URL}]\npolicy: round_robin\nhealth: {{interval: 1s}}\nbreaker: {{failure_threshold: 9}}\n"
        "discovery: {dns: {host: h, port: 1}}\nclusters: {default: {max_in_flight: 3}}\n"
    )
    cluster = config.clusters["default"]
    assert cluster.policy is PolicyName.ROUND_ROBIN
    assert (cluster.health.interval, cluster.breaker.failure_threshold, cluster.max_in_flight) == (1.0, 9, 3)
    assert cluster.discovery.dns is not None
    assert cluster.discovery.dns.host == "h"


def test_the_default_chain() -> None:
    """Without filters the usual ones, with their settings decoded."""
    config = load(f"endpoints: [{URL}]")
    assert [spec.name for spec in config.filters] == [
        "request_id",
        "access_log",
        "inference_request",
        "kvcache",
        "router",
    ]
    assert isinstance(config.filters[1].settings, AccessLogSettings)


def test_filters_by_name_or_with_settings() -> None:
    """A name has defaults; so has a key without a value."""
    chain = "[access_log: , rate_limit: {requests_per_minute: 60}, inference_request, kvcache, router]"
    config = load(f"endpoints: [{URL}]\nfilters: {chain}")
    kinds = [type(spec.settings) for spec in config.filters]
    assert kinds[0] is AccessLogSettings
    assert kinds[1] is RateLimitSettings
    assert issubclass(kinds[3], KvCacheSettings)
    assert issubclass(kinds[4], RouterSettings)


def test_a_mapping_adds_to_the_default_chain() -> None:
    """Each filter at its place, whatever the order in the file; the rest of the chain stays."""
    added = (
        "{rate_limit: {requests_per_minute: 6}, auth: {keys: [{name: a, key: k}]}, kvcache: {min_matched_tokens: 7},"
    )
    config = load(f"endpoints: [{URL}]\nfilters: {added} tracing: , normalize: }}")
    assert [spec.name for spec in config.filters] == [
        "tracing",
        "request_id",
        "access_log",
        "auth",
        "rate_limit",
        "inference_request",
        "normalize",
        "kvcache",
        "router",
    ]
    settings = {spec.name: spec.settings for spec in config.filters}
    assert settings["kvcache"] == composed(KvCacheSettings)(min_matched_tokens=7)
    assert settings["rate_limit"] == RateLimitSettings(requests_per_minute=6)


def test_an_empty_mapping_is_the_default_chain() -> None:
    """Every line of it commented out changes nothing."""
    assert load(f"endpoints: [{URL}]\nfilters: {{}}").filters == load(f"endpoints: [{URL}]").filters


def test_added_filters_of_other_people_see_the_parsed_request() -> None:
    """They stand behind `inference_request`, in the order of the file, and before any fact is gathered."""
    raw = {"endpoints": {"a": URL}, "filters": {"second": {}, "first": {}, "normalize": {}}}
    config = load_config(raw, env={}, extra_filters={"first": None, "second": None})
    names = [spec.name for spec in config.filters]
    assert names[2:] == ["inference_request", "second", "first", "normalize", "kvcache", "router"]


@pytest.mark.parametrize(
    ("filters", "problem"),
    [
        ("{ath: {}}", "filters.ath: unknown filter 'ath' (did you mean 'auth'?)"),
        ("{kvcache: {enable: false}}", "filters.kvcache.enable: unknown key (did you mean 'enabled'?)"),
        ("{auth: {file: /nowhere}}", "filters.auth.file: no such file: '/nowhere'"),
        ("{cors: 5}", "filters.cors: must be a mapping of settings"),
    ],
)
def test_problems_of_added_filters_have_their_place(filters: str, problem: str) -> None:
    """The path is the written one."""
    _, problems = check_config(f"endpoints: [{URL}]\nfilters: {filters}", env={})
    assert [str(one) for one in problems] == [problem]


class _OtherSettings(Model):
    limit: int = 1


def test_other_peoples_filters() -> None:
    """Typed by their own model, or given as plain data; both with substituted values."""
    raw = {
        "endpoints": [URL],
        "filters": [{"typed": {"limit": "${N}"}}, {"raw": {"n": "${N}", "s": "5"}}, "bare", "router"],
        "policy": "random",
    }
    extra: Mapping[str, type[Model] | None] = {"typed": _OtherSettings, "raw": None, "bare": None}
    config = load_config(raw, env={"N": "7"}, extra_filters=extra)
    assert [spec.settings for spec in config.filters[:3]] == [_OtherSettings(limit=7), {"n": 7, "s": "5"}, {}]


def test_values_from_the_environment_have_the_fields_type() -> None:
    """Numbers, booleans, durations; and a numeric secret stays as it is."""
    text = (
        "endpoints: [{id: '${ID}', url: '${URL}', weight: '${W}', api_key: '${KEY}'}]\n"
        "limits: {connections: '${N}'}\ntimeouts: {connect: '${T}'}\nhealth: {active: '${B}'}\n"
    )
    config = load(text, ID="007", URL=URL, W="2.5", KEY="0012", N="5", T="3", B="no")
    endpoint = config.clusters["default"].endpoints[0]
    assert (endpoint.id, endpoint.weight, config.limits.connections, config.timeouts.connect) == ("007", 2.5, 5, 3.0)
    assert not config.clusters["default"].health.active
    assert endpoint.api_key is not None
    assert endpoint.api_key.get_secret_value() == "0012"


def test_an_environment_value_cannot_change_the_structure() -> None:
    """It is a value, whatever it looks like."""
    config, problems = check_config("endpoints: ['${URL}']", env={"URL": "http://h:1\nadmin: false"})
    assert config is None
    assert [problem.path for problem in problems] == ["endpoints[0].url"]


@pytest.mark.parametrize("raw", [None, [], "text", 5, {}])
def test_a_configuration_is_a_mapping(raw: Any) -> None:
    """Anything else is refused with the shortest good one."""
    with pytest.raises(ConfigError, match="endpoints:"):
        load_config(raw, env={})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """Missing, not text, too large: a configuration error, not a crash."""
    binary, large = tmp_path / "binary", tmp_path / "large"
    binary.write_bytes(b"a: \xff")
    large.write_bytes(b"#" * (5 * 1024 * 1024))
    for path, message in (
        (tmp_path / "none", "No such file"),
        (binary, "UTF-8"),
        (large, "larger"),
        (tmp_path, "directory"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(Path(path), env={})


def test_a_byte_order_mark_is_no_problem(tmp_path: Path) -> None:
    """Some editors write one."""
    path = tmp_path / "bom.yaml"
    path.write_text(f"endpoints: [{URL}]", encoding="utf-8-sig")
    assert endpoints(load_config(Path(path), env={}))


def test_a_loaded_configuration_never_changes() -> None:
    """Models are frozen, and loading does not touch the caller's data."""
    raw = {"endpoints": {"a": URL}, "policy": "random", "filters": ["router"]}
    config = load_config(raw, env={})
    assert raw == {"endpoints": {"a": URL}, "policy": "random", "filters": ["router"]}
    with pytest.raises(ValueError, match="frozen"):
        config.listen = config.listen  # type: ignore[misc]


def test_secrets_stay_hidden_in_a_whole_configuration() -> None:
    """Tokens and keys appear in no representation."""
    config = load(
        f"endpoints: [{{url: {URL}, api_key: topsecret-1}}]\nadmin: {{token: topsecret-2}}\n"
        "filters: {auth: {keys: [{name: a, key: topsecret-3}]}}"
    )
    assert "topsecret" not in f"{config!r} {config.model_dump()} {config.model_dump_json()}"
