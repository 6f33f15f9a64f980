"""Dubbo-go-Pixiu files load unchanged and mean what they say."""

from __future__ import annotations

from typing import Any

import pytest

from kvproxy.base.errors import Problem
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.cluster.settings import EndpointSettings, PolicyName
from kvproxy.operate.config.load import check_config, load_config
from kvproxy.operate.config.schema import Config
from tests.features.pixiu.pixiu_files import DOCUMENTATION, ENVIRONMENT, PLACEHOLDERS, ROOT, manager_of, sample, small

FILTERS = "static_resources.listeners[0].filter_chains.filters[0].config.http_filters"


EXPONENTIAL = {"times": 2, "initialInterval": "200ms", "maxInterval": "8s", "multiplier": 3}
ANOTHER_A = {"id": "a", "socket_address": {"address": "h", "port": 1}}


def static(raw: dict[str, Any]) -> Any:
    return raw["static_resources"]


def listener(raw: dict[str, Any]) -> Any:
    return static(raw)["listeners"][0]


def first(raw: dict[str, Any]) -> Any:
    """Return the first cluster."""
    return static(raw)["clusters"][0]


def check(raw: dict[str, Any], *, lenient: bool = False) -> tuple[Config | None, list[Problem]]:
    return check_config(raw, env={}, lenient=lenient)


def kvcache(config: Config) -> KvCacheSettings:
    settings = next(spec.settings for spec in config.filters if spec.name == "kvcache")
    assert isinstance(settings, KvCacheSettings)
    return settings


def only(problems: list[Problem], severity: str) -> list[str]:
    return [str(problem) for problem in problems if problem.severity == severity]


def endpoint_of(**settings: Any) -> EndpointSettings:
    endpoint = {"id": "a", "socket_address": {"address": "127.0.0.1", "port": 8000}, **settings}
    return load_config(small(cluster={"endpoints": [endpoint]}), env={}).clusters["c"].endpoints[0]


def test_the_mock_sample() -> None:
    """The five-check demonstration: every setting arrives, nothing but notes is said."""
    config, problems = check_config((ROOT / "samples" / "pixiu-mock" / "config.yaml").read_text(), env={})
    assert config is not None
    assert {problem.severity for problem in problems} == {"note"}
    assert (config.listen.host, config.listen.port, config.admin.port) == ("127.0.0.1", 18888, 2222)
    assert [spec.name for spec in config.filters] == [
        "request_id",
        "access_log",
        "inference_request",
        "kvcache",
        "router",
    ]
    settings = kvcache(config)
    assert settings.enabled
    assert (settings.vllm_endpoint, settings.lmcache_endpoint) == ("http://127.0.0.1:18091", "http://127.0.0.1:18081")
    assert (settings.request_timeout, settings.lookup_routing_timeout, settings.hot_window) == (3.0, 0.08, 120.0)
    assert settings.lookup_min_tokens == 0
    assert (settings.token_cache.max_size, settings.token_cache.ttl) == (1024, 600.0)
    strategy = settings.cache_strategy
    assert (strategy.load_threshold, strategy.memory_threshold, strategy.hot_content_threshold) == (1e-6, 1e-6, 1)
    assert (strategy.pin_instance_id, strategy.pin_location, strategy.evict_instance_id) == (
        "mock-llm-b",
        "ram-b",
        "mock-llm-a",
    )
    cluster = config.clusters["engines"]
    assert cluster.policy is PolicyName.ROUND_ROBIN
    assert not cluster.health.active
    assert [(e.id, e.url) for e in cluster.endpoints] == [
        ("mock-llm-a", "http://127.0.0.1:18091"),
        ("mock-llm-b", "http://127.0.0.1:18092"),
    ]
    assert [(route.prefix, route.cluster) for route in config.routes] == [("/v1/chat/completions", "engines")]
    assert (config.timeouts.first_byte, config.limits.body_timeout, config.shutdown.drain) == (30.0, 30.0, 10.0)
    assert config.pool.max_connections == 100


