"""Endpoints from Kubernetes: slices and pods, listed and watched, against an API server that misbehaves."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvproxy.base.errors import ClientError, DiscoveryError
from kvproxy.cluster.pick import AttemptOutcome
from kvproxy.cluster.settings import EndpointSettings
from kvproxy.features.kubernetes.client import KubernetesAccess
from kvproxy.features.kubernetes.settings import KubernetesDiscoverySettings
from kvproxy.features.kubernetes.source import KubernetesDiscovery
from kvproxy.proxy.settings import ListenerTls
from tests.cluster.followed import Follow
from tests.support.certificates import make_certificate
from tests.support.clock import FakeClock
from tests.support.fake_kubernetes import PODS, SLICES, FakeKubernetes, member, pod, slice_of
from tests.support.loopback import serve
from tests.support.until import until

_FORBIDDEN = 'pods is forbidden: User "system:serviceaccount:default:kvproxy" cannot list resource "pods"'


@pytest.fixture
async def api() -> AsyncIterator[tuple[FakeKubernetes, dict[str, str]]]:
    """Yield the API server, and where it is."""
    fake = FakeKubernetes()
    async with serve(fake) as url:
        yield fake, {"url": url}


Api = tuple[FakeKubernetes, dict[str, str]]


def discovery(where: dict[str, str], **settings: Any) -> KubernetesDiscovery:
    settings = {"service": "vllm", "namespace": "models", **settings, "api": where}
    return KubernetesDiscovery(
        KubernetesDiscoverySettings.model_validate(settings), clock=FakeClock(), rng=random.Random(1)
    )


def service(where: dict[str, str], **settings: Any) -> dict[str, Any]:
    return {"kubernetes": {"service": "vllm", "namespace": "models", "api": where, **settings}}


def pods(where: dict[str, str], **settings: Any) -> dict[str, Any]:
    return {"kubernetes": {"selector": "app=vllm", "namespace": "models", "api": where, **settings}}


async def test_two_slices_of_a_service_are_one_cluster(api: Api) -> None:
    """Those of other services are not asked for; a pod that is in two of them is there once."""
    fake, where = api
    fake.put(SLICES, slice_of("s1", member("a", "10.0.0.1"), member("b", "10.0.0.2")))
    fake.put(SLICES, slice_of("s2", member("c", "10.0.0.3"), member("b", "10.0.0.2", ready=False, serving=False)))
    fake.put(SLICES, slice_of("s3", member("x", "10.0.0.9"), service="other"))
    found = {one.id: one.url for one in await discovery(where).endpoints()}
    assert found == {"a": "http://10.0.0.1:8000", "b": "http://10.0.0.2:8000", "c": "http://10.0.0.3:8000"}
    assert fake.lists == [{"labelSelector": "kubernetes.io/service-name=vllm", "limit": "100", "namespace": "models"}]


async def test_pages_are_put_together(api: Api) -> None:
    """As many as it takes."""
    fake, where = api
    fake.page = 2
    for number in range(5):
        fake.put(PODS, pod(f"p{number}", f"10.0.0.{number}"))
    assert len(await discovery(where, service="", selector="app=vllm").endpoints()) == 5
    assert [query.get("continue") for query in fake.lists] == [None, "2", "4"]


async def test_ipv6_and_both_families(api: Api) -> None:
    """Addresses in brackets, also for LMCache; a pod with both counts once, by IPv4."""
    fake, where = api
    fake.put(SLICES, slice_of("s6", member("a", "fd00::1"), member("b", "fd00::2"), family="IPv6"))
    fake.put(SLICES, slice_of("s9", member("a", "10.0.0.1")))
    found = {one.id: (one.url, one.instance_id) for one in await discovery(where).endpoints()}
    assert found == {
        "a": ("http://10.0.0.1:8000", "10.0.0.1:8000"),
        "b": ("http://[fd00::2]:8000", "[fd00::2]:8000"),
    }


@pytest.mark.parametrize(("port", "url"), [("http", ":8000"), ("grpc", ":9000"), ("1234", ":1234")])
async def test_ports_by_name_and_number(api: Api, port: str, url: str) -> None:
    """Each slice says what the name means there."""
    fake, where = api
    ports = (("http", 8000), ("grpc", 9000))
    fake.put(SLICES, slice_of("s1", member("a", "10.0.0.1"), ports=ports))
    fake.put(PODS, pod("a", "10.0.0.1", ports=ports))
    for more in ({}, {"service": "", "selector": "app=vllm"}):
        (found,) = await discovery(where, port=port, **more).endpoints()
        assert found.url == f"http://10.0.0.1{url}"


@pytest.mark.parametrize(
    ("port", "complaint"),
    [
        ("", "slice s1: name one of its ports in `port`: it has http 8000, x 1"),
        ("web", "slice s1: no port 'web', it has"),
    ],
)
async def test_a_port_that_is_not_there_is_named(follow: Follow, api: Api, port: str, complaint: str) -> None:
    """With those there are; what another slice offers still counts."""
    fake, where = api
    fake.put(SLICES, slice_of("s1", member("a", "10.0.0.1"), ports=(("http", 8000), ("x", 1))))
    fake.put(SLICES, slice_of("s2", member("b", "10.0.0.2"), ports=((port or "only", 9),)))
    async with follow(**service(where, port=port)) as one:
        assert one.urls == {"b": "http://10.0.0.2:9"}
        assert str(one.cluster.poller.left_out["kubernetes"][0]).startswith(complaint)


async def test_annotations_of_pods(api: Api) -> None:
    """Role, models, weight and LMCache's id, an annotation before a label, a pod before its slice."""
    fake, where = api
    said = {
        "kvproxy.io/models": "Qwen/Qwen3-8B, lora-1",
        "kvproxy.io/weight": "2.5",
        "kvproxy.io/instance-id": "vllm-a",
    }
    fake.put(
        PODS, pod("a", "10.0.0.1", labels={"kvproxy.io/role": "decode", "kvproxy.io/weight": "7"}, annotations=said)
    )
    fake.put(PODS, pod("b", "10.0.0.2", annotations={"kvproxy.io/weight": "much"}))
    fake.put(SLICES, slice_of("s1", member("a", "10.0.0.1"), member("b", "10.0.0.2"), labels={"kvproxy.io/model": "m"}))
    both = {one.id: one for one in await discovery(where, selector="app=vllm").endpoints()}
    a, b = both["a"], both["b"]
    assert (a.models, a.weight, a.instance_id) == (("Qwen/Qwen3-8B", "lora-1"), 2.5, "vllm-a")
    assert a.labels == {"role": "decode", "node": "n1", "zone": "z1"}
    assert (a.role, b.role) == ("decode", "both")
    assert (b.models, b.weight, b.instance_id) == (("m",), 1.0, "10.0.0.2:8000")
    alone = {one.id: one for one in await discovery(where, service="", selector="app=vllm", models=["z"]).endpoints()}
    assert (alone["a"].models, alone["b"].models) == (("Qwen/Qwen3-8B", "lora-1"), ("z",))


