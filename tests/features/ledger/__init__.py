"""Tests of autoscaling."""
