"""Losses."""

from colossalai.nn.loss._cross_entropy import CrossEntropyLoss as CrossEntropyLoss
