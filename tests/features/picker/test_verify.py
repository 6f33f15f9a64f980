"""Checks of its settings, and its certificate in `kvproxy doctor`."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvproxy.operate.config.load import check_config
from kvproxy.operate.doctor.check_configuration import check_certificates
from tests.operate.doctor.setup import parsed
from tests.support.certificates import make_certificate

NOWHERE = "{certificate: /nowhere/c, private_key: /nowhere}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("picker: {host: ''}\n", "error: picker.host: must not be empty"),
        ("picker: {port: 8889}\n", "error: picker.port: the picker has the admin listener's port"),
        (f"picker: {{tls: {NOWHERE}}}\n", "error: picker.tls.certificate: no such file: '/nowhere/c'"),
        (
            "picker: {}\nclusters: {x: {endpoints: ['http://engine:8000']}}\nroutes: [{cluster: x}]\n",
            "warning: clusters.x.endpoints[0].url: Envoy knows endpoints by address",
        ),
        ("picker: {ports: 1}\n", "error: picker.ports: unknown key"),
    ],
)
def test_faults(text: str, problem: str) -> None:
    """Each with its place."""
    engines = "" if "clusters" in text else "endpoints: [http://127.0.0.1:1]\n"
    found = check_config(f"{engines}{text}", env={})[1][0]
    assert f"{found.severity}: {found}".startswith(problem)


def test_a_pair_that_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    """As OpenSSL loads it."""
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    one, two = (make_certificate(folder, "127.0.0.1") for folder in folders)
    text = "endpoints: [http://127.0.0.1:1]\npicker: {{tls: {{certificate: {}, private_key: {}}}}}\n"
    assert check_config(text.format(one.certificate, one.private_key), env={})[1] == []
    (found,) = check_config(text.format(one.certificate, two.private_key), env={})[1]
    assert str(found).startswith(f"picker.tls.private_key: the private key '{two.private_key}' does not belong to")


async def test_the_doctor_looks_at_its_certificate(tmp_path: Path) -> None:
    """Where the listener has one."""
    files = make_certificate(tmp_path, "127.0.0.1")  # until tomorrow
    tls = {"certificate": str(files.certificate), "private_key": str(files.private_key)}
    config = parsed({"endpoints": ["http://127.0.0.1:1"], "picker": {"tls": tls}})
    (found,) = await check_certificates(config, lambda: 0.0).collect()
    assert found.what == "last for 14 days or longer"
    config = parsed({"endpoints": ["http://127.0.0.1:1"], "picker": {}})
    assert not await check_certificates(config, lambda: 0.0).collect()
