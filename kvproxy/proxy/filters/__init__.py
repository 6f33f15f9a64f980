"""The filters of the chain, and what they share."""
