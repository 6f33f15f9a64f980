"""Rules that give places to sessions instead of ordering requests, to compare with."""
