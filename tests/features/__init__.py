"""Tests of features, each in the folder of its feature: it goes with it."""
