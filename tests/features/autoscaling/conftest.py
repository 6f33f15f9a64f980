"""Clusters, as the core's tests make them."""

from tests.cluster.conftest import make_cluster as make_cluster
