"""Endpoints, changed while the proxy runs."""

from __future__ import annotations

from typing import Any

import pytest

from kvproxy.base.types import EndpointId
from kvproxy.cluster.routing.policy import PickRequest
from tests.operate.admin.support import admin_of, audited, problems_of, proxy_of
from tests.support.picks import pick_endpoint

Z = {"id": "z", "url": "http://127.0.0.1:10"}
TWO = {"endpoints": [{"id": "a", "url": "http://127.0.0.1:9"}, {"id": "org/b", "url": "http://127.0.0.1:10"}]}


async def test_an_endpoint_is_added() -> None:
    """With everything a configuration may say of one; its key is neither shown nor written down."""
    proxy = proxy_of()
    body = {**Z, "cluster": "default", "weight": 2, "models": ["m"], "api_key": "topsecret"}
    with audited() as lines:
        async with admin_of(proxy) as client:
            answer = await client.post("/endpoints", json=body)
            listed = (await client.get("/endpoints")).text
    added = proxy.clusters["default"].find_endpoint(EndpointId("z"))
    assert added is not None
    assert (answer.status_code, answer.json()["weight"], added.authorization) == (201, 2.0, b"Bearer topsecret")
    assert lines[0]["action"] == "endpoint.add"
    assert (lines[0]["endpoint"], lines[0]["url"]) == ("z", "http://127.0.0.1:10")
    assert "topsecret" not in answer.text + listed + str(lines)


@pytest.mark.parametrize(
    ("body", "status", "where", "what"),
    [
        ({**Z, "cluster": "nowhere"}, 404, "cluster", "there is no such cluster"),
        ({**Z, "cluster": 3}, 404, "cluster", "there is no such cluster"),
        ({"id": "z"}, 422, "url", "required"),
        ({**Z, "wieght": 2}, 422, "wieght", "unknown key"),
        ({**Z, "weight": 0}, 422, "weight", "greater than 0"),
        ({**Z, "id": "a b"}, 422, "id", "must start with"),
        ({**Z, "url": "ftp://x"}, 422, "url", "http or https"),
        ({**Z, "url": "http://me:pw@x"}, 422, "url", "credentials"),
        ({**Z, "api_key": {"file": "/etc/hostname"}}, 422, "api_key", "files cannot be named here"),
        ({**Z, "ca_file": "/etc/hostname"}, 422, "ca_file", "files cannot be named here"),
        ({**Z, "id": "a"}, 409, "id", "has an endpoint 'a'"),
    ],
)
async def test_invalid_additions(body: dict[str, Any], status: int, where: str, what: str) -> None:
    """Where, what and what to do; nothing changed, nothing written down."""
    proxy = proxy_of()
    with audited() as lines:
        async with admin_of(proxy) as client:
            answer = await client.post("/endpoints", json=body)
    assert answer.status_code == status
    assert what in problems_of(answer)[where][0]
    assert [endpoint.id for endpoint in proxy.clusters["default"].endpoints] == ["a"]
    assert lines == []


async def test_among_several_clusters_one_must_be_named() -> None:
    """A guess would send traffic to the wrong models."""
    clusters = {name: {"endpoints": {name: f"http://127.0.0.1:{port}"}} for name, port in (("x", 1), ("y", 2))}
    routes = [{"model": "x", "cluster": "x"}, {"cluster": "y"}]
    proxy = proxy_of(endpoints=None, health=None, clusters=clusters, routes=routes)
    async with admin_of(proxy) as client:
        answer = await client.post("/endpoints", json=Z)
        assert problems_of(answer)["cluster"] == ("required, since there are several", "clusters: x, y")
        assert (await client.post("/endpoints", json={**Z, "cluster": "y"})).status_code == 201


async def test_additions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is not the admin client's to fill."""
    monkeypatch.setattr("kvproxy.cluster.operator.MAX_ADDED", 1)
    async with admin_of(proxy_of()) as client:
        assert (await client.post("/endpoints", json=Z)).status_code == 201
        assert (await client.post("/endpoints", json={**Z, "id": "y"})).status_code == 409


