"""lm-evaluation-harness over simulated engines: through a proxy, and by a model of its own kind over the transport."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import kvproxy
from kvproxy.proxy.listener.server import Server
from kvproxy.testing import simulated_engines

lm_eval = pytest.importorskip("lm_eval")
models = pytest.importorskip("lm_eval.api.model")
pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("default")]

SUBJECTS, QUESTIONS, AT_ONCE = 4, 16, 4
#: Of each subject those that begin before its text is anywhere.
MOST_COMPUTED = SUBJECTS * AT_ONCE
TASK = """
task: subjects
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{context}}}}{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["never"], max_gen_toks: 4, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(autouse=True)
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write questions on subjects with long texts, and what of them is a task; return its folder."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    questions = [
        {"context": f"A fact about subject {subject}. " * 80, "question": f"Question {number}?", "answer": "x"}
        for subject in range(SUBJECTS)
        for number in range(QUESTIONS)
    ]
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(map(json.dumps, questions)))
    (tmp_path / "subjects.yaml").write_text(TASK.format(file=file))
    return tmp_path


def evaluate(folder: Path, model: Any, **arguments: Any) -> list[str]:
    """Return the answers of a run."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(model, tasks=["subjects"], task_manager=manager, log_samples=True, **arguments)
    return [str(sample["resps"][0][0]) for sample in found["samples"]["subjects"]]


def computed(proxy: kvproxy.Proxy, endpoints: Mapping[str, str]) -> int:
    """Return how many requests had nothing cached where they went."""
    requests = [one for one in proxy.recent.latest() if str(one.outcome.endpoint) in endpoints]
    assert len(requests) == SUBJECTS * QUESTIONS
    return sum(not one.outcome.cached_tokens for one in requests)


@pytest.mark.parametrize("kind", ["local-completions", "local-chat-completions"])
async def test_it_runs_through_a_proxy(task: Path, kind: str) -> None:
    """By its own clients, several requests at once."""
    chat = kind == "local-chat-completions"
    async with simulated_engines(3) as endpoints:
        proxy = kvproxy.Proxy({"endpoints": endpoints})
        async with proxy, Server(proxy, drain_s=0.1) as server:
            url = f"{server.url}/v1/{'chat/completions' if chat else 'completions'}"
            settings = f"model=sim,base_url={url},num_concurrent={AT_ONCE},tokenizer_backend=None"
            answers = await asyncio.to_thread(evaluate, task, kind, model_args=settings, apply_chat_template=chat)
            assert len(answers) == SUBJECTS * QUESTIONS
            assert all(answers)
            assert computed(proxy, endpoints) <= MOST_COMPUTED


class OverTransport(models.LM):  # type: ignore[misc]
    """A model of the harness whose requests go through `kvproxy.Transport`."""

    def __init__(self, client: httpx.Client) -> None:
        super().__init__()
        self._client = client

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(self._ask, [request.args for request in requests]))

    def _ask(self, arguments: tuple[str, dict[str, Any]]) -> str:
        prompt, how = arguments
        body = {"model": "sim", "prompt": prompt, "max_tokens": how["max_gen_toks"]}
        answer = self._client.post("http://engines/v1/completions", json=body)
        return str(answer.raise_for_status().json()["choices"][0]["text"])

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


async def test_it_runs_over_the_transport(task: Path) -> None:
    """From threads of its own, without a server between."""
    async with simulated_engines(3) as endpoints:
        transport = kvproxy.Transport(endpoints=endpoints)

        def run() -> list[str]:
            with httpx.Client(transport=transport, timeout=60) as client:
                found = evaluate(task, OverTransport(client))
                assert computed(transport.proxy, endpoints) <= MOST_COMPUTED
                return found

        answers = await asyncio.to_thread(run)
    assert len(answers) == SUBJECTS * QUESTIONS
    assert all(answers)
