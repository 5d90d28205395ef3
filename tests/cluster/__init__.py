"""Tests of colossalai.cluster."""
