"""Tests of the access log."""
