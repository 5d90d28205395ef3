"""Tests of colossalai.launcher."""
