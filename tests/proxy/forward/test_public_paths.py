"""Which paths are public."""

from __future__ import annotations

import pytest

from kvproxy.proxy.forward.public import PublicPaths, has_dot_segment


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/completions", "/v1/responses/resp_1/cancel", "/v1/messages/count_tokens",
     "/v1/embeddings", "/v1/models/a/b", "/v1/audio/transcriptions", "/tokenize", "/detokenize", "/v2/rerank",
     "/pooling", "/classify", "/score", "/generate"],
)  # fmt: skip
def test_inference_is_public(path: str) -> None:
    """Paths that clients of vLLM and SGLang call."""
    assert path in PublicPaths()


@pytest.mark.parametrize(
    "path",
    ["/sleep", "/wake_up", "/reset_prefix_cache", "/collective_rpc", "/pause", "/shutdown", "/metrics", "/flush_cache",
     "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/abort_request", "/abort_requests", "/update_weights",
     "/update_weights_from_disk", "/v1/loads", "/server_info", "/kv_event_sources", "/start_profile", "/pd_role_switch",
     "/hicache/storage-backend", "/scale_elastic_ep", "/openapi.json", "/docs", "/inference/v1/generate",
     "/invocations", "/v1", "/v1/", "/", "", "//v1/chat/completions", "/v1/chat/completions//", "/v1//models",
     "/V1/models"],
)  # fmt: skip
def test_paths_that_steer_engines_are_not_public(path: str) -> None:
    """Nor is anything that is not listed."""
    assert path not in PublicPaths()


def test_one_slash_behind_a_public_path_passes() -> None:
    """Engines redirect it to the path without it, which clients follow."""
    assert "/v1/chat/completions/" in PublicPaths()
    assert "/sleep/" not in PublicPaths()


def test_further_paths() -> None:
    """Exact ones, and those ending in a slash with everything below."""
    paths = PublicPaths(["/metrics", "/tts/"])
    assert "/metrics" in paths
    assert "/tts/a/b" in paths
    assert "/metrics/x" not in paths
    assert "/tts" not in paths
    assert "/anything" in PublicPaths(["all"])
    assert "/anything" in PublicPaths(["/"])


@pytest.mark.parametrize(
    ("prefix", "path", "public"),
    [
        ("/", "/sleep", False),
        ("/v1", "/v1/load_lora_adapter", False),
        ("/v1/", "/v1/load_lora_adapter", False),
        ("/v1/audio", "/v1/audio/speech", True),
        ("/tts", "/tts", True),
        ("/tts/", "/tts/voices", True),
        ("/tts", "/ttsx", False),
        ("/v1/custom", "/v1/custom/x", True),
    ],
)
def test_a_route_opens_what_could_not_be_reached_otherwise(prefix: str, path: str, public: bool) -> None:
    """`/v1` sends what is public somewhere; nothing public is below `/tts`, so the route must mean it."""
    assert (path in PublicPaths(prefixes=[prefix])) is public


@pytest.mark.parametrize(
    ("path", "has"),
    [
        ("/v1/../sleep", True),
        ("/v1/.", True),
        ("/..", True),
        ("/v1\\..\\sleep", True),
        ("/v1/..\\sleep", True),
        ("/v1/..;x=1/sleep", True),
        ("/v1/models/..a", False),
        ("/v1/models/a;..", False),
        ("/v1/models/a.b/...", False),
        ("/v1/models/a\\b", False),
        ("/v1/.hidden", False),
    ],
)
def test_dot_segments(path: str, has: bool) -> None:
    """A backslash is a slash to some servers, and what follows a `;` a parameter."""
    assert has_dot_segment(path) is has
