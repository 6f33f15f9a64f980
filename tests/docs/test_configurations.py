"""Every configuration the documentation shows is one that loads."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
import yaml

from kvproxy.operate.config.load import check_config, load_config
from kvproxy.proxy.filter_settings import order_filters
from tests.docs.blocks import ROOT, Block, blocks
from tests.support.certificates import make_certificate

#: Of another program: what tests/deploy looks at.
FOREIGN = {"scrape_configs", "env", "apiVersion", "rules"}


def is_foreign(block: Block) -> bool:
    """Whether the YAML is another program's."""
    return bool(FOREIGN & set(yaml.safe_load(block.text)))


OTHERS = [block for block in blocks("yaml") if is_foreign(block)]
OWN = [block for block in blocks("yaml") if block not in OTHERS]


def whole(text: str) -> str:
    """Return a part of a configuration with the endpoints it leaves out."""
    if not {"endpoints", "clusters"} & set(yaml.safe_load(text)):
        text = f"endpoints: [http://127.0.0.1:8000]\n{text}"
    return text


@pytest.mark.parametrize("block", OWN, ids=lambda block: block.where)
def test_configurations_load(block: Block, tmp_path: Path) -> None:
    """A reader that pastes one gets a proxy that starts, and takes every setting."""
    (tmp_path / "keys").write_text("bob: sk-b\n")
    env = {"ALICE_KEY": "sk-a", "OPERATOR_KEY": "sk-o", "KEYS_FILE": str(tmp_path / "keys"), "KVPROXY_ADMIN_TOKEN": "t"}
    env |= {"TLS_DIR": str(tmp_path), "SCALER_TOKEN": "t"}
    if "TLS_DIR" in block.text:
        made = make_certificate(tmp_path, "127.0.0.1")
        for name in ("tls", "client", "engines-ca"):
            shutil.copy(made.certificate, tmp_path / f"{name}.crt")
            shutil.copy(made.private_key, tmp_path / f"{name}.key")
    config, problems = check_config(whole(block.text), env=env, extra_filters={"model_policy": None})
    assert config is not None
    assert [one for one in problems if one.message.startswith("ignored")] == []


@pytest.mark.parametrize("block", OWN, ids=lambda block: block.where)
def test_a_chain_written_out_lacks_no_default_filter(block: Block) -> None:
    """A reader that copies a chain loses no request id, no log line and no cached prefix. A list that leaves a default
    filter out on purpose says why in a comment `# without NAME: ...`."""
    chain = yaml.safe_load(block.text).get("filters", {})
    if isinstance(chain, list):
        names = {spec if isinstance(spec, str) else next(iter(spec)) for spec in chain}
        lacking = [name for name in order_filters() if name not in names]
        assert [name for name in lacking if f"# without {name}: " not in block.text] == []


def test_blocks_of_other_programs_are_known() -> None:
    """Nothing is passed over by mistake: Prometheus' and its adapter's own configuration, a container's environment,
    and objects of Kubernetes."""
    foreign = Counter(block.page for block in OTHERS)
    pages = {
        "kvproxy/features/autoscaling/README.md": 2,
        "docs/deployment.md": 1,
        "kvproxy/features/kubernetes/README.md": 5,
    }
    assert foreign == pages


def test_the_shipped_configuration_loads() -> None:
    """`kvproxy serve -c config.yaml` out of the box."""
    assert len(load_config(ROOT / "config.yaml").clusters["default"].endpoints) == 2