async def test_draining_and_back() -> None:
    """Ids with a slash work too; both are written down with what was before."""
    proxy = proxy_of(**TWO)
    cluster = proxy.clusters["default"]
    with audited() as lines:
        async with admin_of(proxy) as client:
            drained = await client.post("/endpoints/default/org/b/drain")
            assert drained.json()["condition"] == "draining"
            picks = [pick_endpoint(cluster, PickRequest(), now=proxy.clock()) for _ in range(4)]
            assert {pick.endpoint.id for pick in picks if pick} == {"a"}
            assert (await client.post("/endpoints/default/org/b/undrain")).json()["condition"] == "up"
    assert [(line["action"], line["endpoint"], line["was_draining"]) for line in lines] == [
        ("endpoint.drain", "org/b", False),
        ("endpoint.undrain", "org/b", True),
    ]
    assert (lines[0]["event"], lines[0]["from"]) == ("admin", "127.0.0.1")


async def test_a_weight_is_changed() -> None:
    """It holds against later updates of the source."""
    proxy = proxy_of(**TWO)
    with audited() as lines:
        async with admin_of(proxy) as client:
            answer = await client.post("/endpoints/default/a/weight", json={"weight": 3})
    assert (answer.status_code, answer.json()["weight"]) == (200, 3.0)
    assert (lines[0]["before"], lines[0]["after"]) == (1.0, 3.0)


@pytest.mark.parametrize("weight", [0, -1, 1001, True, "2", None])
async def test_weights_have_a_range(weight: object) -> None:
    """The error names it."""
    async with admin_of(proxy_of()) as client:
        answer = await client.post("/endpoints/default/a/weight", json={"weight": weight, "wait": 1})
    assert answer.status_code == 422
    assert problems_of(answer)["weight"][1] == "allowed: more than 0, at most 1000"
    assert problems_of(answer)["wait"][0] == "unknown key"


async def test_an_endpoint_is_removed_and_finishes_what_it_has() -> None:
    """It is listed as leaving until then."""
    proxy = proxy_of(**TWO)
    pick = pick_endpoint(proxy.clusters["default"], PickRequest(preferred=EndpointId("a")), now=proxy.clock())
    assert pick is not None
    with audited() as lines:
        async with admin_of(proxy) as client:
            answer = await client.delete("/endpoints/default/a")
            listed = (await client.get("/endpoints")).json()["clusters"]["default"]
    assert answer.json() == {"removed": "a", "cluster": "default", "in_flight": 1}
    assert [(one["id"], one.get("leaving", False)) for one in listed] == [("org/b", False), ("a", True)]
    assert (lines[0]["action"], lines[0]["in_flight"]) == ("endpoint.remove", 1)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/endpoints/default/c/drain"),
        ("POST", "/endpoints/nowhere/a/drain"),
        ("POST", "/endpoints/default/c/weight"),
        ("DELETE", "/endpoints/default/c"),
    ],
)
async def test_nobody_of_that_name(method: str, path: str) -> None:
    """404 with the names there are."""
    async with admin_of(proxy_of()) as client:
        answer = await client.request(method, path, json={"weight": 1})
    assert answer.status_code == 404
    assert all(fix for _, fix in problems_of(answer).values())


async def test_all_ranks_of_an_engine_are_named_by_its_id() -> None:
    """Drained, weighed and removed together; one rank by its own id. An added engine answers with its ranks."""
    proxy = proxy_of()
    body = {**Z, "data_parallel": {"ranks": [0, 1]}}
    with audited() as lines:
        async with admin_of(proxy) as client:
            added = await client.post("/endpoints", json=body)
            again = await client.post("/endpoints", json=body)
            drained = await client.post("/endpoints/default/z/drain")
            undrained = await client.post("/endpoints/default/z@1/undrain")
            weighed = await client.post("/endpoints/default/z/weight", json={"weight": 3})
            removed = await client.delete("/endpoints/default/z")
    assert added.status_code == 201
    assert [(one["id"], one["engine_id"], one["data_parallel_rank"]) for one in added.json()["ranks"]] == [
        ("z@0", "z", 0),
        ("z@1", "z", 1),
    ]
    assert again.status_code == 409
    assert (drained.json()["id"], drained.json()["in_flight"]) == ("z", 0)
    assert [one["condition"] for one in drained.json()["ranks"]] == ["draining", "draining"]
    assert (undrained.json()["id"], undrained.json()["condition"]) == ("z@1", "up")
    assert [one["weight"] for one in weighed.json()["ranks"]] == [3.0, 3.0]
    assert removed.json() == {"removed": "z", "cluster": "default", "in_flight": 0}
    assert [endpoint.id for endpoint in proxy.clusters["default"].endpoints] == ["a"]
    assert [line["endpoint"] for line in lines] == ["z", "z", "z@1", "z", "z"]
