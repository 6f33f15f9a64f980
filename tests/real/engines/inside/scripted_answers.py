"""Logits processor for vLLM's engine: answers of chats follow a script, whose free words the model chooses.

`--logits-processors scripted_answers:ScriptedAnswers`; the script is in SCRIPTED_ANSWER, where `{12}` means twelve free
words. The place in it follows from the tokens behind the last turn, so that half an answer in a prompt goes on.
`python scripted_answers.py SOURCE FOLDER` makes a model that has the marks as tokens, as models that think have.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence

import torch
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_TURN = "<|im_start|>assistant\n"
_END = "<|im_end|>"


class ScriptedAnswers(AdapterLogitsProcessor):
    """Of one engine."""

    def __init__(self, vllm_config, device, is_pin_memory):
        super().__init__(vllm_config, device, is_pin_memory)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(vllm_config.model_config.model)
        self._turn = tokenizer.encode(_TURN)
        words = {f" {one}{two}" for one in ("ka", "lo", "mi", "ne", "so") for two in ("", "r", "n", "st", "la")}
        self._words = [ids[0] for word in sorted(words) if len(ids := tokenizer.encode(word)) == 1]
        #: Each place has the tokens that may stand there.
        self._places: list[Sequence[int]] = []
        for number, part in enumerate(re.split(r"\{(\d+)\}", os.environ["SCRIPTED_ANSWER"])):
            self._places += [self._words] * int(part) if number % 2 else [[one] for one in tokenizer.encode(part)]
        self._places.append(tokenizer.encode(_END))

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        return self._follow

    def _follow(self, prompt_ids, output_ids, logits):
        ids = [*prompt_ids, *output_ids]
        size = len(self._turn)
        began = next((at + size for at in range(len(ids) - size, -1, -1) if ids[at : at + size] == self._turn), None)
        if began is None or not 0 <= len(ids) - began < len(self._places):
            return logits
        allowed = torch.tensor(self._places[len(ids) - began])
        kept = logits[allowed].clone()
        logits.fill_(float("-inf"))
        logits[allowed] = kept
        return logits


def main(source: str, folder: str) -> None:
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in _MARKS])
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
