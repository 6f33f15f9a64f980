"""Do the engines serve what the configuration sends them?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvproxy.doctor.engine import Engine
from kvproxy.doctor.finding import Finding, ok, problem
from kvproxy.doctor.site import Site, known, routed_models


@dataclass(frozen=True, slots=True)
class ModelsCheck:
    """One cluster: declared names, routed names, and what engines without a declaration must have in common."""

    site: Site
    cluster: str

    name = "models"
    calls = 3

    @property
    def where(self) -> str:
        return f"cluster {self.cluster}"

    async def find(self) -> Sequence[Finding]:
        engines = dict(self.site.clusters())[self.cluster]
        listed = await known(engines, lambda engine: engine.models())
        if not listed:
            return []
        served = {engine: frozenset(model.id for model in models) for engine, models in listed.items()}
        routed = routed_models(self.site.config, self.cluster)
        found = [*_declared(served), *_undeclared(served, routed), *_unserved(self.where, served, engines, routed)]
        return found or [ok(self.where, f"every engine serves what it is sent: {_list(set().union(*served.values()))}")]


def _declared(served: Mapping[Engine, frozenset[str]]) -> Iterator[Finding]:
    for engine, names in served.items():
        for model in engine.endpoint.models:
            if model not in names:
                yield _missing(engine, model, names, "as `models` of the endpoint says")


def _undeclared(served: Mapping[Engine, frozenset[str]], routed: Sequence[str]) -> Iterator[Finding]:
    """An endpoint without `models` is sent every model of the cluster."""
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
    where: str, served: Mapping[Engine, frozenset[str]], engines: Sequence[Engine], routed: Sequence[str]
) -> Iterator[Finding]:
    if len(served) < len(engines):
        return  # whoever could not be asked may serve it
    for model in routed:
        if not any(model in names for names in served.values()):
            names = _list(set().union(*served.values()))
            fix = f"correct the name in `routes` (or `default_model`); served: {names}"
            yield problem(where, f"no engine serves {model!r}, which is routed here", fix)


#: Where it is no mistake.
_TWO = "or, if these are two models on purpose, make two clusters with `routes` by model"


def _missing(engine: Engine, model: str, names: frozenset[str], why: str) -> Finding:
    fix = (
        f"start the engine with `--served-model-name {model}` (or load that adapter), "
        f"or set `models` of the endpoint to what it serves: {_list(names)}; {_TWO}"
    )
    return problem(engine.where, f"does not serve the model {model!r}, {why}", fix)


def _alone(engine: Engine, model: str, names: frozenset[str]) -> Finding:
    what = f"serves the model {model!r}, which most engines of its cluster do not: requests for it go to them as well"
    own = f"set `models` of every endpoint to what it serves (here: {_list(names)})"
    fix = f"start it with the model of the others, or {own}; {_TWO}"
    return problem(engine.where, what, fix)


def _list(names: set[str] | frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
