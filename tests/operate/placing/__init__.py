"""Tests of placing requests that other programs carry."""
