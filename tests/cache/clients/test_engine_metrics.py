"""The scrape parser against a real page, old names, several ranks and hostile lines."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvproxy.cache.clients.engine_metrics import (
    MAX_LORA_NAMES,
    CacheConfig,
    EngineKind,
    EngineMetrics,
    parse_engine_metrics,
    parse_lora_use,
)
from kvproxy.cluster.adapters import LoraUse
from tests.cache.clients.support import FIXTURES

PAGE = (FIXTURES / "vllm_http/metrics.txt").read_bytes()


def test_a_real_page_agrees_with_the_slow_parser() -> None:
    """Ours reads the same numbers as prometheus_client's."""
    slow = {
        sample.name: sample.value
        for family in text_string_to_metric_families(PAGE.decode())
        for sample in family.samples
        if sample.name.startswith("vllm:")
    }
    ours = parse_engine_metrics(PAGE)
    assert ours.prompt_tokens == slow["vllm:prompt_tokens_total"] == 119
    assert ours.generation_tokens == slow["vllm:generation_tokens_total"] == 8202
    assert ours.prefix_queries_tokens == slow["vllm:prefix_cache_queries_total"] == 119
    assert (ours.kv_usage, ours.waiting, ours.running) == (0.0, 0, 0)
    assert ours.cache == CacheConfig(128, 32768, 4_194_304, True, 1)


def test_the_prefills_of_requests_that_ended() -> None:
    """Their number and the time they took, as the real page has them."""
    ours = parse_engine_metrics(PAGE)
    assert (ours.prefills, ours.prefill_s, ours.prefill_tokens) == (11, pytest.approx(0.13412985), 119)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            'vllm:prefix_cache_hits_total{engine="0"} 7\n'
            'vllm:prompt_tokens_cached_by_source_total{engine="0",source="device"} 1472\n'
            'vllm:prompt_tokens_cached_by_source_total{engine="1",source="device"} 8\n'
            'vllm:prompt_tokens_cached_by_source_total{engine="0",source="external_unspecified"} 1280\n'
            'vllm:prompt_tokens_cached_by_source_total{engine="0",source="p2p"} 5\n',
            {"device": 1480, "peer": 5, "unspecified": 1280},
        ),
        (
            'vllm:prefix_cache_hits_total{engine="0"} 32\nvllm:external_prefix_cache_hits_total{engine="0"} 256\n',
            {"device": 32, "unspecified": 256},
        ),
        (
            'sglang:cached_tokens_total{cache_source="device",model_name="m"} 40.0\n'
            'sglang:cached_tokens_total{cache_source="host",model_name="m"} 2.0\n'
            'sglang:cached_tokens_total{cache_source="storage_file",model_name="m"} 3.0\n',
            {"device": 40, "host": 2, "shared": 3},
        ),
        ("vllm:num_requests_running 3\n", {}),
    ],
    ids=["vllm", "a vllm without sources", "sglang", "nothing said"],
)
def test_where_cached_tokens_came_from(text: str, found: dict[str, int]) -> None:
    """By the engine's own counters, over its ranks; what a connector does not say is `unspecified`."""
    assert parse_engine_metrics(text.encode()).cached_from == found


SGLANG = b"""
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 3.0
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="1"} 3.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 2.0
sglang:token_usage{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 0.25
sglang:max_total_num_tokens{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 20480.0
sglang:page_size{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 16.0
sglang:num_pages{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 1280.0
sglang:num_pages{engine_type="unified",model_name="m",pp_rank="1",tp_rank="0"} 1280.0
sglang:prompt_tokens_total{model_name="m"} 100.0
sglang:cached_tokens_total{cache_source="device",model_name="m"} 40.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 2.0
sglang:realtime_tokens_total{mode="prefill_compute",model_name="m",tp_rank="0"} 58.0
sglang:realtime_tokens_total{mode="prefill_cache",model_name="m",tp_rank="0"} 42.0
sglang:per_stage_req_latency_seconds_bucket{le="0.1",model_name="m",stage="prefill_forward",tp_rank="0"} 4.0
sglang:per_stage_req_latency_seconds_count{model_name="m",stage="prefill_forward",tp_rank="0"} 4.0
sglang:per_stage_req_latency_seconds_sum{model_name="m",stage="prefill_forward",tp_rank="0"} 0.5
sglang:per_stage_req_latency_seconds_count{model_name="m",stage="chunked_prefill",tp_rank="0"} 9.0
sglang:per_stage_req_latency_seconds_sum{model_name="m",stage="chunked_prefill",tp_rank="0"} 1.5
sglang:per_stage_req_latency_seconds_sum{model_name="m",stage="decode_forward",tp_rank="0"} 77.0
sglang:gen_throughput{model_name="m",tp_rank="0"} 77.0
"""