def test_the_documentations_excerpt_works_without_clusters() -> None:
    """Its one engine becomes the cluster, under the instance id the strategies name; and that is said."""
    config, problems = check_config(DOCUMENTATION, env={})
    assert config is not None
    assert only(problems, "error") == []
    assert [(e.id, e.url) for e in config.clusters["vllm_cluster"].endpoints] == [
        ("vllm-instance-1", "http://127.0.0.1:8000")
    ]
    assert len(only(problems, "warning")) == 1
    assert "the file has no clusters" in only(problems, "warning")[0]
    assert kvcache(config).circuit_breaker.recovery_timeout == 10.0


def test_without_clusters_and_engine_the_route_is_named() -> None:
    """Nothing to serve from: an error with the route's place."""
    config, problems = check_config(DOCUMENTATION.replace("vllm_endpoint", "#"), env={})
    assert config is None
    assert "there is no cluster 'vllm_cluster'" in "\n".join(only(problems, "error"))


def test_without_clusters_the_engine_has_a_name_anyway() -> None:
    """Strategies that name different instances leave it to us."""
    text = DOCUMENTATION.replace("evict_instance_id: vllm-instance-1", "evict_instance_id: other")
    config, problems = check_config(text, env={})
    assert config is not None
    assert [endpoint.id for endpoint in config.clusters["vllm_cluster"].endpoints] == ["vllm"]
    assert sum("no endpoint has the instance id" in line for line in only(problems, "warning")) == 3


def test_placeholders_of_the_real_engine_sample() -> None:
    """Numbers, ids and urls from the environment."""
    config = load_config(PLACEHOLDERS, env=ENVIRONMENT)
    assert (config.listen.port, config.admin.port) == (18889, 2223)
    assert kvcache(config).cache_strategy.memory_threshold == 0.85
    assert kvcache(config).cache_strategy.hot_content_threshold == 2
    assert [(e.id, e.url) for e in config.clusters["real"].endpoints] == [
        ("engine-1", "http://127.0.0.1:8000"),
        ("engine-2", "http://127.0.0.1:8001"),
    ]


def test_every_missing_placeholder_is_named() -> None:
    """With Pixiu's own path, once each, and nothing that only follows from it."""
    missing = {name: value for name, value in ENVIRONMENT.items() if name not in ("LISTEN_PORT", "A_ID")}
    _, problems = check_config(PLACEHOLDERS, env=missing)
    shown = only(problems, "error")
    assert shown == [
        "static_resources.listeners[0].address.socket_address.port: environment variable LISTEN_PORT is not set",
        f"{FILTERS}[0].config.cache_strategy.pin_instance_id: environment variable A_ID is not set",
        "static_resources.clusters[0].endpoints[0].id: environment variable A_ID is not set",
    ]


def test_bad_values_from_the_environment() -> None:
    """Named with Pixiu's path, and not shown."""
    wrong = {"A_PORT": "topsecret", "HOT": "0", "LOAD": "topsecret"}
    _, problems = check_config(PLACEHOLDERS, env={**ENVIRONMENT, **wrong})
    given = "(a value from the environment)"
    assert sorted(only(problems, "error")) == [
        f"static_resources.clusters[0].endpoints[0].socket_address.port: must be a whole number, not {given}",
        f"{FILTERS}[0].config.cache_strategy.hot_content_threshold: must be greater than or equal to 1, not {given}",
        f"{FILTERS}[0].config.cache_strategy.load_threshold: must be a number, not {given}",
    ]


