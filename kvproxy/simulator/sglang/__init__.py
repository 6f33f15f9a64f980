"""A simulated SGLang server."""
