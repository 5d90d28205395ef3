"""Tests of the solver of choice problems."""
