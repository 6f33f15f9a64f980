"""Acceptance against real servers: what they do is not ours to imitate. Each test skips with a word where its server is
not installed."""
