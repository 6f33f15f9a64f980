"""Workers that give no answer: what is asked of all goes on without them, what is to be done by all is not done."""

from __future__ import annotations

import os

import pytest

from kvproxy.base.errors import ConfigError
from tests.features.workers.together import Together, together
from tests.support.proxy import chat

ENDPOINTS = {"a": "http://127.0.0.1:9"}


def silence(both: Together, *indexes: int) -> None:
    """Its process is there, but nothing listens any more."""
    for index in indexes:
        slot = both.workers.supervisor.slots[index]
        slot.path.unlink()
        os.close(slot.file)
        slot.file = -1


async def test_hits_are_read_from_the_other_engines() -> None:
    """One of two is enough to be ready, and for the page."""
    async with together(ENDPOINTS, answer_s=1.0) as both:
        silence(both, 1)
        assert (await both.admin.get("/readyz")).status_code == 200
        assert [one["serves"] for one in (await both.live())["workers"]] == [True, True]
        assert (await both.admin.get("/endpoints")).json()["clusters"]["default"][0]["id"] == "a"


async def test_a_change_that_the_first_does_not_answer_is_made_by_none() -> None:
    """It is not known whether it did it; none is started again to repeat it."""
    async with together(ENDPOINTS, answer_s=1.0) as both:
        silence(both, 0)
        answer = await both.admin.post("/endpoints/default/a/drain")
        assert (answer.status_code, "no worker answers" in answer.text) == (503, True)
        assert not both.proxies[1].clusters["default"].endpoints[0].draining
        assert not both.workers.supervisor.served.changes


async def test_a_worker_that_did_not_hear_of_a_change_is_to_be_started_again() -> None:
    """The others go on with it, and it comes back knowing."""
    async with together(ENDPOINTS, answer_s=1.0) as both:
        silence(both, 1)
        assert (await both.admin.post("/endpoints/default/a/drain")).status_code == 200
        assert both.proxies[0].clusters["default"].endpoints[0].draining
        told = [slot.process.told for slot in both.workers.supervisor.slots if slot.process is not None]
        assert [one == both.workers.supervisor.served.number for one in told] == [True, False]
        assert len(both.workers.supervisor.served.changes) == 1


@pytest.mark.parametrize("silent", [0, 1])
async def test_a_reload_that_one_does_not_answer_changes_none(silent: int) -> None:
    """It could not be known which configuration that one serves."""
    async with together(ENDPOINTS, answer_s=1.0) as both:
        before = [proxy.config for proxy in both.proxies]
        silence(both, silent)
        with pytest.raises(ConfigError, match="gives no answer"):
            await both.workers.reload(both.workers.config)
        assert [proxy.config for proxy in both.proxies] == before
        assert both.workers.supervisor.served.number == 0


async def test_a_place_is_not_looked_for_at_another_worker() -> None:
    """It was reserved by one, which is gone or gives no answer."""
    async with together(ENDPOINTS, answer_s=1.0) as both:
        question = {"request": chat(), "reserve": True}
        reserved = (await both.admin.post("/pick", json=question)).json()["reservation"]["id"]
        index = int(reserved.partition("-")[0])
        assert (await both.admin.post(f"/pick/7-{reserved}/done", json={})).status_code == 503
        silence(both, 1 - index)
        assert (await both.admin.post("/pick", json=question)).status_code == 503
        assert (await both.admin.post(f"/pick/{reserved}/done", json={})).is_success
        assert (await both.admin.get("/decisions/99999")).status_code in (404, 503)


async def test_without_any_answer_nothing_is_said() -> None:
    """Readiness, the page and the metrics' own part: the supervisor is there, its workers are not."""
    async with together(ENDPOINTS, answer_s=1.0) as both:
        silence(both, 0, 1)
        for path in ("/readyz", "/live", "/endpoints"):
            assert (await both.admin.get(path)).status_code == 503
        assert (await both.admin.get("/healthz")).status_code == 200
        assert await both.metric("kvproxy_workers") == 2


async def test_a_drain_is_not_ready() -> None:
    """Whatever the workers say until they have heard of it."""
    async with together(ENDPOINTS, answer_s=1.0) as both:
        both.workers.supervisor.ending.set()
        answer = await both.admin.get("/readyz")
        assert (answer.status_code, answer.text) == (503, "draining\n")
