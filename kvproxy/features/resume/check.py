"""Check of `kvproxy doctor`: a finished greedy answer, continued by text from its middle, must come out the same."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvproxy.base.errors import ClientError
from kvproxy.operate.doctor.deployment import ClusterCheck
from kvproxy.operate.doctor.engine import EngineFacts
from kvproxy.operate.doctor.report import Finding, ok, problem, warning

_PATH = "/v1/chat/completions"
_TOKENS = 48
#: A model that ends its answer earlier shows too little.
_LEAST_CHARS = 40
_QUESTION = "Describe in three long sentences how rain comes to be and where its water goes."
_word_ends = re.compile(r"(?<=\S)(?=\s)").finditer
_FIX = "use `resume: exact` on the routes to this cluster, or serve the model with a template that continues a message"


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message = msgspec.field(default_factory=_Message)


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []


def find_middle(text: str) -> int:
    """Return the end of the word nearest to the middle of a text; 0: it has none."""
    ends = [found.start() for found in _word_ends(text)]
    return min(ends, key=lambda end: abs(end - len(text) // 2), default=0)


@dataclass(frozen=True, slots=True)
class ContinuationCheck(ClusterCheck):
    """One cluster's first engine, whose model and template are those of all."""

    name = "resume"
    calls = 4

    async def collect_findings(self) -> Sequence[Finding]:
        engines = self.engines
        if not engines:
            return []
        engine = engines[0]
        model = (await engine.choose_model()).id
        question = {"role": "user", "content": _QUESTION}
        body = {"model": model, "messages": [question], "temperature": 0, "max_tokens": _TOKENS}
        whole = await _ask(engine, body)
        at = find_middle(whole)
        if len(whole) < _LEAST_CHARS or not at:
            return [warning(self.where, f"{model} answered too briefly to continue its answer", _FIX)]
        begun = {"role": "assistant", "content": whole[:at]}
        continued = {**body, "messages": [question, begun], "max_tokens": _TOKENS // 4}
        continued |= {"continue_final_message": True, "add_generation_prompt": False}
        try:
            rest = await _ask(engine, continued)
        except ClientError as error:
            return [problem(self.where, f"{model} cannot continue half an answer: {error}", _FIX)]
        if rest and whole[at:].startswith(rest):
            return [ok(self.where, f"{model} continues half an answer with the same words (`resume: text`)")]
        return [problem(self.where, f"{model} continues half of its own answer differently", _FIX)]


async def _ask(engine: EngineFacts, body: Mapping[str, Any]) -> str:
    answer = await engine.api.post(
        _PATH, msgspec.json.encode(body), _Answer, timeout_s=engine.tools.timeouts.exchange_s
    )
    return (answer.choices[0].message.content or "") if answer.choices else ""
