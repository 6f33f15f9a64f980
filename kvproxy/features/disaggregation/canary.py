"""The canary: 16 greedy tokens on a pair of endpoints, separated and at the decoder alone, must be the same, and the
decoder's counters must show that it pulled the prompt. Where no decoder answers alone, two separated answers are
compared."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from random import Random
from typing import NamedTuple

import msgspec

from kvproxy.base.errors import ClientError, ClientTimeout, UpstreamError
from kvproxy.base.types import Clock, Headers, RequestKind
from kvproxy.base.upstream.origin import Origin
from kvproxy.base.upstream.pool import Timeouts, UpstreamPool
from kvproxy.cache.clients.vllm import VllmClient
from kvproxy.features.disaggregation.bodies import Names, encode, read_body, shorten
from kvproxy.features.disaggregation.connectors.base import Engine, KvConnector, LegTerms, NoHandle
from kvproxy.features.disaggregation.connectors.sglang import MODES, ServerInfo
from kvproxy.features.disaggregation.pairs import PairState
from kvproxy.features.disaggregation.prefill_leg import MAX_ANSWER_BYTES

TOKENS = 16
#: Numbers in the prompt: more tokens than a chunk of LMCache's.
_NUMBERS = 160
_LARGEST = 10_000
_PATH = b"/v1/completions"
#: Share of the prompt that must have been pulled.
_PULLED = 0.5
_JSON: Headers = [(b"content-type", b"application/json")]


class Verdict(NamedTuple):
    """Finding of a canary. State None: it could not be sent."""

    state: PairState | None
    why: str = ""
    s_per_token: float | None = None  # of a pull, where a pair is good and its legs go one after the other
    late: bool = False  # an engine gave no answer in time


class _Choice(msgspec.Struct):
    text: str


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage = msgspec.field(default_factory=_Usage)


class CanaryFailed(Exception):
    """An engine did not answer as expected."""


_FAILURES = (CanaryFailed, ClientError, UpstreamError, TimeoutError, NoHandle, msgspec.DecodeError)
_LATE = (TimeoutError, ClientTimeout)


class Canary:
    """Examines pairs with one connector. `timeout_s` bounds each request."""

    def __init__(
        self, connector: KvConnector, *, pool: UpstreamPool, rng: Random, timeout_s: float, clock: Clock
    ) -> None:
        self._connector = connector
        self._pool = pool
        self._rng = rng
        self._timeout_s = timeout_s
        self._clock = clock

    async def examine(
        self, prefill: Engine, decode: Engine, clients: tuple[VllmClient, VllmClient], model: str
    ) -> Verdict:
        """Return the verdict on a pair. `clients` are those of its endpoints."""
        try:
            if why := await _compare_versions(*clients):
                return Verdict(PairState.VERSIONS, why)
            if self._connector.has_modes and (why := await self._compare_modes(prefill, decode)):
                return Verdict(PairState.MODES, why)
            await self._connector.prepare(prefill, self._fetch, await self._block_tokens(clients[0]))
            different = ""
            for _ in range(2):  # greedy answers may part by the size of a batch, seldom twice
                verdict = await self._compare(prefill, decode, clients[1], model)
                if verdict.state is PairState.GOOD:
                    with contextlib.suppress(*_FAILURES):  # the price stays as it was
                        verdict = verdict._replace(s_per_token=await self._measure_pull(prefill, decode, model))
                    return verdict
                if verdict.state is not PairState.WRONG:
                    return verdict
                different = verdict.why
            return Verdict(PairState.WRONG, different)
        except _FAILURES as error:
            return Verdict(None, f"{type(error).__name__}: {error}", late=isinstance(error, _LATE))

    async def _compare_modes(self, *engines: Engine) -> str:
        """Return the servers' modes where they are not those of the legs; "": they are, or are not reported."""
        try:
            answers = [await self._call(one.origin, b"GET", b"/server_info", one, None, ()) for one in engines]
        except CanaryFailed:
            return ""
        modes = tuple(msgspec.json.decode(answer, type=ServerInfo).disaggregation_mode for answer in answers)
        return "" if None in modes or modes == MODES else f"the servers' modes are {modes[0]} and {modes[1]}"

    async def _compare(self, prefill: Engine, decode: Engine, client: VllmClient, model: str) -> Verdict:
        body = self._make_body(model, tokens=TOKENS)
        before = await self._count_pulled(client)
        separated = await self._ask_separated(prefill, decode, body)
        after = await self._count_pulled(client)
        salted = msgspec.json.encode(
            {**msgspec.json.decode(body), "cache_salt": f"canary-{self._rng.getrandbits(64):x}"}
        )
        if self._connector.computes_alone:
            alone = await self._ask(decode, salted)
        else:
            alone = await self._ask_separated(prefill, decode, salted)
        if separated.choices[0].text != alone.choices[0].text:
            return Verdict(PairState.WRONG, f"answered {separated.choices[0].text!r}, alone {alone.choices[0].text!r}")
        if before is not None and after is not None and after - before < _PULLED * separated.usage.prompt_tokens:
            why = f"of {separated.usage.prompt_tokens} prompt tokens the decoder pulled {after - before}"
            return Verdict(PairState.NO_EFFECT, why)
        return Verdict(PairState.GOOD)

    async def _measure_pull(self, prefill: Engine, decode: Engine, model: str) -> float | None:
        """Return the time to pull a token: a first token with a pull, less one of the same prompt, which the decoder is
        taken to hold then. The pair has pulled before, so its handshake is over."""
        if self._connector.at_once or not self._connector.sends_prefill:
            return None
        body = self._make_body(model, tokens=1)
        terms = await self._prefill(prefill, body)
        times = [self._clock()]
        pulled = await self._ask(decode, body, terms)
        times.append(self._clock())
        for _ in range(2):  # the faster one counts: a pause there would hide the pull
            await self._ask(decode, body)
            times.append(self._clock())
        first_s, *held_s = (after - before for before, after in pairwise(times))
        pull_s = first_s - min(held_s)
        return pull_s / max(1, pulled.usage.prompt_tokens) if pull_s > 0.0 else None  # None: too short to be seen

    def _make_body(self, model: str, *, tokens: int) -> bytes:
        """Return a request with a prompt of its own."""
        prompt = " ".join(str(self._rng.randrange(_LARGEST)) for _ in range(_NUMBERS))
        asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return msgspec.json.encode({"model": model, **asked} if model else asked)

    async def _block_tokens(self, client: VllmClient) -> int:
        """Return the tokens of the engine's KV blocks; 0: not reported."""
        if not self._connector.counts_pulls:
            return 0
        cache = (await client.fetch_metrics(timeout_s=self._timeout_s)).cache
        return (cache.block_tokens if cache is not None else None) or 0

    async def _count_pulled(self, client: VllmClient) -> int | None:
        if not self._connector.counts_pulls:
            return None
        return (await client.fetch_metrics(timeout_s=self._timeout_s)).external_hits_tokens

    async def _ask_separated(self, prefill: Engine, decode: Engine, body: bytes) -> _Completion:
        connector = self._connector
        if connector.sends_prefill and not connector.at_once:
            return await self._ask(decode, body, await self._prefill(prefill, body))
        terms = connector.begin(prefill)
        if not connector.sends_prefill:
            return await self._ask(decode, body, terms)
        first = self._make_first(body, terms)
        _, answer = await asyncio.gather(self._send(prefill, first), self._ask(decode, body, terms))
        return answer

    async def _prefill(self, prefill: Engine, body: bytes) -> LegTerms:
        """Return the terms of the decode leg, once the prompt is prefilled."""
        terms = self._connector.begin(prefill)
        answer = await self._send(prefill, self._make_first(body, terms))
        return terms._replace(decode=self._connector.read_member(answer, prefill))

    def _make_first(self, body: bytes, terms: LegTerms) -> bytes:
        """Return the body of the prefill leg."""
        names = read_body(body, RequestKind.COMPLETION)
        assert names is not None
        return encode({**_short(self._connector, names), **terms.prefill})

    async def _ask(self, engine: Engine, body: bytes, terms: LegTerms = LegTerms({})) -> _Completion:
        answer = await self._send(engine, b"{" + terms.decode + body[1:], *terms.fields)
        completion = msgspec.json.decode(answer, type=_Completion)
        if not completion.choices:
            raise CanaryFailed("an answer without a choice")
        return completion

    async def _send(self, engine: Engine, body: bytes, *fields: tuple[bytes, bytes]) -> bytes:
        return await self._call(engine.origin, b"POST", _PATH, engine, body, fields)

    async def _fetch(self, endpoint: Engine, port: int, path: str) -> bytes:
        origin = endpoint.origin
        at_port = Origin(origin.scheme, origin.host, port, tls=origin.tls, server_name=origin.server_name)
        return await self._call(at_port, b"GET", path.encode(), None, None, ())

    async def _call(
        self,
        origin: Origin,
        method: bytes,
        path: bytes,
        engine: Engine | None,
        body: bytes | None,
        fields: Sequence[tuple[bytes, bytes]],
    ) -> bytes:
        headers = [*_JSON, *fields]
        if engine is not None and engine.authorization is not None:
            headers.append((b"authorization", engine.authorization))
        async with asyncio.timeout(self._timeout_s):
            response = await self._pool.request(origin, method, path, headers, body, timeouts=Timeouts())
            answer = b""
            try:
                while not response.complete and len(answer) <= MAX_ANSWER_BYTES:
                    answer += await response.next_chunk()
                answer += response.take() or b""
            finally:
                response.abort()
        if response.status != 200:
            raise CanaryFailed(f"{origin}{path.decode()} answered {response.status}: {answer[:200]!r}")
        return answer


def _short(connector: KvConnector, names: Names) -> Mapping[str, msgspec.Raw]:
    return shorten(names, RequestKind.COMPLETION) if connector.shortens else names


async def _compare_versions(prefill: VllmClient, decode: VllmClient) -> str:
    """Return how the engines' versions differ; "": they are the same, or not reported."""
    found = await asyncio.gather(*(client.fetch_version() for client in (prefill, decode)), return_exceptions=True)
    versions = [one for one in found if isinstance(one, str)]
    return f"the engines' versions are {versions[0]} and {versions[1]}" if len(set(versions)) > 1 else ""
