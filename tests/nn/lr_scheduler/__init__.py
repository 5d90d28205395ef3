"""Tests of the learning-rate schedules."""
