"""Do lookups find what an engine has just computed, in time, and are prompts long enough for LMCache's chunks?"""

from __future__ import annotations

from collections.abc import Sequence

from kvproxy.base.errors import BadResponse, ClientError
from kvproxy.features.lmcache.service_facts import LmcacheFacts, LookupAnswer
from kvproxy.features.lmcache.settings import ServiceKind
from kvproxy.operate.doctor.check_trial import TRIAL_CALLS
from kvproxy.operate.doctor.deployment import gather_facts
from kvproxy.operate.doctor.engine import EngineFacts, PromptLengths, parse_prompt_lengths
from kvproxy.operate.doctor.report import Finding, check, ok, problem, warning

LOOKUP_CALLS = TRIAL_CALLS + 8
_HASHES = (
    "PYTHONHASHSEED is not the same for the controller and every engine: set PYTHONHASHSEED=0 for all, restart them",
    "the controller's environment cannot import vLLM, or not the same one: its first hash differs then",
    "engines hash with pre_caching_hash_algorithm sha256 or sha256_cbor: only `builtin` matches the controller",
    "engines have a chunk_size other than 256: the controller looks up nothing else",
    "LMCache before 0.4.1 on Python before 3.12 hashes differently in every process: upgrade it",
)
_EMPTY = (
    "vLLM runs without the connector: --kv-transfer-config with LMCacheConnectorV1 (controller) or LMCacheMPConnector",
    "the engine does not report its entries: enable_controller and its URLs, or --coordinator-event-reporting",
    "LMCache has just been (re)started and the engine is frozen until the first full sync: wait, then look again",
    "the engine runs without LMCache's memory: local_cpu and max_local_cpu_size, or --l1-size-gb",
)
#: Fewer samples have no 99th percentile.
_FOR_P99 = 200
#: Fewer prompts prove nothing: visits like this one are among them.
_ENOUGH_PROMPTS = 300
_SMALLER = "start LMCache with a smaller chunk size"
_WITHOUT = (
    "if this is its usual traffic, take `lmcache_endpoint` out of the kvcache filter: it gains nothing from lookups"
)


@check("lookup", calls=LOOKUP_CALLS)
async def check_lookup(engine: EngineFacts, lmcache: LmcacheFacts) -> Sequence[Finding]:
    """Look up one engine's trial prompt."""
    await lmcache.find_kind()
    trial = await engine.trials.try_generating()
    if not trial.tokens or not await _registered(engine, lmcache):
        return []  # reported with tokenize, or with the instance ids
    try:
        found = await lmcache.find_holders(engine)
    except BadResponse as error:
        fix = "is it LMCache, and of a version up to 0.5? A proxy in between may have changed its answers"
        return [problem(lmcache.where, f"answers lookups in an unknown shape: {error}", fix)]
    except ClientError as error:
        return [problem(lmcache.where, f"does not answer lookups: {error}", "read LMCache's log")]
    if found.holders:
        return [_held(engine, found, lmcache.expected_model(trial))]
    if not found.chunks:
        return []  # reported with the chunk size
    return [await _empty(engine, lmcache, found)]


async def _registered(engine: EngineFacts, lmcache: LmcacheFacts) -> bool:
    """Also when the service cannot list its instances."""
    try:
        return engine.instance_id in await lmcache.list_instances()
    except ClientError:
        return True


def _held(engine: EngineFacts, found: LookupAnswer, expected_model: str) -> Finding:
    own = engine.instance_id
    if own not in found.holders:
        what = f"LMCache holds its prompts under {', '.join(found.holders)}, not under {own!r}: hits lead elsewhere"
        return problem(engine.where, what, f"set `instance_id: {found.holders[0]}`; are two endpoints swapped?")
    if found.model not in ("", expected_model):
        what = f"LMCache holds its prompts for the model {found.model!r}, and lookups ask for {expected_model!r}"
        return problem(engine.where, what, f"set `directory_model: {found.model}` of the kvcache filter")
    shapes = {"arrays": ", in LMCache's own shape", "objects": ", in Pixiu's shape: no real LMCache"}
    return ok(engine.where, f"LMCache finds what it computed{shapes.get(found.shape, '')}")


async def _empty(engine: EngineFacts, lmcache: LmcacheFacts, found: LookupAnswer) -> Finding:
    provider = await lmcache.make_provider()
    try:
        indexed: int | None = await provider.indexed_chunks()
    except ClientError:
        indexed = None
    if indexed == 0:
        what = "LMCache's index is empty although the engine has just computed a long prompt"
        return problem(engine.where, what, "let the engine store in LMCache; see the causes", _EMPTY)
    if await lmcache.find_kind() is ServiceKind.COORDINATOR:
        what = f"LMCache does not find a prompt that the engine has just computed, under the model {found.model!r}"
        causes = ("the directory has it under another name: set `directory_model` to vLLM's --model", *_EMPTY)
        return problem(engine.where, what, "see the causes", causes)
    what = "LMCache does not find a prompt that the engine has just computed"
    what += ", though its index is not empty" if indexed else ""
    return problem(engine.where, what, "make controller and engines hash alike; see the causes", (*_HASHES, *_EMPTY))


