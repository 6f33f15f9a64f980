"""vLLM's NixlConnector, simulated: decoders read a prompt's KV from a prefiller's memory, by block ids.

As in vLLM 0.32 nothing checks that these blocks hold the prompt: after their lease, read twice or with another prompt
they give what is there by then, with status 200. Without `remote_request_id` a decoder hangs, and dies with the client
that leaves; with too few blocks it dies at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request

from kvproxy.base.types import Clock
from kvproxy.lab.simulator.answering import Faults
from kvproxy.lab.simulator.engine_runner import EngineRunner
from kvproxy.lab.simulator.generation import GenerationPlan
from kvproxy.lab.simulator.json_app import run_while_connected
from kvproxy.lab.simulator.vllm_errors import VllmError, engine_dead
from kvproxy.lab.simulator.vllm_settings import NixlLinks

PARAMS = "kv_transfer_params"
#: Blocks that prefilled prompts are held in, beside the engine's own: more than wait for decoders at once.
_BLOCKS = 65_536
_HANDSHAKE_S = 0.2

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """Blocks that wait for their decoder."""

    blocks: tuple[int, ...]
    expires_at: float


class NixlSide:
    """One engine's connector."""

    def __init__(
        self,
        links: NixlLinks,
        *,
        block_size: int,
        runner: EngineRunner,
        faults: Faults,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._links = links
        self._block_size = block_size
        self._runner = runner
        self._faults = faults
        self._clock = clock
        self._rng = rng
        self._contents: dict[int, Prompt] = {}
        self._next = 0
        self.held: dict[str, Held] = {}
        self.pulled_tokens = 0
        self.engine_id = f"{rng.getrandbits(128):032x}"
        links.peers[self.engine_id] = self

    def hold(self, prompt: Prompt, request_id: str, cached_tokens: int) -> dict[str, Any] | None:
        """Keep a prefilled prompt for its decoder, and return the parameters; None with the fault `no_handle`, or where
        too many blocks are held."""
        fault = self._faults.values.kv_fault
        if fault == "no_handle":
            return None
        blocks = self._take(-(-len(prompt) // self._block_size))
        if len(blocks) * self._block_size < len(prompt):
            return None
        self._contents |= dict.fromkeys(blocks, tuple(reversed(prompt)) if fault == "other_prompt" else prompt)
        name = f"{request_id}-{self._rng.getrandbits(32):08x}"
        self.held[name] = Held(blocks, self._clock() + self._links.lease_s)
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(blocks[:-1] if fault == "fewer_blocks" else blocks)],
            "remote_engine_id": "gone" if fault == "unknown_engine" else self.engine_id,
            "remote_request_id": "unknown" if fault == "unknown_request" else name,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "remote_num_tokens": len(prompt),
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": cached_tokens,
        }
        if fault == "no_request_id":
            del params["remote_request_id"]
        if fault == "dies_after":
            self._faults.values.engine_dead = True
        return params

    async def receive(self, request: Request, plan: GenerationPlan, params: dict[str, Any]) -> Prompt:
        """Pull the prompt of a request and return the one whose KV it was."""
        try:
            found = await run_while_connected(request.receive, self._pull(plan, params))
        except ClientDisconnect:
            if "remote_request_id" not in params:
                self._die()
            elif (peer := self._links.peers.get(params["remote_engine_id"])) is not None:
                peer.free(params["remote_request_id"])
            raise
        pulled = plan.requests[0]
        self._runner.receive(pulled.block_hashes[: pulled.prompt_tokens // self._block_size])
        self.pulled_tokens += pulled.prompt_tokens
        return found

    @property
    def dead(self) -> bool:
        return self._faults.values.engine_dead

    def read(self, block: int) -> Prompt:
        """As of NixlPeer."""
        return self._contents.get(block, ())

    def free(self, request_id: str) -> None:
        """As of NixlPeer."""
        self.held.pop(request_id, None)

    async def _pull(self, plan: GenerationPlan, params: dict[str, Any]) -> Prompt:
        prompt = plan.prompts[0]
        if "remote_request_id" not in params:
            await asyncio.Event().wait()
        peer = self._links.peers.get(params["remote_engine_id"])
        if peer is None or peer.dead:
            await asyncio.sleep(_HANDSHAKE_S)
            raise VllmError("Internal server error", kind="InternalServerError", code=500)
        blocks: Sequence[int] = params["remote_block_ids"][0]
        if len(blocks) < -(-len(prompt) // self._block_size):
            self._die()
            raise engine_dead()
        await asyncio.sleep(len(prompt) * self._links.s_per_token)
        others = (peer.read(block) for block in blocks)
        found = next((one for one in others if one != prompt), prompt)
        peer.free(params["remote_request_id"])
        return found

    def _take(self, count: int) -> tuple[int, ...]:
        """Return blocks that none waits for, in turns."""
        now = self._clock()
        self.held = {name: held for name, held in self.held.items() if held.expires_at > now}
        busy = {block for held in self.held.values() for block in held.blocks}
        blocks: list[int] = []
        while len(blocks) < count and len(blocks) + len(busy) < _BLOCKS:
            if self._next not in busy:
                blocks.append(self._next)
            self._next = (self._next + 1) % _BLOCKS
        return tuple(blocks)

    def _die(self) -> None:
        self._faults.values.engine_dead = True
        self._runner.kill()
