"""Tests of warming."""
