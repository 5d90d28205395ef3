"""Tests of colossalai.checkpoint_io.storage."""
