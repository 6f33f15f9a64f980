"""Names that other routers give to what kvproxy has: for "did you mean"."""

from __future__ import annotations

#: Name in other routers, letters and digits only: our policy.
POLICY_ALIASES = {
    "rr": "round_robin",
    "roundrobin": "round_robin",
    "leastconn": "least_request",
    "leastconnection": "least_request",
    "leastconnections": "least_request",
    "leastloaded": "least_request",
    "leastload": "least_request",
    "leastrequests": "least_request",
    "leastbusy": "least_request",
    "p2c": "power_of_two",
    "poweroftwochoices": "power_of_two",
    "ringhash": "consistent_hash",
    "maglev": "consistent_hash",
    "hash": "consistent_hash",
    "sticky": "session",
    "stickysession": "session",
    "kvaware": "kv_aware",
    "kvcacheaware": "kv_aware",
    "kv": "kv_aware",
    "precise": "kv_aware",
    "cacheaware": "prefix_affinity",
    "prefixaware": "prefix_affinity",
    "prefixcache": "prefix_affinity",
    "prefix": "prefix_affinity",
}
