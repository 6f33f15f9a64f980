"""Certificates: loaded, checked, and read again when their files change."""
