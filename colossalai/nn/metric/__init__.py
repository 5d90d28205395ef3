"""Metrics of a batch, made to be added up over batches and ranks."""

from colossalai.nn.metric._accuracy import Accuracy as Accuracy
