"""A real LMCache engine without a model, in LMCache's environment: it stores zeros for the tokens it is told.

It registers with the controller as engines inside vLLM do. Control over HTTP on 127.0.0.1: `POST /store` and
`POST /lookup` with `{"tokens": [...]}` answer `{"tokens": n}`; `GET /state`.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import lmcache.v1.rpc_utils as rpc

LOOPBACK = "127.0.0.1"
CHUNK_TOKENS = 256


def stay_on_loopback() -> None:
    """LMCache itself registers the address of the default route and binds every interface.

    To be called before other LMCache modules are imported: they take these functions by name.
    """
    stock: Callable[..., Any] = rpc.get_zmq_socket

    def on_loopback(context: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(context, path.replace("*:", f"{LOOPBACK}:"), *args, **kwargs)

    rpc.get_ip = lambda: LOOPBACK
    rpc.get_zmq_socket = on_loopback


class Engine:
    """The engine, one call at a time."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        stay_on_loopback()
        import torch
        from lmcache.utils import mock_up_broadcast_fn, mock_up_broadcast_object_fn
        from lmcache.v1.cache_engine import LMCacheEngineBuilder
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
        from lmcache.v1.metadata import LMCacheMetadata

        shape = (2, 2, CHUNK_TOKENS, 4, 16)  # layers, K and V, tokens, heads, head size: 128 KiB a chunk
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK_TOKENS,
            local_cpu=True,
            max_local_cpu_size=0.1,
            enable_controller=True,
            lmcache_instance_id=arguments.instance,
            controller_pull_url=arguments.pull,
            controller_reply_url=arguments.reply,
            lmcache_worker_ports=[arguments.worker_port],
            pin_timeout_sec=arguments.pin_timeout,
            pin_check_interval_sec=1,
            pre_caching_hash_algorithm="builtin",  # the only one the controller can look up
        )
        metadata = LMCacheMetadata(
            model_name="test-model",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.float16,
            kv_shape=shape,
            use_mla=False,
            role="worker",
        )
        self._slots = torch.arange
        self._lock = threading.Lock()
        self._engine = LMCacheEngineBuilder.get_or_create(
            arguments.instance,
            config,
            metadata,
            MockGPUConnector(kv_shape=shape),
            mock_up_broadcast_fn,
            mock_up_broadcast_object_fn,
        )
        self._engine.post_init()

    def store(self, tokens: Sequence[int]) -> int:
        """Tokens that were not held before."""
        with self._lock:
            before = self._engine.lookup(tokens)
            self._engine.store(req_id="store", tokens=tokens, slot_mapping=self._slots(len(tokens)), kvcaches=None)
            return int(self._engine.lookup(tokens)) - int(before)

    def lookup(self, tokens: Sequence[int]) -> int:
        """Leading tokens held."""
        with self._lock:
            return int(self._engine.lookup(tokens))


def handler(engine: Engine) -> type[BaseHTTPRequestHandler]:
    """Return the control API."""
    calls = {"/store": engine.store, "/lookup": engine.lookup}

    class Control(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, {"ready": True})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            call = calls.get(self.path)
            if call is None:
                self._answer(404, {"error": "no such call"})
            else:
                self._answer(200, {"tokens": call(body["tokens"])})

        def _answer(self, status: int, value: object) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Control


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--instance", required=True)
    parser.add_argument("--pull", required=True)
    parser.add_argument("--reply", required=True)
    for name in ("control-port", "worker-port", "pin-timeout"):
        parser.add_argument(f"--{name}", type=int, required=True)
    arguments = parser.parse_args()
    engine = Engine(arguments)
    ThreadingHTTPServer((LOOPBACK, arguments.control_port), handler(engine)).serve_forever()


if __name__ == "__main__":
    main()