@pytest.mark.parametrize(
    ("written", "policy"),
    [
        ("Rand", "random"), ("RoundRobin", "round_robin"), ("round_robin", "round_robin"),
        ("round-robin", "round_robin"),
        ("RingHashing", "consistent_hash"), ("MaglevHashing", "consistent_hash"), ("maglev", "consistent_hash"),
        ("WeightRandom", "random"), ("", "random"), ("lb", "random"), ("least_request", "least_request"),
        ("KvAware", "kv_aware"),
    ],
)  # fmt: skip
def test_lb_policy_in_any_spelling(written: str, policy: str) -> None:
    """The meaning is honoured; a word that means nothing is random, with a warning."""
    kvcache = {"enabled": True, "vllm_endpoint": "http://127.0.0.1:8000", "lmcache_endpoint": "http://127.0.0.1:9000"}
    filters = [{"name": "dgp.filter.ai.kvcache", "config": kvcache}] if policy == "kv_aware" else []
    config, problems = check(small(cluster={"lb_policy": written}, http_filters=filters))
    assert config is not None
    assert config.clusters["c"].policy.value == policy
    assert bool(only(problems, "warning")) == (written == "lb")


@pytest.mark.parametrize(
    ("meta", "attempts", "backoff", "max_backoff", "multiplier", "fallback"),
    [
        ({}, 1, 0.1, 5.0, 2.0, False),
        ({"retry_policy": {"name": "NoRetry"}, "fallback": True}, 1, 0.1, 5.0, 2.0, True),
        ({"retry_policy": {"name": "CountBased", "times": 3}}, 4, 0.0, 0.0, 1.0, False),
        ({"retry_policy": {"name": "CountBased", "config": {"times": "1"}}}, 2, 0.0, 0.0, 1.0, False),
        ({"retry_policy": {"name": "CountBased"}}, 3, 0.0, 0.0, 1.0, False),
        ({"retry_policy": {"name": "CountBased", "times": 99}}, 20, 0.0, 0.0, 1.0, False),
        ({"retry_policy": {"name": "ExponentialBackoff", "config": EXPONENTIAL}}, 3, 0.2, 8.0, 3.0, False),
        ({"retry_policy": {"name": "ExponentialBackoff", "times": 2}}, 3, 0.1, 5.0, 2.0, False),
    ],
)  # fmt: skip
def test_llm_meta_retry_policies(
    meta: dict[str, Any], attempts: int, backoff: float, max_backoff: float, multiplier: float, fallback: bool
) -> None:
    """`times` are the retries after the first attempt, beside the name or in `config`."""
    retry = endpoint_of(llm_meta=meta).retry
    assert retry is not None
    assert (retry.attempts, retry.backoff, retry.max_backoff) == (attempts, backoff, max_backoff)
    assert (retry.multiplier, retry.fallback) == (multiplier, fallback)


def test_attempts_in_all_reach_every_endpoint() -> None:
    """The request's bound leaves room for the endpoints' own attempts."""
    meta = {"fallback": True, "retry_policy": {"name": "CountBased", "times": 3}}
    endpoints = [{"id": n, "socket_address": {"address": "h", "port": n}, "llm_meta": meta} for n in (1, 2)]
    assert load_config(small(cluster={"endpoints": endpoints}), env={}).retry.attempts == 8


def test_without_llm_meta_our_retries_apply() -> None:
    """No panic, and a failed request is tried elsewhere; that is said."""
    config, problems = check(small())
    assert config is not None
    assert config.clusters["c"].endpoints[0].retry is None
    assert config.retry.attempts == 3
    assert any("without llm_meta" in line for line in only(problems, "note"))


def test_llm_meta_credentials_and_cooldown() -> None:
    """The key goes to this endpoint alone and is not shown; the interval is milliseconds."""
    meta = {"provider": "deepseek", "api_key": "topsecret", "health_check_interval": 2500}
    raw = small(
        cluster={
            "endpoints": [
                {"ID": 1, "name": "n", "socket_address": {"domains": ["api.example.com", "x"]}, "llm_meta": meta}
            ]
        }
    )
    raw["static_resources"]["clusters"][0]["endpoints"][0]["meta"] = {"weight": "3", "zone": "z"}
    manager_of(raw)["http_filters"][0]["config"] = {"scheme": "https"}
    config, problems = check(raw)
    assert config is not None
    endpoint = config.clusters["c"].endpoints[0]
    assert endpoint.api_key is not None
    assert endpoint.api_key.get_secret_value() == "topsecret"
    assert (endpoint.id, endpoint.url, endpoint.weight) == ("1", "https://api.example.com", 3.0)
    assert endpoint.labels == {"zone": "z", "name": "n", "provider": "deepseek"}
    health = config.clusters["c"].health
    assert (health.eject_after, health.eject_for) == (1, 2.5)
    assert "topsecret" not in f"{config!r}{problems}"


