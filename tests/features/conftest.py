"""Clusters, and clusters that follow a source, as the core's tests make them."""

from tests.cluster.conftest import make_cluster as make_cluster
from tests.cluster.followed import follow as follow
