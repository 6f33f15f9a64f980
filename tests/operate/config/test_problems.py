"""One run names every planted error, whatever stage it belongs to, and shows no secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvproxy.base.errors import ConfigError
from kvproxy.base.settings.paths import dotted_path
from kvproxy.cluster.settings import ClusterSettings
from kvproxy.operate.config.decode import decode_model
from kvproxy.operate.config.load import check_config, load_config

PLANTED = """
listen: 127.0.0.1:99999
admin: 0.0.0.0:8889
polcy: random
health: {interval: 0, unhealthy_threshold: many}
endpoints:
  a: http://user:topsecret@h:1
  b: {url: http://h:2, wieght: 3, weight: -1}
  c: {weight: 1}
  d: {url: "${NOT_SET}"}
  e: http://h:2
timeouts: {connect: 5 fortnights, idle: "${SECRET}"}
limits: {body: 8 furlongs}
log: {level: inof}
filters:
  - acces_log
  - kvcache:
      token_cache: {ttl: x}
      cache_strategy: {enable_pinning: true, pin_instance_id: zz, load_threshold: 2}
  - inference_request
  - router
  - auth: {keys: [{name: a, key: ""}], fil: topsecret}
  - {two: 1, keys: 2}
routes:
  - {cluster: nowhere}
  - {cluster: default, model: x}
  - {cluster: default, upstream_model: y}
shutdown: 5
log: {level: inof}
"""

EXPECTED = [
    "line 29, column 1: duplicate key 'log'",
    "endpoints.d.url: environment variable NOT_SET is not set",
    "listen: expected host:port, :port, [ipv6]:port or a port number up to 65535",
    "filters[5]: must be a filter's name, or one `name: {settings}`",
    "health.unhealthy_threshold: must be a whole number, not 'many'",
    "endpoints.b.weight: must be greater than 0, not -1",
    "endpoints.b.wieght: unknown key (did you mean 'weight'?)",
    "endpoints.c.url: required",
    "timeouts.connect: expected a duration like 50ms, 2s or 5m, not '5 fortnights'",
    "timeouts.idle: expected a duration like 50ms, 2s or 5m, not (a value from the environment)",
    "limits.body: expected a size like 64KiB or 8MiB, not '8 furlongs'",
    "log.level: must be 'debug', 'info', 'warning' or 'error', not 'inof' (did you mean 'info'?)",
    "shutdown: must be a mapping of settings",
    "polcy: unknown key (did you mean 'policy'?)",
    "filters[0]: unknown filter 'acces_log' (did you mean 'access_log'?)",
    "filters[1].kvcache.token_cache.ttl: expected a duration like 50ms, 2s or 5m, not 'x'",
    "filters[1].kvcache.cache_strategy.load_threshold: must be less than or equal to 1, not 2",
    "filters[4].auth.keys[0].key: the secret is empty; leave the key out to have none",
    "filters[4].auth.fil: unknown key (did you mean 'file'?)",
    "admin.token: required when the admin listener is not on loopback",
    "endpoints.a.url: must not contain credentials, they would end up in logs: use `api_key`",
    "endpoints.e.url: the same engine as 'b': its load is counted separately",
    "routes[0].cluster: there is no cluster 'nowhere' (clusters: default)",
    "routes[1]: never reached: routes[0] already matches all of it",
    "routes[2].upstream_model: needs a `model` without *: it is the alias for that one name",
    "health.interval: must be longer than 0",
    "filters[4].auth: never reached: it comes after router",
    "filters[1].kvcache: kvcache needs the request that inference_request parses "
    "(put inference_request before kvcache)",
    "filters[1].kvcache: kvcache works for requests that auth then refuses (put auth before kvcache)",
    "filters[1].kvcache.cache_strategy.enable_pinning: needs lmcache_endpoint",
    "filters[1].kvcache.cache_strategy.pin_instance_id: no endpoint has the instance id 'zz' (instances: a, b, d, e)",
]


def test_every_planted_error_is_named_at_once(tmp_path: Path) -> None:
    """Syntax, duplicates, environment, types, ranges, unknown keys and cross references, each with the written path."""
    path = tmp_path / "bad.yaml"
    path.write_text(PLANTED)
    env = {"SECRET": "topsecret"}
    config, problems = check_config(Path(path), env=env)
    assert config is None
    assert sorted(str(problem) for problem in problems) == sorted(EXPECTED)
    with pytest.raises(ConfigError) as caught:
        load_config(Path(path), env=env)
    assert [problem.severity for problem in caught.value.problems] == ["error"] * len(caught.value.problems)
    assert len(caught.value.problems) == sum(problem.severity == "error" for problem in problems)


def test_a_long_value_is_cut_short() -> None:
    """A page pasted at the wrong place does not push the other problems off the screen."""
    config, (problem, *rest) = check_config({"endpoints": {"a": "http://h:1"}, "log": {"level": "x" * 5000}})
    assert config is None
    assert not rest
    assert str(problem).startswith("log.level: ")
    assert "x" * 30 in str(problem)
    assert "x" * 50 not in str(problem)


def test_no_message_contains_a_secret() -> None:
    """Neither credentials in a url, nor values from the environment, nor misplaced keys."""
    _, problems = check_config(PLANTED, env={"SECRET": "topsecret"})
    assert "topsecret" not in "".join(str(problem) for problem in problems)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("endpoints: [{id: a}, {id: b, url: 'http://h:1'}, {id: b, url: 'http://h:2'}]",
         ["endpoints[0].url: required", "endpoints[2].id: two endpoints have the id 'b' (give each an id of its own)"]),
        ("clusters: {x: 5, y: {endpoints: 7}}\nroutes: [{cluster: x}, 9, {cluster: z}]",
         ["clusters.x: must be a mapping of settings", "clusters.y.endpoints: must be a list",
          "routes[1]: must be a mapping of settings", "routes[2].cluster: there is no cluster 'z' (clusters: x, y)"]),
        ("clusters: []\nendpoints: [{id: 5, url: x}]",
         ["clusters: must be a mapping of names to clusters", "endpoints[0].id: must be text (put it in quotes)"]),
        ("filters: router\nendpoints: ['http://h:1']", [
            "filters: must be a mapping or a list of filters "
            "(`name: {settings}` of filters to add to the default chain, or the whole chain as a list)"
        ]),
        ("filters: [ruter]\nendpoints: ['http://h:1']",
         ["filters[0]: unknown filter 'ruter' (did you mean 'router'?)"]),
        ("policy: random\nclusters: {default: {policy: session}}\nendpoints: ['http://h:1']",
         ["policy: given here and in clusters.default"]),
        ("endpoints: {a: {id: b, url: 'http://h:1'}}",
         ["endpoints.a.id: the endpoint's id is already given by its key"]),
        ("endpoints: [{url: 'http://h:1', labels: {a: 1}}]",
         ["endpoints[0].labels.a: must be text (put it in quotes)"]),
        ("endpoints: ['http://h:1']\nzzzz: 1", ["zzzz: unknown key (known: "]),
        ("endpoints: [{url: 'http://h:1', retry: {atempts: 1}}]",
         ["endpoints[0].retry.atempts: unknown key (did you mean 'attempts'?)"]),
        ("endpoints: ['http://h:1']\nfilters: [cors: 5, router]", ["filters[0].cors: must be a mapping of settings"]),
        ("endpoints: ['http://h:1']\nadmin:", ["admin: has no value (`host:port`, or a mapping of settings)"]),
        ("endpoints: ['http://h:1']\npolicy: roundrobin",
         ["policy: must be 'random', 'round_robin'"]),
    ],
)  # fmt: skip
def test_problems_and_nothing_that_only_follows_from_them(text: str, expected: list[str]) -> None:
    """Wrong parts do not hide others, and do not cause messages about parts that are right."""
    _, problems = check_config(text, env={})
    shown = [str(problem) for problem in problems]
    assert len(shown) == len(expected)
    assert all(line.startswith(start) for line, start in zip(shown, expected, strict=True)), shown


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("limits: {body_timeout: 0}", "limits.body_timeout: must be greater than 0, not 0"),
        ("limits: {stall_timeout: 2d}", "limits.stall_timeout: must be less than or equal to 86400, not '2d'"),
        ("limits: {head: 1KiB}", "limits.head: must be greater than or equal to 4096, not '1KiB'"),
        (
            "limits: {body_timeout: '${ZERO}'}",
            "limits.body_timeout: must be greater than 0, not (a value from the environment)",
        ),
    ],
)
def test_a_value_out_of_bounds_is_shown_as_it_was_written(written: str, message: str) -> None:
    """Not as the number its unit makes of it; one from the environment is not shown."""
    _, problems = check_config(f"endpoints: [http://a:1]\n{written}", env={"ZERO": "0"})
    assert [str(problem) for problem in problems] == [message]


def test_wrong_parts_of_a_list_take_no_good_one_along() -> None:
    """They are cut out from the end on, so that no position moves before its turn."""
    endpoints = [{"id": "a"}, {"id": "b", "url": "http://h:1"}, {"id": "c"}]
    decoded = decode_model(ClusterSettings, {"endpoints": endpoints}, dotted_path)
    assert [problem.path for problem in decoded.problems] == ["endpoints[0].url", "endpoints[2].url"]
    assert decoded.value is not None
    assert [endpoint.id for endpoint in decoded.value.endpoints] == ["b"]


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("endpoints: [http://127.0.0.1:1]\nworkers: four\n", "workers", "must be a whole number or 'auto', not 'four'"),
        ("endpoints:\n\ta: http://127.0.0.1:1\n", "", "indent with spaces, not with tabs"),
        ("model_list: [{model_name: m}]\nlitellm_settings: {}\n", "model_list", "configuration of LiteLLM's proxy"),
    ],
)
def test_one_problem_for_one_mistake(text: str, path: str, words: str) -> None:
    """In our words, not in those of a library, and without what only follows from it."""
    config, [problem] = check_config(text)
    assert (config, problem.path) == (None, path)
    assert words in str(problem)
