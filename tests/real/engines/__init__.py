"""Starts the real vLLM (CPU build, small random models) and the real LMCache on this machine, on 127.0.0.1 only."""
