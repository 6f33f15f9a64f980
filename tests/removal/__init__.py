"""Removes features, one by one and all at once, and sees that the rest works: `make test-removal`."""
