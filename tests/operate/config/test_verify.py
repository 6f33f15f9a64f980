"""Checks across a configuration that is fine piece by piece."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvproxy.base.settings.paths import dotted_path
from kvproxy.operate.config.load import check_config
from kvproxy.operate.config.schema import Config
from kvproxy.operate.config.verify import find_faults
from tests.support.certificates import Certificate, encrypt, make_certificate

E = "endpoints: ['http://127.0.0.1:8000']\n"
ROUTER = "filters: {{router: {{{}}}}}\n"


def problems_of(text: str) -> list[str]:
    _, problems = check_config(text, env={})
    return [f"{problem.severity}: {problem}" for problem in problems]


def test_all_bodies_together_hold_at_least_one() -> None:
    """As much as the largest body is enough, and less is not."""
    assert problems_of(E + "limits: {body: 2MiB, bodies: 2MiB}\n") == []
    (problem,) = problems_of(E + "limits: {body: 2MiB, bodies: 1MiB}\n")
    assert problem.startswith("error: limits.bodies: less than limits.body")


def test_a_good_configuration_has_no_problem() -> None:
    """Everything on at once, in the right order."""
    text = (
        "clusters:\n"
        "  a: {endpoints: {x: {url: 'http://127.0.0.1:1', instance_id: i1}, y: {url: 'http://127.0.0.1:2'}}}\n"
        "  b: {discovery: {dns: {host: engines, port: 8000}}}\n"
        "routes:\n  - {model: m*, cluster: a}\n  - {prefix: /v1/embeddings, cluster: b}\n"
        "  - {model: big, cluster: b}\n  - {cluster: a}\n"
        "filters:\n  - request_id\n  - inference_request\n"
        "  - kvcache:\n      lmcache_endpoint: 'http://127.0.0.1:9000'\n"
        "      cache_strategy: {enable_pinning: true, pin_instance_id: i1}\n"
        "  - router\n"
    )
    assert problems_of(text) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        # listeners
        ("listen: ':8888'\nadmin: '8888'\n", "error: admin: the admin listener has the public listener's address"),
        ("listen: ':8888'\nadmin: {port: 8888}\n", "error: admin.port: the admin listener has"),
        ("admin: {port: 8888}\n", "error: admin.port: the admin listener has"),
        ("admin: {host: 0.0.0.0}\n", "error: admin.token: required when"),
        ("admin: {host: engines.local}\n", "error: admin.token: required when"),
        ("admin: {host: ''}\n", "error: admin.host: must not be empty"),
        ("listen: {host: ''}\n", "error: listen.host: must not be empty"),
        ("listen: {tls: {certificate: /nowhere/c, private_key: /nowhere}}\n",
         "error: listen.tls.certificate: no such file: '/nowhere/c'"),
        # the router's public paths
        (ROUTER.format("paths: all"), "warning: filters.router.paths: every path of every"),
        (ROUTER.format("paths: [/]"), "warning: filters.router.paths: every path of every"),
        (ROUTER.format("paths: [tts]"), "error: filters.router.paths[0]: must start with /"),
        ("filters: {router: {paths: /tts}}\n",
         "error: filters.router.paths: must be a list of paths, or `all`"),
        ("filters: {router: {health_path: up}}\n",
         "error: filters.router.health_path: must start with /"),
        # header names
        ("queue: {priority_header: 'x priority'}\n", "error: queue.priority_header: no HTTP header has such a name"),
        ("filters: {request_id: {header: 'x:id'}}\n",
         "error: filters.request_id.header: no HTTP header has such a name"),
        ("filters: {request_id: {header: ''}}\n", "error: filters.request_id.header: must not be empty"),
        # intervals
        ("timeouts: {idle: 0}\n", "error: timeouts.idle: must be longer than 0"),
        ("health: {timeout: 0}\n", "error: health.timeout: must be longer than 0"),
        ("health: {path: health}\n", "error: health.path: must start with /"),
        # routes
        ("routes: [{prefix: v1}]\n", "error: routes[0].prefix: must start with /"),
        ("routes: [{model: 'a*b'}]\n", "error: routes[0].model: a * may only stand at the end"),
        ("routes: [{model: 'a*', upstream_model: b}]\n", "error: routes[0].upstream_model: needs a `model`"),
        ("routes: [{prefix: /v1}, {prefix: /v1/chat}]\n", "error: routes[1]: never reached: routes[0]"),
        ("routes: [{model: 'm*'}, {model: m-7b}]\n", "error: routes[1]: never reached"),
        ("routes: [{model: '*'}, {model: m}]\n", "error: routes[1]: never reached"),
        ("routes: [{model: m}, {model: m}]\n", "error: routes[1]: never reached"),
        # removed settings
        ("profile: batch\n", "warning: profile: ignored: no longer a setting (leave it out: profiles"),
        ("tier_weights: {host: 1}\n", "warning: tier_weights: ignored: no longer a setting (leave it out: what"),
        ("parameters: {llm_d: {kv_weight: 3}}\n", "warning: parameters: ignored: no longer a setting (leave it"),
        # discovery
        ("discovery: {file: {path: /nowhere}}\n", "warning: discovery.file.path: the file does not exist yet"),
        # engine priority
        (
            "policy: round_robin\nengine_priority: auto\n",
            "error: engine_priority: round_robin does not estimate prefill times",
        ),
        (
            "engine_priority: on\nfilters: [router]\n",
            "error: engine_priority: needs the filter inference_request",
        ),
        (
            "queue: {enabled: false, priority_header: x-priority}\n",
            "warning: queue.priority_header: nothing reads it",
        ),
        # the router queue
        ("policy: round_robin\nqueue: {}\n", "error: queue: round_robin does not estimate prefill times"),
        # the chain
        ("filters: [inference_request]\n", "error: filters: no filter forwards requests (the last must be `router`)"),
        ("filters: [inference_request, router, request_id]\n", "error: filters[2]: never reached: it comes after"),
        ("filters: [inference_request, router, router]\n", "error: filters[2]: router is already in the chain"),
        ("filters: [kvcache, inference_request, router]\n", "error: filters[0]: kvcache needs the request"),
        ("filters: [kvcache, router]\n", "error: filters[0]: needs inference_request before it"),
        ("filters: [router]\nroutes: [{model: m}]\n", "error: routes[0].model: needs the filter inference_request"),
        ("policy: dynamo\nfilters: [inference_request, router]\n",
         "error: filters: dynamo weighs cached prefixes, and no filter `kvcache` finds them (add `- kvcache` before"),
        ("policy: random\nclient_policies: [lmetric]\nfilters: [router]\n",
         "error: filters: lmetric weighs cached prefixes, and no filter `kvcache` finds them "
         "(add `- inference_request` and `- kvcache` before"),
        ("policy: random\nclient_policies: [llm_d]\nfilters: [inference_request, router]\n", "error: filters: llm_d"),
    ],
)  # fmt: skip
def test_contradictory_settings(text: str, problem: str) -> None:
    """One problem each, at its place."""
    shown = problems_of(E + text)
    assert len([line for line in shown if line.startswith(problem)]) == 1, shown


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ("lmcache_endpoint: 127.0.0.1:9000", "error: filters[1].kvcache.lmcache_endpoint: must start with http://"),
        ("vllm_endpoint: 'ftp://h'", "error: filters[1].kvcache.vllm_endpoint: the scheme must be"),
        ("cache_strategy: {enable_eviction: true}", "error: filters[1].kvcache.cache_strategy.enable_eviction: needs"),
        ("cache_strategy: {compress_instance_id: nobody}",
         "warning: filters[1].kvcache.cache_strategy.compress_instance_id: no endpoint has the instance id 'nobody'"),
        ("lookup_routing_timeout: 3s", "warning: filters[1].kvcache.lookup_routing_timeout: 3 s is longer"),
    ],
)  # fmt: skip
def test_kvcache_settings(settings: str, problem: str) -> None:
    """Settings that contradict each other or the endpoints; none of them counts while the filter is off."""
    chain = "filters: [inference_request, kvcache: {{{}}}, router]\n"
    shown = problems_of(E + chain.format(settings))
    assert [line for line in shown if line.startswith(problem)], shown
    (off,) = problems_of(E + chain.format(f"enabled: false, {settings}"))
    assert off.startswith("warning: filters[1].kvcache.enabled: kvcache is off, and kv_aware weighs"), off
    assert problems_of(E + "policy: random\n" + chain.format(f"enabled: false, {settings}")) == []


@pytest.mark.parametrize("policy", ["random", "round_robin", "least_request", "power_of_two", "session"])
def test_a_policy_that_weighs_no_prefixes_needs_no_kvcache(policy: str) -> None:
    """A chain may be as short as it likes."""
    assert problems_of(E + f"policy: {policy}\nfilters: [inference_request, router]\n") == []


def test_a_prefix_is_named_as_the_audit_log_names_it() -> None:
    """Not by its text."""
    chain = E + "filters: [inference_request, kvcache: {{cache_strategy: {{keep_prefixes: ['{}']}}}}, router]\n"
    assert problems_of(chain.format("00c0ffee00c0ffee")) == []
    (problem,) = problems_of(chain.format("You are a helpful assistant"))
    assert "keep_prefixes[0]: must be the 16 hex digits" in problem


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("127.0.0.1:8000", "must start with http:// or https:// (did you mean http://127.0.0.1:8000?)"),
        ("[::1]:80", "must start with http:// or https:// (did you mean http://[::1]:80?)"),
        ("me:topsecret@host", "must start with http:// or https://"),
        ("ws://h:1", "the scheme must be http or https"),
        ("http://", "names no host"),
        ("http://:8000", "names no host"),
        ("http://h:0", "the port must be between"),
        ("http://h:", "the port must be between"),
        ("http://h:99999", "not a valid URL"),
        ("http://h:x", "not a valid URL"),
        ("http://[::1", "not a valid URL"),
        ("http://h/?key=topsecret", "must not contain a query"),
        ("http://h/#x", "must not contain a query"),
        ("http://u:topsecret@h:1", "must not contain credentials"),
        ("http://topsecret@h:1", "must not contain credentials"),
        ("http://h h", "a URL holds no spaces"),
        ("http://hé", "a URL holds no spaces"),
    ],
)
def test_endpoint_urls(url: str, fault: str) -> None:
    """A text that is no engine's URL is refused, and not quoted: it may hold a credential."""
    shown = problems_of(f"endpoints: {{a: '{url}'}}")
    assert len(shown) == 1
    assert shown[0].startswith(f"error: endpoints.a.url: {fault}")
    assert "topsecret" not in shown[0]


