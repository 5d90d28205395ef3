"""Tests of the plans of colossalai.auto_parallel."""
