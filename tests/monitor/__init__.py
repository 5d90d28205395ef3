"""Tests of colossalai.monitor."""