def test_words_that_sglang_shares() -> None:
    """Under names of its own; ranks that share the work of one request count once, chunks are part of a prefill, and
    what was cached counts on whichever tier it was."""
    assert parse_engine_metrics(SGLANG) == EngineMetrics(
        kv_usage=0.25,
        waiting=2,
        running=3,
        prefix_queries_tokens=100,
        prefix_hits_tokens=42,
        prompt_tokens=100,
        prompt_tokens_cached=42,
        cached_from={"device": 40, "host": 2},
        prefills=4,
        prefill_s=2.0,
        prefill_tokens=58,
        cache=CacheConfig(16, 1280, 20480, None, 1),
        kind=EngineKind.SGLANG,
    )


def test_each_rank_of_sglang_is_told_by_one_of_its_processes() -> None:
    """With data-parallel attention a rank's processes are numbered over all ranks: the first of each counts, and the
    memory of all of them adds up."""
    page = b"".join(
        b'sglang:%s{dp_rank="%d",model_name="m",pp_rank="0",tp_rank="%d"} %d\n' % (name, tp // 2, tp, value + tp // 2)
        for name, value in ((b"num_running_reqs", 3), (b"max_total_num_tokens", 1000))
        for tp in (3, 2, 1, 0)
    )
    metrics = parse_engine_metrics(page)
    assert {rank: one.running for rank, one in metrics.ranks.items()} == {0: 3, 1: 4}
    assert (metrics.running, metrics.cache) == (7, CacheConfig(None, None, 2001, None, 2))


def test_the_cache_of_sglangs_without_gauges_of_it() -> None:
    """Older versions have labels, and the oldest nothing; the first hit makes its counter."""
    page = b'sglang:cache_config_info{num_pages="100",page_size="16"} 1.0\nsglang:prompt_tokens_total{a="b"} 9.0\n'
    metrics = parse_engine_metrics(page)
    assert metrics.cache == CacheConfig(16, 100, 1600, None, 1)
    assert (metrics.prefix_queries_tokens, metrics.prefix_hits_tokens, metrics.prefill_tokens) == (9, 0, None)
    gauge = b'sglang:max_total_num_tokens{tp_rank="0"} 1590\n'
    assert parse_engine_metrics(gauge + page).cache == CacheConfig(16, 100, 1590, None, 1)
    pages = b'sglang:page_size{tp_rank="0"} 8\nsglang:num_pages{tp_rank="0"} 5\n'
    assert parse_engine_metrics(pages).cache == CacheConfig(8, 5, 40, None, 1)
    oldest = parse_engine_metrics(b"sglang:token_usage 0.5\n")
    assert (oldest.cache, oldest.prefix_queries_tokens, oldest.prefix_hits_tokens) == (None, None, None)


def test_a_vllm_that_sleeps() -> None:
    """At whichever level; a deployment sleeps when all its ranks do."""
    state = b'vllm:engine_sleep_state{engine="%d",model_name="m",sleep_state="%s"} %d.0\n'
    awake = parse_engine_metrics(state % (0, b"awake", 1) + state % (0, b"discard_all", 0))
    assert (awake.asleep, awake.kind) == (False, EngineKind.VLLM)
    level_1 = state % (0, b"awake", 0) + state % (0, b"weights_offloaded", 1) + state % (0, b"discard_all", 0)
    deep = parse_engine_metrics(level_1)
    assert (deep.asleep, deep.gave_up_cache) == (True, True)
    level_0 = state % (0, b"awake", 0) + state % (0, b"weights_offloaded", 0) + state % (0, b"discard_all", 0)
    paused = parse_engine_metrics(level_0)
    assert (paused.asleep, paused.gave_up_cache) == (True, False)
    half = parse_engine_metrics(state % (0, b"awake", 0) + state % (1, b"awake", 1))
    assert (half.asleep, half.ranks[0].asleep, half.ranks[1].asleep) == (False, True, False)


def test_ranks_are_summed_and_the_fullest_counts() -> None:
    """Load adds up over data-parallel ranks; pressure is the fullest rank's."""
    page = b"""
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.2
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.9
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="1",model_name="m"} 4.0
vllm:num_requests_running{engine="0",model_name="m"} 1.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 1e+06
vllm:prompt_tokens_total{engine="1",model_name="m"} 5.0
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="1",num_gpu_blocks="100"} 1.0
"""
    metrics = parse_engine_metrics(page)
    assert (metrics.kv_usage, metrics.waiting, metrics.running) == (0.9, 7, 3)
    assert metrics.prompt_tokens == 1_000_005
    assert metrics.cache == CacheConfig(16, 200, 3200, True, 2)
    assert sorted(metrics.ranks) == [0, 1]
    first, second = metrics.ranks[0], metrics.ranks[1]
    assert (first.kv_usage, first.waiting, first.running, first.prompt_tokens) == (0.2, 3, 1, 1_000_000)
    assert (second.kv_usage, second.waiting, second.running, second.prompt_tokens) == (0.9, 4, 2, 5)
    assert second.cache == CacheConfig(16, 100, 1600, True, 1)
    assert not second.ranks


def test_ranks_are_named_as_their_deployment_counts_them() -> None:
    """A node of vLLM's hybrid balancing has ranks that do not begin at 0; SGLang calls the label `dp_rank`; all ranks
    are of one process."""
    node = b"""process_start_time_seconds 7.0
vllm:num_requests_running{engine="4",model_name="m"} 1.0
vllm:num_requests_running{engine="5",model_name="m"} 2.0
"""
    ranks = parse_engine_metrics(node).ranks
    assert {rank: one.running for rank, one in ranks.items()} == {4: 1, 5: 2}
    assert {one.started_at for one in ranks.values()} == {7.0}
    sglang = b"""sglang:num_running_reqs{dp_rank="0",engine_type="unified",model_name="m",tp_rank="0"} 3.0
sglang:num_running_reqs{dp_rank="1",engine_type="unified",model_name="m",tp_rank="0"} 4.0
"""
    assert {rank: one.running for rank, one in parse_engine_metrics(sglang).ranks.items()} == {0: 3, 1: 4}


@pytest.mark.parametrize("labels", [b'engine="3"', b'engine="x"', b'model_name="m"', b'my_engine="1",engine="2"'])
def test_one_rank_is_the_engine(labels: bytes) -> None:
    """Each server of external balancing shows one rank, whatever its number; so do engines without ranks."""
    assert not parse_engine_metrics(b"vllm:num_requests_running{" + labels + b"} 1.0\n").ranks


def test_ranks_beyond_the_bound_count_in_the_sum_alone() -> None:
    """An exposition cannot make more series of ours than a deployment has ranks."""
    page = b"\n".join(b'vllm:num_requests_running{engine="%d"} 1' % rank for rank in range(1000))
    metrics = parse_engine_metrics(page)
    assert (metrics.running, len(metrics.ranks)) == (1000, 256)


def test_old_names_are_understood_and_never_counted_twice() -> None:
    """0.11 shows old and new names side by side: one of them counts."""
    old = (
        b'vllm:gpu_cache_usage_perc{m="x"} 0.5\nvllm:gpu_prefix_cache_queries_total 10\nvllm:gpu_prefix_cache_hits 4\n'
    )
    assert parse_engine_metrics(old) == EngineMetrics(
        kv_usage=0.5,
        prefix_queries_tokens=10,
        prefix_hits_tokens=4,
        cached_from={"device": 4},
        kind=EngineKind.VLLM,
    )
    both = old + b'vllm:kv_cache_usage_perc{m="x"} 0.25\nvllm:prefix_cache_queries_total 11\n'
    assert parse_engine_metrics(both).kv_usage == 0.25
    assert parse_engine_metrics(both).prefix_queries_tokens == 11


def test_a_field_missing_in_a_version_is_none() -> None:
    """Absent is not zero."""
    assert parse_engine_metrics(b"") == EngineMetrics()
    config = parse_engine_metrics(b'vllm:cache_config_info{block_size="None",num_gpu_blocks="None"} 1').cache
    assert config == CacheConfig(None, None, None, None, 1)
    off = parse_engine_metrics(b'vllm:cache_config_info{enable_prefix_caching="False"} 1').cache
    assert off is not None
    assert off.prefix_caching is False


@pytest.mark.parametrize(
    "line",
    [
        b"vllm:num_requests_waiting",
        b"vllm:num_requests_waiting{} ",
        b"vllm:num_requests_waiting NaN",
        b"vllm:num_requests_waiting +Inf",
        b"vllm:num_requests_waiting 1e308\nvllm:num_requests_waiting 1e308",
        b"vllm:num_requests_waiting -1",
        b"vllm:num_requests_waiting seven",
        b"vllm:num_requests_waiting_by_reason 9",
        b"other:num_requests_waiting 9",
    ],
)
def test_lines_that_cannot_be_read_are_passed_over(line: bytes) -> None:
    """One bad line does not spoil a scrape."""
    metrics = parse_engine_metrics(line + b"\nvllm:num_requests_running 2\n")
    assert (metrics.waiting, metrics.running) == (None, 2)


def test_a_cache_beyond_all_reason_is_unknown() -> None:
    """Numbers that no float or integer of this size can be made of spoil nothing else."""
    labels = b'block_size="%b",num_gpu_blocks="%b"' % (b"9" * 5000, b"9" * 20)
    metrics = parse_engine_metrics(b"vllm:cache_config_info{" + labels + b"} 1\nvllm:num_requests_running 2\n")
    assert metrics.cache is not None
    assert (metrics.cache.block_tokens, metrics.cache.capacity_tokens, metrics.running) == (None, None, 2)
    sglang = parse_engine_metrics(b"sglang:max_total_num_tokens 1e308\nsglang:num_running_reqs 2\n")
    assert (sglang.cache, sglang.running) == (None, 2)


def test_labels_may_hold_anything() -> None:
    """Braces and escaped quotes in a model's name, a timestamp after the value."""
    metrics = parse_engine_metrics(b'vllm:num_requests_waiting{model_name="a\\"}{ b"} 3.0 1795252803\n')
    assert metrics.waiting == 3


@pytest.mark.parametrize(
    ("line", "started_at"),
    [
        (b"process_start_time_seconds 1.79525276252e+09", 1795252762.52),
        (b"process_start_time_seconds ", None),
        (b"process_start_time_seconds +e", None),
        (b"my_process_start_time_seconds 17", None),
        (b"# HELP process_start_time_seconds 17", None),
    ],
)
def test_when_the_process_began(line: bytes, started_at: float | None) -> None:
    """Another time is another process, with an empty cache."""
    assert parse_engine_metrics(b"vllm:x 1\n" + line + b"\npython_info 1").started_at == started_at


def test_labels_of_the_configuration_are_bounded() -> None:
    """A line of a megabyte of labels is passed over; others count."""
    long = b"vllm:cache_config_info{" + b'a="",' * 200_000 + b"} 1.0\n"
    good = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100",enable_prefix_caching="True"} 1.0\n'
    metrics = parse_engine_metrics(long + good)
    assert metrics.cache is not None
    assert (metrics.cache.capacity_tokens, metrics.cache.ranks) == (1600, 1)


def line(running: str, waiting: str, at: float | str, slots: str = "2") -> str:
    labels = f'max_lora="{slots}",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
    return f"vllm:lora_requests_info{{{labels}}} {at}\n"


@pytest.mark.parametrize(
    ("text", "use"),
    [
        ("", None),
        ("vllm:num_requests_running 3\n", None),
        (line("", "", 1.0), LoraUse(2, frozenset(), frozenset())),
        (line("a", "", 10.0) + line("b", "c", 20.0), LoraUse(2, frozenset("b"), frozenset("c"))),
        (line("b", "c", "1.7e9") + line("a", "", 10.0), LoraUse(2, frozenset("b"), frozenset("c"))),
        (line("a,b", "a,c", 10.0), LoraUse(2, frozenset("ab"), frozenset("ac"))),
        (line("a", "", "NaN") + line("b", "", "inf"), None),
        (line("a", "", "1e5e5") + line("b", "", 5.0), LoraUse(2, frozenset("b"), frozenset())),
        (line("a", "", 5.0, slots="many"), LoraUse(0, frozenset("a"), frozenset())),
        (line("a", "", 5.0, slots="9" * 40), LoraUse(0, frozenset("a"), frozenset())),
    ],
)
def test_the_newest_line_counts(text: str, use: LoraUse | None) -> None:
    assert parse_lora_use(text.encode()) == use
    assert parse_engine_metrics(text.encode()).lora == use


def test_data_parallel_ranks_write_in_turn() -> None:
    """Lines of the same two seconds are the ranks' own, so that none flickers; older ones are over."""
    text = line("a", "", 100.0) + line("b", "", 101.5) + line("", "", 101.9) + line("old", "old", 99.0)
    assert parse_lora_use(text.encode()) == LoraUse(2, frozenset("ab"), frozenset())


def test_names_are_bounded() -> None:
    names = ",".join(f"n{number}" for number in range(2 * MAX_LORA_NAMES))
    use = parse_lora_use(line(names, "", 1.0).encode())
    assert use is not None
    assert len(use.running) == MAX_LORA_NAMES