def test_endpoints_that_collide() -> None:
    """One id twice is an error; one engine twice, one instance twice and unverified certificates are warnings."""
    text = (
        "endpoints:\n"
        "  - {id: a, url: 'http://Host:80/base/'}\n"
        "  - {id: a, url: 'http://h:2'}\n"
        "  - {id: c, url: 'http://host/base', instance_id: a}\n"
        "  - {id: d, url: 'https://h', insecure: true, ca_file: /nowhere}\n"
        "  - {id: e, url: 'http://h:3', api_key: k, retry: {backoff: 9s}}\n"
        "  - {id: f, url: 'http://127.0.0.1:3', api_key: k}\n"
    )
    assert problems_of(text) == [
        "error: endpoints[1].id: two endpoints have the id 'a' (give each an id of its own)",
        "warning: endpoints[2].url: the same engine as 'a': its load is counted separately",
        "warning: endpoints[2].instance_id: the instance id 'a' also belongs to 'a' "
        "(right only if both share one LMCache)",
        "warning: endpoints[3].insecure: the endpoint's certificate is not verified",
        "error: endpoints[3].ca_file: no such file: '/nowhere'",
        "warning: endpoints[4].api_key: sent in clear text over http",
        "error: endpoints[4].retry.max_backoff: shorter than backoff",
    ]


