"""One answer out of several: sums, the worst, the newest, each thing once."""

from __future__ import annotations

from typing import Any

import pytest

from kvproxy.features.workers.answers import list_rules, merge_answers
from kvproxy.operate.merge import merge_events, merge_findings, merge_histories


def endpoint(name: str, **more: Any) -> dict[str, Any]:
    """Return a worker's report of an endpoint."""
    return {"cluster": "c", "id": name, "condition": "up", "in_flight": 1, "engine": None, "cache": None, **more}


def history(*requests: int, p50: float | None = None) -> dict[str, list[Any]]:
    """Of the last seconds, one sample each."""
    ago = [float(len(requests) - place) for place in range(len(requests))]
    quantiles = [p50] * len(requests)
    return {"ago_s": ago, "requests": list(requests), "ttft_p50_s": quantiles, "ttft_p95_s": quantiles}


def test_endpoints_are_one_by_name() -> None:
    """Each worker knows the load of all; the worst condition counts, since clients of that worker suffer from it."""
    answers = [
        {"clusters": {"c": [endpoint("a", in_flight=2), endpoint("b")]}},
        {"clusters": {"c": [endpoint("a", in_flight=3, condition="ejected"), endpoint("d")]}},
    ]
    merged = merge_answers("/endpoints", answers)["clusters"]["c"]
    assert [(one["id"], one["in_flight"], one["condition"]) for one in merged] == [
        ("a", 3, "ejected"), ("b", 1, "up"), ("d", 1, "up"),
    ]  # fmt: skip


def test_counts_reported_by_engines_are_not_summed() -> None:
    """Every worker reads the same engine: the freshest reading counts."""
    old, new = ({"age_s": age, "waiting": waiting} for age, waiting in ((4.0, 7), (1.0, 9)))
    answers = [{"clusters": {"c": [endpoint("a", engine=one)]}} for one in (old, None, new)]
    (merged,) = merge_answers("/endpoints", answers)["clusters"]["c"]
    assert merged["engine"] == new


def test_histories_are_added_from_their_latest_samples() -> None:
    """A worker that was started again has fewer; quantiles are weighted by requests."""
    merged = merge_histories([history(1, 2, 3, p50=0.1), history(5, p50=0.5)])
    assert merged["requests"] == [1, 2, 8]
    assert merged["ago_s"] == [3.0, 2.0, 1.0]
    assert merged["ttft_p50_s"] == [pytest.approx(0.1), pytest.approx(0.1), pytest.approx(0.35)]


def test_a_second_without_an_answer_has_no_quantile() -> None:
    """Nothing is not zero."""
    assert merge_histories([history(0), history(0)])["ttft_p50_s"] == [None]


def test_decisions_are_the_newest_of_all() -> None:
    """As many as were asked for."""
    answers = [{"decisions": [{"n": 1, "ago_s": 0.5}, {"n": 2, "ago_s": 3.0}]}, {"decisions": [{"n": 3, "ago_s": 1.0}]}]
    assert [one["n"] for one in merge_answers("/decisions", answers, limit=2)["decisions"]] == [1, 3]


def test_a_finding_of_several_workers_is_said_once() -> None:
    """Though they count otherwise; with its full age, the worst first."""
    note = {"severity": "note", "where": "x", "what": "other", "fix": "", "age_s": 1.0}
    found = [
        {"severity": "problem", "where": "c", "what": f"{share}% of {n} requests failed", "fix": "", "age_s": age}
        for share, n, age in ((5, "1,200", 3.0), (7, "900", 8.0))
    ]
    merged = merge_findings([[note, found[0]], [found[1]]])
    assert [(one["severity"], one["age_s"]) for one in merged] == [("problem", 8.0), ("note", 1.0)]


def test_queues_and_learned_speeds() -> None:
    """A queue's places are summed, its oldest wait is the oldest; speeds are those of the most samples."""
    queue = {"depth": 1, "limit": 4, "refused": 0, "oldest_wait_s": 2.0, "released": {"turn": 1}, "max_wait_s": 9}
    answers = [
        {"clusters": {"c": {"policy": "kv_aware", "learned": {"samples": 3}, "queue": queue}}},
        {
            "clusters": {
                "c": {"policy": "kv_aware", "learned": {"samples": 8}, "queue": {**queue, "oldest_wait_s": 5.0}}
            }
        },
    ]
    merged = merge_answers("/routing", answers)["clusters"]["c"]
    assert merged["learned"] == {"samples": 8}
    assert merged["queue"] == {
        "depth": 2, "limit": 8, "refused": 0, "oldest_wait_s": 5.0, "released": {"turn": 2}, "max_wait_s": 9,
    }  # fmt: skip


def test_hot_prefixes_are_one_by_hash() -> None:
    """Whichever worker knows more of it."""
    one = {"cluster": "c", "prefix": "ab", "touches": 2.0, "replicas": {"a": 3}}
    other = {**one, "touches": 4.0, "replicas": {"a": 2, "b": 1}}
    assert merge_answers("/cache/hot", [{"prefixes": [one]}, {"prefixes": [other]}]) == {
        "prefixes": [{"cluster": "c", "prefix": "ab", "touches": 4.0, "replicas": {"a": 3, "b": 1}}]
    }


def test_of_what_workers_know_of_others_the_worst_is_said() -> None:
    """One that misses something decides otherwise for its clients."""
    answers = [{"status": "synced", "consistency_ratio": ratio, "peers": []} for ratio in (1.0, 0.5, 0.9)]
    assert merge_answers("/sync", answers)["consistency_ratio"] == 0.5


def test_streams_that_moved_or_stay_are_added() -> None:
    """For any endpoint, a slash in its name included."""
    answers = [{"id": "a/b", "moved": 2, "staying": {"tools": 1}}, {"id": "a/b", "moved": 1, "staying": {"n": 2}}]
    merged = {"id": "a/b", "moved": 3, "staying": {"tools": 1, "n": 2}}
    assert merge_answers("/endpoints/default/a/b/move", answers) == merged


def test_a_path_without_a_rule_has_one_answer() -> None:
    """As `/log`: it is the same in all."""
    assert "/log" not in list_rules()
    assert merge_answers("/log", [{"level": "info"}, {"level": "info"}]) == {"level": "info"}


def test_an_event_that_all_workers_noticed_is_one() -> None:
    """As early as the first noticed it; the same again later is another."""

    def event(what: str, ago_s: float) -> dict[str, Any]:
        return {"what": what, "kind": "down", "ago_s": ago_s}

    one, other = [event("a down", 5.0), event("a down", 905.0)], [event("b down", 1.0), event("a down", 904.0)]
    assert [(each["what"], each["ago_s"]) for each in merge_events([one, other])] == [
        ("b down", 1.0), ("a down", 5.0), ("a down", 905.0)
    ]  # fmt: skip
