"""Tests of colossalai.model_zoo."""