def test_ranks_that_cannot_be_told_from_endpoints() -> None:
    """Ranks are called after their engine; one that is there twice or is no number is a mistake. A cluster's ranks are
    those of each endpoint that names none."""
    text = (
        "data_parallel: {ranks: [0, 1]}\n"
        "endpoints:\n"
        "  - {id: a, url: 'http://h:1'}\n"
        "  - {id: a@1, url: 'http://h:2', data_parallel: {steer: false}}\n"
    )
    assert problems_of(text) == [
        "error: endpoints[0].id: rank 1 would be called as the endpoint 'a@1' (give that endpoint another id)"
    ]
    wrong = "endpoints:\n  - {id: a, url: 'http://h:1', data_parallel: {ranks: %s}}\n"
    (twice,) = problems_of(wrong % "[1, 0, 1]")
    assert twice.startswith("error: endpoints[0].data_parallel.ranks: a rank stands there twice")
    (negative,) = problems_of(wrong % "[-1]")
    assert "endpoints[0].data_parallel.ranks[0]" in negative
    assert problems_of(wrong % "[4, 5, 6, 7]") == []


def test_an_engine_is_known_again_by_the_port_its_scheme_implies() -> None:
    """443 for https, 80 for http: two schemes on one host are two engines."""
    text = (
        "endpoints:\n"
        "  - {id: a, url: 'https://h:443'}\n"
        "  - {id: b, url: 'http://h:443'}\n"
        "  - {id: c, url: 'https://h'}\n"
        "  - {id: d, url: 'https://h:80'}\n"
    )
    assert problems_of(text) == ["warning: endpoints[2].url: the same engine as 'a': its load is counted separately"]


