"""The metric families a vLLM 0.32 server exposes, as data: name, help, further label, its values, buckets."""

from __future__ import annotations

_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_BATCH = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)

#: name -> (help, label besides engine and model_name, values of that label)
GAUGES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "num_requests_running": ("Number of requests in model execution batches.", "", ()),
    "num_requests_waiting": ("Number of requests waiting to be processed.", "", ()),
    "num_requests_waiting_by_reason": (
        "Number of waiting requests by reason.",
        "reason",
        ("capacity", "deferred"),
    ),
    "engine_sleep_state": ("Engine sleep state.", "sleep_state", ("awake", "weights_offloaded", "discard_all")),
    "kv_cache_usage_perc": ("KV-cache usage. 1 means 100 percent usage.", "", ()),
}

#: As GAUGES; exposed with `_total`.
COUNTERS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "estimated_flops_per_gpu": ("Estimated number of floating point operations per GPU.", "", ()),
    "estimated_read_bytes_per_gpu": ("Estimated number of bytes read from memory per GPU.", "", ()),
    "estimated_write_bytes_per_gpu": ("Estimated number of bytes written to memory per GPU.", "", ()),
    "prefix_cache_queries": ("Prefix cache queries, in terms of number of queried tokens.", "", ()),
    "prefix_cache_hits": ("Prefix cache hits, in terms of number of cached tokens.", "", ()),
    "external_prefix_cache_queries": ("External prefix cache queries, in tokens.", "", ()),
    "external_prefix_cache_hits": ("External prefix cache hits, in tokens.", "", ()),
    "mm_cache_queries": ("Multi-modal cache queries, in items.", "", ()),
    "mm_cache_hits": ("Multi-modal cache hits, in items.", "", ()),
    "num_preemptions": ("Cumulative number of preemption from the engine.", "", ()),
    "prompt_tokens": ("Number of prefill tokens processed.", "", ()),
    "prompt_tokens_by_source": (
        "Number of prompt tokens by source.",
        "source",
        ("local_compute", "local_cache_hit", "external_kv_transfer"),
    ),
    "prompt_tokens_cached": ("Number of cached prompt tokens (local + external).", "", ()),
    "prompt_tokens_cached_by_source": (
        "Prefix-cache hit tokens by the cache tier that supplied them.",
        "source",
        ("device", "host", "p2p", "disk", "external_unspecified"),
    ),
    "generation_tokens": ("Number of generation tokens processed.", "", ()),
    "request_success": (
        "Count of successfully processed requests.",
        "finished_reason",
        ("stop", "length", "abort", "error", "repetition"),
    ),
}

#: name -> (help, buckets)
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "request_prompt_tokens": ("Number of prefill tokens processed.", _COUNTS),
    "request_generation_tokens": ("Number of generation tokens processed.", _COUNTS),
    "iteration_tokens_total": ("Histogram of number of tokens per engine_step.", _BATCH),
    "request_max_num_generation_tokens": ("Histogram of maximum number of requested generation tokens.", _COUNTS),
    "request_params_n": ("Histogram of the n request parameter.", (1, 2, 5, 10, 20)),
    "request_params_max_tokens": ("Histogram of the max_tokens request parameter.", _COUNTS),
    "time_to_first_token_seconds": ("Histogram of time to first token in seconds.", _FIRST),
    "inter_token_latency_seconds": ("Histogram of inter-token latency in seconds.", _BETWEEN),
    "request_time_per_output_token_seconds": ("Histogram of time_per_output_token_seconds per request.", _BETWEEN),
    "e2e_request_latency_seconds": ("Histogram of e2e request latency in seconds.", _WHOLE),
    "request_queue_time_seconds": ("Histogram of time spent in WAITING phase for request.", _WHOLE),
    "request_inference_time_seconds": ("Histogram of time spent in RUNNING phase for request.", _WHOLE),
    "request_prefill_time_seconds": ("Histogram of time spent in PREFILL phase for request.", _WHOLE),
    "request_decode_time_seconds": ("Histogram of time spent in DECODE phase for request.", _WHOLE),
    "request_num_preemptions": ("Histogram of preemptions per request.", (1, 2, 3, 4, 5, 10, 20)),
    "request_prefill_kv_computed_tokens": ("Histogram of new KV tokens computed during prefill.", _COUNTS),
}

REJECTION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")

#: Labels of cache_config_info that a simulated engine does not vary.
CACHE_CONFIG = {
    "_block_size_resolved": "True",
    "cache_dtype": "auto",
    "cache_hit_alignment_tokens": "None",
    "enable_mamba_shared_prefix_checkpoint": "False",
    "gpu_memory_utilization": "0.92",
    "hash_block_size": "None",
    "is_attention_free": "False",
    "kv_cache_dtype_skip_layers": "[]",
    "kv_cache_layout": "None",
    "kv_cache_memory_bytes": "None",
    "kv_offloading_backend": "native",
    "kv_offloading_size": "None",
    "kv_sharing_fast_prefill": "False",
    "mamba_block_size": "None",
    "mamba_cache_dtype": "auto",
    "mamba_cache_mode": "none",
    "mamba_page_size_padded": "None",
    "mamba_ssm_cache_dtype": "float32",
    "num_cpu_blocks": "None",
    "prefix_cache_retention_interval": "0",
    "prefix_caching_hash_algo": "sha256",
    "prefix_match_unit": "None",
    "replayssm_buffer_len": "16",
    "skip_page_size_padded": "None",
    "sliding_window": "None",
    "swa_bounded_replay": "True",
    "use_kda_recoverssm": "False",
    "use_replayssm": "False",
    "user_specified_block_size": "True",
}
