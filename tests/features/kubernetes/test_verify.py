"""Checks of its settings."""

from __future__ import annotations

import pytest

from kvproxy.operate.config.load import check_config

KUBERNETES = "discovery: {kubernetes: "


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"{KUBERNETES}{{namespace: x}}}}\n", "error: discovery.kubernetes: needs `service`, `selector`, or both"),
        (f"{KUBERNETES}{{service: x, api: {{url: 'ftp://x'}}}}}}\n", "error: discovery.kubernetes.api.url: the scheme"),
        (
            f"{KUBERNETES}{{service: x, api: {{url: 'https://x', ca_file: /no}}}}}}\n",
            "error: discovery.kubernetes.api.ca_file: no such file",
        ),
        (
            f"{KUBERNETES}{{service: x, api: {{url: 'http://x:1', token_file: /no}}}}}}\n",
            "warning: discovery.kubernetes.api.token_file: sent in clear text over http",
        ),
        (
            f"{KUBERNETES}{{service: x, api: {{token_file: /no}}}}}}\n",
            "warning: discovery.kubernetes.api: without `url` the pod's own service account is used",
        ),
    ],
)
def test_faults(text: str, problem: str) -> None:
    """Each with its place."""
    (found,) = check_config(f"endpoints: [http://127.0.0.1:1]\n{text}", env={})[1]
    assert f"{found.severity}: {found}".startswith(problem)
