"""Rules that admit sessions."""
