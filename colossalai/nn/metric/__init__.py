"""Metrics of a batch, made to be added up over batches and ranks."""

from colossalai.nn.metric._accuracy import Accuracy as Accuracy
from colossalai.nn.metric._named import Accuracy2D as Accuracy2D
from colossalai.nn.metric._named import Accuracy2p5D as Accuracy2p5D
from colossalai.nn.metric._named import Accuracy3D as Accuracy3D
