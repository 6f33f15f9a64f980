"""Tests of the discovery from kubernetes."""
