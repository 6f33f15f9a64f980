"""Warm restart: what the proxy knows, in a file."""
