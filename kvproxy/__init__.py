"""kvproxy: a KV-cache-aware reverse proxy for LLM engines."""

__version__ = "0.1.0"
