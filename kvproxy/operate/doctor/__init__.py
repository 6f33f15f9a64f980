"""Checks of a setup against the engines and LMCache themselves, with a fix for each finding."""
