"""The proxies that are measured: how each is started in front of two engines, and how the pip ones are installed.

`python -m benchmarks.peers` installs vllm-router, sglang-router and litellm, each into a virtual environment of its
own under .bench/.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.ports import free_port

VENVS = Path(".bench")
PACKAGES = {"vllm-router": "vllm-router", "sglang-router": "sglang-router", "litellm": "litellm[proxy]"}
KVPROXY = (
    f"{sys.executable} -m kvproxy serve --host 127.0.0.1 --port {{port}}"
    " --endpoint a={a} --endpoint b={b} --policy {policy} --no-admin"
)

#: No look at the network for prices, and no key, since it listens on loopback for minutes.
_LITELLM = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}


@dataclass(frozen=True)
class Peer:
    """Proxy to compare: `command(port, engines, folder)` starts it; `missing` has the reason if it cannot."""

    name: str
    command: Callable[[int, tuple[str, str], Path], list[str]]
    missing: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def peers(kvproxy: str, *, policies: tuple[str, ...]) -> list[Peer]:
    """All of them, installed or not; kvproxy's command line once for each policy."""
    ours = [
        Peer(f"kvproxy {policy}", lambda port, engines, _, p=policy: _kvproxy(kvproxy, p, port, engines))  # type: ignore[misc]
        for policy in policies
    ]
    routers = [
        Peer(
            f"{name} {policy}",
            lambda port, engines, _, n=name, p=policy: _router(n, p, port, engines),  # type: ignore[misc]
            _absent(name),
        )
        for name in ("vllm-router", "sglang-router")
        for policy in ("round_robin", "cache_aware")
    ]
    nginx = Peer("nginx", _nginx, "" if shutil.which("nginx") else "not installed (apt install nginx-light)")
    litellm = Peer("litellm", _litellm, _absent("litellm"), _LITELLM)
    return [nginx, *ours, *routers, litellm]


def _absent(name: str) -> str:
    return "" if _binary(name).exists() else "not installed (python -m benchmarks.peers)"


def _binary(name: str) -> Path:
    return VENVS / name / "bin" / name


def _kvproxy(template: str, policy: str, port: int, engines: tuple[str, str]) -> list[str]:
    return shlex.split(template.format(port=port, a=engines[0], b=engines[1], policy=policy))


def _router(name: str, policy: str, port: int, engines: tuple[str, str]) -> list[str]:
    start = [str(_binary(name))] + (["launch"] if name == "sglang-router" else [])
    metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    common = [*metrics, "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *engines, "--policy", policy]
    return [*start, *common, "--log-level", "error"] if name == "vllm-router" else [*start, *common]


def _litellm(port: int, engines: tuple[str, str], folder: Path) -> list[str]:
    models = "".join(
        f"  - model_name: bench\n    litellm_params: {{model: openai/bench, api_base: {url}/v1, api_key: none}}\n"
        for url in engines
    )
    config = folder / "litellm.yaml"
    config.write_text(f"model_list:\n{models}")
    return [str(_binary("litellm")), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]


def _nginx(port: int, engines: tuple[str, str], folder: Path) -> list[str]:
    servers = " ".join(f"server {url.removeprefix('http://')};" for url in engines)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    config = folder / "nginx.conf"
    config.write_text(f"""
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log crit;
events {{ worker_connections 8192; }}
http {{
  access_log off; {temporary} keepalive_requests 1000000000;
  client_max_body_size 32m; client_body_buffer_size 1m; tcp_nodelay on;
  upstream engines {{ {servers} keepalive 256; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{ proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header connection "";
                  proxy_buffering off; proxy_request_buffering off; }}
  }}
}}
""")
    return ["nginx", "-p", str(folder), "-c", str(config), "-e", f"{folder}/error.log"]


def install() -> None:
    """Each into its own virtual environment, so that their requirements do not meet."""
    for name, package in PACKAGES.items():
        if _binary(name).exists():
            print(f"{name}: already there")
            continue
        subprocess.run([sys.executable, "-m", "venv", str(VENVS / name)], check=True)
        pip = [str(VENVS / name / "bin" / "python"), "-m", "pip", "install", "-q", package]
        done = subprocess.run(pip, check=False, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
        print(f"{name}: {'installed' if not done.returncode else 'cannot be installed here'}")


if __name__ == "__main__":
    install()
