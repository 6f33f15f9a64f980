"""Views for people: receipts, the doctor, findings, capabilities, faults of settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvproxy.base.types import EndpointId
from kvproxy.features.disaggregation.feature import FEATURE
from kvproxy.features.disaggregation.note import NOTE, Legs
from kvproxy.operate.config.load import check_config, load_config
from kvproxy.operate.doctor.report import Severity
from kvproxy.operate.receipts.explain import explain_decision, explain_receipt
from kvproxy.operate.receipts.receipt import decode_receipt, note_of
from tests.features.disaggregation.support import Separated, prompt, running_fleet, separated, words
from tests.lab.simulator.support import engine
from tests.operate.admin.support import admin_of
from tests.operate.doctor.setup import visit

P = {"id": "p", "url": "http://127.0.0.1:1", "role": "prefill"}
PATH = "/v1/completions"
D = {"id": "d", "url": "http://127.0.0.1:2", "role": "decode"}


@pytest.mark.parametrize(
    ("fault", "result", "said"),
    [
        ("", "pulled", "were computed at p, and its KV pulled from there"),
        ("no_handle", "local", "were computed at p, in vain"),
        ("unknown_engine", "refused", "were computed at p, but its KV was refused"),
    ],
)
async def test_receipts_have_both_legs(tmp_path: Path, fault: str, result: str, said: str) -> None:
    """With what was expected of them."""
    path = tmp_path / "receipts.jsonl"
    async with separated("p", "d", policy="kv_aware", receipts={"path": str(path)}) as two:
        two.fleet.fault("p", kv_fault=fault)
        make_busy(two)
        await two.ask(words("x", 600))
    (receipt,) = map(decode_receipt, path.read_bytes().splitlines())
    legs = note_of(receipt, NOTE, Legs)
    assert legs is not None
    assert (legs.prefill, legs.result, legs.prefills) == ("p", result, 1)
    assert 0.0 < legs.expected_s < legs.local_s
    assert said in explain_receipt(receipt)


def make_busy(two: Separated, name: str = "d") -> None:
    """Give an endpoint many answers under way, which a prefill would stall."""
    endpoint = two.proxy.proxy.clusters["default"].find_endpoint(EndpointId(name))
    assert endpoint is not None
    for _ in range(40):
        endpoint.load.first_token(endpoint.load.reserve(1, 0, 0.0), 0.0)


async def test_the_live_page_has_both_legs_of_a_decision() -> None:
    """In the words of `kvproxy explain`, which has them without receipts, too."""
    async with separated("p", "d", policy="kv_aware") as two, admin_of(two.proxy.proxy) as admin:
        make_busy(two)
        await two.ask(words("x", 600))
        (number,) = (one["number"] for one in (await admin.get("/decisions")).json()["decisions"])
        decision = (await admin.get(f"/decisions/{number}")).json()
        (note,) = decision["notes"]
        assert "were computed at p, and its KV pulled from there" in note
        assert f"  {note}" in explain_decision(decision).splitlines()


@pytest.mark.parametrize("reserve", [False, True])
async def test_a_program_that_picks_learns_of_the_first_leg(reserve: bool) -> None:
    """With the plan's seconds, as for a request without a reservation; a short prompt has one leg."""
    async with separated("p", "d", policy="kv_aware") as two, admin_of(two.proxy.proxy) as admin:

        async def pick(text: str) -> dict[str, Any]:
            answer = await admin.post("/pick", json={"request": prompt(text), "path": PATH, "reserve": reserve})
            found: dict[str, Any] = answer.json()
            return found

        make_busy(two)
        long = await pick(words("x", 600))
        assert long["endpoint"] == "d"
        leg = long["prefill"]
        assert (leg["endpoint"], leg["url"], leg["connector"]) == ("p", two.fleet.urls["p"], "nixl")
        assert leg["tokens"] == long["prompt_tokens"]
        assert 0.0 < leg["expected_s"] < leg["alone_s"]
        assert "prefill" not in await pick("short")


