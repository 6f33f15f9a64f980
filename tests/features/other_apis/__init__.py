"""Tests of tokens of messages and responses."""
