"""Runs vLLM's API tests straight (twice) and through kvproxy, and prints what differs."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.compat import vllm_suite
from tests.compat.comparison import PASSED, compare, read_expected, read_outcomes, unused
from tests.real.engines.place import TINY
from tests.real.engines.vllm import Vllm, running
from tests.support.process import kvproxy_serve

EXPECTED = Path(__file__).with_name("expected.txt")
#: Every path is open and clients may say to engines what they like: default settings refuse both, as documented.
CONFIG = """listen: 127.0.0.1:0
admin: {{enabled: false}}
endpoints: {{a: '{url}'}}
filters: [request_id, inference_request, {{router: {{paths: [all], trust_clients: true}}}}]
"""
#: What most of these tests give their own servers, and an end of answers that name none: a random model finds no end.
ENGINE_OPTIONS = ("--max-model-len", "2048", "--override-generation-config", '{"max_new_tokens": 32}')


async def through_kvproxy(engine_url: str, files: Sequence[str]) -> str:
    """Return the report of a run through a proxy of its own."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(CONFIG.format(url=engine_url))
        async with kvproxy_serve("--config", str(config)) as proxy:
            return await asyncio.to_thread(vllm_suite.run, proxy.url, files)


def main(chosen: Sequence[str]) -> int:
    files = chosen or vllm_suite.FILES
    expected = read_expected(EXPECTED.read_text())
    names = vllm_suite.model_names(vllm_suite.fetch(), files)
    vllm_suite.install()
    engine = Vllm("compat", TINY, core=0, further=[*ENGINE_OPTIONS, "--served-model-name", *names])
    with running([engine]):
        first, second = (read_outcomes(vllm_suite.run(engine.url, files)) for _ in range(2))
        through = read_outcomes(asyncio.run(through_kvproxy(engine.url, files)))
    differences = compare(first, second, through, expected)
    passed = [sum(one == PASSED for one in run.values()) for run in (first, second, through)]
    lines = [f"{len(first)} tests; passed: {passed[0]} and {passed[1]} straight, {passed[2]} through kvproxy"]
    lines += map(str, differences)
    if not chosen:
        lines += [f"no longer needed in {EXPECTED.name}: {name}" for name in unused(expected, differences)]
    sys.stdout.write("\n".join(lines) + "\n")
    return any(not one.reason for one in differences)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
