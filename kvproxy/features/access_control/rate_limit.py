"""Filter `rate_limit`: requests and tokens a minute, per tenant or per client address."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from starlette.types import ASGIApp, Scope

from kvproxy.base.bounded import BoundedMapping
from kvproxy.base.errors import ConfigError, Problem
from kvproxy.base.metrics.bounds import BoundMetrics
from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, Headers
from kvproxy.features.access_control.metrics import AccessMetrics
from kvproxy.features.access_control.settings import RateLimitSettings
from kvproxy.proxy.filters.chain import FilterContext
from kvproxy.proxy.filters.step import Step
from kvproxy.proxy.request.downstream import Downstream
from kvproxy.proxy.request.error_reply import LocalReply
from kvproxy.proxy.request.exchange import Exchange
from kvproxy.proxy.request.observer import RequestObserver

#: Upper bound of a bucket's debt, as a multiple of its size.
MAX_DEBT = 5.0


class TokenBucket:
    """Fills at `rate_per_s` up to `capacity`; a charge may take it below zero, into debt."""

    __slots__ = ("_at", "_level", "capacity", "on_charge", "rate_per_s")

    def __init__(self, *, rate_per_s: float, capacity: float, now: float) -> None:
        self.rate_per_s = rate_per_s
        self.capacity = capacity
        self._level = capacity
        self._at = now
        #: Called with each charge if others share the bucket; returns the amount to charge.
        self.on_charge: Callable[[float], float] | None = None

    def level(self, now: float) -> float:
        """Return what it holds; negative in debt."""
        if now > self._at:
            self._level = min(self.capacity, self._level + (now - self._at) * self.rate_per_s)
            self._at = now
        return self._level

    def resize(self, *, rate_per_s: float, capacity: float, now: float) -> None:
        """Another rate and size from now on, as full as before; a debt grows and shrinks with the size as well."""
        self._level = self.level(now) * (capacity / self.capacity)
        self.rate_per_s = rate_per_s
        self.capacity = capacity

    def charge(self, amount: float, now: float) -> None:
        """Take `amount`, whatever is there, as far as debts go."""
        if self.on_charge is not None:
            amount = self.on_charge(amount)
        self.take(amount, now)

    def take(self, amount: float, now: float) -> None:
        """As `charge`, of what others charged."""
        self._level = max(self.level(now) - max(0.0, amount), -MAX_DEBT * self.capacity)

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until it holds `amount`; 0 when it does already."""
        return max(0.0, (min(amount, self.capacity) - self.level(now)) / self.rate_per_s)


@dataclass(frozen=True, slots=True)
class Limit:
    """One limited thing: `kind` names it in headers, errors and metrics."""

    kind: str
    per_minute: float
    burst_minutes: float

    @property
    def rate_per_s(self) -> float:
        """How fast a bucket fills."""
        return self.per_minute / 60.0

    @property
    def capacity(self) -> float:
        """A bucket holds at least one unit, or no request would ever be let in."""
        return max(1.0, self.per_minute * self.burst_minutes)


class BucketTable(BoundedMapping[str, tuple[tuple[Limit, ...], tuple[TokenBucket, ...]]]):
    """Every key's buckets with the limits they are for, the longest unused first: what outlives a reload."""

    def __init__(self) -> None:
        super().__init__(sys.maxsize)  # `Buckets` bounds it, by its own settings
        #: Called with the key, the kind and the amount of each charge; returns the amount to charge.
        self.watch: Callable[[str, str, float], float] | None = None
        self.present: Buckets | None = None  # the current limits, once they are in use

    def take(self, key: str, kind: str, amount: float, now: float) -> None:
        """Another proxy charged so much to this key's bucket."""
        for bucket in self._shared(key, kind, now):
            bucket.take(amount, now)

    def take_until(self, key: str, kind: str, missing: float, now: float) -> None:
        """At another proxy so much is missing in this key's bucket. Here it is once, however often that is reported."""
        for bucket in self._shared(key, kind, now):
            bucket.take(missing - (bucket.capacity - bucket.level(now)), now)

    def _shared(self, key: str, kind: str, now: float) -> list[TokenBucket]:
        if self.present is None:
            return []
        pairs = zip(self.present.limits, self.present.of(key, now), strict=True)
        return [bucket for limit, bucket in pairs if limit.kind == kind]

    def missing(self, now: float) -> Iterator[tuple[str, str, float]]:
        """Key, kind and what is missing in each bucket that is not full. Not to be changed meanwhile."""
        for key, (limits, buckets) in [*self.items()]:
            for limit, bucket in zip(limits, buckets, strict=True):
                if (missing := bucket.capacity - bucket.level(now)) > 0.0:
                    yield key, limit.kind, missing