def test_several_clusters_need_routes_or_models() -> None:
    """Without routes a cluster is found by the models its endpoints declare."""
    clusters = "clusters: {{a: {{endpoints: [{{url: 'http://h:1', models: [m]}}]}}, b: {{endpoints: [{{url: 'http://h:2'{}}}]}}}}\n"
    assert problems_of(clusters.format("")) == [
        "error: clusters.b: no route leads here and no endpoint declares its models"
    ]
    assert problems_of(clusters.format(", models: [n]")) == []
    assert problems_of(clusters.format("") + "routes: [{cluster: a}, {cluster: b}]") == []
    assert problems_of(clusters.format("") + "routes: [{cluster: a}]") == [
        "warning: clusters.b: no route leads to this cluster"
    ]


def test_a_prefix_ends_at_a_segment() -> None:
    """`/v1` does not cover `/v10`, and a longer prefix before a shorter one is fine."""
    assert problems_of(E + "routes: [{prefix: /v1}, {prefix: /v10}, {prefix: /}]\n") == []
    assert problems_of(E + "routes: [{prefix: /v1/}, {prefix: /v1}]\n") == [
        "error: routes[1]: never reached: routes[0] already matches all of it"
    ]


def test_files_that_exist(tmp_path: Path) -> None:
    """Certificates and key files that are there are no problem."""
    file = tmp_path / "pem"
    file.write_text("x")
    files = make_certificate(tmp_path, "127.0.0.1")
    pair = f"certificate: {files.certificate}, private_key: {files.private_key}"
    text = f"listen: {{tls: {{{pair}}}}}\ndiscovery: {{file: {{path: {file}}}}}\n"
    assert problems_of(E + text) == []


def test_without_an_admin_listener_nothing_is_asked_of_it() -> None:
    """No token, no free port."""
    assert problems_of(E + "admin: {enabled: false, host: 0.0.0.0, port: 8888}") == []


def test_a_configuration_made_in_code() -> None:
    """`find_faults` works on any Config, with the model's own paths."""
    assert [f"{dotted_path(fault.path)}: {fault.message} ({fault.hint})" for fault in find_faults(Config())] == [
        "clusters: no cluster is configured (the shortest way is `endpoints: [http://host:port]`)",
        "filters: no filter forwards requests (the last must be `router`)",
    ]


LOOPS = "this is the proxy's own address"


@pytest.mark.parametrize(
    ("listen", "url", "loops"),
    [
        ("127.0.0.1:18870", "http://127.0.0.1:18870", "listen"),
        ("127.0.0.1:18870", "http://127.0.0.1:18870/base", "listen"),
        ("127.0.0.1:18870", "https://localhost:18870", "listen"),
        ("127.0.0.1:18870", "http://127.0.0.1:8889", "admin"),
        (":18870", "http://127.0.0.1:18870", "listen"),
        (":18870", "http://localhost:18870", "listen"),
        (":18870", "http://0.0.0.0:18870", "listen"),
        (":18870", f"http://{socket.gethostname()}:18870", "listen"),
        ("[::]:18870", "http://[::1]:18870", "listen"),
        ("[::1]:18870", "http://[0:0:0:0:0:0:0:1]:18870", "listen"),
        ("proxy.example:18870", "http://PROXY.example:18870", "listen"),
        ("127.0.0.1:18870", "http://127.0.0.1:18871", ""),
        ("127.0.0.1:18870", "http://127.0.0.2:18870", ""),
        (":18870", "http://192.0.2.1:18870", ""),
        (":18870", "http://engines.example:18870", ""),
    ],
)
def test_an_endpoint_is_not_the_proxy_itself(listen: str, url: str, loops: str) -> None:
    """Its requests would come back to it without end; every address of this machine counts where it listens on all."""
    found = [line for line in problems_of(f"listen: '{listen}'\nendpoints: ['{url}']\n") if LOOPS in line]
    assert [f"(`{loops}`)" in line for line in found] == ([True] if loops else [])


