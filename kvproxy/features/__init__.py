"""The list of what ships: a name and a folder each, whose `feature.py` has the feature as `FEATURE`, and whose
`settings.py`, if there is one, has its settings as `SETTINGS`.

Delete a line and its folder, and everything else works as before. The order is that of the list in documents.
"""

SHIPPED = (
    "lmcache",
    "tracing",
    "access_log",
    "access_control",
    "normalize",
    "other_apis",
    "autoscaling",
    "shadow",
    "priority",
    "polled_discovery",
    "kubernetes",
    "etcd",
    "pixiu",
    "kv_events",
    "leases",
    "transfers",
    "warming",
    "hygiene",
    "snapshot",
    "picker",
    "exchange",
    "workers",
    "ledger",
    "hash_policies",
    "published",
    "shield",
    "residents",
    "disaggregation",
    "resume",
    "hedging",
    "rollouts",
    "engine_sleep",
    "stored_responses",
)
