"""Does an engine that is told an order take the number?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvproxy.config.priority_schema import EnginePriorityMode
from kvproxy.doctor.checks.trial import TRIAL_CALLS
from kvproxy.doctor.deployment import Deployment
from kvproxy.doctor.engine import EngineCheck, EngineFacts
from kvproxy.doctor.report import Finding, ok, problem, warning
from kvproxy.errors import Refused

_START_WITH = (
    "start vLLM with `--scheduling-policy priority` (SGLang: `--enable-priority-scheduling "
    "--disable-priority-preemption`), or set engine_priority to off"
)


def priority_mode(deployment: Deployment, engine: EngineFacts) -> EnginePriorityMode:
    """What the configuration says of it."""
    return engine.endpoint.engine_priority or deployment.config.clusters[engine.cluster].engine_priority


@dataclass(frozen=True, slots=True)
class PriorityCheck(EngineCheck):
    """A request of one token with a `priority`, after the same without was answered. Whether it is heeded shows only
    where requests wait: the running proxy finds that out."""

    mode: EnginePriorityMode

    name = "engine priority"
    calls = TRIAL_CALLS + 1

    async def collect_findings(self) -> Sequence[Finding]:
        trial = await self.engine.try_generating()
        try:
            await self.engine.send_priority(chat=trial.chat)
        except Refused as error:
            make = problem if self.mode is EnginePriorityMode.ON else warning
            return [make(self.where, f"takes no request with a `priority`: {error}", _START_WITH)]
        return [ok(self.where, "takes a request's `priority`; whether it goes by it, `/endpoints` tells under load")]
