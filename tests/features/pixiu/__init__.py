"""Tests of the dialect of Pixiu."""
