"""One question each, by subject."""