@pytest.mark.parametrize(
    ("endpoint", "identity", "url"),
    [
        ({"socket_address": {"address": "::1", "port": 80}, "id": "x"}, "x", "http://[::1]:80"),
        ({"socket_address": {"address": "h", "port": 80}, "name": "n"}, "n", "http://h:80"),
        ({"socket_address": {"address": "h", "port": 80}}, "h:80", "http://h:80"),
        (
            {"socket_address": {"domains": ["d.example"], "address": "h", "port": 81}},
            "d.example:81",
            "http://d.example:81",
        ),
    ],
)
def test_ids_and_addresses(endpoint: dict[str, Any], identity: str, url: str) -> None:
    """`id`, `ID`, the name, or the address; a domain goes before the address."""
    found = load_config(small(cluster={"endpoints": [endpoint]}), env={}).clusters["c"].endpoints[0]
    assert (found.id, found.url) == (identity, url)


def test_an_empty_api_key_is_none() -> None:
    """As an unset variable with an empty default leaves it."""
    assert endpoint_of(llm_meta={"api_key": "${KEY:-}"}).api_key is None


def test_health_checks() -> None:
    """The first one's numbers; an open port is not enough for an engine."""
    checks = [
        {"protocol": "tcp", "timeout": "2s", "interval": "7s", "healthy_threshold": 2, "unhealthy_threshold": 4},
        {},
    ]
    config, problems = check(small(cluster={"health_checks": checks}))
    assert config is not None
    health = config.clusters["c"].health
    assert (health.active, health.timeout, health.interval) == (True, 2.0, 7.0)
    assert (health.healthy_threshold, health.unhealthy_threshold) == (2, 4)
    assert any("GET /health" in line for line in only(problems, "note"))
    config, problems = check(small(cluster={"health_checks": [{"protocol": "http"}]}))
    assert config is not None
    assert (config.clusters["c"].health.interval, config.clusters["c"].health.unhealthy_threshold) == (3.0, 5)
    assert not any("GET /health" in line for line in only(problems, "note"))


def test_the_longest_route_wins() -> None:
    """As in Pixiu, in whatever order the file has them."""
    raw = small()
    raw["static_resources"]["clusters"].append(
        {"name": "d", "endpoints": [{"id": "b", "socket_address": {"address": "h", "port": 1}}]}
    )
    manager_of(raw)["route_config"]["routes"] = [
        {"match": {"prefix": "/"}, "route": {"cluster": "c"}},
        {"match": {"path": "/v1/chat/completions", "methods": ["POST"]}, "route": {"cluster": "d"}},
        {"match": {"prefix": "/v1"}, "route": {"cluster": "c"}},
    ]
    config, problems = check(raw)
    assert config is not None
    assert [(route.prefix, route.cluster) for route in config.routes] == [
        ("/v1/chat/completions", "d"),
        ("/v1", "c"),
        ("/", "c"),
    ]
    assert len([line for line in only(problems, "note") if ".routes[1].match" in line]) == 2


def test_metrics_off() -> None:
    """No metrics wanted: no admin listener."""
    raw = small() | {"metric": {"enable": False}}
    assert not load_config(raw, env={}).admin.enabled
    assert load_config(small(), env={}).admin.port == 8889


