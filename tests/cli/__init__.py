"""Tests of colossalai.cli."""
