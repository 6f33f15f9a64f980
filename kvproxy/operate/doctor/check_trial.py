"""Findings from a small prompt sent twice: whether the engine answers, what it caches, the offset of its clock, and
whether it takes a priority."""

from __future__ import annotations

from collections.abc import Sequence

from kvproxy.base.errors import ClientError, ClientTimeout, NotSupported, Refused
from kvproxy.cache.clients.engine_metrics import EngineKind
from kvproxy.cache.feedback.reuse_step import LEAST_STEP_TOKENS
from kvproxy.cluster.settings import EnginePriorityMode
from kvproxy.operate.doctor.deployment import Deployment
from kvproxy.operate.doctor.engine import EngineFacts
from kvproxy.operate.doctor.report import Finding, check, ok, problem, warning
from kvproxy.operate.doctor.trial import Trial, TrialReply

#: A trial: link, models, metrics, event sources, subscriptions, two to five requests, tokenize, events, replays.
TRIAL_CALLS = 14
_TURN_ON = {
    EngineKind.VLLM: (
        "start the engine without `--no-enable-prefix-caching` (older versions: with `--enable-prefix-caching`)"
    ),
    EngineKind.SGLANG: "start the engine without `--disable-radix-cache`",
}
_SHOW = {
    EngineKind.VLLM: "start the engine with `--enable-prompt-tokens-details`",
    EngineKind.SGLANG: "start the engine with `--enable-cache-report`",
}
_BY_PRIORITY = (
    "start vLLM with `--scheduling-policy priority` (SGLang: `--enable-priority-scheduling "
    "--disable-priority-preemption`), or set engine_priority to off"
)
#: Dates in headers have whole seconds, and an answer takes time.
_TOLERATED_S = 2.0


@check("generate", calls=TRIAL_CALLS)
async def check_generating(engine: EngineFacts) -> Sequence[Finding]:
    """Send a request of one token."""
    await engine.choose_model()  # anything wrong before a prompt can be sent is reported elsewhere
    if await engine.is_asleep():
        raise ClientError("it sleeps")
    try:
        trial = await engine.trials.try_generating()
    except ClientError as error:
        return [_failed(engine.where, error)]
    form = "chat" if trial.chat else "text completion (it refuses chats)"
    return [ok(engine.where, f"answers a {form} of {trial.first.prompt_tokens} tokens")]


def _failed(where: str, error: ClientError) -> Finding:
    status = error.status if isinstance(error, Refused) else 0
    if status in (400, 404, 405):
        fix = "right for an embedding model; otherwise check how the engine was started"
        return warning(where, f"generates nothing: {error}", fix)
    if status == 503:
        return warning(where, f"is too busy for a small prompt: {error}", "try again when it is less busy")
    if isinstance(error, ClientTimeout):
        fix = "it is overloaded or stuck, or its prefill is slow: look at its queue, or raise --timeout"
        return problem(where, f"does not answer a small prompt: {error}", fix)
    return problem(where, f"gives a bad answer to a small prompt: {error}", "read the engine's log")


@check("tokenize", calls=TRIAL_CALLS)
async def check_tokenize(engine: EngineFacts, *, elsewhere: bool) -> Sequence[Finding]:
    """Compare `/tokenize` with the prompt as the engine counted it. `elsewhere`: another engine tokenizes for all."""
    needed = not elsewhere and await engine.needs_tokens()
    return [judge_tokenize(engine.where, await engine.trials.try_generating(), needed=needed)]


def judge_tokenize(where: str, trial: Trial, *, needed: bool) -> Finding:
    """Return the verdict on one trial."""
    tokens = trial.tokenized
    make = problem if needed else warning
    if isinstance(tokens, NotSupported) and tokens.status in (400, 422):
        fix = "upgrade it (older SGLangs tokenize prompts alone); until then its prompts are matched as text"
        return make(where, f"/tokenize takes no chats: {tokens}", fix)
    if isinstance(tokens, NotSupported):
        fix = "set `vllm_endpoint` of the kvcache filter to an engine that has it; without, nothing can be looked up"
        return make(where, "has no /tokenize", fix) if needed else ok(where, "has no /tokenize, which nothing needs")
    if isinstance(tokens, ClientError):
        return make(where, f"/tokenize fails: {tokens}", "read the engine's log; without it nothing can be looked up")
    counted = trial.first.prompt_tokens
    exact = trial.first.token_ids
    if len(tokens) == counted and (not exact or exact == tokens):
        return ok(where, f"/tokenize agrees with the engine ({counted} tokens)")
    what = f"/tokenize makes {len(tokens)} tokens of a prompt that the engine counts as {counted}"
    if len(tokens) == counted:
        what = f"/tokenize makes other tokens of a prompt than the engine itself ({counted} tokens)"
    fix = "start the engine with one tokenizer and one chat template for both (`--tokenizer`, `--chat-template`)"
    return make(where, f"{what}: lookups and KV events cannot match", fix)


@check("prefix caching", calls=TRIAL_CALLS)
async def check_caching(engine: EngineFacts) -> Sequence[Finding]:
    """Send one prompt twice."""
    return [judge_caching(engine.where, await engine.trials.try_generating(), await engine.find_kind())]


