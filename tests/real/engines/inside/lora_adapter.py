"""Makes a small random LoRA adapter for a tiny model, in PEFT's format: `lora_adapter.py MODEL FOLDER SEED`."""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

RANK = 8


def main(model: str, folder: str, seed: str) -> None:
    config = json.loads((Path(model) / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    widths = {"q_proj": heads * head, "v_proj": config["num_key_value_heads"] * head}
    rng = np.random.default_rng(int(seed))
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in widths.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = rng.normal(size=(RANK, hidden)).astype(np.float32)
            weights[f"{place}.lora_B.weight"] = rng.normal(size=(width, RANK)).astype(np.float32)
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    save_file(weights, target / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "r": RANK,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(widths),
    }
    (target / "adapter_config.json").write_text(json.dumps(described))


main(*sys.argv[1:])
