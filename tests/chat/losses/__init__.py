"""Tests of colossalai.chat.losses."""
