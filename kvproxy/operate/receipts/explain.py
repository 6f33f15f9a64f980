"""One receipt in words: where the request went and why, what else it could have cost, what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvproxy.base.installed import installed
from kvproxy.cluster.routing import selector
from kvproxy.cluster.routing.registry import policy_types
from kvproxy.operate.feature import Feature
from kvproxy.operate.log_lines import align_columns, printable
from kvproxy.operate.receipts.receipt import Attempt, Receipt, ReceiptCandidate, matched_tokens, prefill_s

#: What the reasons of the policies and of the cluster mean.
REASONS = {
    **selector.REASONS,
    **{reason: text for kind in policy_types().values() for reason, text in kind.reasons.items()},
}

_HEADER = ("", "endpoint", "cost", "wait", "prefill", "cached", "known from", "in flight", "pending")


def explain_receipt(receipt: Receipt) -> str:
    """Several lines for a terminal."""
    notes = (f"  {line}" for line in explain_notes(receipt))
    return "\n".join([*_heading(receipt), *_decisions(receipt), "", *_outcome(receipt), *notes])


def explain_notes(receipt: Receipt) -> list[str]:
    """Return the lines of all features about their notes."""
    return [line for feature in installed(Feature) for line in feature.explain(receipt)]


def explain_decision(decision: Mapping[str, Any]) -> str:
    """Return the same from what a running proxy remembers: `/decisions/NUMBER`, with what each candidate would have
    cost."""
    said = {name: printable(str(value)) for name, value in decision.items() if value not in (None, "")}
    about = [f"{name} {said[name]}" for name in ("model", "tenant", "cluster") if name in said]
    lines = [f"Request {said['request_id']}, ended {said.get('ended_at', '?')}", f"  {', '.join(about) or 'request'}"]
    if "prompt_tokens" in said:
        lines.append(f"  prompt of about {said['prompt_tokens']} tokens")
    reason = said.get("reason", "")
    meaning = f" ({REASONS[reason]})" if reason in REASONS else ""
    lines += ["", f"Sent to {said.get('endpoint', 'no endpoint')}"]
    if reason:
        lines.append(f"  policy {said.get('policy', '?')}, reason {reason}{meaning}")
    lines += _remembered_candidates(decision)
    if "matched_tokens" in said and "endpoint" in said:
        lines.append(f"  Predicted: {said['matched_tokens']} of {said.get('prompt_tokens', '?')} tokens cached.")
    tries = int(decision.get("retries") or 0) + 1 if "endpoint" in said else 0
    cause = f" ({said['local_reason']})" if "local_reason" in said else ""
    happened = f"status {said.get('status', 'none')}, {said.get('end', 'aborted')}{cause}"
    first = (
        "no first byte" if decision.get("ttft_s") is None else f"first byte after {format_seconds(decision['ttft_s'])}"
    )
    lines += [
        "",
        f"What happened: {happened}, after {tries} attempt{'s' if tries != 1 else ''}",
        f"  {first}, over after {format_seconds(decision.get('duration_s'))}",
    ]
    if "cached_tokens" in said:
        lines.append(
            f"  cached by the engine's count: {said['cached_tokens']} of {said.get('prompt_tokens', '?')} tokens"
        )
    lines += [f"  {line}" for line in decision.get("notes", ())]
    lines += [
        "",
        "Loads and waits of each endpoint are in receipts alone: `receipts: {path: receipts.jsonl}` keeps them.",
    ]
    return "\n".join(lines)


def _heading(receipt: Receipt) -> Iterator[str]:
    about = [
        receipt.kind or "request",
        *(
            f"{name} {printable(value)}"
            for name, value in (
                ("model", receipt.model),
                ("client", receipt.client),
                ("tenant", receipt.tenant),
                ("session", receipt.session),
                ("cluster", receipt.cluster),
            )
            if value
        ),
    ]
    yield f"Request {printable(receipt.request_id) or '(without an id)'}, ended {receipt.time}"
    yield f"  {', '.join(about)}{', streamed' if receipt.stream else ''}"
    if receipt.prompt_tokens is not None:
        hot = f", the first {receipt.hot_tokens} of them hot" if receipt.hot_tokens else ""
        yield f"  prompt of about {receipt.prompt_tokens} tokens{hot}"


def _decisions(receipt: Receipt) -> Iterator[str]:
    for number, attempt in enumerate(receipt.attempts, start=1):
        yield ""
        yield from _attempt(receipt, attempt, number)
    if receipt.refusals:
        yield ""
        reasons = ", ".join(dict.fromkeys(receipt.refusals))
        yield f"No endpoint could take it {len(receipt.refusals)} time(s): {reasons}."


def _attempt(receipt: Receipt, attempt: Attempt, number: int) -> Iterator[str]:
    meaning = REASONS.get(attempt.reason)
    why = f"{attempt.reason} ({meaning})" if meaning else attempt.reason
    yield f"Attempt {number}, {format_seconds(attempt.at_s)} after it was received: {attempt.endpoint}"
    yield f"  policy {attempt.policy}, reason {why}"
    if attempt.preference is not None:
        yield f"  an earlier filter's preference was {attempt.preference}"
    ordered = sorted(attempt.candidates, key=lambda one: (one.cost is None, one.cost, one.id))
    yield from _indent_table([_HEADER, *(_row(receipt, attempt, one) for one in ordered)])
    if attempt.left_out:
        yield f"  and {attempt.left_out} more"
    yield from _alternatives(attempt, ordered)
    yield from _prediction(receipt, attempt)
    if attempt.failure is not None:
        yield f"  It failed: {attempt.failure}."


def _row(receipt: Receipt, attempt: Attempt, candidate: ReceiptCandidate) -> Sequence[str]:
    held = receipt.facts.get(candidate.id)
    cached = str(matched_tokens(receipt, candidate.id)) if _is_known(receipt) else "-"
    if held is not None and held.lower:
        cached += f" ({', '.join(f'{tokens} {tier.value}' for tier, tokens in held.lower)})"
    return (
        ">" if candidate.id == attempt.endpoint else "",
        candidate.id,
        "-" if candidate.cost is None else f"{candidate.cost:.4g}",
        format_seconds(candidate.wait_s),
        format_seconds(_prefill_s(receipt, attempt, candidate)),
        cached,
        "-" if held is None else f"{held.source}, {held.age_s:.1f} s old",
        str(candidate.in_flight),
        f"{candidate.pending_tokens} tokens",
    )


def _alternatives(attempt: Attempt, ordered: Sequence[ReceiptCandidate]) -> Iterator[str]:
    """How the choice compares, by the policy's own costs."""
    chosen = next((one for one in ordered if one.id == attempt.endpoint), None)
    others = [one for one in ordered if one.id != attempt.endpoint and one.cost is not None]
    if chosen is None or chosen.cost is None or not others or others[0].cost is None:
        return
    best = others[0]
    assert best.cost is not None
    difference = best.cost - chosen.cost
    if difference >= 0:
        yield f"  The next best, {best.id}, would have cost {difference:.4g} more."
    else:
        yield f"  {best.id} would have cost {-difference:.4g} less."


