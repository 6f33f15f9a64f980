"""The one procedure that finds a request its endpoint: decide, wait for a turn, reserve.

The forwarder, requests that others carry and `/pick` all place by it.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable

import msgspec

from kvproxy.base.types import Clock, EndpointId, Headers
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.cluster.pick import Pick
from kvproxy.cluster.routing.policy import NO_FACTS, PickRequest
from kvproxy.cluster.routing.selector import Decision
from kvproxy.cluster.screening import Refusal
from kvproxy.proxy.request.error_reply import LocalReply
from kvproxy.proxy.request.exchange import MAX_REMEMBERED, Exchange
from kvproxy.proxy.request.observer import RequestObserver, extend_question, notify, wait_to_send
from kvproxy.proxy.request.prompt_length import estimate_length

NO_ENDPOINTS: frozenset[EndpointId] = frozenset()

#: Header that names the policy for one request, in clusters with `client_policies`. Never sent to an engine.
POLICY_HEADER = b"x-kvproxy-policy"
#: Largest priority that a header may request; the least is its negative.
MAX_PRIORITY = 100
_SHOWN_CHARS = 64  # of a name that a client chose


class Placement(msgspec.Struct, eq=False, kw_only=True):
    """Placement of one request in one cluster.

    (A struct, since one is made for each request. Callbacks instead of a subclass would make a cycle that keeps the
    body alive until the garbage collector runs.)
    """

    exchange: Exchange
    cluster: Cluster
    clock: Clock
    model: str  # the engine's name for it
    excluded: frozenset[EndpointId] = NO_ENDPOINTS
    instead: EndpointId | None = None  # replaces the preference of the filters
    #: Why the last decision found no endpoint.
    refusal: Refusal = Refusal.NO_ENDPOINTS

    def level(self) -> int:
        """Return the priority level of the request in the router queue, larger first."""
        return 0

    async def place(self, now: float) -> Pick | None:
        """Return the reserved place, or None if no endpoint may take the request (`refusal` has the reason).

        Only the first attempt waits in the router queue. Raises QueueFull. `now` is the present time.
        """
        queue = self.cluster.queue
        exchange = self.exchange
        verdict = self.decide(now)
        if verdict is Refusal.NO_ENDPOINTS and queue is not None and queue.awaits:
            facts = exchange.facts or NO_FACTS
            verdict = await queue.without_endpoint.wait(self._decide_again, facts)
            queue = self.cluster.queue
            now = self.clock()
        if queue is None or isinstance(verdict, Refusal) or exchange.outcome.attempts or queue.admits(verdict, now):
            pick = self.take(verdict, now)
        else:
            hints = exchange.hints
            turn = queue.wait(
                verdict,
                self._decide_again,
                self.take,
                tenant=exchange.tenant,
                weight=exchange.weight,
                level=self.level(),
                within_s=math.inf if hints is None or hints.deadline_s is None else hints.deadline_s,
            )
            pick = await self.wait_turn(turn)
        if pick is not None:
            self.note_attempt(pick)
        return pick

    async def wait_turn(self, turn: Awaitable[Pick | None]) -> Pick | None:
        """Wait in the router queue."""
        return await turn

    def decide(self, now: float) -> Decision[Endpoint] | Refusal:
        """Return where the request would go; nothing changes."""
        asked = self.make_question()
        if "deciding" in self.exchange.hooks and not self.exchange.outcome.attempts:
            asked = extend_question(self.exchange, asked, now)
        return self.cluster.decide(asked, now)

    def take(self, verdict: Decision[Endpoint] | Refusal, now: float) -> Pick | None:
        """Notify the observers and reserve; count a refusal.

        There is no await between a decision and its load.
        """
        if isinstance(verdict, Refusal):
            self.cluster.policies.find_policy(self.exchange.policy).count_result(verdict.value)
            notify(RequestObserver.refused, self.exchange, verdict.value, now)
            self.refusal = verdict
            return None
        notify(RequestObserver.placed, self.exchange, verdict, now)
        return self.cluster.reserve(verdict, now)

    async def wait_to_send(self, pick: Pick) -> None:
        """Wait for what observers do first, within their bounds."""
        if "before_sending" in self.exchange.hooks and await wait_to_send(self.exchange):
            pick.begin(self.exchange.facts or NO_FACTS, self.cluster.speeds, self.clock())

    def note_attempt(self, pick: Pick) -> None:
        """Record where this attempt goes, and why."""
        outcome = self.exchange.outcome
        decision = pick.decision
        outcome.attempts += 1
        outcome.endpoint = pick.endpoint.id
        outcome.policy = decision.policy
        outcome.pick_reason = decision.reason
        if pick.stay is not None:
            if (note := pick.stay.note) is not None:
                outcome.notes[note[0]] = note[1]
            if self.exchange.inference is not None and self.exchange.inference.session_ends:
                pick.stay.last = True
        if len(decision.candidates) <= MAX_REMEMBERED:
            outcome.candidates = decision.candidates
            outcome.costs = () if decision.choice is None else decision.choice.costs

    def make_question(self) -> PickRequest:
        """Return the question for the policy, from the present facts; called again after every wait."""
        exchange = self.exchange
        inference = exchange.inference
        facts = exchange.facts
        if facts is None:
            facts = exchange.facts = estimate_length(inference, exchange.repeats)
        excluded = self.excluded | exchange.barred if exchange.barred else self.excluded
        preferred = self.instead or (None if exchange.policy else exchange.preferred)
        if inference is None:
            return PickRequest(self.model, None, facts, preferred, excluded, streams=False, policy=exchange.policy)
        hints = inference.hints if exchange.trusted else None
        return PickRequest(
            self.model,
            inference.parent_session or inference.session_key,
            facts,
            preferred,
            excluded,
            streams=inference.stream,
            prompt_head=inference.head,
            policy=exchange.policy,
            output_tokens=0 if hints is None else hints.output_tokens,
        )

    def _decide_again(self, now: float) -> Decision[Endpoint] | Refusal:
        """Decide by fresh facts: during a wait, others with the same prompt may have been placed."""
        if self.exchange.facts_source is not None:
            self.exchange.facts_source(self.exchange)
        return self.decide(now)


def priority_of(headers: Headers, name: bytes) -> int:
    """Return the integer in header `name`, from -100 to 100; 0 if there is none."""
    value = next((value for header, value in headers if header == name), b"0")
    try:
        return max(-MAX_PRIORITY, min(MAX_PRIORITY, int(value)))
    except ValueError:
        return 0


def chosen_policy(headers: Headers, cluster: Cluster) -> str:
    """Return the policy that the client asks for; "" without the header. Raises LocalReply if this cluster does not
    offer it."""
    asked = next((value for header, value in headers if header == POLICY_HEADER), b"").decode("latin-1").strip()
    if not asked:
        return ""
    named = cluster.policies.named
    if not named:
        raise _not_offered(f"The policy `{asked[:_SHOWN_CHARS]}` was asked for, and clients cannot choose one here.")
    if asked not in named:
        offered = ", ".join(named)
        raise _not_offered(f"The policy `{asked[:_SHOWN_CHARS]}` is not on offer here; these are: {offered}.")
    return asked


def _not_offered(message: str) -> LocalReply:
    return LocalReply(400, "policy_not_offered", message)
