"""Every problem says where it stands in the file, as an editor can jump to it; what only follows is not said. What a
reload changed is told in names and never in values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from kvproxy.base.errors import Problem
from kvproxy.base.settings.model import Model
from kvproxy.operate.config.changes import summarise_changes
from kvproxy.operate.config.decode import is_inside, keys_of, spelling_hint
from kvproxy.operate.config.load import check_config, load_config
from kvproxy.operate.config.schema import Config
from tests.operate.config.test_problems import PLANTED

SLIPS = """\
listen:
policy: least_conn
polcy: random
endpoints:
  a:
  b:
    url: http://10.0.0.2:8000/v1
    wieght: 3
  c: "${URL}"
health: {active: yes, unhealthy_threshold: many}
routes:
  - prefix: chat
    clutser: default
filters:
  - inference_request
  - kvcache:
      cache_strategy: {enable_pinning: true}
      lookup_routing_timeout: 50
  - router
limits: {body: 8MiB,
  connections: 0}
"""


def places(text: str, **env: str) -> list[tuple[int, int, str]]:
    _, problems = check_config(text, env=env)
    return [(one.line, one.column, str(one)) for one in problems]


def test_each_problem_has_its_line_and_column_in_the_order_of_the_file() -> None:
    """Keys point to themselves, what is missing to the nearest thing written; unset variables keep their place."""
    assert [(line, column) for line, column, _ in places(SLIPS)] == [
        (1, 1), (2, 1), (3, 1), (5, 3), (7, 5), (8, 5), (9, 3), (10, 10), (10, 23), (12, 5), (13, 5), (17, 24), (18, 7),
        (21, 3),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("endpoints: {a: 'http://h:1'}\npolicy: least_conn", "did you mean 'least_request'?"),
        ("endpoints: {a: 'http://h:1'}\npolicy: leastconn", "did you mean 'least_request'?"),
        ("endpoints: {a: 'http://h:1'}\npolicy: cache_aware", "did you mean 'prefix_affinity'?"),
        ("endpoints: {a: 'http://h:1'}\npolicy: roundrobin", "did you mean 'round_robin'?"),
        ("endpoints: {a: 'http://h:1'}\npolicy: kvaware", "not 'kvaware' (did you mean 'kv_aware'?)"),
        ("endpoints: {a: }", "endpoints.a.url: has no value"),
        ("endpoints: {a: 'http://h:1'}\nlisten:", "listen: has no value (`host:port`, or a mapping of settings)"),
        ("endpoints: {a: 'http://h:1'}\nhealth: {active: yes}",
         "health.active: must be true or false, not 'yes'"),
        ("endpoints: {a: 'http://h:1'}\nhealth: {active: 1}", "health.active: must be true or false, not 1"),
        ("endpoints: {a: 'http://h:1'}\nhealth: {active: maybe}", "must be true or false, not 'maybe'"),
        ("endpoints: {a: 'http://h:1'}\nretry: {attempts: 2.5}", "must be a whole number, not 2.5"),
        ("endpoints: {a: 'http://h:1'}\nretry: {attempts: 99}", "must be less than or equal to 20, not 99"),
        ("endpoints: {a: 'http://h:1/v1'}", "ends in /v1, which clients' paths already have (leave it out)"),
        ("endpoints: {a: 'http://h:1/v1/chat/completions'}", "endpoints.a.url: names one path of the engine"),
        ("clusters: {small: {endpoints: {a: 'http://h:1'}}, large: {endpoints: {a: 'http://h:2'}}}\n"
         "routes: [{model: m, cluster: smal}, {cluster: large}]",
         "routes[0].cluster: there is no cluster 'smal' (did you mean 'small'?)"),
        ("endpoints: {a: 'http://h:1'}\nfilters: [inference_request, {kvcache: {lookup_routing_timeout: 50}}, router]",
         "50 s is longer than request_timeout (2 s), which then ends lookups first "
         "(a bare number is seconds: write 50ms for milliseconds)"),
    ],
)  # fmt: skip
def test_usual_slips_are_named(text: str, problem: str) -> None:
    """In words for people, with what the file says; alone, without what would only follow."""
    shown = [what for _, _, what in places(text)]
    assert len(shown) == 1
    assert problem in shown[0]


@pytest.mark.parametrize(
    ("text", "only"),
    [
        ("clusters: {small: {endpoints: {a: 'http://h:1'}}, large: {endpoints: {a: 'http://h:2'}}}\n"
         "routes: [{model: m, clutser: small}, {cluster: large}]", "routes[0].clutser: unknown key"),
        ("clutsers: {small: {endpoints: {a: 'http://h:1'}}}\nroutes: [{cluster: small}]", "clutsers: unknown key"),
        ("policy: random\nendpoits: {a: 'http://h:1'}", "endpoits: unknown key"),
        ("endpoits: {a: 'http://h:1'}", "endpoits: unknown key"),
        ("endpoints: {a: 'http://h:1'}\nfilters: [inference_request, {kvcache: {lmcache_endpoint: '${NO}', "
         "cache_strategy: {enable_pinning: true}}}, router]",
         "filters[1].kvcache.lmcache_endpoint: environment variable NO is not set"),
    ],
)  # fmt: skip
def test_one_slip_is_one_problem(text: str, only: str) -> None:
    """A typo in a key, or a variable that is not set, does not drag others behind it."""
    shown = [what for _, _, what in places(text)]
    assert len(shown) == 1, shown
    assert shown[0].startswith(only)


def test_merged_and_repeated_values_stand_where_they_are_written() -> None:
    """An anchor's lines, not those of its aliases; own keys are found at their own place."""
    text = "clusters:\n  a: &x\n    policy: nonsense\n    endpoints: {e: 'http://h:1'}\n"
    text += "  b:\n    <<: *x\n    policy: worse\n"
    found = {what.split(":")[0]: line for line, _, what in places(text) if "must be 'random'" in what}
    assert found == {"clusters.a.policy": 3, "clusters.b.policy": 7}


