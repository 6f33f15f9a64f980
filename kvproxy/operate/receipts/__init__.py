"""Decision receipts: what was known when a request was placed, what was decided, and what really happened."""
