"""Displays of it for people: findings, explanations, and whether it is on."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvproxy.operate.capabilities import list_capabilities
from kvproxy.operate.config.load import load_config
from kvproxy.operate.receipts.explain import explain_receipt
from kvproxy.operate.receipts.receipt import decode_receipt
from tests.features.priority.support import known_of
from tests.operate.admin.test_troubles import Place
from tests.support.clock import FakeClock

URLS = ["http://127.0.0.1:9", "http://127.0.0.1:10"]


async def test_engines_that_pay_no_heed_to_their_priority_are_named() -> None:
    """By `on` the operator expects an effect; by `auto` it is switched off and nothing is wrong."""
    clock = FakeClock()
    place = Place(clock, policy="kv_aware", engine_priority="on")
    assert not (await place.live())["findings"]
    known_of(place.proxy.clusters["default"].endpoints[1]).record_refusal()
    clock.advance(5.0)
    [finding] = (await place.live())["findings"]
    assert finding["severity"] == "warning"
    assert finding["what"] == "engine_priority is on, and engines refuse the field, so it is not sent (b)"
    assert "--scheduling-policy priority" in finding["fix"]
    place = Place(clock, policy="kv_aware", engine_priority="auto")
    known_of(place.proxy.clusters["default"].endpoints[1]).record_refusal()
    clock.advance(5.0)
    assert not (await place.live())["findings"]


@pytest.mark.parametrize(("priority", "order"), [(8_434_715_315, "lowest"), (-8_434_715_315, "highest")])
def test_the_number_an_engine_was_told_is_explained(priority: int, order: str) -> None:
    """Its terms, and which request comes first there."""
    plain = {"time": "t", "request_id": "r", "end": "completed", "duration_s": 1.0}
    text = explain_receipt(decode_receipt(msgspec.json.encode({**plain, "engine_priority": priority})))
    assert f"sent with priority {priority} (" in text
    assert f"the engine admits the {order} first" in text
    assert "priority" not in explain_receipt(decode_receipt(msgspec.json.encode(plain)))


@pytest.mark.parametrize(
    ("config", "state", "reason"),
    [
        ({}, "off", "`engine_priority: off`, the default"),
        ({"engine_priority": "auto"}, "on", "`engine_priority: auto`"),
    ],
)
def test_it_is_on_or_off_for_a_reason(config: dict[str, Any], state: str, reason: str) -> None:
    """By the file alone."""
    rows = {one.name: one for one in list_capabilities(load_config({"endpoints": URLS, **config}))}
    assert (rows["engine priority"].state, rows["engine priority"].reason) == (state, reason)


async def test_a_running_proxy_counts_who_is_sent_it() -> None:
    """An engine that refuses it is sent none."""
    place = Place(FakeClock(), policy="kv_aware", engine_priority="on")
    known_of(place.proxy.clusters["default"].endpoints[1]).record_refusal()
    rows = {one["name"]: one for one in (await place.live())["capabilities"]}
    assert rows["engine priority"]["reason"] == "`engine_priority: on`, sent to 2 of 3 endpoints now"
