"""Tests of auth, cors and rate_limit."""
