"""Tiers below the memory of a replay's engines: how large, how fast, and what comes into them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvproxy.lab.simulator.retention import Eviction, TierSettings


@dataclass(frozen=True, slots=True)
class TierPlan:
    """Host memory and disk below the engines', and a store that they share: sizes in multiples of an engine's memory as
    it is cut to `device`, speeds in bytes a second. A token's KV is that of a model of 32 layers with 8 KV heads of 128
    values in two bytes: 128 KiB. Engines' blocks are written to host memory at once; the disk gets those that host
    memory evicts."""

    device: float = 1.0  # share that is left of an engine's memory
    host: float = 4.0
    gb_per_s: float = 20.0
    disk: float = 0.0
    disk_gb_per_s: float = 5.0
    shared: float = 0.0  # of all engines together
    shared_gb_per_s: float = 2.5
    latency_s: float = 0.001  # of a read
    failing_reads: int = 0  # one of this many host reads fails
    kv_bytes_per_token: int = 131_072

    #: In the text of an option.
    NAMES: ClassVar[Mapping[str, str]] = {
        "device": "device",
        "host": "host",
        "gbps": "gb_per_s",
        "disk": "disk",
        "disk_gbps": "disk_gb_per_s",
        "shared": "shared",
        "shared_gbps": "shared_gb_per_s",
        "latency": "latency_s",
        "failing_reads": "failing_reads",
    }

    @classmethod
    def parse(cls, text: str) -> TierPlan:
        """Of `device=0.25,host=4,gbps=20` and the like. Raises ValueError with what is possible."""
        found: dict[str, float] = {}
        for each in text.split(","):
            name, _, value = each.strip().partition("=")
            try:
                found[cls.NAMES[name]] = int(value) if value.isdecimal() else float(value)
            except (KeyError, ValueError):
                raise ValueError(
                    f"--tiers takes numbers for {', '.join(cls.NAMES)}, as in device=0.25,host=4,gbps=20; not {each!r}"
                ) from None
        plan = cls(**found)  # type: ignore[arg-type]
        plan._check()
        return plan

    def own_tiers(self, capacity_blocks: int, block_size: int, eviction: Eviction) -> tuple[TierSettings, ...]:
        """Of an engine with so many blocks, the nearest first."""
        tiers = []
        if self.host:
            room = self._room(self.host, capacity_blocks)
            read_s = self._read_s(self.gb_per_s, block_size)
            tiers.append(TierSettings("CPU", room, read_s, self.latency_s, self.failing_reads, eviction=eviction))
        if self.disk:
            room = self._room(self.disk, capacity_blocks)
            read_s = self._read_s(self.disk_gb_per_s, block_size)
            tiers.append(TierSettings("DISK", room, read_s, self.latency_s, below=True, eviction=eviction))
        return tuple(tiers)

    def shared_tier(self, capacity_blocks: int, block_size: int, eviction: Eviction) -> TierSettings:
        """Of engines with so many blocks each."""
        room = self._room(self.shared, capacity_blocks)
        read_s = self._read_s(self.shared_gb_per_s, block_size)
        return TierSettings("EXTERNAL", room, read_s, self.latency_s, eviction=eviction)

    def _room(self, multiple: float, capacity_blocks: int) -> int:
        return max(1, round(multiple * capacity_blocks))

    def _read_s(self, gb_per_s: float, block_size: int) -> float:
        return block_size * self.kv_bytes_per_token / 1e9 / gb_per_s

    def _check(self) -> None:
        sizes = (self.host, self.disk, self.shared, self.latency_s)
        speeds = (self.gb_per_s, self.disk_gb_per_s, self.shared_gb_per_s)
        if not 0 < self.device <= 1 or min(*sizes, self.failing_reads) < 0 or min(speeds) <= 0:
            raise ValueError("--tiers: device is a share above 0, sizes are not negative, and speeds are above 0")
        if not isinstance(self.failing_reads, int):
            raise ValueError("--tiers: failing_reads is a whole number")
