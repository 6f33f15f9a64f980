"""Runs other people's tests of engines' APIs straight (twice) and through kvproxy, and prints what differs: those of
vLLM and SGLang, LangChain's standard tests, and the SDKs for Node. Arguments: the names of suites, all by default."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.compat import langchain_suite, node_suite, sglang_suite, vllm_suite
from tests.compat.comparison import compare, read_expected, unused, usable
from tests.real.engines import sglang, vllm
from tests.real.engines.place import TINY
from tests.real.engines.program import flags
from tests.support.process import kvproxy_serve

EXPECTED = Path(__file__).with_name("expected.txt")
CONFIG = "listen: 127.0.0.1:0\nadmin: {{enabled: false}}\nendpoints: {{a: '{url}'}}\n"
#: Every path is open and clients may say to engines what they like: default settings refuse both, as documented.
OPEN = CONFIG + "filters: {{router: {{paths: [all], trust_clients: true}}}}\n"
Run = Callable[[str], dict[str, str]]
#: Suites by engine and name, with the configuration of kvproxy: the engines' own tests use more than the default opens.
SUITES: dict[str, dict[str, tuple[Run, str]]] = {
    "vllm": {
        "vllm": (vllm_suite.run, OPEN),
        "langchain": (langchain_suite.run, CONFIG),
        "node": (node_suite.run, CONFIG),
    },
    "sglang": {"sglang": (sglang_suite.run, OPEN)},
}


@contextmanager
def engine(kind: str) -> Iterator[str]:
    """One real engine of the tiny model; yields its URL."""
    if kind == "sglang":
        server = sglang.Sglang("compat", TINY)
        with sglang.running([server]):
            yield server.url
        return
    # What most of vLLM's tests give their own servers, and an end of answers that name none: a random model finds none.
    options = flags(
        {
            "--max-model-len": 2048,
            "--max-num-queued-reqs": 1000,
            "--override-generation-config": '{"max_new_tokens": 32}',
        }
    )
    names = ["--served-model-name", *vllm_suite.model_names()]
    one = vllm.Vllm("compat", TINY, core=0, further=[*options, *names])
    with vllm.running([one]):
        yield one.url


async def through_kvproxy(engine_url: str, run: Run, configuration: str) -> dict[str, str]:
    """Return the outcomes of a run through a proxy of its own."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(configuration.format(url=engine_url))
        async with kvproxy_serve("--config", str(config)) as proxy:
            return await asyncio.to_thread(run, proxy.url)


def run_suite(name: str, run: Run, configuration: str, engine_url: str) -> bool:
    """Run one suite three times, print its differences, and return whether each is expected."""
    runs = [run(engine_url), run(engine_url), asyncio.run(through_kvproxy(engine_url, run, configuration))]
    first, second, through = ({f"{name}/{test}": ended for test, ended in one.items()} for one in runs)
    known = read_expected(EXPECTED.read_text())
    differences = compare(first, second, through, known)
    alike = len(usable(first, second))
    lines = [
        f"{name}: {len(first)} tests, {alike} pass alike straight; {len(differences)} of them differ through kvproxy"
    ]
    lines += map(str, differences)
    stale = unused((test for test in known if test.startswith(f"{name}/")), differences)
    lines += [f"no longer needed in {EXPECTED.name}: {test}" for test in stale]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
    return all(one.reason for one in differences)


def main(chosen: Sequence[str]) -> int:
    known = [name for suites in SUITES.values() for name in suites]
    if unknown := set(chosen) - set(known):
        sys.exit(f"unknown suites: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    good = True
    for kind, suites in SUITES.items():
        wanted = {name: suite for name, suite in suites.items() if not chosen or name in chosen}
        if not wanted:
            continue
        with engine(kind) as url:
            for name, (run, configuration) in wanted.items():
                good &= run_suite(name, run, configuration, url)
    return not good


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
