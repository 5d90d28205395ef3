"""Tests of colossalai.logging."""
