"""Capacity planning: what a model's KV takes, what fits where, and what that is worth on a trace."""
