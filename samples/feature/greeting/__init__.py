"""Sample of a feature: answers carry a header with a greeting."""
