"""Tests of the trainer and its hooks."""
