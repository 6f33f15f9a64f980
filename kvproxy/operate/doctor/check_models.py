"""Do the engines of a cluster fit together: models, versions, tokenizers, and no engine twice?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from kvproxy.base.errors import ClientError
from kvproxy.operate.doctor.check_trial import TRIAL_CALLS
from kvproxy.operate.doctor.deployment import ClusterFacts, Deployment, gather_facts, list_routed_models
from kvproxy.operate.doctor.engine import Counters, EngineFacts, parse_counters
from kvproxy.operate.doctor.report import Finding, check, ok, problem, warning

#: Text for the case that it is intended.
_TWO = "or, if these are two models on purpose, make two clusters with `routes` by model"
Window = tuple[Counters, Counters]


@check("models", calls=3)
async def check_models(cluster: ClusterFacts) -> Sequence[Finding]:
    """Compare one cluster's models: declared, routed, and what engines without a declaration must have in common."""
    engines = cluster.engines
    listed = await gather_facts(engines, lambda engine: engine.list_models())
    if not listed:
        return []
    served = {engine: frozenset(model.id for model in models) for engine, models in listed.items()}
    adapters = {engine: frozenset(model.id for model in models if model.parent) for engine, models in listed.items()}
    routed = list_routed_models(cluster.deployment.config, cluster.name)
    found = [
        *_declared(served),
        *_undeclared({engine: names - adapters[engine] for engine, names in served.items()}, routed),
        *_unserved(cluster.where, served, engines, routed),
    ]
    return found or [
        ok(cluster.where, f"every engine serves its models: {_list(set().union(*served.values()))}"),
        *_adapters(cluster.where, adapters),
    ]


def _declared(served: Mapping[EngineFacts, frozenset[str]]) -> Iterator[Finding]:
    """Yield one fault for each model that no engine serves, however many endpoints promise it."""
    anywhere = set().union(*served.values())
    promised = Counter(model for engine in served for model in engine.endpoint.models)
    nowhere = {model for model, count in promised.items() if count > 1 and model not in anywhere}
    for model in sorted(nowhere):
        where = ", ".join(engine.endpoint.id for engine in served if model in engine.endpoint.models)
        fix = f"load that adapter, or take the name out of `models`; served: {_list(anywhere)}"
        yield problem(f"endpoints {where}", f"no engine serves {model!r}, by the `models` of all of them", fix)
    for engine, names in served.items():
        for model in engine.endpoint.models:
            if model not in names and model not in nowhere:
                yield _missing(engine, model, names, "which `models` of the endpoint names")


def _adapters(where: str, adapters: Mapping[EngineFacts, frozenset[str]]) -> Iterator[Finding]:
    """They need not be everywhere: requests go where an adapter is listed."""
    for name in sorted(set().union(*adapters.values())):
        having = [engine.endpoint.id for engine, names in adapters.items() if name in names]
        yield ok(where, f"adapter {name} at {', '.join(having)}")


def _undeclared(served: Mapping[EngineFacts, frozenset[str]], routed: Sequence[str]) -> Iterator[Finding]:
    """Yield findings about endpoints without `models`, which get every model of the cluster; adapters are found where
    they are."""
    anywhere = {engine: names for engine, names in served.items() if not engine.endpoint.models}
    expected = set().union(*anywhere.values())
    expected |= {model for model in routed if any(model in names for names in served.values())}
    for model in sorted(expected):
        without = [engine for engine, names in anywhere.items() if model not in names]
        if len(without) * 2 > len(anywhere) and model not in routed:
            yield from (_alone(engine, model, names) for engine, names in anywhere.items() if model in names)
        else:
            for engine in without:
                yield _missing(engine, model, anywhere[engine], "though other engines of its cluster do")


def _unserved(
    where: str, served: Mapping[EngineFacts, frozenset[str]], engines: Sequence[EngineFacts], routed: Sequence[str]
) -> Iterator[Finding]:
    if len(served) < len(engines):
        return  # an engine that did not answer may serve it
    for model in routed:
        if not any(model in names for names in served.values()):
            names = _list(set().union(*served.values()))
            fix = f"correct the name in `routes` (or `default_model`), or load that adapter; served: {names}"
            yield problem(where, f"no engine serves {model!r}, which is routed here", fix)


def _missing(engine: EngineFacts, model: str, names: frozenset[str], why: str) -> Finding:
    fix = (
        f"start the engine with `--served-model-name {model}` (or load that adapter), or set `models` of the endpoint "
        f"to its own: {_list(names)}; {_TWO}"
    )
    return problem(engine.where, f"does not serve the model {model!r}, {why}", fix)


