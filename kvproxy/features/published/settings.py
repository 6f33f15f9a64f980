"""Settings of the published policies."""

from __future__ import annotations

from pydantic import Field

from kvproxy.base.settings.model import Fraction, Model


class DynamoSettings(Model):
    """Weights of the cost. The defaults are the original's."""

    prefill_load_scale: float = Field(default=1.0, ge=0, le=100)
    """Weight of blocks to prefill against live blocks; once called the overlap weight."""
    device_credit: float = Field(default=1.0, ge=0, le=10)
    """Saving of a block in engine memory, in blocks to prefill (`overlap_score_credit`)."""
    credit_decay: float = Field(default=0.0, ge=0, le=100)
    """How fast that credit shrinks with the prefill an endpoint has pending beyond the least of all, measured in
    prompts like this one: 1 halves it at one of them (`overlap_score_credit_decay`)."""
    lower_tier_credit: float = Field(default=0.75, ge=0, le=1)
    """Saving of a block on a lower tier."""
    active_request_weight: float = Field(default=0.0, ge=0, le=10_000)
    """Blocks that each request in flight counts as, besides its own (`decode_active_request_weight`)."""
    temperature: float = Field(default=0.0, ge=0, le=10)
    """Above 0 the choice is drawn from the softmax of the negative costs."""
    block_size: int = Field(default=16, ge=1, le=4096)
    """Tokens of a block, as `active_request_weight` and the costs shown count them."""


class DynamoAgenticSettings(DynamoSettings):
    """The same weights, with those of the original's `--agentic` preset as defaults."""

    prefill_load_scale: float = Field(default=4.0, ge=0, le=100)
    """Weight of blocks to prefill against live blocks."""
    device_credit: float = Field(default=2.0, ge=0, le=10)
    """Saving of a block in engine memory, in blocks to prefill."""
    active_request_weight: float = Field(default=64.0, ge=0, le=10_000)
    """Blocks that each request in flight counts as, besides its own."""


class LlmDSettings(Model):
    """Weights of the score."""

    prefix_weight: float = Field(default=2.0, ge=0, le=100)
    """Of matched tokens."""
    queue_weight: float = Field(default=1.0, ge=0, le=100)
    """Of waiting requests."""
    kv_weight: float = Field(default=1.0, ge=0, le=100)
    """Of free KV memory."""
    kv_capacity_tokens: int = Field(default=800_000, ge=1, le=1_000_000_000)
    """KV memory of one endpoint, in tokens."""


class LlmDStickySettings(Model):
    """When it sticks to those that hold the prompt. The defaults are the original's."""

    affinity_threshold: Fraction = 0.8
    """Share of the prompt that an endpoint must hold for the request to stick to it."""
    max_penalty_s: float = Field(default=18.0, ge=0, le=3600)
    """Seconds that the best of them may take longer than the best other endpoint."""
    peak_prefill_tokens_per_s: float = Field(default=15_928.0, ge=1, le=10_000_000)
    """Tokens a second that an engine prefills at most: what pending tokens take. The default is that of Qwen 32B on two
    H100; measure yours."""


class PublishedPlace(Model):
    """Keys that `parameters` of a cluster gets."""

    dynamo: DynamoSettings = DynamoSettings()
    """Weights of Dynamo's cost."""
    dynamo_agentic: DynamoAgenticSettings = DynamoAgenticSettings()
    """The same, as Dynamo's preset for agents has them."""
    llm_d: LlmDSettings = LlmDSettings()
    """Weights of llm-d's scorers."""
    llm_d_sticky: LlmDStickySettings = LlmDStickySettings()
    """Bounds of llm-d's affinity."""
