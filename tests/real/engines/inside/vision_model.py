"""Makes a small random LLaVA: `vision_model.py FOLDER TINY MAX_TOKENS`, a CLIP tower of 56 x 56 pixels that makes 16
tokens of each picture, in front of a Qwen2.

Tokenizer and chat template are those of TINY, a folder that `tiny_model.py` made, with a placeholder for pictures. In
vLLM's environment. vLLM loads it with `--load-format dummy`: transformers writes the tower's weights under other names
than vLLM reads.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, Qwen2Config

SIDE, PATCH, TOKENS = 56, 14, 16
PLACEHOLDER = "<image>"
_TEXT_PART = "{%- if part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}"
_ANY_PART = (
    "{%- if part['type'] == 'text' -%}{{- part['text'] -}}"
    f"{{%- elif part['type'] in ('image', 'image_url') -%}}{{{{- '{PLACEHOLDER}' -}}}}{{%- endif -%}}"
)


def main(folder: str, tiny: str, max_tokens: str) -> None:
    made = Path(folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    template = tokenizer.chat_template.replace(_TEXT_PART, _ANY_PART)
    assert template != tokenizer.chat_template
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", PLACEHOLDER]})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(made)
    image = tokenizer.convert_tokens_to_ids(PLACEHOLDER)
    text = Qwen2Config(
        vocab_size=(len(tokenizer) + 63) // 64 * 64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=int(max_tokens),
        tie_word_embeddings=False,
        bos_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=64,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=image,
        image_token_id=image,
        vision_feature_select_strategy="default",
        vision_feature_layer=-2,
        image_seq_length=TOKENS,
    )
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(made)
    _write_processors(made, template)


def _write_processors(made: Path, template: str) -> None:
    image_processor = {
        "image_processor_type": "CLIPImageProcessor",
        "crop_size": {"height": SIDE, "width": SIDE},
        "do_center_crop": True,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.48, 0.46, 0.41],
        "image_std": [0.27, 0.26, 0.28],
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": SIDE},
        "processor_class": "LlavaProcessor",
    }
    processor = {
        "processor_class": "LlavaProcessor",
        "patch_size": PATCH,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
        "image_token": PLACEHOLDER,
        "chat_template": template,
    }
    (made / "preprocessor_config.json").write_text(json.dumps(image_processor))
    (made / "processor_config.json").write_text(json.dumps(processor))


if __name__ == "__main__":
    main(*sys.argv[1:])