async def test_pods_without_address_or_already_over_are_none(api: Api) -> None:
    """Neither is one that was never ready, or is being deleted."""
    fake, where = api
    fake.put(PODS, pod("pending", ""))
    fake.put(PODS, pod("starting", "10.0.0.1", ready=False))
    fake.put(PODS, pod("ending", "10.0.0.2", deleted=True))
    over = pod("over", "10.0.0.3")
    over["status"]["phase"] = "Succeeded"
    fake.put(PODS, over)
    assert await discovery(where, service="", selector="app=vllm").endpoints() == ()


@pytest.mark.parametrize("way", ["slices", "pods"])
async def test_ready_then_not_then_again_then_ending_then_gone(follow: Follow, api: Api, way: str) -> None:
    """Not ready: it takes nothing new and is not forgotten. Ending: it finishes what it has, and then it is."""
    fake, where = api

    def say(name: str, address: str, *, ready: bool = True, ending: bool = False) -> None:
        if way == "pods":
            fake.put(PODS, pod(name, address, ready=ready, deleted=ending))
        else:
            conditions = {"ready": ready and not ending, "serving": ready, "terminating": ending}
            fake.put(SLICES, slice_of(f"s-{name}", member(name, address, **conditions)))

    say("a", "10.0.0.1")
    say("b", "10.0.0.2", ready=False)
    async with follow(**(pods(where) if way == "pods" else service(where))) as one:
        assert one.conditions == {"a": "up"}
        await until(lambda: fake.watching)
        say("b", "10.0.0.2")
        await until(lambda: one.conditions == {"a": "up", "b": "up"})
        held, b = one.picked(preferred="b"), one.endpoint("b")
        say("b", "10.0.0.2", ready=False)
        await until(lambda: one.conditions["b"] == "not_ready")
        assert one.ids() == {"a"}
        say("b", "10.0.0.2")
        await until(lambda: one.conditions["b"] == "up")
        assert one.endpoint("b") is b
        say("b", "10.0.0.2", ending=True)
        await until(lambda: one.conditions == {"a": "up"})
        assert [str(each.id) for each in one.cluster.members.departures.endpoints] == ["b"]
        assert b.load.in_flight == 1
        if way == "pods":
            fake.delete(PODS, "b")
        else:
            fake.delete(SLICES, "s-b")
        say("c", "10.0.0.3")
        await until(lambda: "c" in one.conditions)
        assert [str(each.id) for each in one.cluster.members.departures.endpoints] == ["b"]
        held.settle(AttemptOutcome.SUCCESS, one.clock())
        assert not one.cluster.members.departures.endpoints
        assert one.series("b") == []


