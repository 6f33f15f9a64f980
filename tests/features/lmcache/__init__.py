"""Tests of the discovery from etcd."""
