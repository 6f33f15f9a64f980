"""The checks of a visit, grouped by subject."""
