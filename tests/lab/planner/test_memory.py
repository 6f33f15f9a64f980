"""Tokens and blocks of each tier, and the cheapest setting for so many."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvproxy.lab.planner.layers import PlanError, read_layers
from kvproxy.lab.planner.memory import Engine, count_tiers, find_cheapest
from kvproxy.lab.planner.models import known_models

GIB = 1 << 30
LLAMA = read_layers(known_models()["meta-llama/Llama-3.1-8B"].config)


def test_tiers_are_what_is_left_over_by_the_bytes_of_a_token() -> None:
    """40 of 100 GiB are for KV, 128 KiB a token: 8,192 tokens a GiB."""
    engine = Engine(100 * GIB, 48 * GIB, host_bytes=2 * GIB, disk_bytes=10 * GIB, block_tokens=32)
    tiers = {tier.name: (tier.tokens, tier.blocks) for tier in count_tiers(engine, LLAMA)}
    assert tiers == {"device": (327_680, 10_240), "host": (16_384, 512), "disk": (81_920, 2_560)}


def test_weights_that_do_not_fit_name_how_many_gpus_do() -> None:
    """Not a negative number of tokens."""
    with pytest.raises(PlanError, match="--tp 4 is the least"):
        count_tiers(Engine(80 * GIB, 250 * GIB), LLAMA)
    with pytest.raises(PlanError, match="GPUs with more memory"):
        count_tiers(Engine(2 * GIB, 250 * GIB), LLAMA)


def test_the_cheapest_setting_takes_fp8_before_another_gpu() -> None:
    """And no more than is needed."""
    engine = Engine(80 * GIB, 16 * GIB)
    fits = count_tiers(engine, LLAMA)[0].tokens
    assert find_cheapest(engine, LLAMA, fits) == engine
    assert find_cheapest(engine, LLAMA, fits + 1) == replace(engine, dtype="fp8")
    assert find_cheapest(engine, LLAMA, 2 * fits + 2) == replace(engine, gpus=2)
    assert find_cheapest(replace(engine, gpus=8), LLAMA, fits) == engine
    assert find_cheapest(engine, LLAMA, 10**12) is None


@given(
    st.sampled_from(sorted(known_models())), st.integers(40, 200), st.integers(1, 100), st.integers(0, 5),
    st.integers(16, 200_000), st.sampled_from(["bf16", "fp8"]),
)  # fmt: skip
def test_more_memory_is_never_fewer_tokens(
    model: str, gpu_gib: int, more_gib: int, doublings: int, length: int, dtype: str
) -> None:
    """Nor are more GPUs or a smaller precision."""
    layers = read_layers(known_models()[model].config)
    engine = Engine(gpu_gib * GIB, 15 * GIB, gpus=2**doublings, dtype=dtype, host_bytes=GIB, sequence_tokens=length)
    assume(engine.kv_bytes() > 0)
    before = [tier.tokens for tier in count_tiers(engine, layers)]
    larger = replace(engine, gpu_bytes=(gpu_gib + more_gib) * GIB, host_bytes=(1 + more_gib) * GIB)
    for better in (larger, replace(engine, dtype="fp8"), replace(engine, weights_bytes=GIB)):
        assert all(
            now >= then for now, then in zip([t.tokens for t in count_tiers(better, layers)], before, strict=True)
        )
    assert count_tiers(replace(engine, gpus=2 * engine.gpus), layers)[0].tokens >= before[0]
