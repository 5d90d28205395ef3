"""Tests of colossalai.checkpoint_io.formats."""
