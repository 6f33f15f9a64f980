"""Endpoints as sources name them: the good ones, and those that are left out with the reason."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pydantic import ValidationError

from kvproxy.base.background_task import in_slices
from kvproxy.base.errors import BadResponse
from kvproxy.base.settings.addresses import url_fault
from kvproxy.cluster.settings import EndpointSettings
from kvproxy.cluster.sources.watched import check_count

#: Fields by which an endpoint has the proxy read a file or send a credential.
CREDENTIALS = ("api_key", "ca_file", "cert_file", "key_file")
_LONGEST_REASON = 300
#: Endpoints that come, change or leave in one turn of the event loop, some 0.2 ms each.
AT_ONCE = 5

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An object of a source that cannot be an endpoint: how the source names it, and why."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name[:_LONGEST_REASON]}: {self.why[:_LONGEST_REASON]}"


#: Complete answer of a source, one entry for each of its objects.
Answer = Sequence[EndpointSettings | LeftOut]
#: The reason why this deployment cannot use an endpoint; "" if it can.
Refuse = Callable[[EndpointSettings], str]


def read_entry(name: str, fields: object, *, credentials: bool) -> EndpointSettings | LeftOut:
    """Return the endpoint of these fields, or why there is none. Without `credentials` it may name no file and no
    credential of its own: who writes to the source would read the proxy's files by it."""
    if not isinstance(fields, Mapping):
        return LeftOut(name, "expected an object with the fields of an endpoint")
    named = [] if credentials else [key for key in CREDENTIALS if fields.get(key)]
    if named:
        return LeftOut(name, f"names `{named[0]}`, which this source may not: allow it by `credentials: true` there")
    try:
        return EndpointSettings.model_validate(dict(fields))
    except ValidationError as error:
        return LeftOut(name, explain(error))
    except TypeError:
        return LeftOut(name, "the names of its fields are no text")


def explain(error: ValidationError) -> str:
    """Describe the first faults, without the values, which may be secrets."""
    faults = error.errors(include_input=False)[:3]
    return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in faults)


async def split_answer(
    answer: Answer, *, known: Sequence[EndpointSettings] = (), refuse: Refuse
) -> tuple[tuple[EndpointSettings, ...], tuple[LeftOut, ...]]:
    """Separate the endpoints that can be used from what is left out. One that equals a `known` one, which was found
    good before, is that object. BadResponse for more than are kept."""
    check_count(len(answer), "endpoints from one source")
    found_good = {one.id: one for one in known}
    good: dict[str, EndpointSettings] = {}
    bad: list[LeftOut] = []

    async for one in in_slices(answer):
        if isinstance(one, LeftOut):
            bad.append(one)
            continue
        before = found_good.get(one.id)
        if one.id in good:
            bad.append(LeftOut(one.id, "another endpoint of this source has the same id"))
        elif before is not None and (before is one or before == one):
            good[one.id] = before
        elif fault := url_fault(one.url) or refuse(one):
            bad.append(LeftOut(one.id, fault))
        else:
            good[one.id] = one
    return tuple(good.values()), tuple(bad)


def all_bad(bad: Sequence[LeftOut]) -> BadResponse:
    """Return the error of an answer without a single good endpoint."""
    return BadResponse(f"no endpoint of it can be used: {bad[0]}" + (f" (and {len(bad) - 1} more)" if bad[1:] else ""))


class Discovery(Protocol):
    """A source that answers with all endpoints at present and with those left out, or raises DiscoveryError or
    OSError."""

    async def endpoints(self) -> Answer: ...


#: Takes all current endpoints (None: not known yet), and an error ("": none).
Tell = Callable[[Answer | None, str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Source:
    """Discovery with its name. It is polled, or reports each change of its answer by itself: then `follow` runs until
    it is cancelled, and there may be no endpoint at all."""

    name: str
    discovery: Discovery
    #: Between two polls, and before a watched source that failed at once is tried again.
    interval_s: float = 5.0
    follow: Callable[[Tell], Awaitable[None]] | None = None
