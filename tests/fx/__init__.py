"""Tests of colossalai.fx."""