async def test_a_pod_that_is_gone_without_a_warning_is_gone(follow: Follow, api: Api) -> None:
    """Deleted by force, with its node: the last word of it has it ready still."""
    fake, where = api
    for name, address in (("a", "10.0.0.1"), ("b", "10.0.0.2")):
        fake.put(PODS, pod(name, address))
    async with follow(**pods(where)) as one:
        assert one.conditions == {"a": "up", "b": "up"}
        await until(lambda: fake.watching)
        fake.delete(PODS, "b")
        await until(lambda: one.conditions == {"a": "up"})


async def test_all_of_them_may_go(follow: Follow, api: Api) -> None:
    """A service scaled to zero has no endpoint; that is an answer like another."""
    fake, where = api
    fake.put(SLICES, slice_of("s1", member("a", "10.0.0.1")))
    async with follow(**service(where)) as one:
        await until(lambda: fake.watching)
        fake.put(SLICES, slice_of("s1"))
        await until(lambda: not one.conditions)
        assert one.failing == 0


async def test_where_none_is_ready_none_is_asked(follow: Follow, api: Api) -> None:
    """No panic: what Kubernetes calls not ready would not answer."""
    fake, where = api
    fake.put(SLICES, slice_of("s1", member("a", "10.0.0.1")))
    async with follow(**service(where)) as one:
        await until(lambda: fake.watching)
        fake.put(SLICES, slice_of("s1", member("a", "10.0.0.1", ready=False, serving=False)))
        await until(lambda: one.conditions == {"a": "not_ready"})
        assert one.pick() is None


async def test_conditions_that_are_not_given() -> None:
    """Mean ready: those who write slices by hand leave them out. A service that publishes what is not ready does not
    make it ready."""
    fake = FakeKubernetes()
    bare = {"addresses": ["10.0.0.1"]}
    fake.put(SLICES, slice_of("s1", bare, member("b", "10.0.0.2", ready=True, serving=False)))
    async with serve(fake) as url:
        assert [one.id for one in await discovery({"url": url}).endpoints()] == ["vllm@10.0.0.1"]


