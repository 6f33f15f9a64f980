"""Real vLLM servers: prefix caching and KV events on, one core each."""

from __future__ import annotations

import contextlib
import json
import os
import random
import ssl
from collections.abc import Iterator, Mapping, Sequence

from tests.real.engines.place import VLLM, Model, root
from tests.real.engines.program import Program, flags
from tests.support.ports import free_ports

BLOCK_TOKENS = 32
#: Requests vLLM runs at once, and further ones it queues before it answers 503.
MAX_RUNNING, MAX_QUEUED = 16, 16
_START_LIMIT_S = 1800.0


class Vllm:
    """One server, a core a data-parallel rank. It may be ended or killed, and started again on the same ports."""

    def __init__(
        self,
        name: str,
        model: Model,
        *,
        core: int,
        ranks: int = 1,
        blocks: int = 4096,
        further: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        http, events, replay = _ports(ranks)
        self.name = name
        self.model = model
        self.ranks = ranks
        self.blocks = blocks
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{http}"
        self.program = Program(
            f"vllm-{name}",
            # The `vllm` command itself looks for a distribution of that name, which the CPU build is not.
            [
                *(VLLM.python, "-m", "vllm.entrypoints.openai.api_server"),
                *self._options(http, events, replay),
                *(flags({"--data-parallel-size": str(ranks)}) if ranks > 1 else ()),
                *further,
            ],
            ready=f"{self.url}/health",
            log=root() / "logs" / f"vllm-{name}.log",
            environment={**_environment(core, ranks), **(environment or {})},
            tls=tls,
        )

    def await_ready(self) -> None:
        self.program.await_ready(within_s=_START_LIMIT_S * self.ranks)

    def _options(self, http: int, events: int, replay: int) -> list[str]:
        published = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            # vLLM binds an event address only with `*` or `::` in it; the mapped form is plain 127.0.0.1.
            "endpoint": f"tcp://[::ffff:127.0.0.1]:{events}",
            "replay_endpoint": f"tcp://127.0.0.1:{replay}",
            "topic": "kv-events",
        }
        values = {
            "--model": str(self.model.folder),
            "--served-model-name": self.model.name,
            "--host": "127.0.0.1",
            "--port": str(http),
            "--max-model-len": str(min(self.model.max_tokens, (self.blocks - 1) * BLOCK_TOKENS)),
            "--block-size": str(BLOCK_TOKENS),
            "--num-gpu-blocks-override": str(self.blocks),
            "--max-num-seqs": str(MAX_RUNNING),
            "--max-num-queued-reqs": str(MAX_QUEUED),
            "--tool-call-parser": "hermes",
            "--kv-events-config": json.dumps(published),
        }
        switches = [
            "--enforce-eager",
            "--enable-prefix-caching",
            "--enable-prompt-tokens-details",
            "--enable-server-load-tracking",
            "--enable-auto-tool-choice",
        ]
        return flags(values) + switches


def _ports(ranks: int) -> tuple[int, int, int]:
    """For HTTP, events and replays. Further data-parallel ranks publish above the first one, minutes after it: on ports
    that no program is given by chance."""
    http, events, replay = free_ports(3)
    if ranks > 1:
        events, replay = random.sample(range(20_000, 30_000, 16), 2)
    return http, events, replay


def _environment(core: int, ranks: int) -> dict[str, str]:
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
        # By itself every instance would pin itself to the first core.
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(str((core + rank) % (os.cpu_count() or 1)) for rank in range(ranks)),
    }


@contextlib.contextmanager
def running(servers: Sequence[Vllm]) -> Iterator[None]:
    """Start them together; ends all of them, also those that had already died."""
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.enter_context(server.program)
        for server in servers:
            server.await_ready()
        yield
