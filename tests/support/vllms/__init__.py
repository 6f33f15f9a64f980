"""Simulated vLLMs of kinds that only tests need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvproxy.lab.simulator.fleet import KINDS as OFFERED
from tests.support.vllms.hybrid import HybridSettings, HybridVllm
from tests.support.vllms.ranks import RankedSettings, RankedVllm
from tests.support.vllms.scale_out import ScaleOutSettings, ScaleOutVllm

#: For a Fleet: all there are.
KINDS: Mapping[type, Callable[..., Any]] = {
    **OFFERED,
    RankedSettings: RankedVllm,
    ScaleOutSettings: ScaleOutVllm,
    HybridSettings: HybridVllm,
}
