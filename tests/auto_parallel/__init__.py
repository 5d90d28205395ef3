"""Tests of colossalai.auto_parallel."""
