"""Adviser: settings that would help recorded traffic."""
