"""How many tokens and blocks of KV fit into each tier of one engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvproxy.lab.planner.layers import KvLayers, PlanError

_GIB = 1 << 30

#: Defaults: vLLM's shares and blocks, a request of middling length.
UTILIZATION = 0.9
BLOCK_TOKENS = 16
SEQUENCE_TOKENS = 8192
_GPU_COUNTS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine: its GPUs in tensor parallel, and the memory below them that is for KV."""

    gpu_bytes: float
    weights_bytes: float
    gpus: int = 1
    dtype: str = "bf16"  # of the KV cache
    utilization: float = UTILIZATION  # of a GPU's memory, as vLLM's --gpu-memory-utilization
    overhead_bytes: float = 2 * _GIB  # on each GPU: activations, CUDA graphs, communication buffers
    host_bytes: float = 0.0
    disk_bytes: float = 0.0
    block_tokens: int = BLOCK_TOKENS
    sequence_tokens: int = SEQUENCE_TOKENS  # of a usual request, over which windows and states are shared

    def kv_bytes(self) -> float:
        """Left for KV on each GPU; not positive where the weights do not fit."""
        return self.gpu_bytes * self.utilization - self.weights_bytes / self.gpus - self.overhead_bytes


@dataclass(frozen=True, slots=True)
class Tier:
    """One place for KV, of a whole engine."""

    name: str
    size_bytes: float
    bytes_per_token: float
    tokens: int
    blocks: int


def count_tiers(engine: Engine, layers: KvLayers) -> list[Tier]:
    """Device first. Raises PlanError where the weights leave no room on the GPUs."""
    if engine.kv_bytes() <= 0:
        raise PlanError(_why_no_room(engine))
    length = engine.sequence_tokens
    on_gpu = layers.bytes_of_sequence(length, engine.dtype, engine.gpus) / length
    below = layers.stored_bytes_of_sequence(length, engine.dtype, engine.gpus) / length
    device = _tier("device", engine.kv_bytes(), on_gpu, engine)
    tiers = [replace(device, size_bytes=engine.gpus * device.size_bytes, bytes_per_token=engine.gpus * on_gpu)]
    for name, size in (("host", engine.host_bytes), ("disk", engine.disk_bytes)):
        if size:
            tiers.append(_tier(name, size, below, engine))
    return tiers


def _tier(name: str, size_bytes: float, token_bytes: float, engine: Engine) -> Tier:
    tokens = int(size_bytes / token_bytes)
    return Tier(name, size_bytes, token_bytes, tokens, tokens // engine.block_tokens)


def _why_no_room(engine: Engine) -> str:
    enough = next((gpus for gpus in _GPU_COUNTS if replace(engine, gpus=gpus).kv_bytes() > 0), 0)
    advice = f"--tp {enough} is the least that does" if enough else "give GPUs with more memory, or smaller weights"
    usable = engine.gpu_bytes * engine.utilization / _GIB
    weights = engine.weights_bytes / engine.gpus / _GIB
    return (
        f"no room for KV: of the {usable:.1f} GiB of each of {engine.gpus} GPUs the weights take {weights:.1f} and "
        f"other things {engine.overhead_bytes / _GIB:.1f}; {advice}"
    )


def find_cheapest(engine: Engine, layers: KvLayers, tokens: int) -> Engine | None:
    """Return the setting with the fewest GPUs whose device memory holds `tokens`: at the same number, the KV precision
    it has now before fp8. None: not even 64 GPUs do."""
    for gpus in _GPU_COUNTS:
        for dtype in dict.fromkeys((engine.dtype, "fp8")):
            setting = replace(engine, gpus=gpus, dtype=dtype)
            if setting.kv_bytes() > 0 and count_tiers(setting, layers)[0].tokens >= tokens:
                return setting
    return None
