"""Losses."""

from colossalai.nn.loss._cross_entropy import CrossEntropyLoss as CrossEntropyLoss
from colossalai.nn.loss._cross_entropy import ParallelCrossEntropyLoss as ParallelCrossEntropyLoss
from colossalai.nn.loss._named import CrossEntropyLoss2D as CrossEntropyLoss2D
from colossalai.nn.loss._named import CrossEntropyLoss2p5D as CrossEntropyLoss2p5D
from colossalai.nn.loss._named import CrossEntropyLoss3D as CrossEntropyLoss3D
from colossalai.nn.loss._named import VocabParallelCrossEntropyLoss1D as VocabParallelCrossEntropyLoss1D
from colossalai.nn.loss._named import VocabParallelCrossEntropyLoss2D as VocabParallelCrossEntropyLoss2D
from colossalai.nn.loss._named import VocabParallelCrossEntropyLoss2p5D as VocabParallelCrossEntropyLoss2p5D
from colossalai.nn.loss._named import VocabParallelCrossEntropyLoss3D as VocabParallelCrossEntropyLoss3D