def _prediction(receipt: Receipt, attempt: Attempt) -> Iterator[str]:
    chosen = next((one for one in attempt.candidates if one.id == attempt.endpoint), None)
    if chosen is None or not _is_known(receipt):
        return
    text = f"  Predicted: {matched_tokens(receipt, chosen.id)} of {receipt.prompt_tokens} tokens cached"
    prefill = _prefill_s(receipt, attempt, chosen)
    if prefill is not None and chosen.wait_s is not None:
        text += f", first token {format_seconds(chosen.wait_s + prefill)} after the decision"
    yield text + "."


def _outcome(receipt: Receipt) -> Iterator[str]:
    tries = f"{len(receipt.attempts)} attempt{'s' if len(receipt.attempts) != 1 else ''}"
    where = f"{receipt.endpoint}, " if receipt.endpoint else ""
    yield f"What happened: {where}status {receipt.status or 'none'}, {receipt.end or 'aborted'}, after {tries}"
    first = "no first byte" if receipt.ttft_s is None else f"first byte after {format_seconds(receipt.ttft_s)}"
    if receipt.ttft_s is not None and receipt.attempts:
        first += f" ({format_seconds(receipt.ttft_s - receipt.attempts[-1].at_s)} after the decision)"
    tokens = "" if receipt.completion_tokens is None else f", {receipt.completion_tokens} tokens generated"
    yield f"  {first}, over after {format_seconds(receipt.duration_s)}{tokens}"
    if receipt.engine_media_tokens:
        yield f"  {receipt.engine_media_tokens} of its prompt's tokens are those of pictures, audio or video"
    if receipt.cached_tokens is None:
        yield "  the engine did not report its cached tokens"
        return
    prompt = receipt.engine_prompt_tokens
    expected = ""
    if _is_known(receipt) and receipt.endpoint is not None:
        expected = f" (predicted {matched_tokens(receipt, receipt.endpoint)})"
    yield f"  cached by the engine's count: {receipt.cached_tokens} of {prompt or '?'} tokens{expected}"
    if receipt.cache_loss:
        how = _LOSSES.get(receipt.cache_loss, receipt.cache_loss)
        yield f"  it had lost its cache less than a minute before: {how}"


_LOSSES = {
    "restarted": "it restarted",
    "cleared": "it dropped the cache on request, by its KV events",
    "forgot": "it reused nothing of a prompt sent shortly before",
    "asleep": "it was put to sleep",
}


def _is_known(receipt: Receipt) -> bool:
    """Return whether what endpoints held was looked for."""
    return receipt.searched and receipt.prompt_tokens is not None


def _prefill_s(receipt: Receipt, attempt: Attempt, candidate: ReceiptCandidate) -> float | None:
    if attempt.seconds is None or candidate.slowness is None or not _is_known(receipt):
        return None
    return prefill_s(receipt, candidate, attempt.seconds, candidate.slowness)


def format_seconds(value: float | None) -> str:
    """Return a duration as people read it, "-" where it is unknown."""
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1.0 else f"{1000 * value:.1f} ms"


def _remembered_candidates(decision: Mapping[str, Any]) -> Iterator[str]:
    candidates = decision.get("candidates") or ()
    if not candidates:
        return
    rows = [("", "endpoint", "cost", "cached", "known from")]
    for one in candidates:
        source = one.get("source")
        age_s = one.get("age_s")
        rows.append(
            (
                ">" if one.get("endpoint") == decision.get("endpoint") else "",
                printable(str(one.get("endpoint"))),
                "-" if one.get("cost") is None else f"{one['cost']:.4g}",
                "-" if one.get("matched_tokens") is None else str(one["matched_tokens"]),
                "-" if source is None else f"{source}, {age_s or 0:.1f} s old",
            )
        )
    yield from _indent_table(rows)


def _indent_table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    return (f"  {line}" for line in align_columns(rows, left=len(rows[0])))
