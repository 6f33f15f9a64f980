"""A proxy made in Python: from the path of a file, from plain data, from a loaded configuration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvproxy.app import Proxy
from kvproxy.base.errors import ConfigError
from kvproxy.operate.config.load import load_config

ENGINES = {"endpoints": {"a": "http://127.0.0.1:1"}}


def test_a_path_and_plain_data_give_the_same_configuration(tmp_path: Path) -> None:
    """A string is a path, not text."""
    file = tmp_path / "engines.yaml"
    file.write_text("endpoints: {a: http://127.0.0.1:1}\n")
    assert Proxy(str(file)).config == Proxy(file).config == Proxy(ENGINES).config == load_config(ENGINES)


def test_mistakes_are_named_as_check_names_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"endpoints\.a"):
        Proxy({"endpoints": {"a": "nowhere"}})
    with pytest.raises(ConfigError, match="cannot read"):
        Proxy(tmp_path / "missing.yaml")


def test_warnings_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Those of `kvproxy check`, which is not run here."""
    Proxy({"endpoints": {"a": "http://127.0.0.1:9/v1"}})
    assert "endpoints.a.url: ends in /v1, which clients' paths already have" in caplog.text


def test_endpoints_alone_are_no_configuration() -> None:
    """`endpoints=` was left out in front of them."""
    with pytest.raises(ConfigError, match=r"these are endpoints and no settings .*name them `endpoints`"):
        Proxy({"a": "http://127.0.0.1:9", "b": "http://127.0.0.1:10"})
    with pytest.raises(ConfigError) as refused:
        Proxy({"endpoints": "http://127.0.0.1:9"})
    assert "no settings" not in str(refused.value)


def test_the_operators_app_is_made_on_first_use() -> None:
    proxy = Proxy(ENGINES)
    assert "admin" not in vars(proxy)
    assert proxy.admin is proxy.admin


@pytest.mark.slow
def test_a_host_loads_no_server_and_no_admin() -> None:
    """Of the transport, up to a proxy that is made."""
    program = (
        "import sys, kvproxy\n"
        "kvproxy.AsyncTransport, kvproxy.Router\n"
        "print(sorted({'uvicorn', 'zmq', 'kvproxy.operate.admin', 'kvproxy.lab'} & sys.modules.keys()))\n"
        "kvproxy.Proxy({'endpoints': {'a': 'http://127.0.0.1:9'}})\n"
        "print(sorted({'uvicorn', 'zmq', 'kvproxy.operate.admin', 'kvproxy.lab'} & sys.modules.keys()))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n[]\n"


def test_importing_the_package_loads_nothing_but_the_standard_library() -> None:
    """Milliseconds, whatever a host uses of it."""
    program = (
        "import sys\nbefore = set(sys.modules)\nimport kvproxy\n"
        "roots = {name.partition('.')[0] for name in sys.modules.keys() - before}\n"
        "print(sorted(roots - sys.stdlib_module_names), len(sys.modules) - len(before) < 50)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "['kvproxy'] True\n"
