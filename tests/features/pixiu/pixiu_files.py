"""Pixiu configurations in the shapes its documentation and its samples have, in our own words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]

#: The shape of the documentation: listeners at the top, no clusters.
DOCUMENTATION = """
listeners:
  - name: net/http
    protocol_type: HTTP
    address: {socket_address: {address: 0.0.0.0, port: 8888}}
    filter_chains:
      filters:
        - name: dgp.filter.httpconnectionmanager
          config:
            route_config:
              routes:
                - match: {prefix: /}
                  route: {cluster: vllm_cluster}
            http_filters:
              - name: dgp.filter.ai.kvcache
                config:
                  enabled: true
                  vllm_endpoint: "http://127.0.0.1:8000"
                  lmcache_endpoint: "http://127.0.0.1:9000"
                  default_model: demo
                  request_timeout: "2s"
                  lookup_routing_timeout: "50ms"
                  hot_window: "5m"
                  hot_max_records: 300
                  token_cache: {enabled: true, max_size: 1024, ttl: "10m"}
                  cache_strategy:
                    enable_compression: true
                    enable_pinning: true
                    enable_eviction: true
                    load_threshold: 0.7
                    memory_threshold: 0.85
                    hot_content_threshold: 10
                    pin_instance_id: vllm-instance-1
                    pin_location: LocalCPUBackend
                    compress_instance_id: vllm-instance-1
                    compress_location: LocalCPUBackend
                    compress_method: zstd
                    evict_instance_id: vllm-instance-1
                  retry: {max_attempts: 3, base_backoff: "100ms", max_backoff: "2s"}
                  circuit_breaker: {failure_threshold: 5, recovery_timeout: "10s", half_open_max_calls: 2}
              - name: dgp.filter.llm.proxy
"""

#: The shape of the real-engine sample: everything that differs between machines comes from the environment.
PLACEHOLDERS = """
static_resources:
  listeners:
    - name: real
      protocol_type: HTTP
      address:
        socket_address:
          address: 0.0.0.0
          port: ${LISTEN_PORT}
      filter_chains:
        filters:
          - name: dgp.filter.httpconnectionmanager
            config:
              route_config:
                routes:
                  - match: {prefix: /v1/chat/completions}
                    route: {cluster: real, cluster_not_found_response_code: 505}
              http_filters:
                - name: dgp.filter.ai.kvcache
                  config:
                    enabled: true
                    vllm_endpoint: "${VLLM}"
                    lmcache_endpoint: "${LMCACHE}"
                    default_model: "${MODEL}"
                    request_timeout: 5s
                    lookup_routing_timeout: 150ms
                    token_cache: {enabled: true, max_size: 20000, ttl: 20m}
                    cache_strategy:
                      enable_pinning: true
                      memory_threshold: ${MEMORY}
                      hot_content_threshold: ${HOT}
                      load_threshold: ${LOAD}
                      pin_instance_id: "${A_ID}"
                - name: dgp.filter.llm.proxy
                  config:
                    timeout: 90s
                    maxIdleConns: 200
                    maxIdleConnsPerHost: 200
                    maxConnsPerHost: 200
                    scheme: "${SCHEME}"
      config: {idle_timeout: 120s, read_timeout: 120s, write_timeout: 120s}
  clusters:
    - name: real
      lb_policy: round_robin
      endpoints:
        - id: "${A_ID}"
          socket_address:
            address: "${A_HOST}"
            port: ${A_PORT}
        - id: "${B_ID}"
          socket_address:
            address: "${B_HOST}"
            port: ${B_PORT}
  shutdown_config: {timeout: 30s, step_timeout: 5s, reject_policy: immediacy}
metric:
  enable: true
  prometheus_port: ${METRICS_PORT}
"""

ENVIRONMENT = {
    "LISTEN_PORT": "18889", "VLLM": "http://127.0.0.1:8000", "LMCACHE": "http://127.0.0.1:9000", "MODEL": "tiny",
    "MEMORY": "0.85", "HOT": "2", "LOAD": "0.7", "SCHEME": "http", "A_ID": "engine-1", "A_HOST": "127.0.0.1",
    "A_PORT": "8000", "B_ID": "engine-2", "B_HOST": "127.0.0.1", "B_PORT": "8001", "METRICS_PORT": "2223",
}  # fmt: skip


def sample() -> dict[str, Any]:
    """samples/pixiu-mock/config.yaml as data, to be changed at will."""
    data: dict[str, Any] = yaml.safe_load((ROOT / "samples" / "pixiu-mock" / "config.yaml").read_text())
    return data


def small(*, http_filters: list[Any] | None = None, cluster: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the least that loads, with the given filters before the proxy and the given cluster settings."""
    manager = {
        "route_config": {"routes": [{"match": {"prefix": "/"}, "route": {"cluster": "c"}}]},
        "http_filters": [*(http_filters or []), {"name": "dgp.filter.llm.proxy"}],
    }
    endpoint = {"id": "a", "socket_address": {"address": "127.0.0.1", "port": 8000}}
    return {
        "static_resources": {
            "listeners": [
                {
                    "address": {"socket_address": {"address": "127.0.0.1", "port": 8888}},
                    "filter_chains": {"filters": [{"name": "dgp.filter.httpconnectionmanager", "config": manager}]},
                }
            ],
            "clusters": [{"name": "c", "endpoints": [endpoint], **(cluster or {})}],
        }
    }


def manager_of(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the connection manager's settings of `small()` or `sample()`."""
    filters = raw["static_resources"]["listeners"][0]["filter_chains"]["filters"]
    settings: dict[str, Any] = filters[0]["config"]
    return settings