async def test_a_cluster_that_separates_nothing_picks_no_first_leg() -> None:
    async with separated("p", "d", disaggregation={"connector": "off"}, roles={"p": "both", "d": "both"}) as two:
        async with admin_of(two.proxy.proxy) as admin:
            answer = (await admin.post("/pick", json={"request": prompt(words("x", 600)), "path": PATH})).json()
        assert answer["endpoint"]
        assert "prefill" not in answer


def test_roles_without_a_connector_are_doubted() -> None:
    """Endpoints that prefill would stand idle."""
    doubts = [one for one in check_config({"endpoints": [P, D]})[1] if "role: prefill" in one.message]
    assert len(doubts) == 1


def test_a_cluster_needs_an_endpoint_that_answers() -> None:
    """An error at the start, not for each request."""
    faults = check_config({"endpoints": [P], "disaggregation": {"connector": "nixl"}})[1]
    assert any("all have `role: prefill`" in one.message for one in faults)


def test_the_capability_names_the_connector() -> None:
    """`kvproxy check` and the live page show it."""
    (off,) = FEATURE.list_capabilities(load_config({"endpoints": [P, D]}))
    (on,) = FEATURE.list_capabilities(load_config({"endpoints": [P, D], "disaggregation": {"connector": "nixl"}}))
    assert (off.state, on.state) == ("off", "on")
    assert "nixl" in on.reason


@pytest.mark.parametrize(
    ("fault", "severity", "said"),
    [
        ("", Severity.OK, "prefill at p for d gives the same tokens as d alone"),
        ("other_prompt", Severity.PROBLEM, "prefill at p for d does not work: answered"),
        ("no_handle", Severity.PROBLEM, "prefill at p for d fails: NoHandle"),
    ],
)
async def test_the_doctor_compares_16_tokens(fault: str, severity: Severity, said: str) -> None:
    """On each pair."""
    async with running_fleet("p", "d") as fleet:
        fleet.fault("p", kv_fault=fault)
        endpoints = [{"id": name, "url": fleet.urls[name], "role": role} for name, role in _ROLES.items()]
        raw: dict[str, Any] = {"endpoints": endpoints, "disaggregation": {"connector": "nixl"}}
        report = await visit(raw)
        (found,) = (one for one in (*report.findings, *report.passed) if one.check == "disaggregation")
        assert found.severity is severity
        assert found.what.startswith(said)


_ROLES = {"p": "prefill", "d": "decode"}


async def test_the_doctor_misses_a_pair() -> None:
    """Of endpoints that all only decode."""
    async with running_fleet("d") as fleet:
        endpoints = [{"id": "d", "url": fleet.urls["d"], "role": "decode"}]
        report = await visit({"endpoints": endpoints, "disaggregation": {"connector": "nixl"}})
        (found,) = (one for one in (*report.findings, *report.passed) if one.check == "disaggregation")
        assert found.severity is Severity.WARNING


@pytest.mark.parametrize(("connector", "severity"), [("off", Severity.WARNING), ("lmcache", Severity.PROBLEM)])
async def test_the_doctor_finds_the_connector(connector: str, severity: Severity) -> None:
    """By what the engine shows of itself: parameters of another connector could end it."""
    async with running_fleet("p", "d") as fleet:
        endpoints = [{"id": name, "url": fleet.urls[name], "role": role} for name, role in _ROLES.items()]
        report = await visit({"endpoints": endpoints, "disaggregation": {"connector": connector}})
        (found,) = (one for one in report.findings if one.check == "disaggregation")
        assert found.severity is severity
        assert "its engine's connector is nixl" in found.what or "the engine's connector is nixl" in found.what
        assert found.fix == "set `disaggregation: {connector: nixl}`"


async def test_the_doctor_finds_no_connector() -> None:
    """Of engines that show none, and of endpoints without roles."""
    async with engine() as one:
        endpoints = [{"id": "p", "url": one.url, "role": "prefill"}, {"id": "d", "url": one.url}]
        report = await visit({"endpoints": endpoints})
        assert not [found for found in report.findings if found.check == "disaggregation"]
