"""Engines named on a command line: what is served without a file."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvproxy.base.errors import ConfigError
from kvproxy.cluster.settings import PolicyName
from kvproxy.lab.simulator.fleet import Fleet, FleetSettings
from kvproxy.operate.commands.survey import survey_engines
from kvproxy.operate.config.schema import Config
from tests.lab.simulator.support import TINY
from tests.support.loopback import serve

NOWHERE = "http://127.0.0.1:1"


async def surveyed(*engines: str, policy: str = "kv_aware") -> tuple[Config, list[str]]:
    """As `kvproxy serve` does, which has no loop yet."""
    config, problems = await asyncio.to_thread(survey_engines, engines, listen="127.0.0.1:0", policy=policy)
    return config, [f"{one.severity}: {one.message}" for one in problems]


async def test_engines_of_one_model_are_one_cluster() -> None:
    """Named by host and port; each is shown as it presented itself."""
    fleet = Fleet(FleetSettings({"a": TINY, "b": TINY}, None))
    async with fleet, serve(fleet.engines["a"]) as a, serve(fleet.engines["b"]) as b:
        config, said = await surveyed(f"{a}/v1", f"second={b}")
    (cluster,) = config.clusters.values()
    assert cluster.policy is PolicyName.KV_AWARE
    assert [(one.id, one.url) for one in cluster.endpoints] == [(a.removeprefix("http://"), a), ("second", b)]
    assert said[0] == "note: no file: 2 engines of the command line"
    assert said[2] == f"note: second  {b}: serves tiny; publishes no KV events"


async def test_engines_of_several_models_are_clusters_with_routes() -> None:
    """A request goes to the engines that have its model; an engine that is down is taken for one of the first."""
    fleet = Fleet(FleetSettings({"a": TINY, "b": replace(TINY, model="other")}, None))
    async with fleet, serve(fleet.engines["a"]) as a, serve(fleet.engines["b"]) as b:
        config, said = await surveyed(f"a={a}", f"b={b}", f"c={NOWHERE}", policy="round_robin")
    assert {name: [one.id for one in each.endpoints] for name, each in config.clusters.items()} == {
        "tiny": ["a", "c"],
        "other": ["b"],
    }
    assert {each.policy for each in config.clusters.values()} == {PolicyName.ROUND_ROBIN}
    assert [(route.model, route.cluster) for route in config.routes] == [("tiny", "tiny"), ("other", "other")]
    assert said[3].startswith(f"warning: c  {NOWHERE}: no answer on /v1/models")
    assert said[3].endswith("taken for one of the first engines' model")


async def test_an_engine_that_is_down_is_served_when_it_answers() -> None:
    """A start order that is not configured is no error."""
    config, said = await surveyed("a=http://127.0.0.1:1/$HOME")
    assert [one.url for one in config.clusters["default"].endpoints] == ["http://127.0.0.1:1/$HOME"]
    assert said[1].startswith("warning: a  http://127.0.0.1:1/$HOME: no answer")


@pytest.mark.parametrize(
    "wrong", [["a=ftp://h"], ["a=http://u:topsecret@h:1"], [NOWHERE, NOWHERE], ["http://[::1"], ["=http://h"], [""]]
)
def test_servers_other_than_engines_are_refused(wrong: list[str]) -> None:
    """Before anything is visited, and without quoting a credential."""
    with pytest.raises(ConfigError) as caught:
        survey_engines(wrong, listen="127.0.0.1:0", policy="kv_aware")
    assert "topsecret" not in str(caught.value)
