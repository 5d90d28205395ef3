"""Tests of colossalai.launcher.preflight."""
