"""Clusters that follow a source, as the core's tests make them."""

from tests.cluster.followed import follow as follow
