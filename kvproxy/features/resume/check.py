"""Check of `kvproxy doctor`: a finished greedy answer, continued by text from its middle, must come out the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvproxy.base.errors import ClientError
from kvproxy.features.resume.proof import PATH, Answer, ask_rest, ask_whole, take_half
from kvproxy.operate.doctor.deployment import ClusterFacts
from kvproxy.operate.doctor.engine import EngineFacts
from kvproxy.operate.doctor.report import Finding, check, ok, problem, warning

_FIX = "use `resume: exact` on the routes to this cluster, or serve the model with a template that continues a message"


@check("resume", calls=4)
async def check_continuation(cluster: ClusterFacts) -> Sequence[Finding]:
    """One cluster's first engine, whose model and template are those of all."""
    engines = cluster.engines
    if not engines:
        return []
    engine = engines[0]
    model = (await engine.choose_model()).id
    whole = await _ask(engine, ask_whole(model))
    begun = take_half(whole)
    if not begun:
        return [warning(cluster.where, f"{model} answered too briefly to continue its answer", _FIX)]
    try:
        rest = await _ask(engine, ask_rest(model, begun))
    except ClientError as error:
        return [problem(cluster.where, f"{model} cannot continue half an answer: {error}", _FIX)]
    if rest and whole.startswith(begun + rest):
        return [ok(cluster.where, f"{model} continues half an answer with the same words (`resume: text`)")]
    return [problem(cluster.where, f"{model} continues half of its own answer differently", _FIX)]


async def _ask(engine: EngineFacts, body: Mapping[str, Any]) -> str:
    timeout_s = engine.tools.timeouts.exchange_s
    answer: Answer = await engine.api.post(PATH, msgspec.json.encode(body), Answer, timeout_s=timeout_s)
    return answer.text