@pytest.fixture
def pairs(tmp_path: Path) -> tuple[Certificate, Certificate]:
    """Two pairs of files."""
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    one, two = (make_certificate(folder, "127.0.0.1") for folder in folders)
    return one, two


def test_a_pair_that_cannot_be_served_is_refused(pairs: tuple[Certificate, Certificate]) -> None:
    """As OpenSSL loads it, with the file and its setting; a pass phrase is not asked for."""
    one, two = pairs
    at = "error: listen.tls"

    def check(certificate: Path, private_key: Path, more: str = "") -> list[str]:
        pair = f"{{certificate: {certificate}, private_key: {private_key}{more}}}"
        return problems_of(f"{E}listen: {{host: 127.0.0.1, tls: {pair}}}\n")

    assert check(one.certificate, one.private_key) == []
    (mismatch,) = check(one.certificate, two.private_key)
    assert mismatch.startswith(f"{at}.private_key: the private key '{two.private_key}' does not belong to")
    (swapped,) = check(one.private_key, one.certificate)
    assert swapped.startswith(f"{at}.certificate: no PEM certificate in")
    assert "swapped" in swapped
    (no_key,) = check(one.certificate, one.certificate)
    assert no_key.startswith(f"{at}.private_key: no PEM private key in")
    two.private_key.write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    (damaged,) = check(one.certificate, two.private_key)
    assert damaged.startswith(f"{at}.private_key: OpenSSL refuses the private key '{two.private_key}'")
    two.certificate.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    (damaged,) = check(two.certificate, one.private_key)
    assert damaged.startswith(f"{at}.certificate: OpenSSL cannot read the certificate '{two.certificate}'")
    (authorities,) = check(one.certificate, one.private_key, f", client_ca: {one.private_key}")
    assert authorities.startswith(f"{at}.client_ca: no usable PEM certificates in '{one.private_key}'")
    encrypt(one.private_key, b"sesame")
    (encrypted,) = check(one.certificate, one.private_key)
    assert encrypted.startswith(f"{at}.private_key: the private key '{one.private_key}' is encrypted by a pass phrase")
    assert "openssl pkey" in encrypted


def test_certificates_for_engines_are_loaded(pairs: tuple[Certificate, Certificate]) -> None:
    """Those of an endpoint, and of the sources that find endpoints."""
    one, two = pairs
    wrong = f"cert_file: {one.certificate}, key_file: {two.private_key}"
    good = f"ca_file: {one.certificate}, cert_file: {one.certificate}, key_file: {one.private_key}"
    assert problems_of(f"endpoints: [{{id: a, url: 'https://h', {good}}}]\n") == []
    (fault,) = problems_of(f"endpoints: [{{id: a, url: 'https://h', {wrong}}}]\n")
    assert fault.startswith("error: endpoints[0].key_file: the private key")
    (alone,) = problems_of(f"endpoints: [{{id: a, url: 'https://h', key_file: {one.private_key}}}]\n")
    assert alone == "error: endpoints[0].key_file: without a certificate it is not used (set `cert_file`)"
    (missing,) = problems_of("endpoints: [{id: a, url: 'https://h', cert_file: /nowhere}]\n")
    assert missing == "error: endpoints[0].cert_file: no such file: '/nowhere'"
    (found,) = problems_of(f"discovery: {{dns: {{host: h, port: 1, scheme: https, {wrong}}}}}\n")
    assert found.startswith("error: discovery.dns.key_file: the private key")
    (found,) = problems_of(f"discovery: {{kubernetes: {{service: h, scheme: https, {wrong}}}}}\n")
    assert found.startswith("error: discovery.kubernetes.key_file: the private key")
