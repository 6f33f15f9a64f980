"""Makes a small random Gemma 3 model with sliding-window layers: `hybrid_model.py FOLDER TINY MAX_TOKENS WINDOW`.

Tokenizer and chat template are those of TINY, a folder that `tiny_model.py` made. In vLLM's environment.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

_COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
#: Three layers of a window to one that attends to all of a prompt.
_LAYERS = ["sliding_attention"] * 3 + ["full_attention"]


def main(folder: str, tiny: str, max_tokens: str, window: str) -> None:
    made, source = Path(folder), Path(tiny)
    made.mkdir(parents=True, exist_ok=True)
    for name in _COPIED:
        shutil.copy(source / name, made / name)
    known = json.loads((source / "config.json").read_text())
    config = Gemma3TextConfig(
        vocab_size=known["vocab_size"],
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=len(_LAYERS),
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        query_pre_attn_scalar=32,
        max_position_embeddings=int(max_tokens),
        sliding_window=int(window),
        layer_types=_LAYERS,
        eos_token_id=known["eos_token_id"],
        pad_token_id=known["pad_token_id"],
        bos_token_id=None,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(made)
    generation = {"eos_token_id": known["eos_token_id"], "do_sample": False}
    (made / "generation_config.json").write_text(json.dumps(generation))


main(*sys.argv[1:])
