"""Pods and EndpointSlices as endpoints. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from kvproxy.base.settings.addresses import is_address, url_fault
from kvproxy.cluster.settings import EndpointRole, EndpointSettings
from kvproxy.cluster.sources.entries import LeftOut, read_entry
from kvproxy.features.kubernetes.client import KubernetesObject, Metadata
from kvproxy.features.kubernetes.settings import KubernetesDiscoverySettings

#: Label with the service of a slice.
SERVICE_LABEL = "kubernetes.io/service-name"

#: Prefix of labels and annotations for kvproxy; an annotation takes precedence over a label.
PREFIX = "kvproxy.io/"


class _Port(msgspec.Struct, frozen=True):
    """Of a slice, or of a container."""

    name: str | None = None
    port: int | None = None
    number: int | None = msgspec.field(name="containerPort", default=None)


class _Conditions(msgspec.Struct, frozen=True):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class _Target(msgspec.Struct, frozen=True):
    kind: str = ""
    name: str = ""


class _SliceEndpoint(msgspec.Struct, frozen=True, rename="camel"):
    addresses: list[str] = []
    conditions: _Conditions = _Conditions()
    target_ref: _Target | None = None
    node_name: str | None = None
    zone: str | None = None


class EndpointSlice(KubernetesObject, frozen=True, rename="camel"):
    """Some of the addresses behind a service."""

    address_type: str = "IPv4"
    endpoints: list[_SliceEndpoint] | None = None
    ports: list[_Port] | None = None


class _Condition(msgspec.Struct, frozen=True):
    type: str
    status: str


class _PodStatus(msgspec.Struct, frozen=True, rename="camel"):
    phase: str = ""
    pod_ip: str = msgspec.field(name="podIP", default="")
    conditions: list[_Condition] | None = None


class _Container(msgspec.Struct, frozen=True):
    ports: list[_Port] | None = None


class _PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    containers: list[_Container] = []
    node_name: str = ""


class Pod(KubernetesObject, frozen=True):
    """A pod, as far as discovery reads it."""

    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()


@dataclass(frozen=True, slots=True)
class Found:
    """An endpoint, whether it takes requests, and whether it is about to go for good."""

    endpoint: EndpointSettings
    ready: bool
    leaving: bool


class MadeEndpoints:
    """Endpoints that were made the last time, for as long as what they are made of is the same: a change among
    thousands costs what changed."""

    def __init__(self, settings: KubernetesDiscoverySettings) -> None:
        self.settings = settings
        self._last: dict[tuple[str, str], tuple[object, EndpointSettings | LeftOut]] = {}
        self._now: dict[tuple[str, str], tuple[object, EndpointSettings | LeftOut]] = {}

    def begin(self) -> None:
        """Another look at all objects begins."""
        self._last = self._now
        self._now = {}

    def endpoint(
        self, name: str, address: str, port: int, about: list[Metadata], **more: str
    ) -> EndpointSettings | LeftOut:
        """Build the endpoint; of several objects about it the first one takes precedence."""
        made_of = (port, [(one.labels, one.annotations) for one in about], more)
        return self._take(
            (name, address), made_of, lambda: _endpoint(name, address, port, about, self.settings, **more)
        )

    def unready(self, endpoint: EndpointSettings) -> EndpointSettings:
        """Return the same, which takes no requests."""
        unready = self._take((endpoint.id, ""), endpoint, lambda: endpoint.model_copy(update={"ready": False}))
        assert isinstance(unready, EndpointSettings)
        return unready

    def _take(
        self, key: tuple[str, str], made_of: object, make: Callable[[], EndpointSettings | LeftOut]
    ) -> EndpointSettings | LeftOut:
        last = self._last.get(key) or self._now.get(key)
        made = last if last is not None and last[0] == made_of else (made_of, make())
        self._now[key] = made
        return made[1]


def endpoints_of_slices(
    slices: Iterable[EndpointSlice], pods: Mapping[str, Pod], made: MadeEndpoints
) -> tuple[dict[str, Found], list[LeftOut]]:
    """Of all slices of one service by id, and what is wrong with some. A pod with addresses of both families counts
    once, by IPv4; `pods` show more of those that they name."""
    found: dict[str, Found] = {}
    faults: list[LeftOut] = []
    for one in sorted(slices, key=lambda each: (each.address_type != "IPv4", each.metadata.name)):
        port = _port(((each.name, each.port) for each in one.ports or ()), made.settings.port)
        if isinstance(port, str):
            faults.append(LeftOut(f"slice {one.metadata.name}", port))
            continue
        for endpoint in one.endpoints or ():
            if endpoint.addresses:
                member = _of_slice(endpoint, port, one, pods, made)
                if isinstance(member, LeftOut):
                    faults.append(member)
                    continue
                before = found.get(member.endpoint.id)
                if before is None or (member.ready and not before.ready):
                    found[member.endpoint.id] = member
    return found, faults


def endpoints_of_pods(pods: Iterable[Pod], made: MadeEndpoints) -> tuple[dict[str, Found], list[LeftOut]]:
    """Of all pods that have an address by id, and what is wrong with some."""
    found: dict[str, Found] = {}
    faults: list[LeftOut] = []
    for pod in sorted(pods, key=lambda each: each.metadata.name):
        if not pod.status.pod_ip or pod.status.phase in ("Succeeded", "Failed"):
            continue
        port = _port(_ports_of(pod), made.settings.port)
        if isinstance(port, str):
            faults.append(LeftOut(f"pod {pod.metadata.name}", port))
            continue
        leaving = pod.metadata.deletion_timestamp is not None
        ready = any(one.type == "Ready" and one.status == "True" for one in pod.status.conditions or ())
        endpoint = made.endpoint(pod.metadata.name, pod.status.pod_ip, port, [pod.metadata], node=pod.spec.node_name)
        if isinstance(endpoint, LeftOut):
            faults.append(endpoint)
            continue
        found[endpoint.id] = Found(endpoint, ready and not leaving, leaving)
    return found, faults


def _of_slice(
    endpoint: _SliceEndpoint,
    port: int,
    of: EndpointSlice,
    pods: Mapping[str, Pod],
    made: MadeEndpoints,
) -> Found | LeftOut:
    target = endpoint.target_ref
    conditions = endpoint.conditions
    address = endpoint.addresses[0]
    pod = pods.get(target.name) if target is not None and target.kind in ("", "Pod") else None
    metadata = of.metadata
    about = [metadata] if pod is None else [pod.metadata, metadata]
    name = target.name if target is not None and target.name else f"{made.settings.service}@{address}"
    more = {"node": endpoint.node_name or "", "zone": endpoint.zone or ""}
    # `serving` is the pod's own state; `ready` is always true where a service publishes pods that are not ready, and
    # missing means unknown to the writer of the slice.
    serving = conditions.serving if conditions.serving is not None else conditions.ready is not False
    leaving = bool(conditions.terminating)
    made_of = made.endpoint(name, address, port, about, **more)
    return made_of if isinstance(made_of, LeftOut) else Found(made_of, serving and not leaving, leaving)


def _endpoint(
    name: str, address: str, port: int, about: list[Metadata], settings: KubernetesDiscoverySettings, **more: str
) -> EndpointSettings | LeftOut:
    if not is_address(address):
        return LeftOut(f"pod {name}", "its address is none")  # not quoted: it may hold a password
    said = _said(about)
    host = f"[{address}]" if ":" in address else address
    labels = {key: value for key, value in {**more, "role": said.get("role", "")}.items() if value}
    models = [word.strip() for word in said.get("models", said.get("model", "")).split(",")]
    fields = {
        "id": name,
        "url": f"{settings.scheme}://{host}:{port}",
        "instance_id": said.get("instance-id", f"{host}:{port}"),
        "models": tuple(filter(None, models)) or settings.models,
        "weight": _weight(said.get("weight", "")),
        "server_name": settings.server_name,
        "ca_file": settings.ca_file,
        "cert_file": settings.cert_file,
        "key_file": settings.key_file,
        "labels": labels,
        "role": _role(said.get("role", "")),
    }
    made = read_entry(f"pod {name}", fields, credentials=True)  # its files are the operator's
    fault = "" if isinstance(made, LeftOut) else url_fault(made.url)
    return LeftOut(f"pod {name}", fault) if fault else made


def _said(about: list[Metadata]) -> dict[str, str]:
    """Return the labels and annotations for kvproxy: the first object's before the next one's."""
    said: dict[str, str] = {}
    for metadata in reversed(about):
        for texts in (metadata.labels, metadata.annotations):
            said.update((key[len(PREFIX) :], text) for key, text in (texts or {}).items() if key.startswith(PREFIX))
    return said


def _role(text: str) -> EndpointRole:
    return EndpointRole(text) if text in set(EndpointRole) else EndpointRole.BOTH


def _weight(text: str) -> float:
    """Return a good weight, or 1: a typing error on one pod takes no pod out."""
    try:
        weight = float(text or "1")
    except ValueError:
        return 1.0
    return weight if 0 < weight <= 1000 else 1.0


def _ports_of(pod: Pod) -> Iterator[tuple[str | None, int | None]]:
    for container in pod.spec.containers:
        yield from ((port.name, port.number) for port in container.ports or ())


def _port(offered: Iterable[tuple[str | None, int | None]], wanted: str) -> int | str:
    """Return the number of the port that is wanted, or why there is none."""
    if wanted.isdecimal():
        return int(wanted)
    numbers = [(name or "", number) for name, number in offered if number is not None]
    if not wanted and len(numbers) == 1:
        return numbers[0][1]
    for name, number in numbers:
        if wanted and name == wanted:
            return number
    have = ", ".join(f"{name or 'unnamed'} {number}" for name, number in numbers) or "none"
    return f"no port {wanted!r}, it has {have}" if wanted else f"name one of its ports in `port`: it has {have}"
