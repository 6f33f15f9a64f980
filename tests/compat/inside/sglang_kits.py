"""SGLang's own tests of its API for the server at KVPROXY_COMPAT_URL. Runs without kvproxy."""

from __future__ import annotations

import os
import unittest

import openai
from sglang.test.kits.abort_timeout_kit import AbortAllMixin
from sglang.test.kits.anthropic_messages_kit import AnthropicMessagesMixin
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.basic_decode_correctness_kit import BasicDecodeCorrectnessMixin
from sglang.test.kits.basic_scheduler_stress_kit import BasicSchedulerStressMixin
from sglang.test.kits.ebnf_constrained_kit import EBNFConstrainedMixin
from sglang.test.kits.json_constrained_kit import JSONConstrainedMixin
from sglang.test.kits.json_mode_kit import JSONModeMixin
from sglang.test.kits.matched_stop_kit import MatchedStopMixin
from sglang.test.kits.regex_constrained_kit import RegexConstrainedMixin

MODEL = os.environ["KVPROXY_COMPAT_MODEL"]


class _Running:
    """The process of a server that runs already."""

    def poll(self) -> None:
        return None


class TestKits(
    AnthropicMessagesMixin,
    BasicAPIContractMixin,
    BasicDecodeCorrectnessMixin,
    BasicSchedulerStressMixin,
    EBNFConstrainedMixin,
    JSONConstrainedMixin,
    JSONModeMixin,
    MatchedStopMixin,
    RegexConstrainedMixin,
    AbortAllMixin,
    unittest.TestCase,
):
    """All kits at one server; aborting all requests comes last."""

    base_url = os.environ["KVPROXY_COMPAT_URL"]
    api_key = "none"
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key=api_key, max_retries=0)
    model = served_model_name = MODEL
    process = _Running()
    abort_all_num_requests = 4
