"""KV memory per token and per sequence of a model's layers, from its HuggingFace config.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvproxy.base.errors import KvproxyError

#: Bytes of a number, by the names of vLLM's --dtype and --kv-cache-dtype and of `torch_dtype`.
DTYPE_BYTES: Mapping[str, float] = {
    **dict.fromkeys(("fp32", "float32", "float"), 4.0),
    **dict.fromkeys(("bf16", "fp16", "bfloat16", "float16", "half"), 2.0),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "int8"), 1.0),
    **dict.fromkeys(("int4", "fp4", "nvfp4", "mxfp4"), 0.5),
}

#: A state has the model's own precision (vLLM's default), whatever that of the KV cache.
STATE_BYTES = 2

#: Words of `layer_types` and `layers_block_type`.
_WORDS = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "window",
    "linear_attention": "linear",
    "mamba": "mamba",
}
_LETTERS = {"*": "full", "M": "mamba", "-": "none", "E": "none"}  # of `hybrid_override_pattern`

#: Keys of attention whose memory is not counted here: a wrong number would be worse than none.
_UNCOUNTED = ("compress_ratios", "index_head_dim", "global_head_dim", "num_kv_shared_layers", "cross_attention_layers")


class PlanError(KvproxyError):
    """Plan that is not possible; the text names the remedy."""


class LayerKind(StrEnum):
    """How much of a sequence a layer keeps."""

    FULL = "full"  # KV of every token
    WINDOW = "window"  # KV of the last tokens
    STATE = "state"  # one state, however long the sequence is


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers alike. `values` are numbers a head keeps: for a token, or, of a state, for the sequence."""

    kind: LayerKind
    layers: int
    heads: int  # 0: all of it is on every GPU, as MLA's latent is
    values: int
    window_tokens: int = 0

    def values_on_gpu(self, gpus: int) -> int:
        """Numbers of all its layers on one of `gpus` in tensor parallel; a head is never divided."""
        return self.layers * self.values * (-(-self.heads // gpus) if self.heads else 1)

    def count_tokens(self, tokens: int) -> int:
        """How many times `values` a sequence of `tokens` keeps."""
        if self.kind is LayerKind.STATE:
            return 1
        return min(tokens, self.window_tokens) if self.kind is LayerKind.WINDOW else tokens


@dataclass(frozen=True, slots=True)
class KvLayers:
    """All layers of a model that keep something."""

    groups: tuple[LayerGroup, ...]

    def bytes_per_token(self, dtype: str, gpus: int = 1) -> float:
        """Return what one more token of a long sequence takes on each GPU. 0 where every layer is bounded."""
        full = (group for group in self.groups if group.kind is LayerKind.FULL)
        return DTYPE_BYTES[dtype] * sum(group.values_on_gpu(gpus) for group in full)

    def bytes_of_sequence(self, tokens: int, dtype: str, gpus: int = 1) -> float:
        """Return what a sequence of `tokens` takes on each GPU: its windows and states as well."""
        return sum(
            (STATE_BYTES if group.kind is LayerKind.STATE else DTYPE_BYTES[dtype])
            * group.values_on_gpu(gpus)
            * group.count_tokens(tokens)
            for group in self.groups
        )

    def stored_bytes_of_sequence(self, tokens: int, dtype: str, gpus: int = 1) -> float:
        """Return what it takes in a tier below the GPUs: theirs together, MLA's latent once."""
        latent = KvLayers(tuple(group for group in self.groups if not group.heads))
        divided = KvLayers(tuple(group for group in self.groups if group.heads))
        return latent.bytes_of_sequence(tokens, dtype) + gpus * divided.bytes_of_sequence(tokens, dtype, gpus)

    def describe(self) -> str:
        """`32 layers: 8 KV heads x 256`."""
        return "; ".join(map(_describe, self.groups))


def _describe(group: LayerGroup) -> str:
    size = f"{group.heads} heads x {group.values}" if group.heads else f"a latent of {group.values}"
    said = {
        LayerKind.FULL: f"{size} numbers a token",
        LayerKind.WINDOW: f"{size} numbers a token of the last {group.window_tokens}",
        LayerKind.STATE: f"a state of {group.heads * group.values} numbers a sequence",
    }[group.kind]
    return f"{group.layers} layers: {said}"


def read_layers(config: Mapping[str, Any]) -> KvLayers:
    """From the fields of a config.json. Raises PlanError with the field that is missing or not understood."""
    config = _of_text(config)
    if uncounted := [key for key in _UNCOUNTED if config.get(key)]:
        raise PlanError(f"config.json: how much KV a model with `{uncounted[0]}` keeps is not known here")
    kinds = Counter(_kinds(config))
    groups = []
    if kinds["full"]:
        groups.append(_attention(config, LayerKind.FULL, kinds["full"]))
    if kinds["window"]:
        groups.append(_attention(config, LayerKind.WINDOW, kinds["window"], window_tokens=_window(config)))
    if kinds["linear"]:
        groups.append(_gated_delta_net(config, kinds["linear"]))
    if kinds["mamba"]:
        groups.append(_mamba(config, kinds["mamba"]))
    return KvLayers(tuple(groups))


def _of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a multimodal configuration."""
    inner = [config[key] for key in ("text_config", "llm_config") if isinstance(config.get(key), dict)]
    return {**config, **inner[0]} if inner else config


def _number(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """Return the first of these fields that is there, a positive whole number."""
    name = next((name for name in names if config.get(name) is not None), "")
    value = config[name] if name else default
    if value is None:
        others = f" (nor {', '.join(names[1:])})" if names[1:] else ""
        raise PlanError(f"config.json: `{names[0]}` is missing{others}; is this the model's own config.json?")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"config.json: `{name}` must be a whole number above 0, not {value!r}")
    return value


def _kinds(config: Mapping[str, Any]) -> Sequence[str]:
    """Return what each layer is: full, window, linear, mamba or none."""
    for name in ("layer_types", "layers_block_type"):
        if isinstance(words := config.get(name), list):
            return [_known(_WORDS, word, name) for word in words]
    if pattern := config.get("hybrid_override_pattern"):
        return [_known(_LETTERS, letter, "hybrid_override_pattern") for letter in str(pattern)]
    layers = range(_number(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers"))
    if "attn_layer_period" in config:
        period = _number(config, "attn_layer_period")
        offset = config.get("attn_layer_offset", 0)
        return ["full" if index % period == offset else "mamba" for index in layers]
    if "full_attention_interval" in config:
        interval = _number(config, "full_attention_interval")
        return ["linear" if (index + 1) % interval else "full" for index in layers]
    if str(config.get("model_type", "")).endswith(("mamba", "mamba2")):
        return ["mamba" for _ in layers]
    return [_sliding_or_full(config, index) for index in layers]


def _known(words: Mapping[str, str], word: Any, field: str) -> str:
    if word not in words:
        raise PlanError(f"config.json: `{field}` names layers of {word!r}, whose memory is unknown")
    return words[word]


def _sliding_or_full(config: Mapping[str, Any], index: int) -> str:
    """Return the kind of a layer by `sliding_window` and the conventions of its family."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return "full"
    family = str(config.get("model_type", ""))
    pattern = config.get("sliding_window_pattern") or (
        6 if family.startswith("gemma3") else 2 if family == "gemma2" else 0
    )
    if pattern:
        return "window" if (index + 1) % pattern else "full"
    return "window" if index >= config.get("max_window_layers", 0) else "full"  # Qwen's first layers see everything


def _window(config: Mapping[str, Any]) -> int:
    return _number(config, "sliding_window", "attention_chunk_size")


def _attention(config: Mapping[str, Any], kind: LayerKind, layers: int, *, window_tokens: int = 0) -> LayerGroup:
    """Keys and values by head, or MLA's latent and the rotated part of the key."""
    if config.get("kv_lora_rank"):
        values = _number(config, "kv_lora_rank") + _number(config, "qk_rope_head_dim")
        return LayerGroup(kind, layers, 0, values, window_tokens)
    heads = _number(config, "num_attention_heads", "n_head", "num_heads")
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        kv_heads = 1  # the first Falcon names no number
    else:
        kv_heads = _number(config, "num_key_value_heads", "num_kv_heads", default=heads)
    if config.get("head_dim") or config.get("attention_head_dim"):
        head = _number(config, "head_dim", "attention_head_dim")
    else:
        head = _number(config, "hidden_size", "n_embd") // heads
    return LayerGroup(kind, layers, kv_heads, 2 * head, window_tokens)


def _gated_delta_net(config: Mapping[str, Any], layers: int) -> LayerGroup:
    """Qwen3-Next's: a matrix for each value head, and what the convolution looks back at."""
    heads = _number(config, "linear_num_value_heads")
    key_heads = _number(config, "linear_num_key_heads")
    key = _number(config, "linear_key_head_dim")
    value = _number(config, "linear_value_head_dim")
    past = _number(config, "linear_conv_kernel_dim") - 1
    numbers = heads * key * value + past * (2 * key_heads * key + heads * value)
    return LayerGroup(LayerKind.STATE, layers, heads, -(-numbers // heads))


def _mamba(config: Mapping[str, Any], layers: int) -> LayerGroup:
    """Return the state of Mamba, or, where heads are named, of Mamba 2."""
    state = _number(config, "mamba_d_state", "ssm_state_size", "state_size")
    past = _number(config, "mamba_d_conv", "conv_kernel") - 1
    if any(config.get(name) for name in ("mamba_num_heads", "mamba_n_heads")):
        heads = _number(config, "mamba_num_heads", "mamba_n_heads")
        inner = heads * _number(config, "mamba_head_dim", "mamba_d_head")
        groups = _number(config, "mamba_n_groups", "n_groups", default=1)
        numbers = inner * state + past * (inner + 2 * groups * state)
        return LayerGroup(LayerKind.STATE, layers, heads, -(-numbers // heads))
    inner = _number(config, "mamba_expand", "expand", default=2) * _number(config, "hidden_size")
    return LayerGroup(LayerKind.STATE, layers, inner, state + past)
