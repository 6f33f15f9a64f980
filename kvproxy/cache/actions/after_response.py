"""Work after a response: uses of its prompt's prefixes are counted, and its tokens are learned for features."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock
from kvproxy.cache.actions.hotness import Hotness, KnownPrefix
from kvproxy.cache.actions.job_queue import Job, JobQueue
from kvproxy.cache.clients.tokens import TokenIds
from kvproxy.cache.overlap.facts import RequestFacts
from kvproxy.cache.overlap.tokens import TokenSource
from kvproxy.cluster.endpoint import Endpoint

#: Facts of a request, the message prefixes of its prompt (shortest first), its tokens, and the endpoint that computed
#: it.
OnTokens = Callable[[RequestFacts, Sequence[KnownPrefix], TokenIds, Endpoint], None]


class AfterResponse:
    """The uses of prefixes (`hotness`) and the queue of background work, around which it is an async context
    manager."""

    def __init__(
        self, hotness: Hotness, tokens: TokenSource, *, counts_uses: bool, metrics: Metrics, clock: Clock
    ) -> None:
        self.hotness = hotness
        self.jobs = JobQueue(metrics=metrics)
        self.on_tokens: Sequence[OnTokens] = ()  # of features, once a prompt's tokens are known
        self._tokens = tokens
        self._counts_uses = counts_uses
        self._clock = clock

    async def __aenter__(self) -> Self:
        await self.jobs.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.jobs.__aexit__()

    def note_served(self, facts: RequestFacts, endpoint: Endpoint | None) -> None:
        """Count the prompt that an endpoint has computed (None: it left), and pass its tokens on. Unknown tokens are
        fetched first, which also gives the chat's next turn its beginning."""
        used = self._count_use(facts, endpoint) if endpoint is not None and self._counts_uses else []
        if facts.tokens is not None and facts.tokens_exact:
            if endpoint is not None and used:
                self._learn(facts, used, facts.tokens, endpoint)
        elif self._tokens.may_ask(facts):
            key = ("tokenize", facts.model, facts.hashes[-1] if facts.hashes else 0, facts.prompt_bytes)
            run = partial(self._tokenize, facts, used, endpoint)
            self.jobs.submit(Job(key, run, about="tokenize", held_bytes=len(facts.body)))

    def _count_use(self, facts: RequestFacts, endpoint: Endpoint) -> list[KnownPrefix]:
        salt = facts.request.cache_salt or ""
        return self.hotness.count_use(
            facts.keys,
            model=facts.model,
            cache_salt=salt,
            instance=endpoint.instance_id,
            now=self._clock(),
            session=facts.names.session,
        )

    async def _tokenize(self, facts: RequestFacts, used: Sequence[KnownPrefix], endpoint: Endpoint | None) -> bool:
        task = self._tokens.start_tokenizing(facts)
        tokens = None if task is None else await asyncio.shield(task)
        if tokens is not None and tokens.whole and endpoint is not None and used:
            self._learn(facts, used, tokens.ids, endpoint)
        return tokens is not None

    def _learn(self, facts: RequestFacts, used: Sequence[KnownPrefix], tokens: TokenIds, endpoint: Endpoint) -> None:
        """Learn the tokens of a prompt that was served there, so that its KV exists."""
        self.hotness.learn_tokens(used, tokens)
        for note in self.on_tokens:
            note(facts, used, tokens, endpoint)