def judge_caching(where: str, trial: Trial, kind: EngineKind = EngineKind.VLLM) -> Finding:
    """Judge the caching in one trial. The answer's report goes before that of metrics, since those count others too."""
    cached = trial.second.cached_tokens
    counted = trial.second.prompt_tokens
    turn_on = _TURN_ON[kind]
    show = _SHOW[kind]
    if cached:
        said = f"{cached} of {counted} prompt tokens came from its cache the second time"
        step = _block_tokens(trial)
        return ok(where, f"{said}; it {_in_steps(step)}" if step >= LEAST_STEP_TOKENS else said)
    configured = caching_enabled(trial)
    hits = _hits(trial)
    if trial.longer is not None and trial.longer.cached_tokens:
        return _in_long_steps(where, trial, trial.longer)
    if configured is False:
        return problem(where, "prefix caching is off (by its /metrics)", turn_on)
    if cached == 0:
        if configured is None and not hits:
            return problem(where, "nothing of a prompt sent twice was reused: prefix caching is off", turn_on)
        fix = "is its KV cache too small, or was it very busy? Look at its KV usage, give it more memory"
        return warning(where, "prefix caching is on, but a prompt sent twice was computed twice", fix)
    what = "does not report how much of a prompt it reused: predictions cannot be checked"
    if hits:
        return warning(where, f"prefix caching works (by its counters), but the engine {what}", show)
    if configured:
        fix = f"{show}; older versions leave the figure out when it is 0, then its KV cache may be too small"
        return warning(where, f"prefix caching is on, but no reuse was seen; the engine {what}", fix)
    if hits == 0:
        return problem(where, "no cached tokens in the answer and none counted: prefix caching is off", turn_on)
    return warning(where, f"the engine shows no counters and {what}", f"{show}, and serve /metrics")


def _in_long_steps(where: str, trial: Trial, longer: TrialReply) -> Finding:
    """Nothing was reused of a short prompt, and something of a longer one."""
    short = trial.second.prompt_tokens
    what = (
        f"reuses in steps: {longer.cached_tokens} of {longer.prompt_tokens} prompt tokens sent twice came from its "
        f"cache, and none of {short}"
    )
    step = _block_tokens(trial)
    return ok(where, f"{what}; it {_in_steps(step)}" if step > short else f"{what}; the proxy learns the step")


def _in_steps(step: int) -> str:
    return f"reuses in steps of {step:,} tokens; prompts under {step:,} never hit"


def _block_tokens(trial: Trial) -> int:
    """Return the block size in its metrics; 0 if missing."""
    cache = None if trial.after is None else trial.after.cache
    return 0 if cache is None else cache.block_tokens or 0


def caching_enabled(trial: Trial) -> bool | None:
    """Return whether the engine's metrics show prefix caching as on; None if missing."""
    for metrics in (trial.after, trial.before):
        if metrics is not None and metrics.cache is not None:
            return metrics.cache.prefix_caching
    return None


def _hits(trial: Trial) -> int | None:
    """Tokens that the engine counted as reused meanwhile; None when it does not count."""
    if trial.before is None or trial.after is None:
        return None
    before = trial.before.prefix_hits_tokens
    after = trial.after.prefix_hits_tokens
    return None if before is None or after is None else after - before


@check("clock", calls=TRIAL_CALLS)
async def check_clock(engine: EngineFacts, *, trial: bool) -> Sequence[Finding]:
    """Compare clocks by the time stamps of its reports, and by the Date header where these are missing or late: one
    that waited looks like a clock that is behind. `trial`: a prompt is sent."""
    skew_s = await _reported_skew_s(engine) if trial else None
    if skew_s is None or abs(skew_s) > _TOLERATED_S:
        stated = [skew_s, (await engine.link.health_reply()).skew_s]
        skew_s = min((one for one in stated if one is not None), key=abs, default=None)
    if skew_s is None:
        return []
    if abs(skew_s) <= _TOLERATED_S:
        return [ok(engine.where, "its clock agrees with ours")]
    what = f"its clock is {abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} ours"
    return [warning(engine.where, what, "run NTP on both hosts: event lag, pins and logs are compared by clock")]


async def _reported_skew_s(engine: EngineFacts) -> float | None:
    try:
        watches = (await engine.trials.try_generating()).watches
    except ClientError:
        return None
    return next((one.skew_s for one in watches if one.skew_s is not None), None)


def priority_mode(deployment: Deployment, engine: EngineFacts) -> EnginePriorityMode:
    """Return what the configuration states of it."""
    return engine.endpoint.engine_priority or deployment.config.clusters[engine.cluster].engine_priority


@check("engine priority", calls=TRIAL_CALLS + 1)
async def check_priority(engine: EngineFacts, mode: EnginePriorityMode) -> Sequence[Finding]:
    """Send a request of one token with a `priority`, after the same without was answered. Its order would show only
    where requests wait."""
    trial = await engine.trials.try_generating()
    try:
        await engine.trials.send_priority(chat=trial.chat)
    except Refused as error:
        make = problem if mode is EnginePriorityMode.ON else warning
        return [make(engine.where, f"takes no request with a `priority`: {error}", _BY_PRIORITY)]
    ignored = ", which a vLLM without `--scheduling-policy priority` ignores"
    is_vllm = await engine.find_kind() is EngineKind.VLLM
    return [ok(engine.where, f"takes a request's `priority`{ignored if is_vllm else ''}")]
