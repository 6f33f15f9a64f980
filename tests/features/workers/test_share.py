"""The configuration that one of several workers gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvproxy.features.workers.assignment import begins_alone, count_workers, take_share, usable_cores
from kvproxy.operate.config.load import load_config

CONFIG = load_config(
    {
        "endpoints": {"a": "http://127.0.0.1:1"},
        "policy": "kv_aware",
        "queue": {"limit": 5},
        "limits": {"connections": 10, "body": "1MiB", "bodies": "3MiB"},
        "receipts": {"path": "/tmp/r.jsonl", "max_file": 100},
    }
)


def test_bounds_of_the_machine_are_divided() -> None:
    """They add up to what was configured, or a little more."""
    shares = [take_share(CONFIG, index, 4) for index in range(4)]
    assert [one.limits.connections for one in shares] == [3, 3, 3, 3]
    assert {one.clusters["default"].queue.limit for one in shares} == {2}
    assert {one.receipts.max_file for one in shares} == {25}
    assert {one.pool.max_connections for one in shares} == {256}


def test_every_worker_can_hold_one_body() -> None:
    """However many share the bound."""
    assert take_share(CONFIG, 0, 64).limits.bodies == CONFIG.limits.body


def test_receipts_have_a_file_each() -> None:
    """Two writers of one file would cut each other's lines."""
    assert [take_share(CONFIG, index, 2).receipts.path for index in (0, 1)] == ["/tmp/r.jsonl", "/tmp/r.jsonl.worker-1"]
    assert take_share(load_config({"endpoints": {"a": "http://127.0.0.1:1"}}), 1, 2).receipts.path == ""


def test_one_worker_keeps_the_snapshot() -> None:
    """The others ask it, or one another; a file that all replace would hold the last one's."""
    kvcache = {"kvcache": {"snapshot": {"path": "/tmp/s"}}}
    filters = ["request_id", "inference_request", kvcache, "router"]
    config = load_config({"endpoints": {"a": "http://127.0.0.1:1"}, "filters": filters})
    paths = [take_share(config, index, 2).filters[2].settings.snapshot.path for index in (0, 1)]
    assert paths == ["/tmp/s", ""]
    assert begins_alone(config)
    assert not begins_alone(CONFIG)


@pytest.mark.parametrize(("wanted", "cores", "expected"), [("auto", 1, 1), ("auto", 4, 3), ("auto", 64, 8), (5, 2, 5)])
def test_auto_leaves_a_core(wanted: int | str, cores: float, expected: int) -> None:
    """To the engines' own processes, the kernel and the supervisor; a number is taken as it is."""
    assert count_workers(wanted, cores=cores) == expected


@pytest.mark.parametrize(("text", "most"), [("150000 100000", 1.5), ("max 100000", 1e9), ("", 1e9)])
def test_a_container_has_its_share_of_the_cores(tmp_path: Path, text: str, most: float) -> None:
    """Not those of the machine it runs on."""
    cgroup = tmp_path / "cpu.max"
    cgroup.write_text(text)
    assert 0 < usable_cores(cgroup=cgroup) <= most