class Buckets:
    """One bucket per limit for each of at most `max_keys` keys; the longest unused is dropped first.

    Buckets in the `table` for other limits are converted when their key comes next, each as full (or as deep in debt)
    as it was for its size. They are the same objects, so that requests which began under the other limits are charged
    here too. A limit that had no bucket starts full."""

    def __init__(self, limits: tuple[Limit, ...], max_keys: int, table: BucketTable) -> None:
        self.limits = limits
        self.max_keys = max_keys
        self._table = table

    def __len__(self) -> int:
        """Keys that have buckets."""
        return len(self._table)

    def serve(self) -> None:
        """Make these limits those of the table."""
        self._table.present = self

    def of(self, key: str, now: float) -> tuple[TokenBucket, ...]:
        """Return a key's buckets, one a limit."""
        limits, buckets = self._table.get(key, ((), ()))
        if limits is not self.limits:
            known = {limit.kind: bucket for limit, bucket in zip(limits, buckets, strict=True)}
            buckets = tuple(_bucket(limit, known.get(limit.kind), now) for limit in self.limits)
            if (watch := self._table.watch) is not None:
                for limit, bucket in zip(self.limits, buckets, strict=True):
                    bucket.on_charge = partial(watch, key, limit.kind)
            self._table[key] = (self.limits, buckets)
            while len(self._table) > self.max_keys:
                self._table.popitem()
        return buckets


def _bucket(limit: Limit, known: TokenBucket | None, now: float) -> TokenBucket:
    if known is None:
        return TokenBucket(rate_per_s=limit.rate_per_s, capacity=limit.capacity, now=now)
    known.resize(rate_per_s=limit.rate_per_s, capacity=limit.capacity, now=now)
    return known


#: Of the filter in a chain.
NAME = "rate_limit"
#: Clients with buckets.
MAX_KEYS = 10_000
_BYTES_PER_TOKEN = 4
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")  # a stream carries about one token an event
#: Paths with generated text, whose bytes give an estimate of its tokens.
_GENERATING = frozenset(
    {
        *("/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", "/v1/responses", "/v1/messages"),
        "/generate",
    }
)


class RateLimitFilter(Step):
    """Refuses with 429 and `retry-after` what is over a limit.

    A request costs one request at once. Its tokens are charged when it is over, by the engine's count or else an
    estimate, so that a bucket may go into debt, and no request gets in before the debt is paid.
    """

    def __init__(self, app: ASGIApp, *, buckets: Buckets, metrics: Metrics, clock: Clock) -> None:
        super().__init__(app, metrics=metrics, clock=clock)
        self._limits = buckets.limits
        self._buckets = buckets

    def bind_gauges(self) -> None:
        """Bind the gauges to these buckets."""
        bounds = self.metrics.group(BoundMetrics)
        buckets = self._buckets
        buckets.serve()
        bounds.queue_depth.labels("rate_limit").set_function(lambda: len(buckets))
        bounds.queue_limit.labels("rate_limit").set(buckets.max_keys)

    def before(self, exchange: Exchange, downstream: Downstream) -> None:
        """Count the request, or refuse it."""
        now = self.clock()
        scope = downstream.scope
        buckets = self._buckets.of(bucket_key(exchange.tenant, scope), now)
        if any(bucket.wait_s(1.0, now) for bucket in buckets):
            raise self._refusal(buckets, now)
        if self._limits[0].kind == "requests":
            buckets[0].charge(1.0, now)
        downstream.further_headers += self._standing(buckets, now)
        if self._limits[-1].kind == "tokens":
            exchange.attach(TokenCharge(buckets[-1], scope["path"]))

    def _standing(self, buckets: tuple[TokenBucket, ...], now: float) -> Headers:
        pairs = zip(self._limits, buckets, strict=True)
        return [header for limit, bucket in pairs for header in standing(limit, bucket, now)]

    def _refusal(self, buckets: tuple[TokenBucket, ...], now: float) -> LocalReply:
        wait_s, limit = max(
            ((bucket.wait_s(1.0, now), limit) for limit, bucket in zip(self._limits, buckets, strict=True)),
            key=lambda pair: pair[0],
        )
        self.metrics.group(AccessMetrics).rate_limited.labels(limit.kind).inc()
        retry_after_s = math.ceil(wait_s)
        message = f"Over the limit of {limit.per_minute:g} {limit.kind} per minute; retry in {retry_after_s} s."
        headers = [(b"retry-after", b"%d" % retry_after_s), *self._standing(buckets, now)]
        return LocalReply(429, "rate_limit_exceeded", message, headers=headers)


