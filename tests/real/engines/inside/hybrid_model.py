"""Makes a small random hybrid model: `hybrid_model.py FOLDER TINY MAX_TOKENS WINDOW`, a Gemma 3 with sliding-window
layers, or with a WINDOW of 0 a Qwen3-Next with layers of linear attention.

Tokenizer and chat template are those of TINY, a folder that `tiny_model.py` made. In vLLM's environment.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen3NextConfig, Qwen3NextForCausalLM

_COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
#: Three layers of that kind to one that attends to all of a prompt.
_LAYERS = 3


def gemma(common: dict[str, Any], window: int) -> torch.nn.Module:
    config = Gemma3TextConfig(
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=window,
        layer_types=["sliding_attention"] * _LAYERS + ["full_attention"],
        **common,
    )
    return Gemma3ForCausalLM(config)


def qwen(common: dict[str, Any]) -> torch.nn.Module:
    config = Qwen3NextConfig(
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        layer_types=["linear_attention"] * _LAYERS + ["full_attention"],
        **common,
    )
    return Qwen3NextForCausalLM(config)


def main(folder: str, tiny: str, max_tokens: str, window: str) -> None:
    made, source = Path(folder), Path(tiny)
    made.mkdir(parents=True, exist_ok=True)
    for name in _COPIED:
        shutil.copy(source / name, made / name)
    known = json.loads((source / "config.json").read_text())
    common = {
        "vocab_size": known["vocab_size"],
        "num_hidden_layers": _LAYERS + 1,
        "max_position_embeddings": int(max_tokens),
        "eos_token_id": known["eos_token_id"],
        "pad_token_id": known["pad_token_id"],
        "bos_token_id": None,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    torch.manual_seed(0)
    model = gemma(common, int(window)) if int(window) else qwen(common)
    model.to(torch.bfloat16).save_pretrained(made)
    generation = {"eos_token_id": known["eos_token_id"], "do_sample": False}
    (made / "generation_config.json").write_text(json.dumps(generation))


main(*sys.argv[1:])
