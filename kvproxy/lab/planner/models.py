"""Models that are known without their files: the fields of their published config.json, and those of a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvproxy.lab.planner.layers import DTYPE_BYTES, PlanError
from kvproxy.operate.config.decode import closest_word

_MAX_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Model:
    """A model to plan for. `parameters` or `checkpoint_bytes` may be 0: not known."""

    name: str
    config: Mapping[str, Any]
    parameters: float = 0.0
    dtype: str = "bf16"  # of its weights, as published
    checkpoint_bytes: int = 0
    source: str = ""

    def weights_bytes(self, dtype: str = "") -> float:
        """All of it, in the precision it is published in unless another is given. 0: not known."""
        if self.checkpoint_bytes and not dtype:
            return self.checkpoint_bytes
        return self.parameters * DTYPE_BYTES[dtype or self.dtype]


def _gqa(layers: int, hidden: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    """As most configurations name it."""
    named = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return {**named, "num_key_value_heads": kv_heads, **more}


def _mla(layers: int) -> dict[str, Any]:
    """DeepSeek's: the same latent in every size."""
    return {"num_hidden_layers": layers, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


_JAMBA = {"attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}
_QWEN3_NEXT = {
    "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "head_dim": 256,
}  # fmt: skip
_NEMOTRON_H = {
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", "head_dim": 128,
    "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 80, "n_groups": 8, "conv_kernel": 4,
}  # fmt: skip
_GPT_OSS = {"head_dim": 64, "sliding_window": 128}


def _alternating(layers: int) -> dict[str, Any]:
    return {"layer_types": ["sliding_attention", "full_attention"] * (layers // 2)}


#: Name on huggingface.co: fields of its config.json, parameters, and precision or size of the published weights.
_PUBLISHED: Mapping[str, tuple[dict[str, Any], float, str, int]] = {
    "openai-community/gpt2-xl": ({"n_layer": 48, "n_head": 25, "n_embd": 1600}, 1.56e9, "fp32", 0),
    "meta-llama/Llama-2-7b-hf": (_gqa(32, 4096, 32, 32), 6.74e9, "fp16", 0),
    "meta-llama/Meta-Llama-3-8B": (_gqa(32, 4096, 32, 8), 8.03e9, "bf16", 0),
    "meta-llama/Llama-3.1-8B": (_gqa(32, 4096, 32, 8), 8.03e9, "bf16", 0),
    "meta-llama/Llama-3.1-70B": (_gqa(80, 8192, 64, 8), 70.6e9, "bf16", 0),
    "meta-llama/Llama-3.3-70B-Instruct": (_gqa(80, 8192, 64, 8), 70.6e9, "bf16", 0),
    "meta-llama/Llama-3.1-405B": (_gqa(126, 16384, 128, 8), 405.9e9, "bf16", 0),
    "Qwen/Qwen2.5-7B": (_gqa(28, 3584, 28, 4), 7.62e9, "bf16", 0),
    "Qwen/Qwen2.5-32B": (_gqa(64, 5120, 40, 8), 32.8e9, "bf16", 0),
    "Qwen/Qwen2.5-72B": (_gqa(80, 8192, 64, 8), 72.7e9, "bf16", 0),
    "Qwen/Qwen3-8B": (_gqa(36, 4096, 32, 8, head_dim=128), 8.19e9, "bf16", 0),
    "Qwen/Qwen3-32B": (_gqa(64, 5120, 64, 8, head_dim=128), 32.8e9, "bf16", 0),
    "Qwen/Qwen3-30B-A3B": (_gqa(48, 2048, 32, 4, head_dim=128), 30.5e9, "bf16", 0),
    "Qwen/Qwen3-235B-A22B": (_gqa(94, 4096, 64, 4, head_dim=128), 235e9, "bf16", 0),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (_gqa(48, 2048, 16, 2, **_QWEN3_NEXT), 81.3e9, "bf16", 0),
    "mistralai/Mistral-7B-v0.1": (_gqa(32, 4096, 32, 8, sliding_window=4096), 7.24e9, "bf16", 0),
    "mistralai/Mixtral-8x7B-v0.1": (_gqa(32, 4096, 32, 8), 46.7e9, "bf16", 0),
    "mistralai/Mistral-Small-24B-Instruct-2501": (_gqa(40, 5120, 32, 8, head_dim=128), 23.6e9, "bf16", 0),
    "deepseek-ai/DeepSeek-V2-Lite": (_mla(27), 15.7e9, "bf16", 0),
    "deepseek-ai/DeepSeek-V3": (_mla(61), 671e9, "fp8", 0),
    "deepseek-ai/DeepSeek-R1": (_mla(61), 671e9, "fp8", 0),
    "google/gemma-2-9b": (
        _gqa(42, 3584, 16, 8, head_dim=256, model_type="gemma2", sliding_window=4096), 9.24e9, "bf16", 0
    ),
    "google/gemma-3-27b-it": (
        _gqa(62, 5376, 32, 16, head_dim=128, model_type="gemma3_text", sliding_window=1024), 27.4e9, "bf16", 0
    ),
    "openai/gpt-oss-20b": (_gqa(24, 2880, 64, 8, **_GPT_OSS, **_alternating(24)), 20.9e9, "mxfp4", int(12.8 * 2**30)),
    "openai/gpt-oss-120b": (_gqa(36, 2880, 64, 8, **_GPT_OSS, **_alternating(36)), 117e9, "mxfp4", int(60.8 * 2**30)),
    "tiiuae/falcon-7b": (
        {"num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71, "multi_query": True},
        7.22e9, "bf16", 0
    ),
    "microsoft/phi-4": (_gqa(40, 5120, 40, 10), 14.7e9, "bf16", 0),
    "ai21labs/Jamba-v0.1": (_gqa(32, 4096, 32, 8, **_JAMBA), 51.6e9, "bf16", 0),
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": (_gqa(56, 4480, 40, 8, **_NEMOTRON_H), 8.89e9, "bf16", 0),
}  # fmt: skip


def known_models() -> dict[str, Model]:
    """By name."""
    return {
        name: Model(name, config, parameters, dtype, size, f"https://huggingface.co/{name}/blob/main/config.json")
        for name, (config, parameters, dtype, size) in _PUBLISHED.items()
    }


def find_model(text: str) -> Model:
    """Return a known model by its name, with or without its owner, or the one of a config.json (or of the folder it is
    in). Raises PlanError with the nearest name."""
    known = known_models()
    path = Path(text)
    if path.is_dir():
        path /= "config.json"
    if path.suffix == ".json" or path.is_file():
        return _read_model(path)
    short = {name.partition("/")[2].casefold(): name for name in known}
    folded = {name.casefold(): name for name in known}
    if name := folded.get(text.casefold()) or short.get(text.casefold()):
        return known[name]
    near = closest_word(text, known) or short.get(closest_word(text, short) or "")
    raise PlanError(
        f"no figures of {text!r}" + (f" (did you mean {near!r}?)" if near else "") + ": give the path of the model's "
        "config.json, or one of `--model list`"
    )


def _read_model(path: Path) -> Model:
    """Read a model; its weights' size is in `model.safetensors.index.json` beside it, if that exists."""
    config = _read_json(path)
    index = path.with_name("model.safetensors.index.json")
    size = _read_json(index).get("metadata", {}).get("total_size", 0) if index.is_file() else 0
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bf16")
    name = config.get("_name_or_path") or path.resolve().parent.name
    return Model(str(name), config, 0.0, dtype if dtype in DTYPE_BYTES else "bf16", int(size), str(path))


def _read_json(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
    try:
        if len(content) > _MAX_BYTES:
            raise ValueError("over 4 MiB")
        read = json.loads(content)
        if not isinstance(read, dict):
            raise ValueError("not a JSON object")
    except ValueError as error:
        raise PlanError(f"{path}: {error}; a model's config.json is a JSON object") from None
    return read
