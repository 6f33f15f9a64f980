"""`kvproxy plan`, run."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from kvproxy.cli import _parser
from kvproxy.lab.planner.command import run

CONFIG = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
TRACE = Path(__file__).parents[3] / "benchmarks" / "traces" / "agent_dev.jsonl.gz"


def plan(*arguments: str) -> tuple[int, str, str]:
    """Exit status, output and errors."""
    out, err = io.StringIO(), io.StringIO()
    return run(_parser().parse_args(["plan", *arguments]), out=out, err=err), out.getvalue(), err.getvalue()


def test_a_known_model_works_without_its_files() -> None:
    """By its name alone, in any case, with its source."""
    status, out, _ = plan("--model", "llama-3.1-8b", "--gpu", "80GiB", "--host", "200GiB")
    assert status == 0
    assert "huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json" in out
    assert "131,072 bytes a token (128.0 KiB)" in out
    assert "1,638,400" in out


def test_a_model_of_windows_alone_keeps_nothing_for_each_further_token() -> None:
    """A figure of 0 bytes would look like a mistake."""
    status, out, _ = plan("--model", "mistralai/Mistral-7B-v0.1")
    assert status == 0
    assert "KV in bf16: nothing beyond its windows and states; a request of 8,192 tokens takes 0.500 GiB" in out


def test_every_known_model_is_listed() -> None:
    """With what a token takes."""
    status, out, _ = plan("--model", "list")
    assert status == 0
    assert len(out.splitlines()) > 20
    assert "deepseek-ai/DeepSeek-V3" in out


def test_a_config_file_with_its_index_is_all_that_is_needed(tmp_path: Path) -> None:
    """The size of the weights is in the index of the checkpoint; the folder names both."""
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "torch_dtype": "bfloat16"}))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 16 << 30}}))
    found = tmp_path / "plan.json"
    assert plan("--model", str(tmp_path), "--gpu", "100GiB", "--json", str(found))[0] == 0
    read = json.loads(found.read_text())
    assert read["kv_bytes_per_token"] == 131_072
    assert read["tiers"][0]["tokens"] == (90 - 16 - 2) * 8192


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "llama-3.2-8b"], "did you mean 'meta-llama/Llama-3.1-8B'"),
        (["--model", "nothing like it"], "config.json, or one of `--model list`"),
        (["--model", "Llama-3.1-8B", "--dtype", "fp88"], "did you mean 'fp8'"),
        (["--model", "Llama-3.1-8B", "--dtype", "int4"], "KV is not kept so"),
        (["--model", "Llama-3.1-8B", "--gpu", "much"], "--gpu: expected a size"),
        (["--model", "Llama-3.1-8B", "--tp", "0"], "--tp"),
        (["--model", "Llama-3.1-8B", "--parameters", "many"], "--parameters takes a number"),
        (["--model", "Llama-3.1-8B", "--weights-dtype", "bf61"], "did you mean 'bf16'"),
        (["--model", "DeepSeek-V3"], "--tp 16 is the least"),
        (["--model", "Llama-3.1-8B", "--want-hit", "0.5"], "need a --trace"),
        (["--model", "Llama-3.1-8B", "--plot", "x.html"], "--plot"),
        (["--model", "Llama-3.1-8B", "--trace", str(TRACE), "--sizes", "one"], "--sizes"),
        (["--model", "Llama-3.1-8B", "--trace", str(TRACE), "--disk-gbps", "0"], "--disk-gbps are above 0"),
        (["--model", "Llama-3.1-8B", "--trace", str(TRACE), "--sizes", "0.000001"], "holds no block"),
    ],
)
def test_faults_are_reported_with_their_fix(arguments: list[str], said: str) -> None:
    """On the error stream, without a traceback."""
    status, out, err = plan(*arguments)
    assert (status, out) == (1, "")
    assert said in err


def test_a_file_that_is_no_config_is_named(tmp_path: Path) -> None:
    """Which file, and what it is not; of one without weights, how to give them."""
    path = tmp_path / "config.json"
    path.write_text("[]")
    assert "config.json: not a JSON object" in plan("--model", str(path))[2]
    path.write_text(json.dumps(CONFIG))
    assert "--parameters 8B or --weights" in plan("--model", str(path))[2]
    assert plan("--model", str(path), "--parameters", "8B")[0] == 0
    with pytest.raises(FileNotFoundError):
        plan("--model", str(tmp_path / "other.json"))


def test_a_trace_shows_what_sizes_are_worth(tmp_path: Path) -> None:
    """Larger caches hit more; the cheapest setting that is wanted is named, and one out of reach is said to be so."""
    page, found, trace = tmp_path / "plan.html", tmp_path / "plan.json", tmp_path / "documents.jsonl"
    rows = [
        {"timestamp": 500 * number, "input_length": 4120, "output_length": 4, "hash_runs": [8 * (number % 12), 8]}
        for number in range(96)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))  # a dozen documents of 4,096 tokens, in turn
    small = ["--model", "Llama-3.1-8B", "--gpu", "21GiB", "--trace", str(trace), "--sizes", "1,4", "--instances", "1"]
    status, out, _ = plan(*small, "--want-hit", "0.3", "--plot", str(page), "--json", str(found))
    assert status == 0
    first, last = json.loads(found.read_text())["sizes"]
    assert first["hit_rate"] < last["hit_rate"]
    assert "a hit rate of 0.3: " in out
    assert "63,664 tokens an engine (4x) are enough; cheapest: 2 such GPUs an engine, KV in bf16" in out
    assert page.read_text().count("<svg") == 3
    assert "no size that was played reaches it" in plan(*small, "--want-ttft", "0.00001")[1]
    for tier in ("--host", "--disk"):
        assert plan(*small, tier, "20GiB", "--json", str(found))[0] == 0
        below = json.loads(found.read_text())["sizes"]
        assert below[0]["hit_rate"] == pytest.approx(last["hit_rate"], abs=0.02)  # all the documents fit there
        assert below[0]["ttft_mean_s"] > below[1]["ttft_mean_s"]  # and have to be read
