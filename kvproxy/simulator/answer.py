"""An answer in the making: what is known of a plan's sequences at one moment, for any API's shapes."""

from __future__ import annotations

from dataclasses import dataclass

from kvproxy.simulator.engine_runner import GenerationGroup
from kvproxy.simulator.generation_request import GenerationPlan
from kvproxy.simulator.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AnswerUsage:
    """Tokens of one client request; `created_cache_tokens` is what its prompt added to the cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    created_cache_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one choice; `finish_reason` comes with the last of them."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    generated: int
    finish_reason: str | None


class Answer:
    """Reads a group's progress as deltas and totals."""

    def __init__(
        self, plan: GenerationPlan, group: GenerationGroup, *, tokenizer: Tokenizer, block_size: int, created: int
    ) -> None:
        self.plan = plan
        self.created = created
        self._group = group
        self._tokenizer = tokenizer
        self._block_size = block_size
        self._seen = [0] * len(plan.requests)

    def take_deltas(self) -> list[Delta]:
        """What came since the last call, at most one a choice; tokens that came together are together."""
        found = []
        for index, member in enumerate(self._group.members):
            if member.generated > self._seen[index]:
                found.append(self._delta(index, self._seen[index], member.generated))
                self._seen[index] = member.generated
        return found

    def read_choice(self, index: int) -> Delta:
        """Everything a choice has so far."""
        return self._delta(index, 0, self._group.members[index].generated)

    def count_usage(self) -> AnswerUsage:
        """Totals as of now. Choices of one prompt share it, so its cached tokens are the first choice's."""
        choices = len(self.plan.requests) // len(self.plan.prompts)
        firsts = [member.first for member in self._group.members[::choices]]
        cached = [first.cached_tokens if first is not None else 0 for first in firsts]
        full = [len(prompt) // self._block_size * self._block_size for prompt in self.plan.prompts]
        return AnswerUsage(
            prompt_tokens=self.plan.prompt_tokens,
            completion_tokens=sum(member.generated for member in self._group.members),
            cached_tokens=sum(cached),
            created_cache_tokens=sum(blocks - hits for blocks, hits in zip(full, cached, strict=True)),
        )

    def _delta(self, index: int, first: int, last: int) -> Delta:
        ids = tuple(self.plan.slice_output_ids(index, first, last))
        finished = self._group.members[index].finished
        return Delta(index, self._tokenizer.decode(ids), ids, last, None if finished is None else finished.reason)
