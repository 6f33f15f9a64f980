"""Two real vLLMs, on which many streams run at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.real.conftest import Saw, needs_memory
from tests.real.engines.place import TINY
from tests.real.engines.vllm import Vllm
from tests.real.pair import Pair, running_pair

#: All streams run at once on one engine, and alike in any batch.
FURTHER = ("--max-num-seqs", "256", "--max-num-queued-reqs", "512", "--dtype", "float32")


@pytest.fixture(scope="module")
def pair(saw: Saw) -> Iterator[Pair]:
    needs_memory(gib=6)
    saw("starting two vLLM servers")
    with running_pair(
        *(Vllm(f"resume-{name}", TINY, core=core, further=FURTHER) for core, name in enumerate("ab"))
    ) as it:
        yield it
