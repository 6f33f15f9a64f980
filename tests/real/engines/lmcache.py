"""The real LMCache: the controller with engine workers, and the coordinator with multi-process servers."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.real.engines.place import HERE, LMCACHE, Model, root
from tests.real.engines.program import Program, flags
from tests.real.engines.vllm import Vllm
from tests.support.ports import free_ports

LOCATION = "LocalCPUBackend"
CHUNK_TOKENS = 256
_START_LIMIT_S = 600.0
_ENVIRONMENT = {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",
}


class Controller:
    """`lmcache_controller`, the service of LMCache's in-process mode."""

    def __init__(self) -> None:
        http, pull, reply, heartbeat = free_ports(4)
        self.url = f"http://127.0.0.1:{http}"
        self.pull, self.reply = f"127.0.0.1:{pull}", f"127.0.0.1:{reply}"
        ports = json.dumps({"pull": pull, "reply": reply, "heartbeat": heartbeat})
        # --host is the address of its ZMQ sockets too.
        command = [_script("lmcache_controller"), "--host", "127.0.0.1", "--port", str(http), "--monitor-ports", ports]
        self.program = _program("lmcache-controller", command, f"{self.url}/openapi.json")


class Worker:
    """A real LMCache engine of one instance, registered with the controller, that stores what it is told to."""

    def __init__(self, instance_id: str, controller: Controller, *, pin_timeout_s: int = 300) -> None:
        control, worker = free_ports(2)
        self.instance_id = instance_id
        self._url = f"http://127.0.0.1:{control}"
        options = {
            "--instance": instance_id,
            "--control-port": str(control),
            "--worker-port": str(worker),
            "--pull": controller.pull,
            "--reply": controller.reply,
            "--pin-timeout": str(pin_timeout_s),
        }
        command = [
            str(LMCACHE.python),
            str(HERE / "inside" / "lmcache_worker.py"),
            *flags(options),
        ]
        self.program = _program(f"lmcache-worker-{instance_id}", command, f"{self._url}/state")

    def store(self, tokens: Sequence[int]) -> int:
        """Store the prompt's whole chunks; returns the number of new tokens."""
        return self._call("/store", tokens)

    def holds(self, tokens: Sequence[int]) -> int:
        """Leading tokens the engine itself says it has."""
        return self._call("/lookup", tokens)

    def _call(self, path: str, tokens: Sequence[int]) -> int:
        answer = httpx.post(self._url + path, json={"tokens": list(tokens)}, timeout=30)
        answer.raise_for_status()
        return int(answer.json()["tokens"])


class Coordinator:
    """`lmcache coordinator`, the service of LMCache's multi-process mode."""

    def __init__(self) -> None:
        (http,) = free_ports(1)
        self.url = f"http://127.0.0.1:{http}"
        command = [_script("lmcache"), "coordinator", "--host", "127.0.0.1", "--port", str(http), "--disable-metrics"]
        self.program = _program("lmcache-coordinator", command, f"{self.url}/healthz")


class Server:
    """`lmcache server`: the memory beside one vLLM, of which the coordinator knows what it holds. With a folder
    `shared` everything is stored there as well, where each server with the same one reads it."""

    def __init__(
        self, instance_id: str, coordinator: Coordinator, *, memory_gb: float = 1, shared: Path | None = None
    ) -> None:
        zmq, http = free_ports(2)
        self.instance_id = instance_id
        self.zmq = zmq
        options = {
            "--host": "127.0.0.1",
            "--port": str(zmq),
            "--http-host": "127.0.0.1",
            "--http-port": str(http),
            "--l1-size-gb": str(memory_gb),
            "--eviction-policy": "LRU",
            "--supported-transfer-mode": "auto",  # on a CPU the engine copies
            "--coordinator-url": coordinator.url,
            "--coordinator-advertise-ip": "127.0.0.1",
            "--instance-id": instance_id,
        }
        switches = ["--coordinator-event-reporting", "--disable-metrics"]
        if shared is not None:
            options["--l2-adapter"] = json.dumps({"type": "fs_native", "base_path": str(shared), "shared": True})
            switches.append("--coordinator-l2-event-reporting")
        command = [_script("lmcache"), "server", *flags(options), *switches]
        self.program = _program(f"lmcache-server-{instance_id}", command, f"http://127.0.0.1:{http}/healthcheck")

    def vllm(self, model: Model, *, core: int, blocks: int = 4096, tells_tokens: bool = False) -> Vllm:
        """Return a vLLM that keeps its KV cache in this server too. With `tells_tokens` the server learns the tokens,
        and its memory's events come in the engine's stream: LMCache's own connector, over shared memory."""
        place: dict[str, Any] = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self.zmq}
        transfer = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": place}
        if tells_tokens:
            place["lmcache.mp.mp_transfer_mode"] = "lmcache_driven"
            transfer["kv_connector_module_path"] = "lmcache.integration.vllm.lmcache_mp_connector"
        return Vllm(
            f"{self.instance_id}-lmcache",
            model,
            core=core,
            blocks=blocks,
            further=["--kv-transfer-config", json.dumps(transfer)],
            environment={"PYTHONPATH": str(_lmcache_for_vllm())},
        )


@contextlib.contextmanager
def running(*programs: Program) -> Iterator[None]:
    """Start them together and waits until all of them serve."""
    with contextlib.ExitStack() as stack:
        for program in programs:
            stack.enter_context(program)
        for program in programs:
            program.await_ready(within_s=_START_LIMIT_S)
        yield


def _program(name: str, command: Sequence[str], ready: str) -> Program:
    return Program(name, command, ready=ready, log=root() / "logs" / f"{name}.log", environment=_ENVIRONMENT)


def _script(name: str) -> str:
    return str(LMCACHE.folder / "bin" / name)


def _lmcache_for_vllm() -> Path:
    """Return a search path that appends LMCache's packages to vLLM's own, so that only what vLLM lacks comes from
    there."""
    question = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    packages = subprocess.run([LMCACHE.python, "-c", question], check=True, capture_output=True, text=True).stdout
    folder = root() / "lmcache-for-vllm"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(f"import sys\n\nsys.path.append({packages.strip()!r})\n")
    return folder