def test_kvcache_is_off_unless_enabled_and_then_needs_its_endpoint() -> None:
    """Pixiu's default, and its rule."""
    entry: dict[str, Any] = {"name": "dgp.filter.ai.kvcache", "config": {}}
    config, _ = check(small(http_filters=[entry]))
    assert config is not None
    assert not kvcache(config).enabled
    entry["config"] = {"enabled": True, "vllm_endpoint": " "}
    _, problems = check(small(http_filters=[entry]))
    assert only(problems, "error") == [
        f"{FILTERS}[0].config.vllm_endpoint: must not be blank when kvcache is enabled",
        f"{FILTERS}[0].config.lmcache_endpoint: required when kvcache is enabled",
    ]


def test_kvcache_bounds_and_connections() -> None:
    """Unlimited is bounded here, and connections are."""
    settings = {
        "enabled": "true", "lmcache_endpoint": "http://127.0.0.1:9000", "hot_max_keys": 0, "max_idle_conns": 5,
        "max_conns_per_host": 7, "cache_strategy": {"dry_run": True},
    }  # fmt: skip
    config, problems = check(small(http_filters=[{"name": "dgp.filter.ai.kvcache", "config": settings}]))
    assert config is not None
    assert kvcache(config).cache_strategy.dry_run
    noted = {problem.path.rpartition(".")[2] for problem in problems if problem.severity == "note"}
    assert noted >= {"hot_max_keys", "max_idle_conns", "max_conns_per_host", "vllm_endpoint"}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("load_threshold", 1.5, "less than or equal to 1"),
        ("memory_threshold", -0.1, "greater than or equal to 0"),
        ("hot_content_threshold", 0, "greater than or equal to 1"),
        ("pin_lease", "soon", "expected a duration"),
        ("enable_pining", True, "did you mean 'enable_pinning'?"),
    ],
)
def test_bad_kvcache_values_never_pass_as_defaults(key: str, value: Any, message: str) -> None:
    """Each is an error at its path in the Pixiu file."""
    raw = sample()
    manager_of(raw)["http_filters"][0]["config"]["cache_strategy"][key] = value
    config, problems = check(raw)
    assert config is None
    errors = only(problems, "error")
    assert len(errors) == 1
    assert errors[0].startswith(f"{FILTERS}[0].config.cache_strategy.{key}: ")
    assert message in errors[0]


def test_bad_connection_numbers() -> None:
    """Negative sizes are refused here, too."""
    settings = {"max_conns_per_host": -1, "max_idle_conns": True}
    _, problems = check(small(http_filters=[{"name": "dgp.filter.ai.kvcache", "config": settings}]))
    assert sorted(line.rpartition("config.")[2] for line in only(problems, "error")) == [
        "max_conns_per_host: must be a number of connections, 0 for the default",
        "max_idle_conns: must be a number of connections, 0 for the default",
    ]


def strange() -> dict[str, Any]:
    raw = small(
        http_filters=[
            {"name": "dgp.filter.http.ratelimit", "config": {}},
            {"name": "dgp.filter.llm.tokeniser"},
            {"name": "dgp.filter.http.csrf"},
        ]
    )
    top = raw["static_resources"]
    top["adapters"] = [{"id": "nacos"}]
    top["pprofConf"] = {"enable": True}
    top["listeners"].append({"name": "second"})
    top["listeners"][0] |= {"protocol_type": "HTTPS", "colour": "red"}
    top["listeners"][0]["filter_chains"]["filters"].append({"name": "dgp.filter.grpcconnectionmanager"})
    top["clusters"][0]["lb_polcy"] = "Rand"
    manager_of(raw)["route_config"]["routes"][0]["match"]["headers"] = [{"name": "x"}]
    raw["dynamic_resources"] = {}
    raw["node"] = {"id": "n"}
    return raw