async def test_a_dropped_watch_goes_on_from_where_it_was(follow: Follow, api: Api) -> None:
    """Half a line at its end is left out; nothing is listed again, and nothing is missed."""
    fake, where = api
    async with follow(**service(where)) as one:
        await until(lambda: fake.watching)
        fake.put(SLICES, slice_of("s1", member("a", "10.0.0.1")))
        await until(lambda: one.conditions == {"a": "up"})
        fake.drop(half=b'{"type":"MODIFIED","obj')
        await until(lambda: len(fake.watches) == 2 and fake.watching)
        fake.put(SLICES, slice_of("s1", member("a", "10.0.0.1"), member("b", "10.0.0.2")))
        await until(lambda: len(one.conditions) == 2)
        assert len(fake.lists) == 1
        assert [query["resourceVersion"] for query in fake.watches] == ["100", "101"]
        assert one.failing == 0


async def test_bookmarks_carry_the_version_on(follow: Follow, api: Api) -> None:
    """After a quiet hour a watch begins where the server is, not where the last change was."""
    fake, where = api
    async with follow(**service(where)):
        await until(lambda: fake.watching)
        fake.put(SLICES, slice_of("other", service="other"))
        fake.version += 500
        fake.bookmark()
        fake.compact()
        fake.drop()
        await until(lambda: len(fake.watches) == 2 and fake.watching)
        assert fake.watches[1]["resourceVersion"] == str(fake.version)
        assert fake.watches[0]["allowWatchBookmarks"] == "true"
        assert len(fake.lists) == 1


@pytest.mark.parametrize("way", ["within the stream", "at its beginning"])
async def test_a_version_that_is_gone_is_listed_again(follow: Follow, api: Api, way: str) -> None:
    """410 is no trouble; what went meanwhile goes."""
    fake, where = api
    fake.put(SLICES, slice_of("s1", member("a", "10.0.0.1")))
    async with follow(**service(where)) as one:
        await until(lambda: fake.watching)
        fake._objects[SLICES].clear()  # unheard of by the watch
        fake.version += 10
        fake._objects[SLICES]["s2"] = slice_of("s2", member("b", "10.0.0.2"))
        if way == "within the stream":
            fake.say_gone()
        else:
            fake.compact()
            fake.drop()
        await until(lambda: one.conditions == {"b": "up"})
        await until(lambda: fake.watching == 1)
        assert len(fake.lists) == 2
        assert one.failing == 0