@check("lookup time", calls=LOOKUP_CALLS + 20, alone=True)
async def check_lookup_time(lmcache: LmcacheFacts, engines: Sequence[EngineFacts]) -> Sequence[Finding]:
    """Compare lookups in a row with the time that the routing path gives them."""
    trials = await gather_facts(engines, lambda engine: engine.trials.try_generating())
    trial = next((one for one in trials.values() if one.tokens), None)
    if trial is None:
        return []
    samples = await lmcache.time_lookups(trial)
    return [judge_lookup_times(lmcache.where, samples, trial.tokenize_s, lmcache.settings.lookup_routing_timeout)]


def judge_lookup_times(where: str, lookups_s: Sequence[float], tokenize_s: float, budget_s: float) -> Finding:
    """Return the verdict on how long lookups took; a prompt that is not remembered is tokenized within the
    same budget."""
    ordered = sorted(lookups_s)
    # of a few: the slowest
    p50 = ordered[len(ordered) // 2]
    p99 = ordered[int(0.99 * (len(ordered) - 1) + 0.5)]
    slowest = "p99" if len(ordered) >= _FOR_P99 else "the slowest"
    took = f"{len(ordered)} lookups took {_ms(p50)} (median) and {_ms(p99)} ({slowest}) of {_ms(budget_s)}"
    fix = f"bring LMCache nearer to the proxy, or set `lookup_routing_timeout` to {_ms(2 * p99)} or more"
    if p50 > budget_s:
        return problem(where, f"{took}: they are never in time", fix)
    if p99 > budget_s:
        return warning(where, f"{took}: some are late", fix)
    if p50 + tokenize_s > budget_s:
        what = f"{took}, and /tokenize {_ms(tokenize_s)} more: prompts seen first are looked up late"
        return warning(where, what, f"set `lookup_routing_timeout` to {_ms(2 * (p99 + tokenize_s))} or more")
    return ok(where, took)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


@check("chunk size", calls=LOOKUP_CALLS)
async def check_chunk_size(engine: EngineFacts, lmcache: LmcacheFacts) -> Sequence[Finding]:
    """Compare one engine's prompts, by its own histogram, and its longest possible one with one chunk."""
    longest = (await engine.choose_model()).max_model_len
    found = await lmcache.find_holders(engine)
    asked = len((await engine.trials.try_generating()).tokens)
    try:
        lengths = parse_prompt_lengths(await engine.fetch_exposition())
    except ClientError:
        lengths = PromptLengths(0, ())
    fixed = await lmcache.find_kind() is ServiceKind.CONTROLLER
    if not found.chunks and asked:
        return [_too_large(engine.where, asked, longest, fixed=fixed)]
    min_tokens = lmcache.settings.lookup_min_tokens
    return [judge_chunk_size(engine.where, lengths, found.chunk_tokens, min_tokens, fixed=fixed)]


def _too_large(where: str, asked: int, longest: int | None, *, fixed: bool) -> Finding:
    if longest is not None and longest <= 2 * asked + 16:
        what = f"a chunk of LMCache is larger than the prompts this model takes ({longest} tokens with their answers)"
    else:
        what = f"a chunk of LMCache is larger than a prompt of {asked} tokens"
    return problem(where, f"{what}: lookups can never match", _cure(fixed=fixed))


def _cure(*, fixed: bool) -> str:
    return f"{_WITHOUT} (LMCache's controller has chunks of 256 tokens only)" if fixed else f"{_SMALLER}, or {_WITHOUT}"


def judge_chunk_size(
    where: str, lengths: PromptLengths, chunk_tokens: int, min_tokens: int, *, fixed: bool = False
) -> Finding:
    """Judge the chunk size by the prompts so far. `fixed`: the service has no other chunk size."""
    below = lengths.share_below(chunk_tokens)
    if lengths.count >= _ENOUGH_PROMPTS and below >= 0.5:
        what = (
            f"{below:.0%} of its {lengths.count} prompts were shorter than one chunk of {chunk_tokens} tokens: "
            "lookups cannot match them"
        )
        return (problem if below >= 0.95 else warning)(where, what, _cure(fixed=fixed))
    if min_tokens < chunk_tokens:
        what = f"prompts of {min_tokens} tokens are looked up, but a chunk has {chunk_tokens}: shorter ones never match"
        return warning(where, what, f"set `lookup_min_tokens: {chunk_tokens}` of the kvcache filter")
    seen = f"at least {below:.0%} of its {lengths.count} prompts were shorter" if lengths.count else "no prompts so far"
    return ok(where, f"chunks have {chunk_tokens} tokens; {seen}")