def _alone(engine: EngineFacts, model: str, names: frozenset[str]) -> Finding:
    what = f"serves the model {model!r}, which most engines of its cluster do not: requests for it go to them as well"
    own = f"set `models` of every endpoint to its own (here: {_list(names)})"
    fix = f"start it with the model of the others, or {own}; {_TWO}"
    return problem(engine.where, what, fix)


def _list(names: set[str] | frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


@check("version", calls=3)
async def check_versions(cluster: ClusterFacts) -> Sequence[Finding]:
    """Compare the versions of one cluster's engines; those that do not report one are left out."""
    versions = await gather_facts(cluster.engines, lambda engine: engine.fetch_version())
    reported = {engine.endpoint.id: version for engine, version in versions.items()}
    if not reported:
        return []
    if len(set(reported.values())) == 1:
        return [ok(cluster.where, f"version {next(iter(reported.values()))}")]
    listed = ", ".join(f"{name} {version}" for name, version in reported.items())
    fix = "bring them to one version: block hashes, templates and KV events change between versions"
    return [warning(cluster.where, f"the engines' versions differ: {listed}", fix)]


@check("tokenizers", calls=4)
async def check_tokenizers(cluster: ClusterFacts) -> Sequence[Finding]:
    """Compare the engines of one cluster whose model has the same name, and the engine that tokenizes for all where
    there is one."""
    engines = [*cluster.engines, *filter(None, [cluster.deployment.tokenizer])]
    samples = await gather_facts(engines, _sampled)
    by_model: dict[str, dict[EngineFacts, tuple[int, ...]]] = {}
    for engine, (model, tokens) in samples.items():
        by_model.setdefault(model, {})[engine] = tokens
    compared = {model: alike for model, alike in by_model.items() if len(alike) > 1}
    found = [one for model, alike in compared.items() for one in compare_tokenizers(model, alike)]
    return found or [ok(cluster.where, f"{len(alike)} engines tokenize alike") for alike in compared.values()]


@check("tokenizer", calls=4)
async def check_tokenizer(engine: EngineFacts) -> Sequence[Finding]:
    """Ask the engine that is configured to tokenize for all of them."""
    await engine.choose_model()
    try:
        await engine.tokenize_sample()
    except ClientError as error:
        fix = "set `vllm_endpoint` to an engine that has /tokenize, or leave it out"
        return [problem(engine.where, f"cannot tokenize: {error}", fix)]
    return [ok(engine.where, "tokenizes")]


async def _sampled(engine: EngineFacts) -> tuple[str, tuple[int, ...]]:
    return (await engine.choose_model()).id, await engine.tokenize_sample()


def compare_tokenizers(model: str, samples: Mapping[EngineFacts, tuple[int, ...]]) -> Sequence[Finding]:
    """One finding for each engine that differs from most others (from the first, when there is no majority)."""
    usual, _ = Counter(samples.values()).most_common(1)[0]
    like = next(engine for engine, tokens in samples.items() if tokens == usual)
    fix = f"give both the same model and `--tokenizer`; another model needs another name than {model!r}"
    what = f"its tokenizer differs from that of {like.where}: tokens of one cannot be used for the other"
    return [problem(engine.where, what, fix) for engine, tokens in samples.items() if tokens != usual]


@check("duplicates", calls=TRIAL_CALLS + 2, where="endpoints")
async def check_duplicates(deployment: Deployment) -> Sequence[Finding]:
    """Find engines that have two endpoints. Every engine counts its work, so two with the same counts are one."""
    tried = await gather_facts(deployment.engines, lambda engine: engine.trials.try_generating())
    first = await gather_facts(tuple(tried), lambda engine: engine.exposition_now())
    second = await gather_facts(tuple(first), lambda engine: engine.exposition_now())
    windows: dict[EngineFacts, Window] = {}
    for engine in second:
        earlier = parse_counters(first[engine])
        later = parse_counters(second[engine])
        if earlier is not None and later is not None and earlier.used:
            windows[engine] = earlier, later
    if len(windows) < 2:
        return []
    return list(_same(windows)) or [ok("endpoints", f"{len(windows)} different engines")]


def _same(windows: Mapping[EngineFacts, Window]) -> Iterator[Finding]:
    for one, other in combinations(windows, 2):
        if may_be_one(windows[one], windows[other]):
            what = f"is the same engine as {one.where}: its load is counted separately, and its cache twice"
            yield problem(other.where, what, f"correct its url, or remove it: {one.origin} and {other.origin} are one")


def may_be_one(one: Window, other: Window) -> bool:
    """Return True if both may have been the same growing figures, each read twice at about the same time."""
    (a1, a2), (b1, b2) = one, other
    if a2.started_at != b2.started_at:
        return False
    figures = zip(a1.values, a2.values, b1.values, b2.values, strict=True)
    return all(a_from <= b_to and b_from <= a_to for a_from, a_to, b_from, b_to in figures)
