"""Connections between simulated engines that read each other's KV."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


class NixlPeer(Protocol):
    """An engine whose memory others read."""

    @property
    def dead(self) -> bool: ...
    def read(self, block: int) -> tuple[int, ...]:
        """Return the prompt whose KV is in a block."""
        ...

    def free(self, request_id: str) -> None:
        """End the hold on a prefill's blocks; what is in them stays until they are taken again."""
        ...


@dataclass(slots=True)
class NixlLinks:
    """Engines by engine id. `s_per_token` is the time of a pull."""

    lease_s: float = 30.0
    s_per_token: float = 0.000_02
    peers: dict[str, NixlPeer] = field(default_factory=dict)
