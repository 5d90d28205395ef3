"""Tests of colossalai.checkpoint_io.resharding."""
