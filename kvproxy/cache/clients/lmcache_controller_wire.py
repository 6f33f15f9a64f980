"""Answers of the LMCache controller in every shape its versions (and stand-ins for it) send. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from kvproxy.base.errors import InstanceBusy, NotSupported, Refused, UnknownInstance

_Tokens = Annotated[int, msgspec.Meta(ge=0)]

#: Instances named for one prompt; more than any fleet has.
MAX_HOLDERS = 1024


@dataclass(frozen=True, slots=True)
class Holder:
    """An instance the controller names for a prompt.

    `matched_tokens` is where its last named chunk ends: a hint, not a contiguous prefix, and one holder per chunk only.
    """

    instance_id: str
    location: str  # LocalCPUBackend, LocalDiskBackend, ...
    matched_tokens: int


@dataclass(frozen=True, slots=True)
class ActionResult:
    """Result of an action. Success is `num_tokens > 0`, not the status: a wrong location answers 200 with 0."""

    num_tokens: int | None = None  # None: not reported by this controller (before 0.3.5)
    success: bool | None = None  # only from controllers before 0.3.5
    event_id: str = ""

    @property
    def had_effect(self) -> bool | None:
        """True if the action had an effect; None if the controller does not report it."""
        return self.success if self.num_tokens is None else self.num_tokens > 0


@dataclass(frozen=True, slots=True)
class InstanceKeys:
    """How much of the index belongs to one instance."""

    instance_id: str
    key_count: int
    worker_count: int


@dataclass(frozen=True, slots=True)
class KeyStats:
    """The controller's index in numbers. Empty for long while engines work: hash, heartbeat or chunk size mismatch."""

    total_key_count: int
    total_instance_count: int
    total_worker_count: int
    instances: tuple[InstanceKeys, ...] = ()


class _NumberedPlace(msgspec.Struct):
    location: str = msgspec.field(name="0")
    tokens: _Tokens = msgspec.field(name="1")


class WireLookup(msgspec.Struct):
    """`layout_info` values: `[location, tokens]`, or a stand-in's `{"0": location, "1": tokens}`."""

    layout_info: Annotated[dict[str, tuple[str, _Tokens] | _NumberedPlace], msgspec.Meta(max_length=MAX_HOLDERS)]
    event_id: str = ""

    def read_holders(self) -> tuple[Holder, ...]:
        """Holders in the controller's order (that of the chunks, not of the match length)."""
        return tuple(
            Holder(instance, *place) if isinstance(place, tuple) else Holder(instance, place.location, place.tokens)
            for instance, place in self.layout_info.items()
        )


class WireAction(msgspec.Struct):
    """`{event_id, num_tokens}`; before 0.3.5 `{success}` or `{event_id}` alone."""

    num_tokens: _Tokens | None = None
    success: bool | None = None
    event_id: str = ""

    def read_result(self) -> ActionResult:
        return ActionResult(self.num_tokens, self.success, self.event_id)


def classify_refusal(error: Refused, *, detail: str) -> Refused:
    """Return the controller's 500 as what it means: its texts are the only sign."""
    if error.status < 500:
        return error
    if "current state" in detail:
        return InstanceBusy(str(error), status=error.status)
    if "not supported" in detail or "P2P is not enabled" in detail:
        return NotSupported(str(error), status=error.status)
    if "same across all workers" in detail:
        return UnknownInstance(str(error), status=error.status)
    return error
