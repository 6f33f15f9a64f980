"""Prefill apart from decode: the prompt at one endpoint, the answer at another. README.md is its page."""
