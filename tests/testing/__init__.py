"""Tests of colossalai.testing."""
