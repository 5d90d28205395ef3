"""Tests of colossalai.registry."""
