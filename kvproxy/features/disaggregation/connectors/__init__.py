"""Ways by which KV goes from one engine to another, by their names in the settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from kvproxy.features.disaggregation.connectors.base import KvConnector
from kvproxy.features.disaggregation.connectors.lmcache import LmcacheConnector
from kvproxy.features.disaggregation.connectors.mooncake import MooncakeConnector
from kvproxy.features.disaggregation.connectors.nixl import NixlConnector
from kvproxy.features.disaggregation.connectors.sglang import SglangConnector
from kvproxy.features.disaggregation.connectors.sidecar import SidecarConnector
from kvproxy.features.disaggregation.settings import Connector

CONNECTORS: Mapping[Connector, Callable[[int, Random], KvConnector]] = {
    Connector.NIXL: NixlConnector,
    Connector.SGLANG: SglangConnector,
    Connector.MOONCAKE: MooncakeConnector,
    Connector.LMCACHE: LmcacheConnector,
    Connector.SIDECAR: SidecarConnector,
}