@pytest.mark.parametrize(
    ("path", "outer", "inside"),
    [
        ("clusters.a.policy", "clusters.a", True),
        ("clusters.a", "clusters.a", True),
        ("clusters.ab", "clusters.a", False),
        ("filters[1].auth", "filters[1]", True),
        ("filters[1].auth", "filters", True),
        ("filters[10]", "filters[1]", False),
        ("anything", "", True),
        ("clusters", "clusters.a", False),
    ],
)
def test_a_part_is_what_stands_below_it(path: str, outer: str, inside: bool) -> None:
    """Another key that begins alike is another part."""
    assert is_inside(path, outer) is inside


def test_keys_are_those_that_a_file_writes() -> None:
    """Where a setting goes by another name in the file, hints name that one."""

    class Renamed(Model):
        max_idle: int = Field(default=0, alias="maxIdleConns")
        scheme: str = "http"

    assert keys_of(Renamed) == ["maxIdleConns", "scheme"]
    assert spelling_hint("maxIdleCons", keys_of(Renamed)) == "did you mean 'maxIdleConns'?"


def test_keys_with_dots_and_brackets_are_found() -> None:
    """Dotted paths are ambiguous; the longest key that was written wins."""
    text = "endpoints:\n  h1.example:8000[x]:\n    url: http://h:1\n    wieght: 3\n"
    assert [(line, column) for line, column, what in places(text) if "wieght" in what] == [(4, 5)]


def test_a_problem_names_its_file(tmp_path: Path) -> None:
    """`FILE:LINE:COLUMN`, which terminals and editors make a link of."""
    file = tmp_path / "config.yaml"
    file.write_text(PLANTED)
    _, problems = check_config(Path(file), env={"SECRET": "topsecret"})
    assert all(one.place == f"{file}:{one.line}:{one.column}" for one in problems)
    typo = next(one for one in problems if one.path == "polcy")
    assert typo.located() == f"{file}:4:1: polcy: unknown key (did you mean 'policy'?)"


def test_a_problem_of_no_file_names_none() -> None:
    """Engines of the command line are in no file."""
    assert Problem("", "no file", "give one").located() == "no file (give one)"
    assert Problem("policy", "no such policy").located() == "policy: no such policy"
    assert Problem("", "odd", line=3, column=5).located() == "line 3, column 5: odd"


BASE: dict[str, Any] = {"endpoints": {"a": "http://127.0.0.1:1", "b": "http://127.0.0.1:2"}}


def config(**fields: Any) -> Config:
    return load_config({**BASE, **fields})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "nothing changed"),
        ({"policy": "round_robin"}, "clusters.default.policy"),
        (
            {"endpoints": {"a": "http://127.0.0.1:3", "c": "http://127.0.0.1:2"}},
            "clusters.default.endpoints (+c, -b), clusters.default.endpoints.a.url",
        ),
        ({"endpoints": dict(reversed(BASE["endpoints"].items()))}, "clusters.default.endpoints (order)"),
        ({"log": {"level": "debug"}, "retry": {"attempts": 5}}, "log.level"),
        ({"admin": {"token": "new-secret"}}, "admin.token"),
    ],
)
def test_changes_are_named(fields: dict[str, Any], said: str) -> None:
    """By the paths of the configuration; endpoints by their ids."""
    text = summarise_changes(config(), config(**fields))
    assert said in text
    assert "secret" not in text


def test_many_changes_are_counted() -> None:
    """A log line stays a line."""
    after = config(
        policy="round_robin", listen=":8801", admin={"port": 8802}, log={"level": "debug", "format": "json"},
        retry={"attempts": 5, "budget": 0.3}, timeouts={"connect": "9s", "idle": "9s"}, limits={"connections": 7},
        health={"interval": "9s"},
    )  # fmt: skip
    text = summarise_changes(config(), after)
    assert text.count(", ") == 7
    assert text.endswith(" and 4 more")  # of twelve: the address to listen at is two
