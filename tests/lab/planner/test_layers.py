"""KV of a model from its config.json: published figures, every kind of layer, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproxy.lab.planner.layers import DTYPE_BYTES, PlanError, read_layers
from kvproxy.lab.planner.models import known_models

LLAMA = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
KV = st.sampled_from(sorted(name for name, size in DTYPE_BYTES.items() if size >= 1))


@pytest.mark.parametrize(
    ("model", "published"),
    [
        ("deepseek-ai/DeepSeek-V3", 70_272),  # "Insights into DeepSeek-V3" (arXiv 2505.09343), table 1: 70.272 KB
        ("Qwen/Qwen2.5-72B", 327_680),  # the same table: 327.680 KB
        ("meta-llama/Llama-3.1-405B", 516_096),  # the same table: 516.096 KB
        ("meta-llama/Llama-3.1-8B", 128 * 1024),  # 128 KiB, e.g. docs.rs/kv-cache-size
        ("openai-community/gpt2-xl", 300 * 1024),  # 300 KiB: MHA
        ("meta-llama/Llama-2-7b-hf", 512 * 1024),  # 0.5 MiB: MHA
        ("ai21labs/Jamba-v0.1", 4 * 2**30 // (256 * 1024)),  # "Jamba" (arXiv 2403.19887): 4 GB at 256K tokens
        ("tiiuae/falcon-7b", 2 * 32 * 64 * 2),  # MQA: one head of 64
    ],
)
def test_known_models_meet_their_published_figures(model: str, published: int) -> None:
    """Bytes of KV a token in 16 bit."""
    assert read_layers(known_models()[model].config).bytes_per_token("bf16") == published


def test_half_the_precision_is_half_the_bytes() -> None:
    """DeepSeek-V3's latent in fp8."""
    layers = read_layers(known_models()["deepseek-ai/DeepSeek-V3"].config)
    assert layers.bytes_per_token("fp8") == 35_136


def test_heads_are_divided_among_gpus_and_then_repeated() -> None:
    """With more GPUs than KV heads each GPU has a whole one; MLA's latent is on every GPU."""
    llama, deepseek = read_layers(LLAMA), read_layers(known_models()["deepseek-ai/DeepSeek-V3"].config)
    whole = llama.bytes_per_token("bf16")
    assert [llama.bytes_per_token("bf16", gpus) for gpus in (2, 8, 16)] == [whole / 2, whole / 8, whole / 8]
    six = read_layers({**LLAMA, "hidden_size": 3072, "num_attention_heads": 24, "num_key_value_heads": 6})
    assert six.bytes_per_token("bf16", 4) == six.bytes_per_token("bf16") / 3  # two of the four have two heads
    assert deepseek.bytes_per_token("bf16", 8) == deepseek.bytes_per_token("bf16")
    assert deepseek.stored_bytes_of_sequence(100, "bf16", 8) == deepseek.bytes_of_sequence(100, "bf16")
    assert llama.stored_bytes_of_sequence(100, "bf16", 16) == 2 * llama.bytes_of_sequence(100, "bf16")


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 16},
        {"sliding_window": 128, "sliding_window_pattern": 2},
        {"sliding_window": 128, "model_type": "gemma2"},
        {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 16},
    ],
)
def test_windows_are_bounded_however_they_are_told(fields: dict[str, Any]) -> None:
    """Half of the layers keep 128 tokens, the others all."""
    layers = read_layers({**LLAMA, **fields})
    assert layers.bytes_per_token("bf16") == 64 * 1024
    assert layers.bytes_of_sequence(1000, "bf16") == 64 * 1024 * (1000 + 128)
    assert layers.bytes_of_sequence(100, "bf16") == 128 * 1024 * 100


def test_a_window_that_is_not_used_counts_as_none() -> None:
    """Qwen2.5's configuration names one and says that it is off."""
    assert read_layers({**LLAMA, "sliding_window": 128, "use_sliding_window": False}) == read_layers(LLAMA)


def test_states_do_not_grow_with_the_sequence() -> None:
    """28 of Jamba's layers keep a state: 8192 x (16 + 3) numbers of 2 bytes; 4 keep KV."""
    jamba = read_layers(known_models()["ai21labs/Jamba-v0.1"].config)
    state = 28 * 8192 * 19 * 2
    assert jamba.bytes_of_sequence(1, "bf16") == state + 16_384
    assert jamba.bytes_of_sequence(1000, "fp8") == state + 1000 * 8192


def test_the_text_part_of_a_multimodal_model_counts() -> None:
    """Its own fields win over those beside it."""
    assert read_layers({"text_config": LLAMA, "hidden_size": 1}) == read_layers(LLAMA)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "`num_hidden_layers` is missing"),
        ({"num_hidden_layers": 2}, "`num_attention_heads` is missing"),
        ({"num_hidden_layers": 2, "num_attention_heads": 2}, "`hidden_size` is missing"),
        ({**LLAMA, "num_hidden_layers": "32"}, "must be a whole number above 0, not '32'"),
        ({**LLAMA, "num_key_value_heads": 0}, "`num_key_value_heads` must be a whole number"),
        ({**LLAMA, "layer_types": ["sliding_attention"]}, "`sliding_window` is missing"),
        ({**LLAMA, "layer_types": ["compressed"]}, "'compressed', whose memory is unknown"),
        ({**LLAMA, "index_head_dim": 128}, "`index_head_dim`"),
        ({**LLAMA, "kv_lora_rank": 512}, "`qk_rope_head_dim` is missing"),
        ({**LLAMA, "layers_block_type": ["mamba"]}, "`mamba_d_state` is missing"),
        ({**LLAMA, "full_attention_interval": 4}, "`linear_num_value_heads` is missing"),
    ],
)
def test_missing_and_unknown_fields_are_named(config: dict[str, Any], said: str) -> None:
    """Never a guess."""
    with pytest.raises(PlanError, match=said.replace("(", r"\(")):
        read_layers(config)


@given(st.sampled_from(sorted(known_models())), st.integers(1, 10**6), st.integers(1, 10**5), KV, st.integers(0, 6))
def test_longer_is_never_less_and_more_gpus_are_never_more(
    model: str, tokens: int, more: int, dtype: str, doublings: int
) -> None:
    """Of every known model, in every precision."""
    layers, gpus = read_layers(known_models()[model].config), 2**doublings
    assert layers.bytes_of_sequence(tokens, dtype, gpus) <= layers.bytes_of_sequence(tokens + more, dtype, gpus)
    assert layers.bytes_of_sequence(tokens, dtype, 2 * gpus) <= layers.bytes_of_sequence(tokens, dtype, gpus)
    assert layers.bytes_of_sequence(tokens, "fp8", gpus) <= layers.bytes_of_sequence(tokens, "fp32", gpus)