def test_missing_features_are_errors_or_warnings_with_lenient() -> None:
    """The same list both times, the nearest of ours beside it."""
    config, problems = check(strange())
    assert config is None
    errors = only(problems, "error")
    top = "static_resources"
    assert sorted(errors) == sorted(
        [
            "dynamic_resources: dynamic resources are not supported (list the clusters)",
            f"{top}.adapters: adapters (registries) are not supported (list the endpoints)",
            f"{top}.clusters[0].lb_polcy: unknown key (did you mean 'lb_policy'?)",
            f"{top}.listeners[0].colour: unknown key (known: address, config, filter_chains, name, protocol_type)",
            f"{top}.listeners[0].filter_chains.filters[1].name: not the one HTTP filter chain "
            "(known: dgp.filter.httpconnectionmanager)",
            f"{top}.listeners[0].protocol_type: only HTTP listeners are supported "
            "(the native `listen.tls` serves https)",
            f"{top}.listeners[1]: only one listener is supported",
            f"{top}.listeners[0].filter_chains.filters[0].config.route_config.routes[0].match.headers: "
            "routes cannot match headers",
            f"{FILTERS}[0].name: unknown filter 'dgp.filter.http.ratelimit' (nearest: rate_limit)",
            f"{FILTERS}[1].name: unknown filter 'dgp.filter.llm.tokeniser' (nearest: dgp.filter.llm.tokenizer)",
            f"{FILTERS}[2].name: unknown filter 'dgp.filter.http.csrf'",
        ]
    )
    config, relaxed = check(strange(), lenient=True)
    assert config is not None
    assert sorted(only(relaxed, "warning")) == sorted(errors)


def test_lenient_forgives_unknown_filter_settings_only() -> None:
    """A wrong value stays an error."""
    raw = sample()
    manager_of(raw)["http_filters"][0]["config"]["novelty"] = 1
    assert check(raw)[0] is None
    assert check(raw, lenient=True)[0] is not None
    manager_of(raw)["http_filters"][0]["config"]["hot_window"] = "soon"
    assert check(raw, lenient=True)[0] is None


def test_kvcache_after_the_proxy_is_moved() -> None:
    """There it could not act. The tokenizer's place does not matter."""
    raw = small()
    manager_of(raw)["http_filters"] += [
        {"name": "dgp.filter.llm.tokenizer", "config": {"log_to_console": True}},
        {"name": "dgp.filter.ai.kvcache"},
    ]
    config, problems = check(raw)
    assert config is not None
    assert [spec.name for spec in config.filters][-2:] == ["kvcache", "router"]
    assert len(only(problems, "warning")) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: static(raw).update(listeners=[]), "static_resources.listeners: a listener is required"),
        (lambda raw: listener(raw).update(filter_chains={}), "no dgp.filter.httpconnectionmanager"),
        (lambda raw: manager_of(raw).update(http_filters=[]), "no filter forwards requests"),
        (lambda raw: listener(raw).update(address={}), "socket_address.port: required"),
        (lambda raw: static(raw)["clusters"].append(first(raw)), "two clusters are named 'c'"),
        (lambda raw: first(raw)["endpoints"][0].update(socket_address={}), "socket_address.address: an address"),
        (
            lambda raw: first(raw).update(endpoints=[]),
            "static_resources.clusters[0].endpoints: the cluster has no endpoints",
        ),
        (lambda raw: first(raw)["endpoints"].append(ANOTHER_A), "two endpoints have the id 'a'"),
        (lambda raw: raw.update(static_resources=5), "static_resources: must be a mapping"),
    ],
)
def test_unusable_files(change: Any, message: str) -> None:
    """Each with Pixiu's own path."""
    raw = small()
    change(raw)
    config, problems = check(raw)
    assert config is None
    assert message in "\n".join(only(problems, "error"))


def test_ignored_settings_are_reported() -> None:
    """Ring sizes, discovery types, profiler, node: notes, once each."""
    raw = small(cluster={"type": "StrictDNS", "consistent": {"replica_num": 10}, "lb_policy": "MaglevHashing"})
    raw |= {"node": {"id": "n"}}
    raw["static_resources"]["pprofConf"] = {}
    config, problems = check(raw)
    assert config is not None
    paths = {problem.path for problem in problems if problem.severity == "note"}
    cluster = "static_resources.clusters[0]"
    assert paths >= {
        "node",
        "static_resources.pprofConf",
        f"{cluster}.type",
        f"{cluster}.consistent",
        f"{cluster}.lb_policy",
    }