async def test_an_api_server_that_goes_away_takes_no_endpoint_along(
    follow: Follow, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Its last answer stands; this is logged once, with pauses that grow between the attempts, and taken back."""
    fake = FakeKubernetes()
    fake.put(SLICES, slice_of("s1", member("a", "10.0.0.1")))
    async with serve(fake) as url, follow(**service({"url": url})) as one:
        await until(lambda: fake.watching)
        fake.refuse = (500, "etcdserver: request timed out")
        with caplog.at_level(logging.INFO, logger="kvproxy"):
            fake.drop()
            await until(lambda: len(one.pauses.asked) > 8)
            assert one.failing == 1
            assert one.conditions == {"a": "up"}
            assert one.cluster.poller.complaints == {
                "kubernetes": "the Kubernetes API /apis/discovery.k8s.io/v1/namespaces/models/endpointslices: 500 "
                "etcdserver: request timed out"
            }
            fake.refuse = None
            await until(lambda: one.failing == 0)
        said = [record.message for record in caplog.records if "discovery" in record.message]
        assert len(said) == 2
        assert said[0].endswith("etcdserver: request timed out; its last endpoints stay")
        assert said[1] == "discovery c/kubernetes answers again"
        assert max(one.pauses.asked[:3]) <= 2
        assert max(one.pauses.asked) > 2


async def test_a_server_that_ends_every_watch_at_once_is_not_hammered(follow: Follow, api: Api) -> None:
    """The pauses grow though each begins well."""
    fake, where = api
    fake.raw_watch = b"\n"
    async with follow(**service(where)) as one:
        await until(lambda: len(one.pauses.asked) > 20)
        assert 3 < max(one.pauses.asked) <= 4
        assert one.failing == 0


async def test_an_account_without_rights_says_what_it_needs(follow: Follow, api: Api) -> None:
    """Verbs, resource and namespace, and the server's own words."""
    fake, where = api
    fake.refuse = (403, _FORBIDDEN)
    async with follow(**pods(where)) as one:
        assert one.cluster.poller.complaints["kubernetes"] == (
            "the Kubernetes API does not let this account get, list and watch pods in namespace models "
            f"(403: {_FORBIDDEN})"
        )


async def test_the_token_is_read_again_when_it_is_replaced(follow: Follow, api: Api, tmp_path: Path) -> None:
    """Kubernetes replaces it every hour; a wrong one is said without being shown."""
    fake, where = api
    token = tmp_path / "token"
    token.write_text("one\n")
    fake.token = "one"
    fake.put(SLICES, slice_of("s1", member("a", "10.0.0.1")))
    async with follow(**service({**where, "token_file": str(token)})) as one:
        await until(lambda: fake.watching)
        fake.token = "two"
        fake.drop()
        await until(lambda: one.failing == 1)
        assert "takes no such token (401: Unauthorized)" in one.cluster.poller.complaints["kubernetes"]
        assert "one" not in one.cluster.poller.complaints["kubernetes"].split()
        (tmp_path / "next").write_text("two\n")
        (tmp_path / "next").replace(token)
        await until(lambda: one.failing == 0)
    assert {"one", "two"} == set(fake.tokens)


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (b"<html>", "not JSON"),
        (b'{"metadata":{},"items":[{"metadata":{"name":7}}]}', "Expected `str"),
        (b'{"kind":"Status","status":"Failure","metadata":{},"message":"no"}', "missing required field `items`"),
        (b'{"metadata":{},"items":null}', "Expected `array`"),
        (b'{"metadata":{"continue":"again"},"items":[]}', "the list does not end after 400 pages"),
        (b'{"metadata":{},"items":[{}]}', "missing required field"),
        (b'{"metadata":{},"items":[{"metadata":{}}]}', "one without a name"),
        (b'{"items":' + b"[" * 300_000, "more than 100000 objects and lists"),
        (b" " * (9 << 20), "answer over 8388608 bytes"),
    ],
)
async def test_absurd_lists_change_nothing(follow: Follow, api: Api, raw: bytes, complaint: str) -> None:
    """They are refused with the place where they are wrong."""
    fake, where = api
    fake.raw_list = raw
    async with follow(**service(where)) as one:
        await until(lambda: complaint in one.cluster.poller.complaints["kubernetes"])  # a slow list is tried again
        assert not one.conditions


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"no json at all\n", "an invalid event"),
        (b'{"type":"ADDED"}\n', "an invalid event"),
        (b'{"type":"ADDED","object":[]}\n', "Expected `object`"),
        (b'{"type":"ERROR","object":{"code":500,"message":"boom"}}\n', "ended with 500: boom"),
        (b"x" * (5 << 20), "a line over 4194304 bytes"),
    ],
)
async def test_absurd_events_are_said_and_the_list_is_read_again(
    follow: Follow, api: Api, line: bytes, complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Known endpoints stay."""
    fake, where = api
    fake.put(SLICES, slice_of("s1", member("a", "10.0.0.1")))
    async with follow(**service(where)) as one:
        await until(lambda: fake.watching)
        fake.send(line)
        await until(lambda: complaint in caplog.text)
        await until(lambda: len(fake.watches) == 2 and one.failing == 0)
        assert one.conditions == {"a": "up"}


async def test_more_objects_than_can_be_meant_are_refused(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """A selector that fits everything must not fill the memory."""
    fake, where = api
    monkeypatch.setattr("kvproxy.cluster.sources.watched.MAX_ITEMS", 3)
    for number in range(4):
        fake.put(PODS, pod(f"p{number}", f"10.0.0.{number}"))
    with pytest.raises(ClientError, match="more than 3 pods in namespace models: narrow"):
        await discovery(where, service="", selector="app=vllm").endpoints()


async def test_a_watch_brings_no_more_than_a_list_may(
    follow: Follow, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one grows beyond the bound that the other has."""
    fake, where = api
    monkeypatch.setattr("kvproxy.cluster.sources.watched.MAX_ITEMS", 3)
    async with follow(**pods(where)) as one:
        await until(lambda: fake.watching)
        for number in range(5):
            fake.put(PODS, pod(f"p{number}", f"10.0.0.{number}"))
        await until(lambda: one.failing == 1)
        assert len(one.conditions) <= 3


async def test_outside_of_a_cluster_it_says_what_is_missing(tmp_path: Path) -> None:
    """Neither the address nor the namespace is guessed."""
    settings = KubernetesDiscoverySettings(service="vllm", namespace="models")
    with pytest.raises(DiscoveryError, match=r"KUBERNETES_SERVICE_HOST is not set.*`api.url`"):
        await KubernetesDiscovery(settings, env={}, clock=FakeClock(), rng=random.Random(1)).endpoints()
    with pytest.raises(DiscoveryError, match="set `namespace`"):
        await discovery({"url": "http://127.0.0.1:1"}, namespace="").endpoints()
    (tmp_path / "empty").write_text("\n")
    for token in ("/nowhere", str(tmp_path / "empty")):
        with pytest.raises(DiscoveryError, match="credentials for the Kubernetes API cannot be read"):
            await discovery({"url": "http://127.0.0.1:1", "token_file": token}).endpoints()


def test_in_a_cluster_everything_is_there(tmp_path: Path) -> None:
    """Address from the environment, IPv6 in brackets; token and authority from the service account."""
    env = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    access = KubernetesAccess.in_cluster(env, folder=tmp_path)
    assert access == KubernetesAccess("https://[fd00::1]:6443", f"{tmp_path}/token", f"{tmp_path}/ca.crt")


async def test_a_thousand_pods_hold_nothing_up(api: Api) -> None:
    """A rolling update changes one at a time; each change costs little, however many there are."""
    fake, where = api
    fake.put(SLICES, slice_of("s1", *(member(f"p{i}", f"10.0.{i // 256}.{i % 256}") for i in range(1000))))
    source = discovery(where)
    assert len(await source.endpoints()) == 1000
    answers: list[int] = []

    async def hear(endpoints: Sequence[EndpointSettings] | None, _: str) -> None:
        answers.append(len(endpoints or ()))

    task = asyncio.create_task(source.follow(hear))
    await until(lambda: fake.watching)
    for i in range(50):
        fake.put(SLICES, slice_of(f"t{i}", member(f"q{i}", f"10.9.0.{i}")))
    await until(lambda: answers and answers[-1] == 1050)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_change_makes_what_changed(api: Api) -> None:
    """Of a rewritten slice the endpoints that are as before are the same objects, ready or not, and so is what other
    slices name."""
    fake, where = api
    members = [member(f"p{i}", f"10.0.0.{i}") for i in range(3)]
    fake.put(SLICES, slice_of("s1", *members))
    fake.put(SLICES, slice_of("s2", member("q", "10.0.1.1")))
    fake.put(SLICES, slice_of("s6", member("p1", "fd00::1"), member("q", "fd00::2"), family="IPv6"))
    source = discovery(where)
    before = {one.id: one for one in await source.endpoints()}
    fake.put(SLICES, slice_of("s1", member("p0", "10.0.0.99"), members[1], member("p2", "10.0.0.2", serving=False)))
    after = {one.id: one for one in await source.endpoints()}
    assert after["p0"].url == "http://10.0.0.99:8000"
    assert (after["p1"] is before["p1"], after["q"] is before["q"], after["p2"].ready) == (True, True, False)
    fake.put(SLICES, slice_of("s3", member("r", "10.0.2.1")))
    again = {one.id: one for one in await source.endpoints()}
    assert all(again[name] is after[name] for name in after)


async def test_an_api_over_tls(tmp_path: Path) -> None:
    """The pod's way: verified with the authority that the service account has, and with no other."""
    fake = FakeKubernetes()
    fake.token = "t"
    fake.put(SLICES, slice_of("s1", member("a", "10.0.0.1")))
    made = make_certificate(tmp_path, "127.0.0.1")
    (tmp_path / "token").write_text("t")
    made.certificate.rename(tmp_path / "ca.crt")
    tls = ListenerTls(certificate=str(tmp_path / "ca.crt"), private_key=str(made.private_key))
    async with serve(fake, tls=tls) as url:
        env = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": url.rpartition(":")[2]}
        access = KubernetesAccess.in_cluster(env, folder=tmp_path)
        assert access.url == url
        where = {"url": url, "token_file": access.token_file, "ca_file": access.ca_file}
        assert [one.id for one in await discovery(where).endpoints()] == ["a"]
        with pytest.raises(ClientError, match=r"ConnectError: \[SSL: CERTIFICATE_VERIFY_FAILED\].*self-signed"):
            await discovery({"url": url, "token_file": access.token_file}).endpoints()
    assert set(fake.tokens) == {"t"}


async def test_an_api_whose_tls_is_refused_is_followed_once_it_is_right(follow: Follow, tmp_path: Path) -> None:
    """The complaint has OpenSSL's reason; the authority's file is read again at each attempt."""
    fake = FakeKubernetes()
    fake.put(SLICES, slice_of("s1", member("a", "10.0.0.1")))
    (tmp_path / "other").mkdir()
    made = make_certificate(tmp_path, "127.0.0.1")
    authority = make_certificate(tmp_path / "other", "127.0.0.1").certificate
    tls = ListenerTls(certificate=str(made.certificate), private_key=str(made.private_key))
    async with serve(fake, tls=tls) as url, follow(**service({"url": url, "ca_file": str(authority)})) as one:
        await until(lambda: one.cluster.poller.complaints)
        assert "ConnectError: [SSL: CERTIFICATE_VERIFY_FAILED]" in one.cluster.poller.complaints["kubernetes"]
        shutil.copy(made.certificate, authority)
        await until(lambda: one.conditions == {"a": "up"})


@pytest.mark.parametrize("bad", [{}, {"metadata": {}}, {"metadata": {"name": 7}}, 7, None, "pod", [[]]])
async def test_an_object_without_a_name_stops_no_other(follow: Follow, api: Api, bad: object) -> None:
    """No API server sends one; what stands in for one in tests of others may."""
    fake, where = api
    items = [bad, pod("a", "10.0.0.1"), bad]
    fake.raw_list = json.dumps({"metadata": {"resourceVersion": "100"}, "items": items}).encode()
    async with follow(**pods(where)) as one:
        assert one.urls == {"a": "http://10.0.0.1:8000"}
        (left_out,) = one.cluster.poller.left_out["kubernetes"]
        assert left_out.name == "pods without a name"
        await until(lambda: fake.watching)
        fake.send(json.dumps({"type": "ADDED", "object": bad}).encode() + b"\n")
        fake.raw_list = None
        fake.put(PODS, pod("b", "10.0.0.2"))
        await until(lambda: set(one.urls) == {"b"})


async def test_credentials_that_hang_are_given_up_and_read_again(
    follow: Follow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a dead mount, for which a pipe stands here: no thread of others is taken, and what comes back is used."""
    monkeypatch.setattr("kvproxy.features.kubernetes.client.FILES_S", 0.05)
    fake = FakeKubernetes()
    fake.put(SLICES, slice_of("s1", member("a", "10.0.0.1")))
    made = make_certificate(tmp_path, "127.0.0.1")
    authority = tmp_path / "ca.crt"
    os.mkfifo(authority)
    tls = ListenerTls(certificate=str(made.certificate), private_key=str(made.private_key))
    async with serve(fake, tls=tls) as url, follow(**service({"url": url, "ca_file": str(authority)})) as one:
        complaints = one.cluster.poller.complaints
        await until(lambda: "cannot be read: no answer within 0.05 s" in complaints["kubernetes"])
        await until(lambda: "an earlier call still hangs" in complaints["kubernetes"])
        with authority.open("wb") as pipe:
            authority.unlink()
            shutil.copy(made.certificate, authority)
            pipe.write(made.certificate.read_bytes())
        await until(lambda: one.conditions == {"a": "up"})


async def test_a_server_that_never_answers(follow: Follow, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is waited for within a bound, and asked again."""
    fake, where = api
    monkeypatch.setattr("kvproxy.features.kubernetes.client._LIST_TIMEOUT_S", 0.5)
    fake.hang = True
    async with follow(**service(where)) as one:
        assert "no answer within 0.5 s" in one.cluster.poller.complaints["kubernetes"]
        fake.hang = False
        fake.put(SLICES, slice_of("s1", member("a", "10.0.0.1")))
        await until(lambda: one.conditions == {"a": "up"})


async def test_a_watch_that_falls_silent_is_begun_anew(
    follow: Follow, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other end may have vanished; that is no trouble."""
    fake, where = api
    monkeypatch.setattr("kvproxy.features.kubernetes.client._IDLE_S", 0.05)
    async with follow(**service(where)) as one:
        await until(lambda: len(fake.watches) >= 3 and one.failing == 0)
        assert len(fake.lists) == 1


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (pod("bad", "user:pw@127.0.0.1"), "pod bad: its address is none"),
        (pod("bad", "::zz::"), "pod bad: its address is none"),
        (pod("bad", "not an ip"), "pod bad: its address is none"),
        (pod("bad", "10.0.0.9", ports=(("http", 99999),)), "pod bad: not a valid URL"),
        (pod("bad", "10.0.0.9", ports=(("http", -1),)), "pod bad: not a valid URL"),
        (pod("bad name!", "10.0.0.9"), "pod bad name!: id: String should match pattern"),
        (pod("b" * 600, "10.0.0.9"), f"pod {'b' * 296}: id: String should have at most 512 characters"),
        ({"metadata": {"name": "bad", "labels": {"app": "vllm"}}, "spec": 7}, "pods bad: pods: Expected `object`"),
    ],
)
async def test_one_odd_pod_stops_no_other(follow: Follow, api: Api, bad: dict[str, Any], why: str) -> None:
    """Whether it is there at the start or comes later; it is named, and its address is not quoted."""
    fake, where = api
    fake.put(PODS, bad)
    fake.put(PODS, pod("a" * 253, "10.0.0.1"))
    async with follow(**pods(where)) as one:
        assert list(one.urls.values()) == ["http://10.0.0.1:8000"]
        await until(lambda: fake.watching)
        fake.put(PODS, pod("later", "10.0.0.2"))
        fake.put(PODS, bad)
        await until(lambda: len(one.urls) == 2)
        (left_out,) = one.cluster.poller.left_out["kubernetes"]
        assert str(left_out).startswith(why)
        assert "pw" not in str(left_out)
        assert one.sample("kvproxy_discovery_left_out", cluster="c", source="kubernetes") == 1
        fake.delete(PODS, bad["metadata"]["name"])
        await until(lambda: not one.cluster.poller.left_out)