class TokenCharge(RequestObserver):
    """Charges one request's tokens to its bucket when it is over."""

    def __init__(self, bucket: TokenBucket, path: str) -> None:
        self._bucket = bucket
        self._path = path
        self._events = self._answer_bytes = 0
        self._head: Headers = []

    def response_started(self, exchange: Exchange, status: int, headers: Headers) -> None:
        """Keep the head, by which an answer without token counts is estimated."""
        self._head = headers

    def body_piece(self, exchange: Exchange, piece: bytes) -> None:
        """Count what the engine answers."""
        self._events += sum(map(piece.count, _EVENT_ENDS))
        self._answer_bytes += len(piece)

    def finished(self, exchange: Exchange, now: float) -> None:
        """By the engine's count, else an estimate."""
        told = exchange.outcome.completion_tokens is not None
        answered = 0 if told else _generated(self._path, self._head, self._events, self._answer_bytes)
        self._bucket.charge(tokens_used(exchange, answered, exchange.received_bytes), now)


def standing(limit: Limit, bucket: TokenBucket, now: float) -> Headers:
    """`x-ratelimit-limit-*`, `-remaining-*` and `-reset-*` as OpenAI's clients read them."""
    suffix = limit.kind.encode()
    reset_s = bucket.wait_s(bucket.capacity, now)
    return [
        (b"x-ratelimit-limit-" + suffix, b"%d" % limit.per_minute),
        (b"x-ratelimit-remaining-" + suffix, b"%d" % max(0.0, bucket.level(now))),
        (b"x-ratelimit-reset-" + suffix, b"%.3fs" % reset_s),
    ]


def _generated(path: str, head: Headers, events: int, answer_bytes: int) -> int:
    """Estimate the tokens of an answer without a count: the events of a stream, else from its bytes."""
    names = {name.lower(): value for name, value in head}
    streams = names.get(b"content-type", b"").startswith(b"text/event-stream")
    if streams and b"content-encoding" not in names:
        return events
    return answer_bytes // _BYTES_PER_TOKEN if path in _GENERATING else 0


def tokens_used(exchange: Exchange, answered: int, sent_bytes: int) -> int:
    """Return the tokens to charge for a finished request of `sent_bytes`.

    The engine's counts if it reported them. Otherwise, or for an answer that was cut short, they are estimated from the
    prompt's bytes (or the whole body's) and the answer (`answered`: its estimated tokens); a request refused before or
    by the engine costs nothing."""
    outcome = exchange.outcome
    inference = exchange.inference
    prompt = outcome.prompt_tokens
    completion = outcome.completion_tokens
    refused = outcome.end == "completed" and outcome.status >= 400
    if prompt is None and completion is None and (refused or outcome.end == "local_reply"):
        return 0
    asked_bytes = 0 if inference is None else inference.prompt.size_bytes
    if prompt is None:
        prompt = (asked_bytes or sent_bytes) // _BYTES_PER_TOKEN
        if completion is None:
            completion = answered if asked_bytes or sent_bytes else 0  # none for a list of models, say
    return prompt + (completion or 0)


def bucket_key(tenant: str, scope: Scope) -> str:
    """Return what a request counts for: its tenant, or its IPv4 address or IPv6 network of 64 bits (one customer's)."""
    if tenant:
        return f"tenant {tenant}"
    client = scope.get("client")
    host: str = client[0][:64] if client else "unknown"
    if ":" in host:
        with contextlib.suppress(ValueError):
            address = ipaddress.IPv6Address(host)
            host = str(address.ipv4_mapped) if address.ipv4_mapped else f"{int(address) >> 64:x}::/64"
    return f"address {host}"


def build(app: ASGIApp, settings: RateLimitSettings, context: FilterContext) -> ASGIApp:
    """Return the filter around `app`. Raises ConfigError when nothing is limited."""
    rates = (("requests", settings.requests_per_minute), ("tokens", settings.tokens_per_minute))
    limits = tuple(Limit(kind, rate, settings.burst) for kind, rate in rates if rate)
    if not limits:
        hint = "set requests_per_minute or tokens_per_minute"
        raise ConfigError([Problem("", "nothing is limited", hint)])
    table = context.limits[NAME] = context.states.get(BucketTable, NAME, BucketTable)
    buckets = Buckets(limits, MAX_KEYS, table)
    under_limits = RateLimitFilter(app, buckets=buckets, metrics=context.metrics, clock=context.clock)
    context.on_serving.append(under_limits.bind_gauges)
    return under_limits