def test_a_native_file_with_a_listeners_key_is_not_mistaken() -> None:
    """Only filter chains make it Pixiu's."""
    _, problems = check({"listeners": [{"port": 1}], "endpoints": ["http://h:1"]})
    assert [str(problem) for problem in problems] == ["listeners: unknown key (did you mean 'listen'?)"]


#: The shape of the samples http/simple and shutdown/http.
PLAIN = """
static_resources:
  listeners:
    - name: net/http
      protocol_type: HTTP
      address: {socket_address: {address: 0.0.0.0, port: 8888}}
      filter_chains:
        filters:
          - name: dgp.filter.httpconnectionmanager
            config:
              route_config:
                routes:
                  - match: {prefix: /user}
                    route: {cluster: user, cluster_not_found_response_code: 505}
              http_filters:
                - name: dgp.filter.http.httpproxy
                  config: {maxIdleConns: 100, maxIdleConnsPerHost: 100, MaxConnsPerHost: 50}
                - name: dgp.filter.http.cors
                  config:
                    allow_origin: [api.dubbo.com, "https://b.example"]
                    allow_methods: "GET, PUT"
                    allow_headers: ""
                    expose_headers: ""
                    max_age: ""
                    allow_credentials: false
                - name: dgp.filter.http.accesslog
                  config: {outPutPath: /app/pixiu/access.log}
  clusters:
    - name: user
      lb_policy: lb
      endpoints:
        - {id: 1, socket_address: {address: 127.0.0.1, port: 1314}}
"""


def settings_of(config: Config, name: str) -> Any:
    return next(spec.settings for spec in config.filters if spec.name == name)


def test_a_plain_http_proxy() -> None:
    """Its routes say which paths there are, and what it proxies is no engine; CORS and the access log have ours."""
    config, problems = check_config(PLAIN, env={})
    assert config is not None
    assert only(problems, "error") == []
    assert [spec.name for spec in config.filters][-2:] == ["cors", "router"]
    router, cors = settings_of(config, "router"), settings_of(config, "cors")
    assert (router.paths, router.health_path, router.trust_clients) == (("all",), "", True)
    assert cors.allow_origins == ("https://api.dubbo.com", "http://api.dubbo.com", "https://b.example")
    assert config.pool.max_connections == 50
    assert config.routes[0].prefix == "/user"


def test_a_cors_filter_without_origins_is_left_out() -> None:
    """As in Pixiu, where it does nothing then."""
    config, problems = check_config(PLAIN.replace('[api.dubbo.com, "https://b.example"]', "[]"), env={})
    assert config is not None
    assert "cors" not in [spec.name for spec in config.filters]
    assert any("allows no origin" in line for line in only(problems, "note"))


def test_the_llm_proxy_opens_inference_paths_and_what_its_routes_name() -> None:
    """As in a native file."""
    config = load_config(sample(), env={})
    assert settings_of(config, "router").paths == ()


def test_clusters_of_a_registry_are_missed_in_this_dialect() -> None:
    """llm/nacos: the advice is about a Pixiu file, not about a native one."""
    raw = small()
    del raw["static_resources"]["clusters"]
    raw["static_resources"]["adapters"] = [{"id": "nacos"}]
    config, problems = check(raw)
    assert config is None
    assert "static_resources.adapters: adapters (registries) are not supported (list the endpoints)" in only(
        problems, "error"
    )
    missing = [line for line in only(problems, "error") if line.startswith("static_resources.clusters: ")]
    assert len(missing) == 1
    assert "socket_address" in missing[0]
    assert not any("http://host:port" in line for line in only(problems, "error"))
