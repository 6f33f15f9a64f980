"""Do engines that serve the same model tokenize alike?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvproxy.doctor.engine import Engine
from kvproxy.doctor.finding import Finding, ok, problem
from kvproxy.doctor.site import Site, known
from kvproxy.errors import ClientError


@dataclass(frozen=True, slots=True)
class TokenizersCheck:
    """One cluster: engines whose model has the same name, and the engine that tokenizes for all where there is one."""

    site: Site
    cluster: str

    name = "tokenizers"
    calls = 4

    @property
    def where(self) -> str:
        return f"cluster {self.cluster}"

    async def find(self) -> Sequence[Finding]:
        engines = [*dict(self.site.clusters())[self.cluster], *filter(None, [self.site.tokenizer])]
        samples = await known(engines, _sampled)
        by_model: dict[str, dict[Engine, tuple[int, ...]]] = {}
        for engine, (model, tokens) in samples.items():
            by_model.setdefault(model, {})[engine] = tokens
        compared = {model: alike for model, alike in by_model.items() if len(alike) > 1}
        found = [one for model, alike in compared.items() for one in differing(model, alike)]
        return found or [ok(self.where, f"{len(alike)} engines tokenize alike") for alike in compared.values()]


@dataclass(frozen=True, slots=True)
class TokenizerCheck:
    """The engine that is configured to tokenize for all of them."""

    engine: Engine

    name = "tokenizer"
    calls = 4

    @property
    def where(self) -> str:
        return self.engine.where

    async def find(self) -> Sequence[Finding]:
        await self.engine.model()
        try:
            await self.engine.sample()
        except ClientError as error:
            fix = "set `vllm_endpoint` to an engine that has /tokenize, or leave it out"
            return [problem(self.where, f"cannot tokenize: {error}", fix)]
        return [ok(self.where, "tokenizes")]


async def _sampled(engine: Engine) -> tuple[str, tuple[int, ...]]:
    return (await engine.model()).id, await engine.sample()


def differing(model: str, samples: Mapping[Engine, tuple[int, ...]]) -> Sequence[Finding]:
    """One finding for each engine that differs from most others (from the first, when there is no majority)."""
    usual, _ = Counter(samples.values()).most_common(1)[0]
    like = next(engine for engine, tokens in samples.items() if tokens == usual)
    fix = f"give both the same model and `--tokenizer`; another model needs another name than {model!r}"
    what = f"its tokenizer differs from that of {like.where}: tokens of one cannot be used for the other"
    return [problem(engine.where, what, fix) for engine, tokens in samples.items() if tokens != usual]
