"""Tests of colossalai.chat."""
