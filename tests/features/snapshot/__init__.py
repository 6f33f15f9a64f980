"""Tests of the snapshot."""
