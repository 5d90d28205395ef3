"""Tests of losses, metrics, optimizers and schedules."""
