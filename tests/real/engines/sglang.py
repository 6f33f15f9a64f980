"""Real SGLang servers: radix cache, KV events, metrics and cache report on."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Iterator, Sequence

from tests.real.engines.place import HERE, SGLANG, Model, root
from tests.real.engines.program import Program, flags
from tests.support.ports import free_ports

PAGE_TOKENS = 16
_START_LIMIT_S = 1800.0


class Sglang:
    """One server with so many data-parallel ranks."""

    def __init__(
        self, name: str, model: Model, *, ranks: int = 1, pages: int = 1024, further: Sequence[str] = ()
    ) -> None:
        (http,) = free_ports(1)
        #: Further ranks publish above the first one's port, a minute after it: where no program gets one by chance.
        events, replay = random.sample(range(20_000, 30_000, 16), 2)
        self.name = name
        self.model = model
        self.ranks = ranks
        self.url = f"http://127.0.0.1:{http}"
        published = {
            "publisher": "zmq",
            # It binds an event address only with `*` or `::` in it; the mapped form is plain 127.0.0.1.
            "endpoint": f"tcp://[::ffff:127.0.0.1]:{events}",
            "replay_endpoint": f"tcp://127.0.0.1:{replay}",
        }
        values = {
            "--model-path": str(model.folder),
            "--served-model-name": model.name,
            "--host": "127.0.0.1",
            "--port": str(http),
            "--device": "cpu",
            "--attention-backend": "torch_native",
            "--sampling-backend": "pytorch",
            "--page-size": str(PAGE_TOKENS),
            "--max-total-tokens": str(pages * PAGE_TOKENS),
            "--dp-size": str(ranks),
            "--kv-events-config": json.dumps(published),
        }
        switches = ["--disable-overlap-schedule", "--enable-metrics", "--enable-cache-report"]
        self.program = Program(
            f"sglang-{name}",
            [SGLANG.python, HERE / "inside" / "sglang_on_cpu.py", *flags(values), *switches, *further],
            ready=f"{self.url}/ready",
            log=root() / "logs" / f"sglang-{name}.log",
            environment={**_ENVIRONMENT, "SGLANG_CPU_OMP_THREADS_BIND": _cores(ranks)},
        )


_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
}


def _cores(ranks: int) -> str:
    """One for each rank, as far as there are so many."""
    return "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(ranks))


@contextlib.contextmanager
def running(servers: Sequence[Sglang]) -> Iterator[None]:
    """Start them together; ends all of them, also those that had already died."""
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.enter_context(server.program)
        for server in servers:
            server.program.await_ready(within_s=_START_LIMIT_S * server.ranks)
        yield
